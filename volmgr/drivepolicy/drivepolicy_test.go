// SPDX-License-Identifier: Apache-2.0

package drivepolicy

import (
	"fmt"
	"math/rand/v2"
	"path"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

const gib = 1 << 30

func inRack(rack string) func(string) string {
	return func(label string) string {
		if label == "rack" {
			return rack
		}
		return ""
	}
}

func TestAPolicySelectsByModelSizeAndNode(t *testing.T) {
	p := Policy{Name: "fast", Model: "SAMSUNG*", MinSize: 1000 * gib, MaxSize: 4000 * gib, Nodes: map[string]string{"rack": "r1"}}
	disk := Device{Model: "SAMSUNG MZQL21T9", Size: 1900 * gib, Identity: "eui.1/S1"}
	for _, c := range []struct {
		name   string
		change func(*Device)
		rack   string
		want   bool
	}{
		{"as it says", func(*Device) {}, "r1", true},
		{"another model", func(d *Device) { d.Model = "INTEL" }, "r1", false},
		{"too small", func(d *Device) { d.Size = 999 * gib }, "r1", false},
		{"just large enough", func(d *Device) { d.Size = 1000 * gib }, "r1", true},
		{"too large", func(d *Device) { d.Size = 4001 * gib }, "r1", false},
		{"another rack", func(*Device) {}, "r2", false},
	} {
		d := disk
		c.change(&d)
		if got := p.Selects(d, inRack(c.rack)); got != c.want {
			t.Errorf("%s: Selects = %v, want %v", c.name, got, c.want)
		}
	}
}

func TestWhatNothingTellsFromOthersIsNotTaken(t *testing.T) {
	all := (*Set)(nil).With(Policy{Name: "all"})
	disk := Device{Identity: "eui.1/S1"}
	if p := all.For(disk, inRack(""), 1, false); p == nil {
		t.Fatal("a disk that only one node sees is not taken, want that it is")
	}
	for name, p := range map[string]*Policy{
		"a device without serial number and WWID":     all.For(Device{}, inRack(""), 1, false),
		"a device that is there twice":                all.For(disk, inRack(""), 2, false),
		"a device that is a drive":                    all.For(disk, inRack(""), 1, true),
		"a device that was evicted":                   all.Evict(disk.Identity).For(disk, inRack(""), 1, false),
		"a device, without any policy":                all.Without("all").For(disk, inRack(""), 1, false),
		"a device, without any policy from the start": (*Set)(nil).For(disk, inRack(""), 1, false),
	} {
		if p != nil {
			t.Errorf("%s is taken by policy %s, want that it is not", name, p.Name)
		}
	}
	if all.Evict(disk.Identity).Return(disk.Identity).For(disk, inRack(""), 1, false) == nil {
		t.Error("a device that its operator has added again since it was evicted is not taken, want that it is")
	}
}

func TestTheLatestEvictionsAreRemembered(t *testing.T) {
	s := (*Set)(nil).With(Policy{Name: "all"})
	for i := range mostEvicted + 10 {
		s = s.Evict(Identity(fmt.Sprint(i)))
	}
	if len(s.Evicted) != mostEvicted || s.Evicted[0] != "10" {
		t.Errorf("%d are remembered, from %s on; want %d from 10 on", len(s.Evicted), s.Evicted[0], mostEvicted)
	}
}

func TestASetIsNeverChangedInPlace(t *testing.T) {
	first := (*Set)(nil).With(Policy{Name: "b"}).Evict("x")
	first.With(Policy{Name: "a"})
	first.Evict("y")
	first.Return("x")
	first.Without("b")
	if len(first.Policies) != 1 || first.Policies[0].Name != "b" || len(first.Evicted) != 1 {
		t.Errorf("the set became %+v, want policy b and x evicted", first)
	}
}

// TestPatternsMatchAsInAShell compares with the standard library's patterns, on texts without the
// characters that are special there alone.
func TestPatternsMatchAsInAShell(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	random := func(letters string) string {
		var b strings.Builder
		for range r.IntN(7) {
			b.WriteByte(letters[r.IntN(len(letters))])
		}
		return b.String()
	}
	matched := 0
	for range 20000 {
		pattern, text := random("ab*"), random("ab")
		want, err := path.Match(pattern, text)
		if err != nil {
			t.Fatal(err)
		}
		if want {
			matched++
		}
		if got := matches(pattern, text); got != want {
			t.Fatalf("matches(%q, %q) = %v, want %v", pattern, text, got, want)
		}
	}
	if matched < 1000 {
		t.Errorf("%d of the pairs match, want more for a test", matched)
	}
}

func TestAPolicySaysWhatItSelects(t *testing.T) {
	p := Policy{Name: "x", Model: "S*", MinSize: gib, MaxSize: 2 * gib, Nodes: map[string]string{"rack": "r1"}, Labels: map[string]string{"class": "fast"}}
	if got, want := p.String(), "model S*, at least 1GiB, at most 2GiB, on rack=r1, label class=fast"; got != want {
		t.Errorf("String = %q, want %q", got, want)
	}
	if got := (&Policy{Name: "x"}).String(); got != "all" {
		t.Errorf("String of a policy that selects all = %q, want all", got)
	}
}

func TestAPolicyIsCheckedBeforeItIsKept(t *testing.T) {
	for field, p := range map[string]Policy{
		"":               {Name: "ok", MinSize: 1, MaxSize: 1},
		"name":           {Name: "No Name"},
		"model":          {Name: "ok", Model: strings.Repeat("x", 129)},
		"max_size_bytes": {Name: "ok", MinSize: 2 * block.Size(gib), MaxSize: gib},
	} {
		if got, err := p.Check(); got != field || (err == nil) != (field == "") {
			t.Errorf("Check(%+v) = %q, %v; want %q", p, got, err, field)
		}
	}
}
