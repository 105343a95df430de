// SPDX-License-Identifier: Apache-2.0

package mirror

import (
	"os"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/raid"
	"weft.dev/weft/raid/dm"
)

// column is a column written as "A B" (in sync), "a" (absent), "a!" (tracked),
// "a+" (rebuilding), with "=" for equalize, "*" for full, "~" for a log from now on, "@" for
// another log device and "?" for that and a leg that lacked two regions; A is device 8:0, A1 the same leg under the number 8:10.
func column(text string) Column {
	c := Column{Name: "c", UUID: "u", Size: 64 * block.MiB, Log: "7:0"}
	for word := range strings.FieldsSeq(text) {
		switch word {
		case "=":
			c.Equalize = true
			continue
		case "*":
			c.Full = true
			continue
		case "~":
			c.FromNow = true
			continue
		case "@":
			c.Log = "7:1"
			continue
		case "?":
			lacked := CleanLog(c.Regions())
			lacked.Mark(3)
			lacked.Mark(200)
			c.Lacked, c.Log = &lacked, "7:1"
			continue
		}
		l := Leg{State: Absent}
		letter := word[0]
		if letter < 'a' {
			l.State = InSync
			letter += 'a' - 'A'
		}
		rest := word[1:]
		switch {
		case strings.HasSuffix(rest, "!"):
			l.State = Tracked
		case strings.HasSuffix(rest, "+"):
			l.State = Rebuilding
		}
		l.Device = dm.RefTo(block.DeviceNumber{Major: 8, Minor: uint32(letter-'a') + 10*uint32(strings.Count(rest, "1"))})
		c.Legs = append(c.Legs, l)
	}
	return c
}

// built returns the kernel's state after a column's devices were made.
func built(c Column) []dm.State {
	var states []dm.State
	for i, d := range c.Devices() {
		info := dm.Info{Name: d.Name, UUID: d.UUID, Number: block.DeviceNumber{Major: 253, Minor: uint32(i)}, Live: true}
		states = append(states, dm.State{Info: info, Table: d.Table})
	}
	return states
}

// TestTransitions reads testdata/transitions.txt: "from -> to", then the steps.
// With UPDATE=1 it writes them; commit only what you understand and want.
func TestTransitions(t *testing.T) {
	const file = "testdata/transitions.txt"
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	for part := range strings.SplitSeq(strings.TrimSuffix(string(text), "\n"), "\n\n") {
		if strings.HasPrefix(part, "#") {
			out.WriteString(part + "\n\n")
			continue
		}
		head, _, _ := strings.Cut(part, "\n")
		out.WriteString(head + "\n" + transition(head) + "\n")
	}
	got := strings.TrimSuffix(out.String(), "\n")
	if os.Getenv("UPDATE") != "" {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if got != string(text) {
		t.Errorf("transitions are\n%s\nwant\n%s", got, text)
	}
}

func transition(head string) string {
	from, to, _ := strings.Cut(head, "->")
	var states []dm.State
	if strings.TrimSpace(from) != "nothing" {
		states = built(column(from))
	}
	want := column(to)
	if strings.Contains(to, "grow") {
		want = column(strings.Replace(to, "grow", "", 1))
		want.Size *= 2
	}
	steps, err := Plan(states, want)
	if err != nil {
		return "    error: " + err.Error() + "\n"
	}
	var out strings.Builder
	for _, s := range steps {
		out.WriteString("    " + s.String() + "\n")
	}
	if len(steps) == 0 {
		out.WriteString("    (nothing)\n")
	}
	return out.String()
}

var columns = []string{
	"A", "A b", "a B", "A B", "B A", "A1 B", "A b!", "a! B", "A b+", "A b1+", "a+ B", "A B =", "A B C", "A B C =", "A B c", "A B c!", "A B c+",
	"A b! C", "A b+ C", "a! B C", "a+ B C", "A b c!", "A b! c", "A b+ c", "A b c+", "A b c", "A B C1", "A B c1+", "A b+ c *", "A b! ~", "A b! ~ @", "A b+ ?", "A b1+ ?", "A B c! ~", "A B c! ~ @", "A B c+ ?",
}

func TestObserveIsTheInverseOfDevices(t *testing.T) {
	for _, text := range columns {
		c := column(text)
		o, err := Observe(c.Name, built(c))
		if err != nil || !o.equal(c.Shape()) || o.Size != c.Size {
			t.Errorf("Observe(%q) = %+v, %v; want %+v", text, o, err, c.Shape())
		}
		if steps, err := Plan(built(c), c); len(steps) != 0 || err != nil {
			t.Errorf("Plan from %q to itself = %v, %v; want nothing", text, steps, err)
		}
	}
	other := []dm.State{{Info: dm.Info{Name: "c", Live: true}, Table: dm.Whole(block.MiB, dm.Zero{})}}
	if o, err := Observe("c", other); err == nil {
		t.Errorf("Observe of a foreign table = %+v, want an error", o)
	}
}

// Every plan that is interrupted after any step is finished by the next one, and every step
// keeps the rules.
func TestACutPlanIsFinishedByTheNext(t *testing.T) {
	starts := append([]string{""}, columns...)
	for _, from := range starts {
		for _, to := range columns {
			if from != "" && len(column(from).Legs) != len(column(to).Legs) {
				continue
			}
			var states []dm.State
			if from != "" {
				states = built(column(from))
			}
			want := column(to)
			steps, err := Plan(states, want)
			if err != nil {
				continue // TestTransitions has what is refused
			}
			for n := range len(steps) + 1 {
				at := slices.Clone(states)
				for _, s := range steps[:n] {
					at = keepRules(t, at, s)
				}
				again, err := Plan(at, want)
				if err != nil {
					t.Fatalf("%q -> %q cut after %d steps: %v", from, to, n, err)
				}
				for _, s := range again {
					at = keepRules(t, at, s)
				}
				if left := dm.Diff(at, want.devices(finalShape(at, want))); len(left) != 0 {
					t.Fatalf("%q -> %q cut after %d steps, planned again: %v is left", from, to, n, left)
				}
			}
		}
	}
}

func finalShape(at []dm.State, want Column) Shape {
	o, _ := Observe(want.Name, at)
	return want.goal(o).Shape()
}

// keepRules applies a step and checks that the devices then keep the rules of the package
// comment.
func keepRules(t *testing.T, at []dm.State, s Step) []dm.State {
	t.Helper()
	if s.Log != nil {
		for _, d := range at {
			if m, ok := d.Table[0].Target.(dm.Mirror); ok && m.Log.Device == s.Log.Device {
				t.Errorf("log written while %s uses it", d.Name)
			}
		}
		return at
	}
	for _, d := range at {
		if m, ok := d.Table[0].Target.(dm.Mirror); ok && s.Lacked != nil && m.Log.Device == s.DM.Device.Table[0].Target.(dm.Mirror).Log.Device {
			t.Errorf("%v writes the log that %s uses", s, d.Name)
		}
	}
	at = after(at, *s.DM)
	for _, d := range at {
		m, ok := d.Table[0].Target.(dm.Mirror)
		if !ok {
			continue
		}
		lost := strings.Contains(m.String(), "-lost")
		last := string(m.Legs[len(m.Legs)-1].Device)
		tracking := lost || strings.HasPrefix(last, "c-back")
		if !m.HandleErrors || m.KeepLog != lost || tracking && (len(m.Legs) != 2 || m.Log.Sync != dm.UseLog) || len(m.Legs) < 2 {
			t.Errorf("after %v, %s is %v", s, d.Name, m)
		}
	}
	return at
}

func TestPlanRefusesWhatItCanNotMakeSafe(t *testing.T) {
	c := column("A B")
	small := c
	small.Size /= 2
	grown, whole := column("A b+ ?"), column("A b+ ? *")
	grown.Lacked = new(CleanLog(2 * c.Regions()))
	for name, test := range map[string]struct {
		from, to Column
	}{
		"to a smaller size":                    {c, small},
		"a leg in sync that was never rebuilt": {column("A b"), c},
		"a tracked leg in sync":                {column("A b!"), c},
		"two legs in sync, one was rebuilt":    {column("A b+ c"), column("A B C")},
		"no leg in sync":                       {c, column("a b+")},
		"two legs rebuilding":                  {column("A b c"), column("A b+ c+")},
		"two legs tracked or rebuilding":       {column("A b c"), column("A b! c+")},
		"no leg":                               {c, Column{Name: "c", Size: block.MiB, Log: "7:0"}},
		"no size":                              {c, Column{Name: "c", Legs: c.Legs, Log: "7:0"}},
		"no log":                               {c, Column{Name: "c", Size: c.Size, Legs: c.Legs}},
		"a leg without a device":               {c, Column{Name: "c", Size: c.Size, Log: "7:0", Legs: []Leg{{State: InSync}}}},
		"what a leg lacks of another size":     {column("A b!"), grown},
		"a leg that lacks little, and is full": {column("A b!"), whole},
		"a state that is none":                 {c, Column{Name: "c", Size: c.Size, Log: "7:0", Legs: []Leg{{Device: "8:0", State: "fine"}}}},
	} {
		if steps, err := Plan(built(test.from), test.to); err == nil {
			t.Errorf("%s: Plan = %v, want an error", name, steps)
		}
	}
}

func TestALogOnAnotherDeviceIsNotBelieved(t *testing.T) {
	want := column("A b+")
	want.Log = "7:1"
	steps, err := Plan(built(column("A b!")), want)
	if err != nil || !slices.ContainsFunc(steps, func(s Step) bool { return s.Log != nil && s.Log.Image.AllDirty() && s.Log.Device == "7:1" }) {
		t.Errorf("Plan = %v, %v; want the new log written all dirty", steps, err)
	}
}

// What a leg lacked before its log began becomes live with the leg, and not before: the switch from the
// table that tracks it is the one step that has it.
func TestWhatALegLackedIsAddedWithTheSwitchThatAddsTheLeg(t *testing.T) {
	for from, added := range map[string]bool{"A b! ~": true, "A b!": true, "A b1+": false, "A b+": false, "A b": false, "A B": false, "A b! same log": false} {
		want := column("A b+ ?")
		if rest, same := strings.CutSuffix(from, "same log"); same {
			from, want.Log = rest, column(rest).Log
		}
		steps, err := Plan(built(column(from)), want)
		if err != nil {
			t.Fatalf("%s: %v", from, err)
		}
		got := 0
		for _, s := range steps {
			if s.Lacked == nil {
				continue
			}
			got++
			m, ok := s.DM.Device.Table[0].Target.(dm.Mirror)
			if !ok || s.DM.Op != dm.OpReload || s.DM.Device.Name != "c" || m.KeepLog || !s.Lacked.Equal(*want.Lacked) {
				t.Errorf("%s: %v has what the leg lacked", from, s)
			}
		}
		if got > 1 || (got == 1) != added {
			t.Errorf("%s: %d steps have what the leg lacked, want one: %v; %v", from, got, added, steps)
		}
		all := slices.ContainsFunc(steps, func(s Step) bool { return s.Log != nil && s.Log.Image.AllDirty() })
		if all == added {
			t.Errorf("%s: everything is copied: %v, want %v; %v", from, all, !added, steps)
		}
	}
}

// From the switch on, one log or the other has each write that the leg misses. So no table without a log is in between,
// and the log before stays as it is.
func TestALogThatIsBegunAnewHasEachWriteFromTheSwitchOn(t *testing.T) {
	for from, anew := range map[string]bool{"A b!": true, "A b! ~": true, "A b1!": true, "A b+": false, "A b": false, "A B": false} {
		steps, err := Plan(built(column(from)), column("A b! ~ @"))
		if err != nil {
			t.Fatalf("%s: %v", from, err)
		}
		only := len(steps) == 2 && steps[0].Log != nil && steps[0].Log.Device == "7:1" && steps[0].Log.Image.AllClean() && steps[1].DM != nil && steps[1].DM.Op == dm.OpReload
		if only != anew {
			t.Errorf("%s: a clean log and one switch: %v, want %v; %v", from, only, anew, steps)
		}
	}
}

// Copies that have been made equal need no copy, but only where the column is built from them: whatever
// else a log is written for is not known to be equal.
func TestOnlyAColumnOfEqualCopiesBeginsWithACleanLog(t *testing.T) {
	for _, test := range []struct {
		from, to string
		clean    bool
	}{
		{"", "A B =", true},
		{"", "A B C =", true},
		{"", "A b+ =", false},
		{"A B", "A b+ =", false},
		{"A B C =", "A B =", true}, // its log is kept, and not written
	} {
		var states []dm.State
		if test.from != "" {
			states = built(column(test.from))
		}
		want := column(test.to)
		want.Equal = true
		steps, err := Plan(states, want)
		if err != nil {
			t.Errorf("%s to %s: %v", test.from, test.to, err)
		}
		for _, s := range steps {
			if s.Log != nil && s.Log.Image.AllClean() != test.clean {
				t.Errorf("%s to %s: the log begins with %d of %d regions dirty", test.from, test.to, s.Log.Image.CountDirty(), s.Log.Image.Regions())
			}
		}
	}
	steps, err := Plan(nil, column("A B ="))
	if err != nil || !slices.ContainsFunc(steps, func(s Step) bool { return s.Log != nil && s.Log.Image.AllDirty() }) {
		t.Errorf("copies of which nothing is known: %v, %v; want the log written all dirty", steps, err)
	}
}

func TestRegionsStayTheSameWhileAColumnGrows(t *testing.T) {
	c := column("A b!")
	want := c
	want.Size = 8 * block.GiB // RegionSize would say 1 MiB
	steps, err := Plan(built(c), want)
	if err != nil || len(steps) == 0 {
		t.Fatalf("Plan = %v, %v; want it to grow", steps, err)
	}
	for _, s := range steps {
		if m, ok := s.DM.Device.Table[0].Target.(dm.Mirror); ok && m.Log.Region != raid.RegionSize(c.Size) {
			t.Errorf("%v changes the region size; the log's bits would mean something else", s)
		}
		if s.DM.Op != dm.OpResize {
			t.Errorf("%v, want only resizes", s)
		}
	}
}

// TestALogGrowsWithATableThatBelievesIt: otherwise the kernel would treat the new regions as
// dirty and copy them. A log that no table relies on is rewritten by the kernel.
func TestALogGrowsWithATableThatBelievesIt(t *testing.T) {
	for from, believed := range map[string]bool{"A": false, "A B": false, "A b!": true, "A b+": true, "A B c!": true} {
		want := column(from)
		want.Size *= 4
		steps, err := Plan(built(column(from)), want)
		if err != nil {
			t.Fatal(err)
		}
		for i, s := range steps {
			last := i == len(steps)-1
			if regions := raid.Regions(want.Size, raid.RegionSize(column(from).Size)); last && believed && s.LogTo != regions || !(last && believed) && s.LogTo != 0 {
				t.Errorf("%s: %v has the log grow to %d; want %d, if it is the column's and believed", from, s, s.LogTo, regions)
			}
		}
	}
}

func TestAColumnDoesNotOutgrowItsLog(t *testing.T) {
	c := column("A b!")
	got, err := Observe(c.Name, built(c))
	if err != nil {
		t.Fatal(err)
	}
	most := block.Size(maxRegions) * got.Region
	for size, ok := range map[block.Size]bool{most: true, most + got.Region: false} {
		want := c
		want.Size = size
		if _, err := Plan(built(c), want); ok != (err == nil) {
			t.Errorf("Plan of %v = %v, want it to be possible: %v", size, err, ok)
		}
		if err := got.MayGrow(size); ok != (err == nil) {
			t.Errorf("MayGrow(%v) = %v, want %v", size, err, ok)
		}
	}
}

func TestRefreshLoadsTheInnerMirrorFirst(t *testing.T) {
	c := column("A B c+")
	steps := Refresh(built(c), c)
	if len(steps) != 2 || steps[0].DM.Device.Name != "c-in" || steps[1].DM.Device.Name != "c" {
		t.Errorf("Refresh = %v, want c-in, then c", steps)
	}
}

// An interrupted plan has left the column suspended, before a switch to a table with c, which
// is recorded in sync; then b is lost. The column's old table must not become live again,
// because it writes dirty regions to one leg only.
func TestASourceLeavesWithoutTheOldTableOfTheColumn(t *testing.T) {
	states := built(column("A B c+"))
	for i := range states {
		states[i].Suspended = states[i].Name == "c"
	}
	steps, err := Plan(states, column("A b! C"))
	if err != nil {
		t.Fatal(err)
	}
	if first := steps[0].DM; first.Op != dm.OpReload || first.Device.Name != "c-in" {
		t.Errorf("the plan begins with %v, want c-in to let go of b", steps[0])
	}
	for _, s := range steps {
		if s.DM != nil && s.DM.Device.Name == "c" && strings.Contains(s.String(), "c-back2") {
			t.Errorf("%v makes the table live again that is being left", s)
		}
	}
}

func TestAnInnerMirrorThatWasLeftSuspendedGoesOnBeforeTheColumnChanges(t *testing.T) {
	states := built(column("A B c+"))
	for i := range states {
		states[i].Suspended = states[i].Name == "c-in"
	}
	steps, err := Plan(states, column("A B C"))
	if err != nil {
		t.Fatal(err)
	}
	if first := steps[0].DM; first == nil || first.Device.Name != "c-in" {
		t.Errorf("the plan begins with %v, want c-in to go on", steps[0])
	}
}

// A leg may come back in sync without a rebuild only if the column is never written.
func TestALegComesBackInSyncOnlyToAColumnThatNobodyWritesTo(t *testing.T) {
	for _, readOnly := range []bool{false, true} {
		was, want := column("A b"), column("A B")
		was.ReadOnly, want.ReadOnly = readOnly, readOnly
		steps, err := Plan(built(was), want)
		if (err == nil) != readOnly {
			t.Errorf("read-only %v: Plan = %v, %v", readOnly, steps, err)
		}
		for _, s := range steps {
			if s.Log != nil || !s.DM.Device.ReadOnly {
				t.Errorf("Plan does %v, want nothing but read-only tables", s)
			}
		}
	}
	c := column("A B C")
	c.ReadOnly, c.First = true, 1
	if got, err := Observe(c.Name, built(c)); err != nil || !slices.Equal(got.Sources, []dm.Ref{"8:1", "8:2", "8:0"}) {
		t.Errorf("a column that reads from copy 1 first has sources %v, %v", got.Sources, err)
	}
	if steps, err := Plan(built(c), c); err != nil || len(steps) > 0 {
		t.Errorf("Plan of what is = %v, %v", steps, err)
	}
	for _, text := range []string{"A b!", "A b+", "A B ="} {
		c := column(text)
		c.ReadOnly = true
		if err := c.Check(); err == nil {
			t.Errorf("Check of a read-only column %q says nothing", text)
		}
	}
}
