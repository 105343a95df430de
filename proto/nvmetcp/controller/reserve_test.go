// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"context"
	"testing"
	"time"

	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

func (p *peer) register(key uint64) nvmetcp.Status {
	p.t.Helper()
	cmd, data := nvmetcp.ReservationRegister{Action: nvmetcp.RegisterKey, New: key}.Command(1)
	return p.do(cmd, data, nil)
}

func (p *peer) acquire(a nvmetcp.AcquireAction, t nvmetcp.ReservationType, key, victim uint64) nvmetcp.Status {
	p.t.Helper()
	cmd, data := nvmetcp.ReservationAcquire{Action: a, Type: t, Current: key, Preempt: victim}.Command(1)
	return p.do(cmd, data, nil)
}

func TestAReservationKeepsOthersOut(t *testing.T) {
	w := newWorld(t)
	a, b := w.attach(hostA).io, w.attach(hostB).io
	page := make([]byte, 4096)
	a.must(a.register(0xa))
	a.must(a.acquire(nvmetcp.Acquire, nvmetcp.WriteExclusive, 0xa, 0))
	a.must(a.write(0, page))
	b.must(b.read(0, page))
	for _, s := range []nvmetcp.Status{b.write(0, page), b.flush(), b.do(ioCommand(nvmetcp.IOWriteZeroes, 0, 1, nvmetcp.Transport(0)), nil, nil),
		b.acquire(nvmetcp.Acquire, nvmetcp.WriteExclusive, 0xb, 0)} {
		b.want(s, nvmetcp.ReservationConflict)
	}
	cmd, data := nvmetcp.ReservationRelease{Action: nvmetcp.Release, Type: nvmetcp.WriteExclusive, Current: 0xa}.Command(1)
	a.must(a.do(cmd, data, nil))
	b.must(b.write(0, page))

	a.must(a.acquire(nvmetcp.Acquire, nvmetcp.ExclusiveAccess, 0xa, 0))
	b.want(b.read(0, page), nvmetcp.ReservationConflict)

	report := make([]byte, 4096)
	b.must(b.do(nvmetcp.ReservationReport{NSID: 1, Length: 4096, Extended: true}.Command(), nil, report))
	status, total, err := nvmetcp.ParseReservationStatus(report, true)
	if err != nil || total != 1 || status.Type != nvmetcp.ExclusiveAccess || status.Registrants[0].HostID != hostA.ID || !status.Registrants[0].Holder || status.Registrants[0].Key != 0xa {
		t.Errorf("report %+v, %v", status, err)
	}
	b.want(b.do(nvmetcp.ReservationReport{NSID: 1, Length: 4096}.Command(), nil, report), nvmetcp.HostIDInconsistent)
}

// TestPreemptAndAbortWaitsForTheVictimsCommands: when the command is answered, the victim's
// write in the Device has landed, and no other one can come.
func TestPreemptAndAbortWaitsForTheVictimsCommands(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	t.Cleanup(slow.release)
	a, b := w.attach(hostA), w.attach(hostB)
	a.io.must(a.io.register(0xa))
	a.io.must(a.io.acquire(nvmetcp.Acquire, nvmetcp.WriteExclusiveRegistrants, 0xa, 0))
	b.io.must(b.io.register(0xb))
	slow.hold(writes)
	write := a.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
	slow.waitHeld(1)
	during(t, slow, "Preempt and Abort", func(context.Context) error {
		b.io.must(b.io.acquire(nvmetcp.PreemptAndAbort, nvmetcp.WriteExclusive, 0xb, 0xa))
		return nil
	})
	a.io.must(a.io.serve(write, nil, nil))
	a.io.want(a.io.write(0, pattern(4096, 2)), nvmetcp.ReservationConflict)
	b.io.must(b.io.write(0, pattern(4096, 3)))
}

func TestPreemptAloneDoesNotWait(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	t.Cleanup(slow.release)
	a, b := w.attach(hostA).io, w.attach(hostB).io
	a.must(a.register(0xa))
	b.must(b.register(0xb))
	slow.hold(writes)
	a.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
	slow.waitHeld(1)
	began := time.Now()
	b.must(b.acquire(nvmetcp.Preempt, nvmetcp.WriteExclusive, 0xb, 0xa))
	if d := time.Since(began); d > patience/2 {
		t.Errorf("it took %v", d)
	}
}

func TestHostsAreToldOfReservations(t *testing.T) {
	w := newWorld(t)
	a, b := w.attach(hostA), w.attach(hostB)
	a.io.must(a.io.register(0xa))
	b.io.must(b.io.register(0xb))
	cid := a.admin.askForEvent()
	b.io.must(b.io.acquire(nvmetcp.Preempt, nvmetcp.WriteExclusive, 0xb, 0xa))
	if e := a.admin.event(cid); e.Type != nvmetcp.EventTypeIO || e.Log != nvmetcp.LogReservations {
		t.Errorf("event %+v", e)
	}
	n, err := nvmetcp.ParseReservationNotice(a.admin.log(nvmetcp.GetLog{ID: nvmetcp.LogReservations, Length: 64}))
	if err != nil || n.Event != nvmetcp.ReservationRegistrationPreempted || n.NSID != 1 || n.Count != 1 {
		t.Errorf("notice %+v, %v", n, err)
	}
	n, err = nvmetcp.ParseReservationNotice(a.admin.log(nvmetcp.GetLog{ID: nvmetcp.LogReservations, Length: 64}))
	if err != nil || n.Event != nvmetcp.ReservationNone {
		t.Errorf("notice after the last %+v, %v", n, err)
	}
}

// TestAReservationOutlivesItsController: a reservation belongs to the host.
func TestAReservationOutlivesItsController(t *testing.T) {
	w := newWorld(t)
	a := w.attach(hostA)
	a.io.must(a.io.register(0xa))
	a.io.must(a.io.acquire(nvmetcp.Acquire, nvmetcp.WriteExclusive, 0xa, 0))
	a.admin.conn.Close()
	a.io.ended()
	b := w.attach(hostB).io
	b.want(b.write(0, make([]byte, 4096)), nvmetcp.ReservationConflict)
	again := w.attach(hostA).io
	again.must(again.write(0, make([]byte, 4096)))
}

func TestReservationsDoNotSurviveARestartAndSaySo(t *testing.T) {
	w := newWorld(t)
	a := w.attach(hostA).io
	cmd, data := nvmetcp.ReservationRegister{Action: nvmetcp.RegisterKey, New: 1, Persist: nvmetcp.PersistOn}.Command(1)
	a.want(a.do(cmd, data, nil), nvmetcp.InvalidField)
	cmd, data = nvmetcp.ReservationAcquire{IgnoreKey: true, Type: nvmetcp.WriteExclusive}.Command(1)
	a.want(a.do(cmd, data, nil), nvmetcp.InvalidField)
	cmd, data = nvmetcp.ReservationRelease{IgnoreKey: true}.Command(1)
	a.want(a.do(cmd, data, nil), nvmetcp.InvalidField)
}
