// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// twoPaths connects through two ports, each with its own network.
func twoPaths(t *testing.T, l *lab, o options) (served, session, [2]*proxy) {
	t.Helper()
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 8 * mib}, ports: 2})
	p := [2]*proxy{newProxy(t, s.portal(0)), newProxy(t, s.portal(1))}
	o.portals = []string{p[0].portal(), p[1].portal()}
	return s, l.connect(t, s, o), p
}

func anaUnderLoad(t *testing.T, l *lab) {
	s, c, _ := twoPaths(t, l, options{})
	s.ana(1, nonOptimized)
	w := load(t, c.device(1), 8*mib)
	w.moves(t)
	for i := range 4 {
		from, to := i%2, 1-i%2
		s.ana(to, optimized)
		s.ana(from, inaccessible)
		eventually(t, "the host knows both states", func() bool {
			return c.ana(from, 1) == inaccessible && c.ana(to, 1) == optimized
		})
		w.moves(t)
	}
	// Without any path requests wait, and the application sees no error.
	s.ana(0, inaccessible)
	s.ana(1, inaccessible)
	w.rests(t)
	s.ana(1, optimized)
	w.moves(t)
	w.end(t)
}

func pathBreaks(t *testing.T, l *lab) {
	_, c, p := twoPaths(t, l, options{keepAlive: 2 * time.Second})
	w := load(t, c.device(1), 8*mib)
	for i := range 2 {
		w.moves(t)
		p[i].refuseAll(true)
		eventually(t, "the host has noticed", func() bool { return !c.live(i) })
		w.moves(t)
		p[i].refuseAll(false)
		eventually(t, "the path is back", func() bool { return c.live(i) })
	}
	w.moves(t)
	w.end(t)
}

// silence interrupts the network for longer than the keep-alive timeout. The target must
// drop the host, the host must drop the connection, and outstanding requests must succeed
// once the network is back.
func silence(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 8 * mib}})
	p := newProxy(t, s.portal(0))
	c := l.connect(t, s, options{portals: []string{p.portal()}, keepAlive: 2 * time.Second})
	w := load(t, c.device(1), 8*mib)
	w.moves(t)
	before := p.givenUp()
	p.mute()
	took := eventually(t, "the host has noticed", func() bool { return !c.live(0) })
	t.Logf("the host noticed after %v", took)
	took = eventually(t, "the target has noticed", func() bool { return p.givenUp() > before })
	t.Logf("the target noticed %v later", took)
	w.rests(t)
	p.listen()
	eventually(t, "the controller is live again", func() bool { return c.live(0) })
	w.moves(t)
	w.end(t)
	must(t, block.Flush(c.device(1)))
}
