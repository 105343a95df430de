// SPDX-License-Identifier: Apache-2.0

package authority

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

func cluster(n byte) block.ClusterID { return block.ClusterID{UUID: block.UUID{n, 15: 1}} }

// What an agent takes, after what: in one process, and in two.
func TestLowerOrdersAreRefusedAlsoAfterARestart(t *testing.T) {
	for name, c := range map[string]struct {
		taken, next Order
		want        error
	}{
		"first of all":           {next: Order{cluster(1), 3, 9}},
		"the same again":         {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 3, 9}},
		"next generation":        {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 3, 10}},
		"lower generation":       {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 3, 8}, want: ErrReplaced},
		"next term":              {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 4, 1}},
		"lower term":             {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 2, 100}, want: ErrReplaced},
		"other cluster":          {taken: Order{cluster(1), 3, 9}, next: Order{cluster(2), 1, 1}},
		"manager without terms":  {taken: Order{cluster(1), 3, 9}, next: Order{cluster(1), 0, 100}, want: ErrReplaced},
		"never a manager's term": {taken: Order{cluster(1), 0, 9}, next: Order{cluster(1), 0, 8}},
		"its first term":         {taken: Order{cluster(1), 0, 9}, next: Order{cluster(1), 1, 8}},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "note")
			for _, restarted := range []bool{false, true} {
				os.Remove(path)
				n := open(t, path)
				if c.taken != (Order{}) {
					if err := n.Take(c.taken); err != nil {
						t.Fatal(err)
					}
				}
				if restarted {
					n = open(t, path)
				}
				if err := n.Check(c.next); !errors.Is(err, c.want) {
					t.Errorf("restarted %t: Check(%v) after %v = %v, want %v", restarted, c.next, c.taken, err, c.want)
				}
				if err := n.Take(c.next); !errors.Is(err, c.want) {
					t.Errorf("restarted %t: Take(%v) after %v = %v, want %v", restarted, c.next, c.taken, err, c.want)
				}
				want := c.next
				if c.want != nil {
					want = c.taken
				}
				if got := n.Newest(); got != want && want.Term > 0 {
					t.Errorf("restarted %t: newest = %v, want %v", restarted, got, want)
				}
			}
		})
	}
}

func open(t *testing.T, path string) *Note {
	t.Helper()
	n := new(Note)
	if err := n.Load(path); err != nil {
		t.Fatal(err)
	}
	return n
}

func TestAnAnswerOfALowerTermIsRefused(t *testing.T) {
	n := open(t, "")
	if err := n.Take(Order{cluster(1), 3, 9}); err != nil {
		t.Fatal(err)
	}
	for term, want := range map[uint64]error{0: ErrReplaced, 2: ErrReplaced, 3: nil, 4: nil} {
		if err := n.CheckAnswer(term); !errors.Is(err, want) {
			t.Errorf("CheckAnswer(%d) = %v, want %v", term, err, want)
		}
	}
}

// Orders follow one another fast, and a note may be removed under an agent that runs.
func TestANoteIsKeptThroughManyOrders(t *testing.T) {
	path := filepath.Join(t.TempDir(), "note")
	n := open(t, path)
	for generation := range uint64(2000) {
		if generation == 1500 {
			os.Remove(path)
		}
		o := Order{cluster(1), 1 + generation/700, generation}
		if err := n.Take(o); err != nil {
			t.Fatal(err)
		}
		if generation%100 == 0 {
			if got := open(t, path).Newest(); got != o {
				t.Fatalf("the note holds %v, want %v", got, o)
			}
		}
	}
}

// A note that cannot be kept is not acted on: the next process would fall back.
func TestANoteThatCannotBeKeptIsAnError(t *testing.T) {
	n := open(t, filepath.Join(t.TempDir(), "missing", "note"))
	if err := n.Take(Order{cluster(1), 3, 9}); err == nil || n.Newest() != (Order{}) {
		t.Errorf("Take = %v, newest = %v", err, n.Newest())
	}
}

func TestADamagedNoteIsNotOverwritten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "note")
	for _, text := range []string{"", "term", "cluster x term 1 generation 2\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := new(Note).Load(path); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("Load with %q there = %v, want an error that names the file", text, err)
		}
	}
}
