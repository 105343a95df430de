// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"testing"
	"testing/synctest"

	"weft.dev/weft/initiator/volume"
)

func TestAnInboxHasTheLastWantedState(t *testing.T) {
	b := NewInbox()
	if b.Unwanted() || b.Last().Known {
		t.Error("before the manager has said anything a volume counts as not wanted")
	}
	w := &volume.Wanted{Epoch: 2}
	b.Want(&volume.Wanted{Epoch: 1}, "", 1)
	b.Want(w, "no such mode", 2)
	if got, want := b.Last(), (Message{Known: true, Wanted: w, Problem: "no such mode", Generation: 2}); got != want {
		t.Errorf("Last() = %+v, want %+v", got, want)
	}
	if b.Unwanted() {
		t.Error("a volume that is wanted counts as not wanted")
	}
	b.Want(nil, "", 3)
	if !b.Unwanted() {
		t.Error("a volume that is not wanted counts as wanted")
	}
}

func TestWhoWantsSomethingNeverWaitsForTheKeeper(t *testing.T) {
	b := NewInbox()
	for range 100 {
		b.Want(nil, "", 1)
		b.Poke()
	}
	<-b.Woken()
	select {
	case <-b.Woken():
		t.Error("pokes that came together wake the keeper twice")
	default:
	}
}

func TestEventsRunInTurnAndNoneAfterTheEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := NewInbox()
		var ran []int
		for i := range 3 {
			if !b.Tell(func() { ran = append(ran, i) }) {
				t.Fatal("an event is refused while the keeper lives")
			}
		}
		b.Drain()
		if len(ran) != 3 || ran[0] != 0 || ran[1] != 1 || ran[2] != 2 {
			t.Errorf("events ran as %v, want 0, 1, 2", ran)
		}
		refused := make(chan bool)
		go func() {
			for b.Tell(func() { t.Error("an event ran after the end") }) {
			}
			refused <- true
		}()
		synctest.Wait() // it waits for room
		b.End()
		<-refused
		<-b.Ended()
	})
}
