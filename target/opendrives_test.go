// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// Formatting writes the label more than once. A scan in between must not open the drive: it would
// read a copy of the label that is about to be replaced.
func TestADriveIsNotOpenedWhileItIsFormatted(t *testing.T) {
	w := newWorld(t)
	m := w.plug("/dev/d1", 4*block.GiB, "w1")
	h := gatedHardware{w, &gate{left: -1}}
	s := newOpenDrives(h, slog.New(slog.DiscardHandler))
	scans := 0
	m.after = func() {
		if !s.refreshing.TryLock() {
			return // a flush by an open, not by the format
		}
		s.refreshing.Unlock()
		if _, err := drive.ReadLabel(m, m.size); err == nil {
			scans++
			if err := s.refresh(t.Context()); err != nil {
				t.Error(err)
			}
		}
	}
	o := formatDrive{device: "/dev/d1", cluster: cluster, id: driveID(1)}
	if err := (tools{drives: s, hardware: h}).formatDrive(t.Context(), o); err != nil {
		t.Fatal(err)
	}
	if scans < 2 {
		t.Fatalf("%d scans found a label during the format, want one after each write of it", scans)
	}
	d, release, err := s.take(driveID(1))
	if err != nil {
		t.Fatal(err)
	}
	defer release()
	if err := d.Update(func(l *drive.Label) error { l.Incarnation++; return nil }); err != nil {
		t.Errorf("the label of a drive that was just formatted cannot be written: %v", err)
	}
}

// The records of several legs change in one write of the label. One that the drive refuses is not in the way of others.
func TestRecordsOfLegsAreWrittenTogether(t *testing.T) {
	for name, test := range map[string]struct {
		legs   wish
		want   []bool // by leg
		writes uint64 // of the label
	}{
		"all fit":        {want().leg(0, 1, 1, 1).leg(1, 1, 1, 1).leg(2, 1, 1, 1), []bool{true, true, true}, 1},
		"one is outside": {want().leg(0, 1, 1, 1).leg(100, 1, 1, 1).leg(2, 1, 1, 1), []bool{true, false, true}, 2},
	} {
		w := newWorld(t)
		w.plug("/dev/d1", 4*block.GiB, "w1")
		h := gatedHardware{w, &gate{left: -1}}
		s := newOpenDrives(h, slog.New(slog.DiscardHandler))
		do := tools{drives: s, hardware: h}
		j := newJobs(do.do, func(_ context.Context, all []order) error { return do.putLegs(all) }, func() {}, slog.New(slog.DiscardHandler))
		if err := do.formatDrive(t.Context(), formatDrive{device: "/dev/d1", cluster: cluster, id: driveID(1)}); err != nil {
			t.Fatal(err)
		}
		label := func() *drive.Label {
			d, release, err := s.take(driveID(1))
			if err != nil {
				t.Fatal(err)
			}
			defer release()
			return d.Label()
		}
		orders := []order{}
		for _, l := range parseWanted(test.legs.TargetWanted).legs {
			orders = append(orders, putLeg{drive: driveID(1), leg: l, change: "carve"})
		}
		before := label().Generation
		if n := together(append(orders, admit{drive: driveID(1)})); n != len(orders) {
			t.Errorf("%s: %d orders run together, want %d", name, n, len(orders))
		}
		key := orders[0].key()
		j.running[key] = &job{cancel: func() {}}
		j.run(t.Context(), key, orders)
		for i, o := range orders {
			leg, err := o.(putLeg).leg.id, j.tries[o.String()].err
			if (err == nil) != test.want[i] || (label().Leg(leg) != nil) != test.want[i] {
				t.Errorf("%s: leg %v: %v; its record is %v", name, leg, err, label().Leg(leg))
			}
		}
		if got := label().Generation - before; got != test.writes {
			t.Errorf("%s: the label was written %d times, want %d", name, got, test.writes)
		}
	}
}

// refusing is hardware whose drives cannot be opened.
type refusing struct {
	gatedHardware
	err error
}

func (h *refusing) Open(path string) (disk, error) {
	if h.err != nil {
		return nil, h.err
	}
	return h.gatedHardware.Open(path)
}

func TestADriveThatCannotBeOpenedSaysWhy(t *testing.T) {
	w := newWorld(t)
	m := w.plug("/dev/d1", 4*block.GiB, "w1")
	if err := drive.Format(m, cluster, driveID(1), ""); err != nil {
		t.Fatal(err)
	}
	h := &refusing{gatedHardware{w, &gate{left: -1}}, syscall.EIO}
	s := newOpenDrives(h, slog.New(slog.DiscardHandler))
	look := func() string {
		_ = s.refresh(t.Context()) // fails in the same way
		devices, _, _ := s.list()
		return devices[0].GetUnread()
	}
	if got := look(); got != "open /dev/d1: input/output error" {
		t.Errorf("the device says %q", got)
	}
	h.err = nil
	if got := look(); got != "" {
		t.Errorf("an open drive still says %q", got)
	}
}

// interrupted is hardware that is scanned until ctx ends: then no drive has answered.
type interrupted struct{ gatedHardware }

func (h interrupted) Scan(ctx context.Context) ([]*pb.Device, error) {
	<-ctx.Done()
	return []*pb.Device{{Path: "/dev/d1"}}, nil
}

// An agent that ends in the middle of a scan knows what it knew before: the next process takes over the
// drives that it lists. A scan that takes too long says what has answered.
func TestAScanThatIsCutOffSaysNothing(t *testing.T) {
	w := newWorld(t)
	w.plug("/dev/d1", 4*block.GiB, "w1")
	h := gatedHardware{w, &gate{left: -1}}
	s := newOpenDrives(h, slog.New(slog.DiscardHandler))
	if err := (tools{drives: s, hardware: h}).formatDrive(t.Context(), formatDrive{device: "/dev/d1", cluster: cluster, id: driveID(1)}); err != nil {
		t.Fatal(err)
	}
	if err := s.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.hardware = interrupted{h}
	knows := func() string {
		devices, _, _ := s.list()
		return devices[0].GetDriveId()
	}
	ends, end := context.WithCancelCause(t.Context())
	end(ErrHandOver)
	if err := s.refresh(ends); !errors.Is(err, ErrHandOver) || knows() != driveID(1).String() {
		t.Errorf("drive %q is known after a scan that was cut off: %v", knows(), err)
	}
	late, stop := context.WithTimeout(t.Context(), time.Millisecond)
	defer stop()
	if err := s.refresh(late); err != nil || knows() != "" {
		t.Errorf("drive %q is known after a scan in which it has not answered: %v", knows(), err)
	}
}

// late is a disk whose last flush takes until it is allowed to end.
type late struct {
	disk
	closed chan<- string
	until  <-chan struct{}
	name   string
}

func (d late) Close() error {
	if d.until != nil {
		<-d.until
	}
	d.closed <- d.name
	return d.disk.Close()
}

// lately opens late disks.
type lately struct {
	gatedHardware
	closed chan string
	until  map[string]chan struct{} // by path
}

func (h lately) Open(path string) (disk, error) {
	d, err := h.gatedHardware.Open(path)
	return late{d, h.closed, h.until[path], path}, err
}

// A drive that hangs keeps an agent, which ends or hands over, neither from its end nor from closing the others.
func TestADriveThatHangsDoesNotKeepAnAgentFromItsEnd(t *testing.T) {
	w := newWorld(t)
	h := lately{gatedHardware{w, &gate{left: -1}}, make(chan string, 4), map[string]chan struct{}{"/dev/d1": make(chan struct{})}}
	s := newOpenDrives(h, slog.New(slog.DiscardHandler))
	for i, path := range []string{"/dev/d1", "/dev/d2", "/dev/d3"} {
		if err := drive.Format(w.plug(path, 4*block.GiB, path), cluster, driveID(byte(i+1)), ""); err != nil {
			t.Fatal(err)
		}
	}
	if err := s.refresh(t.Context()); err != nil {
		t.Fatal(err)
	}
	all := s.closeAll(100 * time.Millisecond)
	for range 2 {
		select {
		case path := <-h.closed:
			if path == "/dev/d1" {
				t.Fatal("the drive that hangs is closed")
			}
		case <-time.After(10 * time.Second):
			t.Fatal("the drives that answer are not closed")
		}
	}
	select {
	case <-all:
		t.Error("all drives are said to be closed, and one hangs")
	default:
	}
	close(h.until["/dev/d1"])
	<-h.closed
	<-all
}

func TestAQuestionAboutADriveThatHangsIsAnswered(t *testing.T) {
	hangs := make(chan struct{})
	defer close(hangs)
	ask := func() *pb.RangesAnswer {
		<-hangs
		return &pb.RangesAnswer{}
	}
	if a := answerWithin(t.Context(), time.Millisecond, ask); !strings.Contains(a.GetFailed(), "no answer in 1ms") {
		t.Errorf("after its time the answer is %v", a)
	}
	ends, end := context.WithCancelCause(t.Context())
	end(ErrHandOver)
	if a := answerWithin(ends, time.Hour, ask); a.GetFailed() != ErrHandOver.Error() {
		t.Errorf("when the agent ends the answer is %v", a)
	}
}
