// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"testing"
)

// mirrorOn is a script in which c1 has db1, a mirror on t1 and t2; t3 has room.
func mirrorOn(t *testing.T, cache string) *script {
	t.Helper()
	s := newScript(t)
	for _, command := range []string{
		"target t1 drives=10GiB " + cache, "target t2 drives=10GiB " + cache, "create db1 size=1GiB", "comply",
		"host c1", "attach db1 c1", "comply", "serve c1 db1",
	} {
		s.run(command)
	}
	return s
}

// whole says what a host is told of how much of a leg it has to copy.
func (l *Leg) whole() string {
	if !l.CopyAll {
		return "what it missed"
	}
	s := fmt.Sprintf("all since %d", l.CopyAllSince)
	if l.CacheLost {
		s += fmt.Sprintf(", but for a lost cache since %d", l.AllSince)
	}
	return s
}

// A host that tracks what it has not flushed need not copy all of a leg that has lost its drive's cache,
// unless something else made that necessary, or flushes may have done nothing.
func TestWhatALostCacheMakesAHostCopy(t *testing.T) {
	for name, c := range map[string]struct {
		cache string
		steps []string
		want  string
	}{
		"a power cut":                       {"volatile", []string{"reboot t2", "comply"}, "all since 2, but for a lost cache since 0"},
		"the manager restarts after it":     {"volatile", []string{"restart", "reboot t2", "restart", "report t1", "report t2", "comply"}, "all since 2, but for a lost cache since 0"},
		"recorded before":                   {"volatile", []string{"stale c1 db1 0.1", "reboot t2"}, "all since 2, but for a lost cache since 0"},
		"recorded while it is not judged":   {"volatile", []string{"lost t1", "reboot t2", "stale c1 db1 0.1"}, "all since 2, but for a lost cache since 0"},
		"in a rebuild":                      {"volatile", []string{"stale c1 db1 0.1", "comply", "reboot t2", "comply"}, "all since 3, but for a lost cache since 0"},
		"twice":                             {"volatile", []string{"reboot t2", "comply", "reboot t2", "comply"}, "all since 3, but for a lost cache since 0"},
		"after it was in sync again":        {"volatile", []string{"reboot t2", "comply", "in-sync c1 db1 0.1", "comply", "stale c1 db1 0.1"}, "what it missed"},
		"its drive returns":                 {"volatile", []string{"return t2 as=1", "return t2 as=2", "comply"}, "all since 2, but for a lost cache since 0"},
		"no cache":                          {"", []string{"reboot t2", "stale c1 db1 0.1"}, "what it missed"},
		"a cache that it had not at boot":   {"", []string{"cache t2 volatile", "reboot t2", "comply"}, "all since 2"},
		"a cache that came with the boot":   {"", []string{"cache t2 volatile later", "reboot t2", "comply", "reboot t2", "comply"}, "all since 2, but for a lost cache since 0"},
		"a cache that is said to have gone": {"volatile", []string{"cache t2 none", "reboot t2", "comply"}, "all since 2"},
		"and is there again":                {"volatile", []string{"cache t2 none", "cache t2 volatile", "reboot t2", "comply"}, "all since 2"},
		"the manager restarts meanwhile":    {"volatile", []string{"cache t2 none", "cache t2 volatile", "restart", "report t1", "report t2", "reboot t2", "comply"}, "all since 2"},
		"a boot ends that":                  {"volatile", []string{"cache t2 none", "cache t2 volatile", "reboot t2", "comply", "in-sync c1 db1 0.1", "comply", "reboot t2", "comply"}, "all since 3, but for a lost cache since 0"},
		"unsure, and then a plain one":      {"volatile", []string{"cache t2 none", "cache t2 volatile", "reboot t2", "comply", "reboot t2", "comply"}, "all since 3, but for a lost cache since 2"},
	} {
		t.Run(name, func(t *testing.T) {
			s := mirrorOn(t, c.cache)
			for _, step := range c.steps {
				s.run(step)
			}
			l := s.db1().legAt(0, 1)
			if l.Node != "t2" {
				t.Fatalf("%v", l)
			}
			if got := l.whole(); got != c.want || l.State == LegInSync {
				t.Errorf("%v is %s, to copy: %s; want %s", l, l.State, got, c.want)
			}
		})
	}
}

// A new leg whose target loses power is copied whole by a host that had not begun, and a host that had
// copies only what it knows to be missing.
func TestANewLegThatLosesItsCacheIsStillNew(t *testing.T) {
	s := mirrorOn(t, "volatile")
	for _, step := range []string{"target t3 drives=10GiB volatile", "move db1 0.1 to=t3", "comply", "serve c1 db1", "reboot t3", "comply"} {
		s.run(step)
	}
	l := s.db1().legAt(0, 2)
	if got, want := l.whole(), "all since 2, but for a lost cache since 1"; got != want {
		t.Errorf("to copy of %v: %s, want %s", l, got, want)
	}
}
