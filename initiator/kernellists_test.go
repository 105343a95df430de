// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/lists"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/checkpoint"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// told is a leg whose target notes what it is told.
type told struct {
	commands []string
	begun    func() // called when a checkpoint begins
	err      error
}

func (l *told) Checkpoint(_ context.Context, commit bool, _ uint64) error {
	if l.err != nil {
		return l.err
	}
	if commit {
		l.commands = append(l.commands, "commit")
		return nil
	}
	l.commands = append(l.commands, "begin")
	if l.begun != nil {
		l.begun()
	}
	return nil
}

func (l *told) CheckpointBehind(_ context.Context, commit bool, _ uint64, behind nvmetcp.Behind) error {
	said := fmt.Sprint("commit ", commit, " except ", behind.Ranges)
	if behind.Since > 0 {
		said += fmt.Sprint(" since ", behind.Since)
	}
	l.commands = append(l.commands, said)
	return l.err
}

func (l *told) Written(context.Context) (nvmetcp.WrittenLog, error) {
	return nvmetcp.WrittenLog{}, l.err
}

// usedColumn is a column in use with two legs.
type usedColumn struct {
	*taker
	t      *testing.T
	a, b   *told
	drains int
}

const usedRegions = 100

func newUsedColumn(t *testing.T) *usedColumn {
	c := &usedColumn{t: t, a: &told{}, b: &told{}}
	now := &columnNow{
		members: []checkpoint.Member{{Copy: 0, Stay: 1}, {Copy: 1, Stay: 1}}, drained: true, legs: map[int]lists.Leg{0: c.a, 1: c.b},
		log: filepath.Join(t.TempDir(), "log"), regions: usedRegions, region: block.MiB,
	}
	listed := &listedColumn{}
	listed.now.Store(now)
	c.taker = &taker{kernel: &kernel{}, column: listed, now: now, drain: func(uint64) { c.drains++ }, rest: func() {}}
	c.dirty()
	return c
}

// dirty has writes under way in some regions.
func (c *usedColumn) dirty(regions ...uint64) {
	image := mirror.CleanLog(usedRegions)
	for _, r := range regions {
		image.Mark(r)
	}
	c.write(image)
}

func (c *usedColumn) write(image mirror.LogImage) {
	if err := os.WriteFile(c.now.log, image.Bytes(), 0o600); err != nil {
		c.t.Fatal(err)
	}
}

// expect takes a checkpoint, which both legs are to be told of.
func (c *usedColumn) expect(commands ...string) {
	c.t.Helper()
	c.a.commands, c.b.commands = nil, nil
	if _, err := checkpoint.Take(c.t.Context(), c.taker, 1); err != nil {
		c.t.Errorf("checkpoint: %v", err)
	}
	for _, leg := range []*told{c.a, c.b} {
		if !slices.Equal(leg.commands, commands) {
			c.t.Errorf("a target was told %q, want %q", leg.commands, commands)
		}
	}
}

// refused takes a checkpoint, which is not to be committed.
func (c *usedColumn) refused(why string) {
	c.t.Helper()
	c.a.commands, c.b.commands = nil, nil
	_, err := checkpoint.Take(c.t.Context(), c.taker, 1)
	if all := fmt.Sprint(c.a.commands, c.b.commands); err == nil || strings.Contains(all, "commit") {
		c.t.Errorf("%s: %v, and the targets were told %s; want an error and no commit", why, err, all)
	}
}

func TestACheckpointOfTheKernelsMirrorTellsWhatIsNotSettled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newUsedColumn(t)
		c.expect("begin", "commit")

		c.dirty(3, 4, 90) // writes are under way there, for as long as anybody looks
		c.expect("begin", "commit true except [[3145728 5242880] [94371840 95420416]]")

		c.dirty(3, 4)
		go func() { // those end, and others begin
			time.Sleep(logPause / 2)
			c.dirty(4, 5)
			time.Sleep(logPause)
			c.dirty(5, 6)
		}()
		c.expect("begin", "commit")
	})
}

// A leg that is copied to is told what it may lack: what is not copied yet, and what is under way. The only leg in sync
// lacks nothing.
func TestACheckpointTellsALegThatIsCopiedToWhatItLacks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newUsedColumn(t)
		c.now.members[1].Copying, c.now.since = true, map[int]uint64{1: 7}
		c.dirty(3, 4, 90)
		if _, err := checkpoint.Take(t.Context(), c.taker, 1); err != nil {
			t.Fatal(err)
		}
		if want := []string{"begin", "commit"}; !slices.Equal(c.a.commands, want) {
			t.Errorf("the leg in sync was told %q, want %q", c.a.commands, want)
		}
		if want := []string{"commit false except []", "commit true except [[3145728 5242880] [94371840 95420416]] since 7"}; !slices.Equal(c.b.commands, want) {
			t.Errorf("the leg that is copied to was told %q, want %q", c.b.commands, want)
		}

		c.b.err = errors.New("no answer") // which does not keep the other one's list long
		c.a.commands = nil
		if _, err := checkpoint.Take(t.Context(), c.taker, 2); err != nil || !slices.Equal(c.a.commands, []string{"begin", "commit"}) {
			t.Errorf("while the leg that is copied to does not answer: %v, and the leg in sync was told %q", err, c.a.commands)
		}
	})
}

func TestOnlyWhatIsSeenAfterTheCheckpointHasBegunCounts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newUsedColumn(t)
		c.b.begun = func() { c.dirty(7) }
		c.expect("begin", "commit true except [[7340032 8388608]]")
	})
}

func TestNoCheckpointWhileWritesMayWaitElsewhere(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newUsedColumn(t)
		c.now.drained = false
		c.refused("before I/O was held after a change")
		if c.drains != 1 {
			t.Errorf("I/O was asked to be held %d times, want once", c.drains)
		}
		c.now.drained = true

		c.b.begun = func() { c.column.changes() }
		c.refused("a change begins meanwhile")
		c.b.begun = nil
		c.column.now.Store(c.now)

		c.write(mirror.CleanLog(usedRegions + 1))
		c.refused("the log is of another table")
		if err := os.WriteFile(c.now.log, make([]byte, 4096), 0o600); err != nil {
			t.Fatal(err)
		}
		c.refused("there is no log")
		if err := os.Remove(c.now.log); err != nil {
			t.Fatal(err)
		}
		c.refused("the log is gone")
		c.dirty()
		c.expect("begin", "commit")
	})
}

func TestAChangeEndsCheckpointsUntilNothingIsUnderWay(t *testing.T) {
	c := &listedColumn{drained: true}
	c.now.Store(&columnNow{})
	before := c.stay
	c.changes()
	if c.now.Load() != nil || c.drained || c.stay == before {
		t.Errorf("after a change checkpoints of %v may be taken, drained %v, stay %d as before %d", c.now.Load(), c.drained, c.stay, before)
	}
	same := columnNow{members: []checkpoint.Member{{Copy: 0}, {Copy: 1}}, drained: true, regions: 5}
	for name, change := range map[string]func(*columnNow){
		"a leg leaves":          func(n *columnNow) { n.members = n.members[:1] },
		"it was drained":        func(n *columnNow) { n.drained = false },
		"it has another device": func(n *columnNow) { n.device.Minor++ },
		"it has grown":          func(n *columnNow) { n.regions++ },
		"a leg is copied to":    func(n *columnNow) { n.members[1].Copying = true },
	} {
		other := same
		other.members = slices.Clone(same.members)
		other.mark(7)
		if !other.same(&same) {
			t.Error("a column differs by its mark alone")
		}
		if change(&other); other.same(&same) {
			t.Errorf("%s: the column counts as the same", name)
		}
	}
}

// list has the targets list some regions of their legs, since one checkpoint.
func (w *world) list(regions ...int) {
	words := make([]uint64, checkpoint.Words(block.GiB))
	for _, r := range regions {
		words[r/64] |= 1 << (r % 64)
	}
	log := nvmetcp.WrittenLog{Committed: 5, Region: uint64(checkpoint.Region), Words: uint64(len(words)), Regions: words}
	w.listed = func(_ string, cmd nvmetcp.Command, data []byte) error {
		if cmd.Opcode() != nvmetcp.AdminGetLogPage {
			return nil
		}
		off := uint64(cmd.CDW(12)) | uint64(cmd.CDW(13))<<32
		copy(data, log.Append(nil)[off:])
		return nil
	}
}

// committed has the targets keep lists, which they do not give away, and calls do for each commit with what the leg
// is said to lack. It holds the world's mutex.
func (w *world) committed(do func(node string, behind []byte)) {
	w.listed = func(node string, cmd nvmetcp.Command, data []byte) error {
		if cmd.Opcode() == nvmetcp.AdminGetLogPage {
			return nvmetcp.InvalidField
		}
		if nvmetcp.ParseCheckpoint(&cmd).Commit {
			do(node, data)
		}
		return nil
	}
}

// nothingIsWritten has the kernel count no writes to the first column.
func (w *world) nothingIsWritten() {
	dir := filepath.Join(w.dir, "sys/dev/block", w.find(mirror.ColumnName(w.volume, 0)).Number.String())
	if err := os.MkdirAll(dir, 0o755); err != nil {
		w.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "stat"), []byte("0 0 0 0 0 0 0 0 0 0 0"), 0o600); err != nil {
		w.t.Fatal(err)
	}
}

// logOf is the log of the first column.
func (w *world) logOf() mirror.LogImage {
	w.mu.Lock()
	defer w.mu.Unlock()
	m, ok := w.find(mirror.ColumnName(w.volume, 0)).Table[0].Target.(dm.Mirror)
	if !ok {
		w.t.Fatal("the column has no log")
	}
	image, err := w.getLog(m.Log.Device)
	if err != nil {
		w.t.Fatal(err)
	}
	return image
}

func TestAfterACrashOnlyWhatTheTargetsListIsComparedInTheKernel(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.attach()
		w.list(3, 4, 9)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Equalize = true })
		w.start()
		w.until(serving)
		w.expect("equal before there are tables", "connect t0", "connect t1",
			"make 2 legs equal in [[196608 327680] [589824 655360]]",
			"create c0: mirror t0 t1", "reload c0: mirror t0 t1", "flush t0", "flush t1", "create top: linear")
		if !w.logOf().AllClean() {
			t.Errorf("%d regions are copied by the kernel", w.logOf().CountDirty())
		}
	})
}

func TestWithoutListsTheKernelCopiesEverything(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		w.equal = false
		w.attach()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Equalize = true })
		w.start()
		w.until(pb.AttachmentPhase_ATTACHMENT_PHASE_EQUALIZING)
		w.expect("the tables make the copies equal", "connect t0", "connect t1", "create c0: mirror t0 t1")
		if !w.logOf().AllDirty() {
			t.Errorf("only %d of %d regions are copied", w.logOf().CountDirty(), w.logOf().Regions())
		}
		if said := w.attachment().WaitingFor; !strings.Contains(said, "keeps no list of writes") {
			t.Errorf("the host waits for %q, want the reason", said)
		}
	})
}

func TestWhatWasWrittenIsCounted(t *testing.T) {
	k := &kernel{sysDir: t.TempDir()}
	dir := filepath.Join(k.sysDir, "dev/block/253:7")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for stat, want := range map[string]uint64{
		"1 2 3 4 10 6 80 8 9 10 11\n":        10 * uint64(checkpoint.Region), // ten small writes
		"1 2 3 4 1 6 1000000 8 9 10 11\n":    1000000 * 512,
		"1 2 3 4 0 6 0 8 9 10 11 12 13 14\n": 0,
	} {
		if err := os.WriteFile(filepath.Join(dir, "stat"), []byte(stat), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := k.written(block.DeviceNumber{Major: 253, Minor: 7}); got != want || err != nil {
			t.Errorf("written(%q) = %d, %v; want %d", stat, got, err, want)
		}
	}
	if _, err := k.written(block.DeviceNumber{Minor: 8}); err == nil {
		t.Error("what was written to a device that is gone is known")
	}
}

// After a change of the tables dm may hold writes back that no log marks, so I/O is held once, until
// nothing is under way, before the next checkpoint. While a leg is missing there are no checkpoints.
func TestAfterALegHasReturnedIOIsHeldOnceBeforeTheNextCheckpoint(t *testing.T) {
	commits := 0 // guarded by the world's mutex, as all that the targets are told
	behind := map[string]bool{}
	first := func(w *world) {
		w.committed(func(node string, data []byte) {
			commits++
			behind[node] = len(data) > 0
		})
	}
	from(t, 1, 2, first, func(w *world) {
		committed := func() int {
			w.mu.Lock()
			defer w.mu.Unlock()
			n := commits
			commits = 0
			return n
		}
		holds := func() (n int) {
			for _, h := range w.took() {
				if h == "suspend top" {
					n++
				}
			}
			return n
		}
		w.nothingIsWritten()
		time.Sleep(30 * time.Second)
		if n, h := committed(), holds(); n < 4 || h != 0 {
			t.Errorf("in half a minute %d commits were sent and I/O was held %d times, want one to each leg every 10 s and no hold", n, h)
		}
		w.fallSilent("t1")
		time.Sleep(4 * time.Second)
		w.write(0, 1)
		committed()
		holds()
		time.Sleep(30 * time.Second)
		if n, h := committed(), holds(); n != 0 || h != 0 {
			t.Errorf("while a leg is missing %d commits were sent and I/O was held %d times, want neither", n, h)
		}
		w.returns(1)
		time.Sleep(30 * time.Second)
		if n, h := committed(), holds(); n < 4 || h != 1 || behind["t0"] || !behind["t1"] {
			t.Errorf("while a leg is rebuilt %d commits were sent, %v to legs that lack something, and I/O was held %d times, want one hold, and one to each leg every 10 s", n, behind, h)
		}
		w.finishResync()
		time.Sleep(20 * time.Second)
		if n, h := committed(), holds(); n < 2 || h != 1 {
			t.Errorf("after that %d commits were sent and I/O was held %d times, want one hold and commits to both legs", n, h)
		}
		w.until(serving)
	})
}

// Beside several legs in sync, a leg is copied to below a mirror that has no log of its own: I/O is held for each
// checkpoint.
func TestForCheckpointsBesideSeveralLegsInSyncIOIsHeld(t *testing.T) {
	commits := 0 // guarded by the world's mutex
	from(t, 1, 3, func(w *world) {
		w.committed(func(string, []byte) { commits++ })
	}, func(w *world) {
		w.nothingIsWritten()
		w.goesAndReturns(2, 1)
		time.Sleep(3 * time.Second)
		w.took()
		w.mu.Lock()
		commits = 0
		w.mu.Unlock()
		time.Sleep(100 * time.Second)
		held := 0
		for _, did := range w.took() {
			if did == "suspend top" {
				held++
			}
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if w.find(mirror.ColumnName(w.volume, 0)+"-back2") == nil || commits < 6 || commits > 12 || held < commits/3 || held > 5 {
			t.Errorf("in 100 s %d commits were sent to three legs, and I/O was held %d times, want one hold for each checkpoint, every 30 s", commits, held)
		}
	})
}

func TestACheckpointBesideSeveralLegsInSyncWaitsForTheHold(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newUsedColumn(t)
		copied := &told{}
		c.now.members = append(c.now.members, checkpoint.Member{Copy: 2, Copying: true})
		c.now.legs[2], c.now.several = copied, true
		c.dirty(3)
		c.refused("I/O is not held")
		c.taker.drain = func(n uint64) {
			c.column.held.Store(n - 1) // that was before
			time.AfterFunc(time.Second, func() { c.column.held.Store(n) })
		}
		c.expect("begin", "commit")
		if want := "commit true except [[3145728 4194304]]"; len(copied.commands) == 0 || copied.commands[len(copied.commands)-1] != want {
			t.Errorf("the leg that is copied to was told %q, want %q at last", copied.commands, want)
		}
	})
}

func TestOfAColumnWithAnErrorNoCheckpointIsTaken(t *testing.T) {
	c := columnSeen{health: map[dm.Ref]dm.Health{"8:0": dm.Alive, "8:1": dm.Alive}}
	c.Kind, c.Sources, c.Back = mirror.ShapeRebuilding, []dm.Ref{"8:0"}, "8:1"
	if !new(listedColumn).well(&c) {
		t.Error("a column without errors is not well")
	}
	c.health["8:1"] = dm.WriteError
	if l := new(listedColumn); l.well(&c) || l.spoiled {
		t.Error("a column is well although the leg that is copied to has an error, or it counts for ever")
	}
	c.health["8:0"], c.health["8:1"] = dm.WriteError, dm.Alive
	l := new(listedColumn)
	if l.well(&c) {
		t.Error("a column is well whose only leg in sync has an error")
	}
	if c.health["8:0"] = dm.Alive; l.well(&c) {
		t.Error("a write that was given up on the only leg in sync is forgotten")
	}
}

// An agent that ends in order leaves no I/O held, whenever it ends.
func TestAnAgentThatEndsHoldsNoIOForACheckpoint(t *testing.T) {
	for after := range 8 {
		from(t, 1, 2, func(w *world) {
			w.committed(func(string, []byte) {})
		}, func(w *world) {
			w.nothingIsWritten()
			held := make(chan struct{})
			w.mu.Lock()
			w.suspended = func() { close(held) }
			w.mu.Unlock()
			w.goesAndReturns(1, 1)
			<-held
			time.Sleep(time.Duration(after) * 50 * time.Millisecond)
			w.stop()
			time.Sleep(time.Second)
			w.mu.Lock()
			defer w.mu.Unlock()
			if w.find(mirror.TopName(w.volume)).Suspended {
				t.Errorf("%d ms after a suspend for a checkpoint the agent ended, and the device is suspended", after*50)
			}
		})
	}
}
