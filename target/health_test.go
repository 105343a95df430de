// SPDX-License-Identifier: Apache-2.0

package target

import (
	"errors"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// healthOf returns a device's health in a report; nil if the report has none.
func healthOf(r *pb.TargetReport, path string) *pb.DriveHealth {
	for _, d := range r.GetDevices() {
		if d.GetPath() == path {
			return d.GetHealth()
		}
	}
	return nil
}

// readings is how often a drive's log was read.
func readings(m *medium) (n int) {
	m.set(func() { n = m.reads })
	return n
}

// withHealth runs an agent with drives 1 and 2; drive 3 stays blank.
func withHealth(t *testing.T, check func(t *testing.T, w *world, first *medium)) {
	at(t, func(t *testing.T, w *world) {
		first, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		first.set(func() { first.smart = &pb.SmartLog{Celsius: 40, SparePercent: 100, MediaErrors: 3} })
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		check(t, w, first)
	})
}

func TestTheHealthOfADriveIsReportedOnceAMinute(t *testing.T) {
	withHealth(t, func(t *testing.T, w *world, first *medium) {
		r := w.until("the first reading", func(r *pb.TargetReport) bool { return healthOf(r, "/dev/d1") != nil })
		if got := healthOf(r, "/dev/d1"); got.GetSmart().GetCelsius() != 40 || got.GetSmart().GetMediaErrors() != 3 || got.GetUnread() != "" {
			t.Errorf("the health of /dev/d1 is %v, want 40 degrees and 3 media errors", got)
		}
		if got := healthOf(r, "/dev/d2"); got != nil {
			t.Errorf("the health of a drive without a log is %v, want none", got)
		}
		first.set(func() {
			first.reads = 0
			first.smart = &pb.SmartLog{Celsius: 41, SparePercent: 100, MediaErrors: 4}
			first.ios = drive.IOs{Count: 200, Bytes: 1 << 20, Time: 3 * time.Second}
		})
		time.Sleep(30 * time.Second)
		r = w.until("the next reading", func(r *pb.TargetReport) bool { return healthOf(r, "/dev/d1").GetSmart().GetMediaErrors() == 4 })
		if h := healthOf(r, "/dev/d1"); h.GetIos() != 200 || h.GetIoBytes() != 1<<20 || h.GetLatency().AsDuration() != 15*time.Millisecond {
			t.Errorf("%d reads and writes took %v each, want 200 of 15 ms", h.GetIos(), h.GetLatency().AsDuration())
		}
		time.Sleep(10 * time.Minute)
		if n := readings(first); n < 9 || n > 12 {
			t.Errorf("the log was read %d times in some 10 minutes, want once a minute", n)
		}
	})
}

func TestTheHealthOfADriveIsReadAsOftenAsConfigured(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.healthEvery = 10 * time.Second
		m, err := w.medium("/dev/d1")
		if err != nil {
			t.Fatal(err)
		}
		w.run()
		w.manager.set(want().drive(1).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		m.set(func() { m.reads = 0 })
		time.Sleep(10 * time.Minute)
		if n := readings(m); n < 55 || n > 61 {
			t.Errorf("the log was read %d times in 10 minutes, want every 10 s", n)
		}
	})
}

func TestADeviceThatIsNoDriveIsNotAsked(t *testing.T) {
	withHealth(t, func(t *testing.T, w *world, _ *medium) {
		blank := w.plug("/dev/d9", 1<<30, "w9")
		time.Sleep(3 * time.Minute)
		if n := readings(blank); n > 0 {
			t.Errorf("the log of a device without a label was read %d times", n)
		}
	})
}

// A drive that does not answer holds up no other, and is asked once and not again each minute.
func TestADriveThatDoesNotAnswerIsSaidToBeSilent(t *testing.T) {
	withHealth(t, func(t *testing.T, w *world, first *medium) {
		silent := make(chan struct{})
		second, err := w.medium("/dev/d2")
		if err != nil {
			t.Fatal(err)
		}
		second.set(func() { second.smart = &pb.SmartLog{Celsius: 30} })
		first.set(func() { first.silent, first.reads = silent, 0 })
		time.Sleep(40 * time.Second)
		w.until("the silence is reported", func(r *pb.TargetReport) bool {
			return strings.Contains(healthOf(r, "/dev/d1").GetUnread(), "does not answer, since")
		})
		began := time.Now()
		second.set(func() { second.smart = &pb.SmartLog{Celsius: 31} })
		time.Sleep(30 * time.Second)
		w.until("the other drive is read", func(r *pb.TargetReport) bool {
			return healthOf(r, "/dev/d2").GetSmart().GetCelsius() == 31
		})
		if took := time.Since(began); took > 2*time.Minute {
			t.Errorf("the other drive's reading came after %v", took)
		}
		time.Sleep(10 * time.Minute)
		if n := readings(first); n != 1 {
			t.Errorf("a silent drive was asked %d times, want once", n)
		}
		first.set(func() { first.silent, first.unread, first.smart = nil, errors.New("input/output error"), nil })
		close(silent)
		r := w.until("the answer", func(r *pb.TargetReport) bool {
			return healthOf(r, "/dev/d1").GetUnread() == "input/output error"
		})
		if !exportsReady(1)(r) {
			t.Errorf("exports are %v, want what they were", r.GetExports())
		}
	})
}
