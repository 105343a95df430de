// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"maps"
	"net/http"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// rack is a failure domain with its targets.
type rack struct {
	Kind, Name string // empty: these nodes have no such label
	Targets    []target
}

// driveRow is a drive and what it does.
type driveRow struct {
	*pb.Drive
	IO load
}

// driveRows are all drives, in the order of their nodes and devices.
func (s *Server) driveRows(ctx context.Context) (rows []driveRow, err error) {
	drives, err := s.read.drives(ctx)
	if err != nil {
		return nil, err
	}
	io, err := s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_DRIVES, "")
	if err != nil {
		return nil, err
	}
	for _, d := range drives {
		rows = append(rows, driveRow{d, loadOf(io[d.GetId()])})
	}
	slices.SortFunc(rows, func(a, b driveRow) int {
		return cmp.Or(strings.Compare(a.GetNode(), b.GetNode()), strings.Compare(a.GetDevice(), b.GetDevice()))
	})
	return rows, nil
}

// target is a node with drives.
type target struct {
	*pb.Node
	Drives              []driveRow
	Capacity, Allocated uint64
}

// drivesPage is the page of targets and drives.
type drivesPage struct {
	Racks []rack
	Rows  []driveRow
	Pools []poolRow
	Forms []*form
}

func loadDrives(ctx context.Context, s *Server, _ *http.Request) (string, any, error) {
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	rows, err := s.driveRows(ctx)
	if err != nil {
		return "", nil, err
	}
	pools, err := s.read.pools(ctx)
	if err != nil {
		return "", nil, err
	}
	return "Targets and drives", &drivesPage{racksOf(nodes, rows), rows, s.poolRows(pools), []*form{s.formFor("pool-create", "", nil)}}, nil
}

// driveForms are the actions on a drive.
func (s *Server) driveForms(d driveRow) []*form {
	labels := s.formFor("drive-label", cli.ShortID(d.GetId()), nil)
	labels.Fields[0].Value = strings.Join(pairs(d.GetLabels()), " ")
	labels.Shown = command(labels.Pattern, map[string]string{"object": labels.Object, "labels": labels.Fields[0].Value})
	return []*form{labels, s.formFor("drive-drain", cli.ShortID(d.GetId()), nil), s.formFor("drive-keep", cli.ShortID(d.GetId()), nil), s.formFor("drive-evict", cli.ShortID(d.GetId()), nil)}
}

// pairs are labels as a command line has them.
func pairs(labels map[string]string) (all []string) {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, key+"="+labels[key])
	}
	return all
}

// racksOf groups targets by their failure domain.
func racksOf(nodes []*pb.Node, drives []driveRow) (all []rack) {
	sorted := slices.SortedFunc(slices.Values(nodes), func(a, b *pb.Node) int {
		_, x := rackOf(a)
		_, y := rackOf(b)
		return cmp.Or(strings.Compare(x, y), strings.Compare(a.GetName(), b.GetName()))
	})
	for _, n := range sorted {
		t := targetOf(n, drives)
		if !n.GetTarget().GetKnown() && len(t.Drives) == 0 {
			continue
		}
		kind, name := rackOf(n)
		if len(all) == 0 || all[len(all)-1].Name != name {
			all = append(all, rack{Kind: kind, Name: name})
		}
		last := &all[len(all)-1]
		last.Targets = append(last.Targets, t)
	}
	return all
}

// targetOf is a node with its drives.
func targetOf(n *pb.Node, drives []driveRow) target {
	t := target{Node: n}
	for _, d := range drives {
		if d.GetNode() == n.GetName() {
			t.Drives = append(t.Drives, d)
			t.Capacity += d.GetCapacityBytes()
			t.Allocated += d.GetAllocatedBytes()
		}
	}
	return t
}

// hostsPage is the page of the machines that use volumes.
type hostsPage struct{ Hosts []host }

// host is a node with what is attached to it.
type host struct {
	*pb.Node
	Attachments []*pb.Attachment
	IO          load // of its volumes together
}

func loadHosts(ctx context.Context, s *Server, _ *http.Request) (string, any, error) {
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	attachments, err := s.read.attachments(ctx, "")
	if err != nil {
		return "", nil, err
	}
	io, err := s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_HOSTS, "")
	if err != nil {
		return "", nil, err
	}
	p := &hostsPage{}
	for _, n := range nodes {
		if n.GetStock() || n.GetInitiator().GetKnown() || n.GetInitiator().GetRefused() != "" {
			p.Hosts = append(p.Hosts, hostOf(n, attachments, io))
		}
	}
	slices.SortFunc(p.Hosts, func(a, b host) int { return strings.Compare(a.GetName(), b.GetName()) })
	return "Hosts", p, nil
}

// hostOf is a node with those of the attachments that are to it.
func hostOf(n *pb.Node, attachments []*pb.Attachment, io rates) host {
	h := host{Node: n, IO: loadOf(io[n.GetName()])}
	for _, a := range attachments {
		if a.GetNode() == n.GetName() {
			h.Attachments = append(h.Attachments, a)
		}
	}
	return h
}

// nodePage is the page of one node: a target, a host, or both.
type nodePage struct {
	host
	Target  target
	Devices []*pb.Device
	Unread  string // why the devices are not known
	Events  []*pb.Event
	Forms   []*form
	Drive   map[string][]*form // by the drive's id
}

func loadNode(ctx context.Context, s *Server, r *http.Request) (string, any, error) {
	name := r.PathValue("name")
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	n := byName(nodes)[name]
	if n == nil {
		return "", nil, status.Errorf(codes.NotFound, "node %q: not found", name)
	}
	drives, err := s.driveRows(ctx)
	if err != nil {
		return "", nil, err
	}
	attachments, err := s.read.attachments(ctx, name)
	if err != nil {
		return "", nil, err
	}
	io, err := s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_HOSTS, "")
	if err != nil {
		return "", nil, err
	}
	p := &nodePage{host: hostOf(n, attachments, io), Target: targetOf(n, drives), Drive: map[string][]*form{}}
	if p.Events, err = s.read.events(ctx, "node "+name, 20); err != nil {
		return "", nil, err
	}
	for _, d := range p.Target.Drives {
		p.Drive[d.GetId()] = s.driveForms(d)
	}
	if n.GetTarget().GetOnline() {
		if p.Devices, err = s.read.devices(ctx, name); err != nil {
			p.Unread = cli.NewReport(err).Error
		}
		var free []string
		for _, d := range p.Devices {
			if d.GetDriveId() == "" && len(d.GetHolders()) == 0 {
				free = append(free, d.GetPath())
			}
		}
		p.Forms = append(p.Forms, s.formFor("drive-add", name, map[string][]string{"device": free}))
	}
	for _, action := range nodeActions(n) {
		p.Forms = append(p.Forms, s.formFor(action, name, nil))
	}
	return name, p, nil
}

// nodeActions are the actions that make sense for a node now.
func nodeActions(n *pb.Node) []string {
	all := []string{"node-maintain", "node-cordon", "node-drain", "node-uncordon"}
	if !n.GetTarget().GetOnline() && !n.GetInitiator().GetOnline() {
		all = append(all, "node-confirm-dead", "node-remove")
	}
	return all
}
