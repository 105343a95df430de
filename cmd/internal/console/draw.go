// SPDX-License-Identifier: Apache-2.0

package console

import (
	"fmt"
	"html"
	"html/template"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// drawing is SVG in the making. Everything that comes from the cluster goes through text.
type drawing struct{ strings.Builder }

func (d *drawing) add(format string, values ...any) {
	for i, v := range values {
		if s, ok := v.(string); ok {
			values[i] = html.EscapeString(s)
		}
	}
	fmt.Fprintf(d, format, values...)
}

// done returns the drawing. Its parts were escaped by add.
func (d *drawing) done() template.HTML { return template.HTML(d.String()) } //nolint:gosec // see add

// svg draws a map.
func (m *volumeMap) svg() template.HTML {
	var d drawing
	d.add(`<svg class="map" viewBox="0 0 %.0f %.0f" role="group" aria-labelledby="map-title map-text">`, left(layers-1)+boxWidth+2, m.height)
	d.add(`<title id="map-title">Map of volume %s</title><desc id="map-text">%s</desc>`, m.volume, m.words())
	for layer, name := range layerNames {
		if len(m.boxes[layer]) > 0 {
			d.add(`<text class="map-head" x="%.1f" y="14">%s</text>`, left(layer)+boxWidth/2, name)
		}
	}
	for _, e := range m.edges {
		e.draw(&d)
	}
	for _, boxes := range m.boxes {
		for _, b := range boxes {
			b.draw(&d)
		}
	}
	for _, e := range m.edges { // above the other edges
		// Nearer to where the edge leads, since many begin at one place.
		x, y := left(e.to.layer)-gaps[e.to.layer]*0.45, e.from.y+(e.to.y-e.from.y)*0.74+boxHeight/2
		for i, line := range e.figures {
			d.add(`<text class="figure" x="%.1f" y="%.1f">%s</text>`, x, y-4+14*float64(i), line)
		}
	}
	d.add(`</svg>`)
	return d.done()
}

// words say what a map shows, for those who do not see it; the table of legs has the rest.
func (m *volumeMap) words() string {
	var all []string
	for _, b := range append(m.boxes[layerHost][:len(m.boxes[layerHost]):len(m.boxes[layerHost])], m.boxes[layerLeg]...) {
		all = append(all, b.title+": "+b.note)
	}
	return strings.Join(all, "; ")
}

func (e edge) draw(d *drawing) {
	x1, y1 := left(e.from.layer)+boxWidth, e.from.y+boxHeight/2
	x2, y2 := left(e.to.layer), e.to.y+boxHeight/2
	bend := gaps[e.to.layer] * 0.5
	class := "edge " + e.tone
	if e.broken {
		class += " broken"
	}
	d.add(`<path class="%s" d="M%.1f %.1fC%.1f %.1f %.1f %.1f %.1f %.1f"/>`, class, x1, y1, x1+bend, y1, x2-bend, y2, x2, y2)
}

func (b *box) draw(d *drawing) {
	x := left(b.layer)
	class := "box " + b.tone
	if b.absent {
		class += " absent"
	}
	if b.link != "" {
		d.add(`<a href="%s">`, b.link)
	}
	d.add(`<g class="%s"><title>%s: %s</title>`, class, b.title, b.note)
	d.add(`<rect class="body" x="%.1f" y="%.1f" width="%.0f" height="%.0f" rx="8"/>`, x, b.y, boxWidth, boxHeight)
	d.add(`<rect class="mark" x="%.1f" y="%.1f" width="4" height="%.0f" rx="2"/>`, x+7, b.y+9, boxHeight-18)
	d.add(`<text class="name" x="%.1f" y="%.1f">%s</text>`, x+19, b.y+19, clip(b.title, 16))
	d.add(`<text class="note" x="%.1f" y="%.1f">%s</text></g>`, x+19, b.y+34, clip(b.note, 20))
	if b.link != "" {
		d.add(`</a>`)
	}
}

// clip shortens a text to what has room.
func clip(text string, most int) string {
	runes := []rune(text)
	if len(runes) <= most {
		return text
	}
	return string(runes[:most-1]) + "…"
}

// meter draws how much of a whole is used.
func meter(part, whole uint64) template.HTML {
	var d drawing
	tone := "fill"
	switch p := percent(part, whole); {
	case p >= 95:
		tone = "fill " + bad
	case p >= 85:
		tone = "fill " + warn
	}
	d.add(`<svg class="meter" viewBox="0 0 100 6" preserveAspectRatio="none" role="img" aria-label="%s used"><rect class="room" width="100" height="6" rx="3"/><rect class="%s" width="%d" height="6" rx="3"/></svg>`,
		cli.Used(part, whole), tone, percent(part, whole))
	return d.done()
}

// mostDots is how many legs are drawn one by one.
const mostDots = 48

// dots draws the legs of a volume: a column of squares for each column of the volume.
func dots(v *pb.Volume, r reach) template.HTML {
	legs := v.GetLegs()
	if len(legs) == 0 || len(legs) > mostDots {
		return ""
	}
	var wide, high uint32
	for _, l := range legs {
		wide, high = max(wide, l.GetColumn()+1), max(high, l.GetCopy()+1)
	}
	if wide > mostDots || high > mostDots {
		return ""
	}
	const step, side = 11, 9
	var d drawing
	d.add(`<svg class="dots" width="%d" height="%d" viewBox="0 0 %d %d" role="img" aria-label="%s legs can be used">`, wide*step, high*step, wide*step, high*step, r.present(v))
	for _, l := range legs {
		d.add(`<rect class="dot %s" x="%d" y="%d" width="%d" height="%d" rx="2"><title>leg %d.%d on %s: %s</title></rect>`,
			r.tone(l), l.GetColumn()*step+1, l.GetCopy()*step+1, side, side, l.GetColumn(), l.GetCopy(), l.GetNode(), r.word(l))
	}
	d.add(`</svg>`)
	return d.done()
}
