// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// now is the page of what is going on.
type now struct {
	Status   *pb.Status
	Verdict  verdict
	Wrong    []problem
	More     int         // problems that are not listed
	Domain   *domainLoss // nil: there is nothing to lose
	Underway []work
	Upgrade  string // which versions run, and what is next; empty: only one runs
	Events   []*pb.Event
	Managers []*pb.ManagerMember
}

// problem is something that is wrong, with the next step.
type problem struct {
	Text    string
	Link    string
	Command string
	Explain *pb.Explanation // of a volume; nil for the rest
}

// domainLoss is how much space is left if the largest failure domain is lost and its legs are made
// again on the others.
type domainLoss struct {
	Kind, Name string
	Left       uint64
	Short      uint64 // this much has no room; 0: all has
}

// work is something that the cluster does or waits for.
type work struct {
	Volume, What, Detail string
	Done, Total          uint64
}

// How many problems the page lists, and how many of them it explains: each is one more call.
const (
	mostProblems  = 25
	mostExplained = 4
)

func loadNow(ctx context.Context, s *Server, _ *http.Request) (string, any, error) {
	p := &now{}
	var err error
	if p.Status, err = s.read.status(ctx); err != nil {
		return "", nil, err
	}
	volumes, err := s.read.volumes(ctx)
	if err != nil {
		return "", nil, err
	}
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	drives, err := s.read.drives(ctx)
	if err != nil {
		return "", nil, err
	}
	if p.Events, err = s.read.events(ctx, "", 12); err != nil {
		return "", nil, err
	}
	if p.Managers, err = s.read.managers(ctx); err != nil {
		return "", nil, err
	}
	mixed, plan, err := s.upgradePlan(ctx)
	if err != nil {
		return "", nil, err
	}
	if p.Upgrade = mixed; plan != nil {
		p.Upgrade = plan.Summary()
	}
	p.Verdict = verdictOf(p.Status)
	p.Domain, p.Underway = largestDomain(nodes, drives), underway(volumes)
	wrong := p.Status.GetWrong()
	if len(wrong) > mostProblems {
		p.More, wrong = len(wrong)-mostProblems, wrong[:mostProblems]
	}
	if p.Wrong, err = s.problems(ctx, wrong); err != nil {
		return "", nil, err
	}
	return "Now", p, nil
}

// verdict is the state of the cluster in a word or two.
type verdict struct{ Tone, Word, Text string }

// verdictOf says how a cluster is: as bad as the worst thing that the manager names or counts.
func verdictOf(s *pb.Status) verdict {
	text := fmt.Sprintf("%s, %s, %s", cli.Nouns(int(s.GetVolumes()), "volume"), cli.Nouns(int(s.GetDrives()), "drive"), cli.Nouns(int(s.GetNodes()), "node"))
	wrong := len(s.GetWrong())
	v := verdict{good, "Nothing is wrong", text}
	switch {
	case wrong == 1:
		v = verdict{warn, "1 thing is wrong", s.GetWrong()[0]}
	case wrong > 1:
		v = verdict{warn, fmt.Sprintf("%d things are wrong", wrong), s.GetWrong()[0]}
	case s.GetVolumesUnavailable()+s.GetVolumesDegraded()+s.GetDrivesNotReady()+s.GetNodesOffline() > 0:
		v = verdict{warn, "Not everything is there", text}
	}
	if s.GetVolumesUnavailable() > 0 {
		v.Tone = bad
	}
	return v
}

// problems are the sentences of the manager, each with the next step; the first volumes among them
// are explained.
func (s *Server) problems(ctx context.Context, sentences []string) (all []problem, err error) {
	explained := map[string]bool{}
	for _, text := range sentences {
		p := problem{Text: text, Link: objectPath(text), Command: cli.NextCommand(text)}
		if name, ok := strings.CutPrefix(p.Link, "/volumes/"); ok && len(explained) < mostExplained && !explained[name] {
			explained[name] = true
			if p.Explain, err = s.read.explain(ctx, name); err != nil && cli.ExitCode(err) != cli.ExitNotFound {
				return nil, err // otherwise it was deleted a moment ago
			}
		}
		all = append(all, p)
	}
	return all, nil
}

// largestDomain is the rack, or without racks the node, with most space, and what its loss leaves.
func largestDomain(nodes []*pb.Node, drives []*pb.Drive) *domainLoss {
	type space struct{ capacity, allocated uint64 }
	var whole space
	domains, kinds, machines := map[string]*space{}, map[string]string{}, byName(nodes)
	for _, d := range drives {
		kind, name := rackOf(machines[d.GetNode()])
		if name == "" {
			kind, name = "node", d.GetNode()
		}
		if domains[name] == nil {
			domains[name], kinds[name] = &space{}, kind
		}
		domains[name].capacity += d.GetCapacityBytes()
		domains[name].allocated += d.GetAllocatedBytes()
		whole.capacity += d.GetCapacityBytes()
		whole.allocated += d.GetAllocatedBytes()
	}
	var names []string
	for name := range domains {
		names = append(names, name)
	}
	if len(names) < 2 {
		return nil
	}
	largest := slices.MaxFunc(names, func(a, b string) int {
		return cmp.Or(cmp.Compare(domains[a].capacity, domains[b].capacity), cmp.Compare(domains[a].allocated, domains[b].allocated), cmp.Compare(b, a))
	})
	loss := &domainLoss{Kind: kinds[largest], Name: largest}
	if rest := whole.capacity - domains[largest].capacity; rest >= whole.allocated {
		loss.Left = rest - whole.allocated
	} else {
		loss.Short = whole.allocated - rest
	}
	return loss
}

// underway lists what volumes do or wait for.
func underway(volumes []*pb.Volume) (all []work) {
	for _, v := range volumes {
		for _, r := range v.GetRebuilds() {
			if r.GetEnded() == nil {
				all = append(all, work{v.GetName(), "copying a leg to " + r.GetNode(), rateText(r), r.GetDoneBytes(), r.GetTotalBytes()})
			}
		}
		for _, a := range cli.AttachmentsOf(v) {
			if a.GetWaitingFor() != "" || a.GetResyncTotalBytes() > 0 {
				all = append(all, work{v.GetName(), wordOf(a.GetState()) + " on " + a.GetNode(), a.GetWaitingFor(), a.GetResyncDoneBytes(), a.GetResyncTotalBytes()})
			}
		}
		if c := v.GetScrub(); c != nil && c.GetEnded() == nil {
			all = append(all, work{v.GetName(), "comparing its copies", "", c.GetDoneBytes(), c.GetTotalBytes()})
		}
		if s := v.GetState(); s != pb.VolumeState_VOLUME_STATE_READY {
			all = append(all, work{v.GetName(), wordOf(s), "", 0, 0})
		}
		if to := v.GetExpandingToBytes(); to != 0 {
			all = append(all, work{v.GetName(), "growing to " + cli.Size(to), "", 0, 0})
		}
	}
	return all
}

// rateText is how fast a copy is, and how long it will take.
func rateText(r *pb.Rebuild) string {
	if r.GetBytesPerSecond() == 0 {
		return ""
	}
	text := cli.Size(r.GetBytesPerSecond()) + "/s"
	if r.GetLeft() != nil {
		text += ", " + r.GetLeft().AsDuration().String() + " left"
	}
	return text
}
