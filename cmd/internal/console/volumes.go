// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"html/template"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// volumeRow is a volume in the list.
type volumeRow struct {
	*pb.Volume
	Claim, Present string
	Dots           template.HTML
	IO             load
}

// volumeList is the page of all volumes.
type volumeList struct {
	Search, State, Order string
	States, Orders       []string
	Rows                 []volumeRow
	Found, All           int
	Before, After        string // the neighbouring pages; empty: there is none
	Command              string // that shows the same
	Create               *form
}

// rowsOfPage is how many rows a list has on one page.
const rowsOfPage = 100

var volumeStates = []string{"healthy", "rebuilding", "degraded", "unavailable", "creating", "deleting"}

func loadVolumes(ctx context.Context, s *Server, r *http.Request) (string, any, error) {
	volumes, err := s.read.volumes(ctx)
	if err != nil {
		return "", nil, err
	}
	nodes, err := s.read.nodes(ctx)
	if err != nil {
		return "", nil, err
	}
	pools, err := s.read.pools(ctx)
	if err != nil {
		return "", nil, err
	}
	io, err := s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_VOLUMES, "")
	if err != nil {
		return "", nil, err
	}
	q := r.URL.Query()
	p := &volumeList{Search: strings.TrimSpace(q.Get("q")), State: q.Get("state"), Order: q.Get("order"), States: volumeStates, Orders: orders, All: len(volumes)}
	p.Command = command("weft volume list -o wide", nil)
	if by := topSorts[p.Order]; by != "" {
		p.Command = command("weft top --sort {by}", map[string]string{"by": by})
	}
	var found []volumeRow
	for _, v := range volumes {
		row := volumeRow{Volume: v, Claim: claimOf(v)}
		if (p.State == "" || p.State == volumeWord(v)) && row.matches(strings.ToLower(p.Search)) {
			found = append(found, row)
		}
	}
	slices.SortFunc(found, func(a, b volumeRow) int { return strings.Compare(a.GetName(), b.GetName()) })
	sortBusiest(found, p.Order, io)
	p.Found = len(found)
	p.Rows, p.Before, p.After = pageOf(found, r.URL)
	answers := reachOf(nodes)
	for i, row := range p.Rows {
		p.Rows[i].Present, p.Rows[i].Dots, p.Rows[i].IO = answers.present(row.Volume), dots(row.Volume, answers), loadOf(io[row.GetId()])
	}
	p.Create = s.formFor("volume-create", "", map[string][]string{"pool": cli.Each(pools, (*pb.Pool).GetName)})
	return "Volumes", p, nil
}

// matches reports whether a row has a text in what people look for.
func (v volumeRow) matches(text string) bool {
	if strings.Contains(strings.ToLower(v.GetName()+" "+v.Claim+" "+v.GetId()+" "+cli.Pairs(v.GetLabels())), text) {
		return true
	}
	return slices.ContainsFunc(cli.AttachmentsOf(v.Volume), func(a *pb.Attachment) bool { return strings.Contains(a.GetNode(), text) })
}

// pageOf returns the rows of the page that an address asks for, and the addresses of its neighbours.
func pageOf[T any](rows []T, at *url.URL) (some []T, before, after string) {
	q := at.Query()
	n, _ := strconv.Atoi(q.Get("page"))
	n = max(0, min(n, (len(rows)-1)/rowsOfPage))
	link := func(n int) string {
		q.Set("page", strconv.Itoa(n))
		return at.Path + "?" + q.Encode()
	}
	if n > 0 {
		before = link(n - 1)
	}
	if (n+1)*rowsOfPage < len(rows) {
		after = link(n + 1)
	}
	return rows[n*rowsOfPage : min(len(rows), (n+1)*rowsOfPage)], before, after
}

// volumePage is the page of one volume.
type volumePage struct {
	*pb.Volume
	Claim   string
	Explain *pb.Explanation
	Map     template.HTML
	Legs    []legRow
	// Snapshots are those of the volume.
	Snapshots []snapshotRow
	Events    []*pb.Event
	IO        []fact
	Facts     []fact
	Forms     []*form
}

// fact is a name and a value.
type fact struct{ Name, Value string }

func loadVolume(ctx context.Context, s *Server, r *http.Request) (string, any, error) {
	name := r.PathValue("name")
	v, err := s.read.volume(ctx, name)
	if err != nil {
		return "", nil, err
	}
	p := &volumePage{Volume: v, Claim: claimOf(v)}
	if p.Explain, err = s.read.explain(ctx, v.GetName()); err != nil {
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
	if p.Events, err = s.read.events(ctx, "volume "+v.GetName(), 20); err != nil {
		return "", nil, err
	}
	io, err := s.mapFigures(ctx, v)
	if err != nil {
		return "", nil, err
	}
	p.Legs = legRows(v, drives, reachOf(nodes), io.legs)
	p.Map = mapOf(v, nodes, drives, io).svg()
	p.IO, p.Facts = ioFacts(io.volume), factsOf(v)
	hosts := sortedNames(nodes, func(n *pb.Node) bool { return n.GetStock() || n.GetInitiator().GetOnline() })
	if p.Snapshots, err = s.snapshotsOf(ctx, v); err != nil {
		return "", nil, err
	}
	for _, action := range volumeActions(v) {
		p.Forms = append(p.Forms, s.formFor(action, v.GetName(), map[string][]string{"node": hosts}))
	}
	p.Forms = append(p.Forms, s.snapshotForms(v, p.Snapshots, hosts)...)
	if v.GetSnapshot() == nil {
		p.Forms = append(p.Forms, s.legForms(v, nodes)...)
	}
	slices.SortStableFunc(p.Forms, func(a, b *form) int { // what can lose data comes last
		return cmp.Compare(strconv.FormatBool(a.Danger), strconv.FormatBool(b.Danger))
	})
	return v.GetName(), p, nil
}

// mapFigures asks for the I/O of a volume, its legs and all drives.
func (s *Server) mapFigures(ctx context.Context, v *pb.Volume) (io figures, err error) {
	volume, err := s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_VOLUMES, v.GetName())
	if err != nil {
		return io, err
	}
	io.volume = volume[v.GetId()]
	if io.legs, err = s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_LEGS, v.GetName()); err != nil {
		return io, err
	}
	io.drives, err = s.read.figures(ctx, pb.FiguresOf_FIGURES_OF_DRIVES, "")
	return io, err
}

// legRow is a leg with its state and the device that it is on.
type legRow struct {
	*pb.Leg
	Tone, Word, Device string
	IO                 load
}

func legRows(v *pb.Volume, drives []*pb.Drive, answers reach, io rates) (rows []legRow) {
	devices := map[string]string{}
	for _, d := range drives {
		devices[d.GetId()] = d.GetDevice()
	}
	for _, l := range v.GetLegs() {
		rows = append(rows, legRow{l, answers.tone(l), answers.word(l), devices[l.GetDriveId()], loadOf(io[l.GetId()])})
	}
	return rows
}

// volumeActions are the actions that make sense for a volume now.
func volumeActions(v *pb.Volume) []string {
	all := lifeActions(v)
	if v.GetCloneOf() != "" && v.GetFlattening() == nil && v.GetState() == pb.VolumeState_VOLUME_STATE_READY {
		all = append(all, "volume-flatten")
	}
	return all
}

// lifeActions are those that any volume may have.
func lifeActions(v *pb.Volume) []string {
	switch {
	case v.GetState() == pb.VolumeState_VOLUME_STATE_DELETING, v.GetSnapshot() != nil:
		return nil
	case v.GetSealed() != nil && len(cli.AttachmentsOf(v)) == 0:
		return []string{"attach", "volume-delete"}
	case v.GetSealed() != nil: // more hosts can read it
		return []string{"attach", "detach", "detach-force"}
	case len(cli.AttachmentsOf(v)) == 0:
		return []string{"attach", "volume-expand", "volume-seal", "volume-delete"}
	}
	return []string{"volume-expand", "volume-scrub", "detach", "detach-force"}
}

// factsOf are the properties of a volume.
func factsOf(v *pb.Volume) []fact {
	all := []fact{
		{"Size", cli.Size(v.GetSizeBytes())},
		{"Layout", cli.Nouns(int(v.GetLayout().GetStripes()), "column") + " of " + copiesText(v)},
		{"Chunk", cli.Size(v.GetLayout().GetChunkBytes())},
		{"Pool", v.GetPool()},
		{"Copies differ in", v.GetSpread()},
		{"Epoch", strconv.FormatUint(v.GetEpoch(), 10)},
		{"File system", v.GetFormatted()},
		{"Labels", cli.Pairs(v.GetLabels())},
		{"Created", when(v.GetCreated())},
		{"Id", v.GetId()},
	}
	all = append(all, originFacts(v)...)
	if to := v.GetExpandingToBytes(); to != 0 {
		all[0].Value += ", growing to " + cli.Size(to)
	}
	return slices.DeleteFunc(all, func(f fact) bool { return f.Value == "" })
}

func copiesText(v *pb.Volume) string {
	if n := v.GetLayout().GetCopies(); n != 1 {
		return strconv.Itoa(int(n)) + " copies"
	}
	return "1 copy"
}
