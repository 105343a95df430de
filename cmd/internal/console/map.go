// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"fmt"
	"net/url"
	"slices"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// The layers of a volume's map, from the host that uses it to the racks that hold it.
const (
	layerHost = iota
	layerColumn
	layerLeg
	layerDrive
	layerTarget
	layerRack
	layers
)

var layerNames = [layers]string{"host", "columns", "legs", "drives", "targets", "racks"}

// box is one thing of a map.
type box struct {
	layer       int
	key         string // among the boxes of its layer
	title, note string
	tone        string
	link        string
	absent      bool // it is only a place: nothing is there
	y           float64
}

// edge connects two boxes.
type edge struct {
	from, to *box
	tone     string
	broken   bool     // no data takes this way
	figures  []string // what is shown on it, in lines; empty: nothing
}

// volumeMap is where a volume's data is, and who uses it.
type volumeMap struct {
	volume string
	reach  reach
	boxes  [layers][]*box
	edges  []edge
	height float64
}

// figures are what a map shows on its edges, beside the progress of copies under way. Those of legs
// are what the hosts see, those of drives what their targets do for all volumes.
type figures struct {
	volume       *pb.Figures
	legs, drives rates
}

// mapOf draws up the map of a volume.
func mapOf(v *pb.Volume, nodes []*pb.Node, drives []*pb.Drive, f figures) *volumeMap {
	m := &volumeMap{volume: v.GetName(), reach: reachOf(nodes)}
	machines, disks := byName(nodes), map[string]*pb.Drive{}
	for _, d := range drives {
		disks[d.GetId()] = d
	}
	legs := slices.SortedFunc(slices.Values(v.GetLegs()), func(a, b *pb.Leg) int {
		return cmp.Or(cmp.Compare(a.GetColumn(), b.GetColumn()), cmp.Compare(a.GetCopy(), b.GetCopy()))
	})
	columns := map[uint32]*box{}
	for _, l := range legs {
		column := columns[l.GetColumn()]
		if column == nil {
			column = m.add(layerColumn, &box{key: fmt.Sprint(l.GetColumn()), title: fmt.Sprintf("column %d", l.GetColumn())})
			columns[l.GetColumn()] = column
		}
		m.addLeg(v, l, column, disks[l.GetDriveId()], machines[l.GetNode()], f)
	}
	for n, column := range columns {
		column.tone, column.note = m.columnState(legsOf(legs, n))
	}
	m.addHosts(v, machines, func(column *box) []string {
		for n, c := range columns {
			if c == column {
				return loadOf(columnFigures(legsOf(legs, n), f.legs)).lines()
			}
		}
		return nil
	})
	m.place()
	return m
}

// add adds a box to a layer.
func (m *volumeMap) add(layer int, b *box) *box {
	b.layer = layer
	m.boxes[layer] = append(m.boxes[layer], b)
	return b
}

// find returns the box of a layer with a key, which create makes if there is none.
func (m *volumeMap) find(layer int, key string, create func() *box) (b *box, isNew bool) {
	for _, b := range m.boxes[layer] {
		if b.key == key {
			return b, false
		}
	}
	b = create()
	b.key = key
	return m.add(layer, b), true
}

// addLeg adds a leg, and what holds it.
func (m *volumeMap) addLeg(v *pb.Volume, l *pb.Leg, column *box, d *pb.Drive, n *pb.Node, f figures) {
	place := fmt.Sprintf("%d.%d", l.GetColumn(), l.GetCopy())
	leg := m.add(layerLeg, &box{key: l.GetId(), title: "leg " + place, note: m.reach.word(l), tone: m.reach.tone(l)})
	broken := l.GetState() == pb.LegState_LEG_STATE_STALE || l.GetState() == pb.LegState_LEG_STATE_DELETING
	shown := loadOf(f.legs[l.GetId()]).lines()
	if progress := rebuildFigure(v, l); progress != "" {
		shown = []string{progress}
	} else if broken {
		shown = nil
	}
	m.edges = append(m.edges, edge{column, leg, leg.tone, broken, shown})

	drive, _ := m.find(layerDrive, l.GetDriveId(), func() *box {
		return &box{
			title: cmp.Or(lastOf(d.GetDevice()), "drive"), note: wordOf(d.GetState()) + " " + cli.Used(d.GetAllocatedBytes(), d.GetCapacityBytes()),
			tone: driveTone(d.GetState()), link: "/drives#drive-" + cli.ShortID(l.GetDriveId()),
		}
	})
	m.edges = append(m.edges, edge{from: leg, to: drive, tone: leg.tone, broken: broken})

	target, isNew := m.find(layerTarget, l.GetNode(), func() *box {
		return &box{title: l.GetNode(), note: agentWord(n, n.GetTarget()), tone: agentTone(n, n.GetTarget()), link: "/nodes/" + url.PathEscape(l.GetNode())}
	})
	if !m.has(drive, target) {
		m.edges = append(m.edges, edge{drive, target, worse(drive.tone, target.tone), drive.tone == bad || target.tone == bad, loadOf(f.drives[l.GetDriveId()]).lines()})
	}
	if kind, name := rackOf(n); isNew && name != "" {
		rack, _ := m.find(layerRack, name, func() *box { return &box{title: name, note: kind, tone: quiet} })
		m.edges = append(m.edges, edge{from: target, to: rack, tone: target.tone, broken: target.tone == bad})
	}
}

// has reports whether two boxes are connected.
func (m *volumeMap) has(from, to *box) bool {
	return slices.ContainsFunc(m.edges, func(e edge) bool { return e.from == from && e.to == to })
}

// addHosts adds the hosts to which the volume is attached; if there are none, the place of one. What
// a host asks of a column is known if it is the only one.
func (m *volumeMap) addHosts(v *pb.Volume, machines map[string]*pb.Node, asked func(column *box) []string) {
	all := cli.AttachmentsOf(v)
	if len(all) == 0 {
		host := m.add(layerHost, &box{key: "", title: "not attached", note: cmp.Or(cli.Healing(v), "no host"), tone: quiet, absent: true})
		for _, column := range m.boxes[layerColumn] {
			m.edges = append(m.edges, edge{from: host, to: column, tone: quiet, broken: true})
		}
	}
	for _, a := range all {
		n := machines[a.GetNode()]
		tone := attachmentTone(a.GetState())
		if agentTone(n, n.GetInitiator()) == bad {
			tone = bad
		}
		host := m.add(layerHost, &box{key: a.GetNode(), title: a.GetNode(), note: wordOf(a.GetState()), tone: tone, link: "/nodes/" + url.PathEscape(a.GetNode())})
		for i, column := range m.boxes[layerColumn] {
			e := edge{from: host, to: column, tone: worse(tone, column.tone), broken: column.tone == bad}
			if len(all) == 1 && !e.broken {
				e.figures = asked(column)
			}
			if progress := resyncFigure(a); i == 0 && progress != "" {
				e.figures = []string{progress}
			}
			m.edges = append(m.edges, e)
		}
	}
}

// legsOf are the legs of a column.
func legsOf(legs []*pb.Leg, column uint32) (all []*pb.Leg) {
	for _, l := range legs {
		if l.GetColumn() == column {
			all = append(all, l)
		}
	}
	return all
}

// columnState is the tone of a column with these legs, and how many of them can be used.
func (m *volumeMap) columnState(legs []*pb.Leg) (tone, note string) {
	usable, all := 0, len(legs)
	for _, l := range legs {
		if m.reach.has(l) {
			usable++
		}
	}
	note = fmt.Sprintf("%d of %s", usable, cli.Nouns(all, "leg"))
	switch {
	case usable == all:
		return good, note
	case usable == 0:
		return bad, note
	}
	return warn, note
}

// tones in order, the worst last.
var toneOrder = []string{quiet, good, busy, warn, bad}

func worse(a, b string) string {
	return toneOrder[max(slices.Index(toneOrder, a), slices.Index(toneOrder, b))]
}

// rebuildFigure is how far the copy to a leg is; empty: there is none under way.
func rebuildFigure(v *pb.Volume, l *pb.Leg) string {
	for _, r := range v.GetRebuilds() {
		if r.GetLegId() != l.GetId() || r.GetEnded() != nil || r.GetTotalBytes() == 0 {
			continue
		}
		text := cli.Used(r.GetDoneBytes(), r.GetTotalBytes())
		if rate := r.GetBytesPerSecond(); rate > 0 {
			text += " " + cli.Size(rate) + "/s"
		}
		return text
	}
	return ""
}

// resyncFigure is how far a host is with making the copies equal; empty: it is not doing that.
func resyncFigure(a *pb.Attachment) string {
	if a.GetResyncTotalBytes() == 0 {
		return ""
	}
	return cli.Used(a.GetResyncDoneBytes(), a.GetResyncTotalBytes()) + " copied"
}

// Sizes of a map, in the units of its view box.
const (
	boxWidth, boxHeight = 142.0, 44.0
	wideGap, narrowGap  = 110.0, 40.0
	rowHeight           = 58.0 // from one leg to the next
	columnGap           = 14.0 // more between columns
	headHeight          = 34.0
)

// gaps are the widths before each layer: there is room for figures, where there are some.
var gaps = [layers]float64{layerHost: 2, layerColumn: wideGap, layerLeg: wideGap, layerDrive: narrowGap, layerTarget: wideGap, layerRack: narrowGap}

// left is where a layer begins.
func left(layer int) (x float64) {
	for i := range layer + 1 {
		x += gaps[i]
	}
	return x + float64(layer)*boxWidth
}

// place gives each box its height. Legs stand in order; everything else is near to what it is
// connected with, and what a rack or a target holds stands together, so that few edges cross.
func (m *volumeMap) place() {
	y := headHeight
	last := ""
	for i, leg := range m.boxes[layerLeg] {
		column := m.before(leg).key
		if i > 0 && column != last {
			y += columnGap
		}
		leg.y, last = y, column
		y += rowHeight
	}
	for _, layer := range []int{layerColumn, layerHost} {
		for _, b := range m.boxes[layer] {
			b.y = m.mean(b, func(e edge) (*box, *box) { return e.from, e.to })
		}
		m.spread(layer)
	}
	from := func(e edge) (*box, *box) { return e.to, e.from }
	for layer := layerDrive; layer < layers; layer++ {
		for _, b := range m.boxes[layer] {
			b.y = m.mean(b, from)
		}
	}
	m.group()
	for layer := layerDrive; layer < layers; layer++ {
		if layer > layerDrive { // their places depend on those of what they hold
			for _, b := range m.boxes[layer] {
				b.y = m.mean(b, from)
			}
		}
		m.spread(layer)
	}
	for _, boxes := range m.boxes {
		for _, b := range boxes {
			m.height = max(m.height, b.y+boxHeight+8)
		}
	}
}

// before is what a box hangs on.
func (m *volumeMap) before(b *box) *box {
	for _, e := range m.edges {
		if e.to == b {
			return e.from
		}
	}
	return &box{}
}

// after is what holds a box; the same box if nothing does.
func (m *volumeMap) after(b *box) *box {
	for _, e := range m.edges {
		if e.from == b {
			return e.to
		}
	}
	return b
}

// mean is the mean height of what a box is connected with on one side.
func (m *volumeMap) mean(b *box, side func(edge) (near, far *box)) float64 {
	sum, n := 0.0, 0
	for _, e := range m.edges {
		if near, far := side(e); near == b {
			sum, n = sum+far.y, n+1
		}
	}
	if n == 0 {
		return headHeight
	}
	return sum / float64(n)
}

// group orders drives by rack, target and height.
func (m *volumeMap) group() {
	order := func(a, b *box) int { return cmp.Or(cmp.Compare(a.y, b.y), cmp.Compare(a.title, b.title)) }
	slices.SortFunc(m.boxes[layerDrive], func(a, b *box) int {
		ta, tb := m.after(a), m.after(b)
		return cmp.Or(order(m.after(ta), m.after(tb)), order(ta, tb), order(a, b))
	})
	slices.SortFunc(m.boxes[layerTarget], func(a, b *box) int { return cmp.Or(order(m.after(a), m.after(b)), order(a, b)) })
	slices.SortFunc(m.boxes[layerRack], order)
}

// spread moves the boxes of a layer apart, in their order, as little as that needs.
func (m *volumeMap) spread(layer int) {
	boxes := m.boxes[layer]
	if layer < layerDrive {
		slices.SortStableFunc(boxes, func(a, b *box) int { return cmp.Compare(a.y, b.y) })
	}
	drift := 0.0
	wanted := make([]float64, len(boxes))
	for i, b := range boxes {
		wanted[i] = b.y
		if i > 0 {
			b.y = max(b.y, boxes[i-1].y+rowHeight)
		}
		drift += b.y - wanted[i]
	}
	if len(boxes) == 0 {
		return
	}
	shift := min(drift/float64(len(boxes)), boxes[0].y-headHeight)
	for _, b := range boxes {
		b.y -= max(0, shift)
	}
}

// lastOf is the last part of a path.
func lastOf(path string) string {
	for i := len(path) - 1; i >= 0; i-- {
		if path[i] == '/' {
			return path[i+1:]
		}
	}
	return path
}
