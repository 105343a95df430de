// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/upgrade"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
)

// eventsPage is the page of what happened, and of who asked for what.
type eventsPage struct {
	Object, Severity string
	Audit            bool
	Severities       []string
	Events           []*pb.Event
	Entries          []*pb.AuditEntry
	Refused          *notice // why there is no audit
}

// Numbers of events.
const eventsAsked = 500

func loadEvents(ctx context.Context, s *Server, r *http.Request) (string, any, error) {
	q := r.URL.Query()
	p := &eventsPage{Object: strings.TrimSpace(q.Get("object")), Severity: q.Get("severity"), Audit: q.Has("audit"), Severities: []string{"info", "warning", "error"}}
	if p.Audit {
		var err error
		if p.Entries, err = s.read.audit(ctx); err != nil {
			p.Refused = s.noticeOf(err, "weft event list --audit")
		}
		p.Entries = slices.Clone(p.Entries)
		slices.Reverse(p.Entries)
		return "Events", p, nil
	}
	events, err := s.read.events(ctx, p.Object, eventsAsked)
	if err != nil {
		return "", nil, err
	}
	for _, e := range events {
		if p.Severity == "" || p.Severity == pb.Word(e.GetSeverity()) {
			p.Events = append(p.Events, e)
		}
	}
	return "Events", p, nil
}

// whatIfPage is the page that plays a loss through.
type whatIfPage struct {
	Kind, Name  string
	Kinds       []string
	Nodes       []string
	Drives      []*pb.Drive
	Racks       []string
	Zones       []string
	Loss        *pb.WhatIfResponse // nil: nothing was asked yet
	Lost, Leads []string
	Unplaced    []string
	Command     string
	Refused     *notice
	Rows        []lossRow
}

// lossRow is a volume that a loss concerns.
type lossRow struct {
	*pb.VolumeLoss
	Then, Tone, Again, Waits string
}

func loadWhatIf(ctx context.Context, s *Server, r *http.Request) (string, any, error) {
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	drives, err := s.read.drives(ctx)
	if err != nil {
		return "", nil, err
	}
	q := r.URL.Query()
	p := &whatIfPage{Kind: q.Get("kind"), Name: strings.TrimSpace(q.Get("name")), Kinds: []string{"node", "rack", "zone", "drive"}, Drives: drives}
	p.Nodes = sortedNames(nodes, func(n *pb.Node) bool { return n.GetTarget().GetKnown() || n.GetInitiator().GetKnown() })
	p.Racks, p.Zones = labelsOf(nodes, "rack"), labelsOf(nodes, "zone")
	if p.Kind == "" || p.Name == "" {
		return "What if", p, nil
	}
	p.Command = command("weft what-if lose {kind} {name}", map[string]string{"kind": p.Kind, "name": p.Name})
	loss, err := s.loss(ctx, p.Kind, p.Name, drives)
	if err != nil {
		p.Refused = s.noticeOf(err, p.Command)
		return "What if", p, nil
	}
	p.Loss, p.Lost, p.Leads, p.Unplaced = loss, cli.LostThings(loss), cli.LossSummary(loss), cli.Unplaced(loss)
	for _, v := range loss.GetVolumes() {
		row := lossRow{VolumeLoss: v, Then: spaced(cli.LossWord(v)), Tone: volumeTone(&pb.Volume{Health: v.GetAfter()})}
		if v.GetDataLost() {
			row.Tone = bad
		}
		row.Again, row.Waits = cli.Remade(v)
		p.Rows = append(p.Rows, row)
	}
	return "What if", p, nil
}

// loss asks the manager what a loss would lead to, as "weft what-if lose" does.
func (s *Server) loss(ctx context.Context, kind, name string, drives []*pb.Drive) (*pb.WhatIfResponse, error) {
	r := &pb.WhatIfRequest{}
	switch kind {
	case "node":
		r.Nodes = strings.Fields(name)
	case "drive":
		id, err := driveID(name, drives)
		if err != nil {
			return nil, err
		}
		r.DriveIds = []string{id}
	default:
		r.Labels = map[string]string{kind: name}
	}
	return ask(ctx, s.read, "what if "+kind+" "+name, func(ctx context.Context) (*pb.WhatIfResponse, error) {
		return s.read.Manager.WhatIf(ctx, r)
	})
}

// labelsOf are the values of a label, in order.
func labelsOf(nodes []*pb.Node, key string) (all []string) {
	for _, n := range nodes {
		if value := n.GetLabels()[key]; value != "" && !slices.Contains(all, value) {
			all = append(all, value)
		}
	}
	slices.Sort(all)
	return all
}

// accessPage is the page of who may do what.
type accessPage struct {
	Who, Role   string
	Roles       []roleRow
	Tokens      []*pb.Token
	NoTokens    *notice // why they are not shown
	Authorities []*pb.Authority
	NoAuthority *notice
	Managers    []*pb.ManagerMember
	Changing    []managerRow  // those of them that can be changed
	Upgrade     *pb.Upgrade   // nil: the manager that leads is too old for levels
	Mixed       string        // which versions run; empty: only one
	Plan        *upgrade.Plan // nil: nothing runs the version of this program, or everything does
	Forms       []*form
	Withdraw    map[string]*form // by token
}

// roleRow is a role of people, and what it may do.
type roleRow struct {
	Name, May string
	Yours     bool
}

var rolesOfPeople = []roleRow{
	{Name: string(access.Viewer), May: "read everything but backups, tokens and the audit"},
	{Name: string(access.Operator), May: "also change volumes, drives, pools and nodes"},
	{Name: string(access.Admin), May: "also make tokens, read the audit, rotate the authority, confirm nodes dead, remove them, promote stale copies, back up, and change the managers"},
}

func loadAccess(ctx context.Context, s *Server, _ *http.Request) (string, any, error) {
	p := &accessPage{Who: s.whoText(), Role: string(s.config.Who.Role), Withdraw: map[string]*form{}}
	for _, role := range rolesOfPeople {
		role.Yours = role.Name == p.Role
		p.Roles = append(p.Roles, role)
	}
	var err error
	if p.Managers, err = s.read.managers(ctx); err != nil {
		return "", nil, err
	}
	if p.Tokens, err = s.read.tokens(ctx); err != nil {
		p.NoTokens = s.noticeOf(err, "weft token list")
	}
	if p.Authorities, err = s.read.authorities(ctx); err != nil {
		p.NoAuthority = s.noticeOf(err, "weft ca list")
	}
	for _, t := range p.Tokens {
		p.Withdraw[t.GetId()] = s.formFor("token-delete", t.GetId(), nil)
	}
	if p.Upgrade, err = s.read.upgrade(ctx); err != nil {
		return "", nil, err
	}
	if p.Mixed, p.Plan, err = s.upgradePlan(ctx); err != nil {
		return "", nil, err
	}
	p.Changing = s.managerRows(p.Managers)
	p.Forms = []*form{s.formFor("token-person", "", nil), s.formFor("token-node", "", nil), s.formFor("ca-rotate", "", nil)}
	if level := p.Upgrade; level.GetNewest() > level.GetLevel() {
		p.Forms = append(p.Forms, s.formFor("upgrade-finish", fmt.Sprint(level.GetNewest()), nil))
	}
	return "Access", p, nil
}

// upgradePlan says which versions run, if it is more than one, and plans the rest of the way to the
// version of this program, if anything runs that.
func (s *Server) upgradePlan(ctx context.Context) (mixed string, plan *upgrade.Plan, err error) {
	f := upgrade.Facts{To: s.config.Version}
	if f.Upgrade, err = s.read.upgrade(ctx); err != nil {
		return "", nil, err
	}
	if mixed = upgrade.Mixed(f.Upgrade); mixed == "" || !upgrade.Runs(f.Upgrade, f.To) {
		return mixed, nil, nil
	}
	if f.Managers, err = s.read.managers(ctx); err != nil {
		return "", nil, err
	}
	if f.Nodes, err = s.read.nodes(ctx); err != nil {
		return "", nil, err
	}
	if f.Volumes, err = s.read.volumes(ctx); err != nil {
		return "", nil, err
	}
	p := upgrade.Make(f)
	return mixed, &p, nil
}
