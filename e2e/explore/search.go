// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"
	"hash/maphash"
	"slices"
	"strings"
)

// Found is the outcome of a search.
type Found struct {
	States, Steps int
	Depth         int      // of the state that is farthest from the beginning
	Complete      bool     // every state was visited
	Broken        string   // the promise that does not hold; empty: all hold
	Trace         []string // the shortest way there, a step a line
	// How often the real code of the manager and of the hosts ran for it, each time on other values.
	Decisions, Turns int
}

// search visits every world that can be reached from the first, nearest first, until a promise is
// broken.
type search struct {
	*rig
	seed  maphash.Seed
	known map[uint64]int32 // by hash; where two worlds have one, the later is at the next that is free
	order []world
	from  []int32
	did   []action
	depth []int32
	edges [][2]int32 // from and to, of the steps in which nothing breaks and nobody does anything
	steps int
}

// Bounds end a search early; 0: no bound.
type Bounds struct{ States, Depth int }

// Explore searches a configuration.
func Explore(c Config, b Bounds) Found {
	r, first := newRig(c)
	s := &search{rig: r, seed: maphash.MakeSeed(), known: map[uint64]int32{}}
	s.visit(edge{to: first}, -1)
	f := Found{Complete: true}
	if bad := s.run(&f, b); bad > 0 {
		f.Trace = s.trace(bad)
	}
	f.States, f.Steps, f.Depth = len(s.order), s.steps, int(slices.Max(s.depth))
	f.Decisions, f.Turns = len(s.decisions), len(s.turns)
	return f
}

// run visits the worlds, and returns the nearest one that breaks a promise; 0: none does.
func (s *search) run(f *Found, b Bounds) int32 {
	for q := 0; q < len(s.order); q++ {
		if b.States > 0 && len(s.order) > b.States || b.Depth > 0 && int(s.depth[q]) >= b.Depth {
			f.Complete = false
			return 0
		}
		for _, e := range s.all(s.order[q]) {
			s.steps++
			n, isNew := s.visit(e, int32(q))
			if isNew {
				if f.Broken = s.broken(&e.to); f.Broken != "" {
					return n
				}
			}
			if e.did.kind == progresses || e.did.kind == heals || e.did.kind == waits {
				s.edges = append(s.edges, [2]int32{int32(q), n})
			}
		}
	}
	var bad int32
	f.Broken, bad = s.stuck()
	return bad
}

// visit numbers the world that a step from another leads to; from is -1 for the first.
func (s *search) visit(e edge, from int32) (n int32, isNew bool) {
	h := maphash.Comparable(s.seed, e.to)
	for ; ; h++ {
		n, known := s.known[h]
		if !known {
			break
		}
		if s.order[n] == e.to {
			return n, false
		}
	}
	n = int32(len(s.order))
	s.known[h] = n
	depth := int32(0)
	if from >= 0 {
		depth = s.depth[from] + 1
	}
	s.order, s.from, s.did, s.depth = append(s.order, e.to), append(s.from, from), append(s.did, e.did), append(s.depth, depth)
	return n, true
}

// trace is the way to a world. A line also says how the manager's records change with that step.
func (s *search) trace(n int32) (lines []string) {
	for ; n > 0; n = s.from[n] {
		line := s.did[n].String()
		was, is := s.managers.at(s.order[s.from[n]].manager), s.managers.at(s.order[n].manager)
		if was.facts != is.facts {
			line += " -> " + is.facts.String()
		}
		lines = append(lines, line)
	}
	slices.Reverse(lines)
	return lines
}

// stuck finds the nearest world from which no world can be reached in which the volume serves,
// though nothing else breaks. The manager's reasons are part of what it returns.
func (s *search) stuck() (why string, at int32) {
	back := s.backward()
	well := make([]bool, len(s.order))
	var todo []int32
	for n := range s.order {
		if s.serves(&s.order[n]) {
			well[n] = true
			todo = append(todo, int32(n))
		}
	}
	for len(todo) > 0 {
		n := todo[len(todo)-1]
		todo = todo[:len(todo)-1]
		for _, from := range back(n) {
			if !well[from] {
				well[from] = true
				todo = append(todo, from)
			}
		}
	}
	for n := range s.order {
		if !well[n] {
			waits := s.managers.at(s.order[n].manager).waits()
			return "from here the volume never serves again; it waits for: " + strings.Join(waits, "; "), int32(n)
		}
	}
	return "", 0
}

// backward returns a function that lists the worlds from which an edge leads to a world.
func (s *search) backward() func(int32) []int32 {
	first := make([]int32, len(s.order)+1)
	for _, e := range s.edges {
		first[e[1]+1]++
	}
	for n := range s.order {
		first[n+1] += first[n]
	}
	from, at := make([]int32, len(s.edges)), slices.Clone(first)
	for _, e := range s.edges {
		from[at[e[1]]] = e[0]
		at[e[1]]++
	}
	return func(n int32) []int32 { return from[first[n]:first[n+1]] }
}

func (f Found) String() string {
	text := fmt.Sprintf("%d states, %d steps, depth %d; %d decisions of the manager, %d turns of hosts", f.States, f.Steps, f.Depth, f.Decisions, f.Turns)
	if !f.Complete {
		text += "; NOT complete"
	}
	if f.Broken != "" {
		text += "\n" + f.Broken + "\n\t" + strings.Join(f.Trace, "\n\t")
	}
	return text
}
