// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"encoding/json"
	"fmt"
	"strings"
)

// Kept is a trace that a search has found in a build that lacked a guard.
type Kept struct {
	What   string // was wrong there
	Config Config
	Steps  []string // a line each; what follows " -> " is for readers
}

// Text returns the trace as it is kept in testdata.
func (k Kept) Text() string {
	config, err := json.Marshal(k.Config)
	if err != nil {
		panic(err) // plain data of our own
	}
	return k.What + "\n" + string(config) + "\n----\n" + strings.Join(k.Steps, "\n") + "\n"
}

// ParseKept is the inverse of Text.
func ParseKept(text string) (k Kept, err error) {
	head, steps, ok := strings.Cut(text, "\n----\n")
	what, config, ok2 := strings.Cut(head, "\n")
	if !ok || !ok2 {
		return k, fmt.Errorf("want what was wrong, a configuration, ---- and the steps, each on its line")
	}
	k.What, k.Steps = what, strings.Split(strings.TrimSuffix(steps, "\n"), "\n")
	return k, json.Unmarshal([]byte(config), &k.Config)
}

// Replay takes the steps of a trace as far as they are possible, in every way in which they are. It
// returns how many are, and which promise they break; empty: none.
func (k Kept) Replay() (taken int, broken string) {
	r, first := newRig(k.Config)
	here := map[world]bool{first: true}
	for _, line := range k.Steps {
		what, _, _ := strings.Cut(line, " -> ")
		next := map[world]bool{}
		for w := range here {
			for _, e := range r.all(w) {
				if e.did.String() != what {
					continue
				}
				next[e.to] = true
				if s := r.broken(&e.to); s != "" {
					return taken + 1, s
				}
			}
		}
		if len(next) == 0 {
			return taken, ""
		}
		here = next
		taken++
	}
	return taken, ""
}
