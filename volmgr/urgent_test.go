// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/cluster"
)

// A host's writes wait for the record of a lost leg, so it overtakes all that waits, and its
// commit is not made longer by what comes after it.
func TestTheRecordOfALostLegGoesBeforeAllThatWaits(t *testing.T) {
	kinds := func(b *batch) (all []string) {
		for _, a := range b.asks {
			all = append(all, fmt.Sprintf("%T", a.input))
		}
		return all
	}
	const pool, record = "cluster.CreatePool", "cluster.RecordStale"
	for what, c := range map[string]struct {
		comesAt int // while this input is stepped through, from 1; 0: before all
		want    []string
	}{
		"waiting with creates": {0, []string{record, pool}},
		"during a batch":       {3, []string{pool, pool, pool, record}},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				state, _ := cluster.New(block.ClusterID{UUID: newUUID()})
				m := newManager(Config{}.withDefaults(), nil, state)
				defer synctest.Wait()
				defer close(m.ended)
				loses := func() {
					go func() { _, _ = m.step(t.Context(), cluster.RecordStale{}) }()
					synctest.Wait()
				}
				steps := 0
				m.cfg.Now = func() time.Time {
					if steps++; steps == c.comesAt {
						loses()
					}
					return time.Now()
				}
				for i := range 20 {
					go func() { _, _ = m.step(t.Context(), cluster.CreatePool{Name: fmt.Sprintf("p%d", i)}) }()
				}
				synctest.Wait()
				if c.comesAt == 0 {
					loses()
				}
				if got := kinds(m.fill(<-m.asks)); !slices.Equal(got, c.want) {
					t.Errorf("a batch of %v, want %v", got, c.want)
				}
			})
		})
	}
}

// commits counts commits.
type commits struct {
	committer
	n int
}

func (c *commits) Commit([]cluster.Record) error {
	c.n++
	return nil
}

// What a host has asked of an earlier leader may be overtaken, so a term begins before any of it is decided.
func TestATermBeginsBeforeTheRecordsOfLostLegs(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		state, _ := cluster.New(block.ClusterID{UUID: newUUID()})
		kept := &commits{}
		m := newManager(Config{}.withDefaults(), kept, state)
		defer synctest.Wait()
		defer close(m.ended)
		asked := make(chan error, 1)
		go func() { _, err := m.step(t.Context(), cluster.RecordStale{}); asked <- err }()
		synctest.Wait()
		if err := m.beginTerm(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		select {
		case err := <-asked:
			t.Errorf("a record that waited is decided with the beginning of the term: %v", err)
		default:
		}
		if kept.n != 1 {
			t.Errorf("%d commits, want that of the term", kept.n)
		}
	})
}

// A batch that takes long to decide ends, so that those whose batch it is, and a lost leg that comes
// next, do not wait for all that waits. One that is decided at once takes all of it.
func TestABatchEndsAfterItsTime(t *testing.T) {
	for each, want := range map[time.Duration]int{0: 20, time.Millisecond: 6, time.Second: 2} {
		synctest.Test(t, func(t *testing.T) {
			state, _ := cluster.New(block.ClusterID{UUID: newUUID()})
			m := newManager(Config{}.withDefaults(), nil, state)
			defer synctest.Wait()
			defer close(m.ended)
			clock := time.Now()
			m.cfg.Now = func() time.Time { clock = clock.Add(each); return clock }
			for i := range 20 {
				go func() { _, _ = m.step(t.Context(), cluster.CreatePool{Name: fmt.Sprintf("p%d", i)}) }()
			}
			synctest.Wait()
			if got := len(m.fill(<-m.asks).asks); got != want {
				t.Errorf("a batch of %d inputs, each of which takes %v; want %d", got, each, want)
			}
		})
	}
}
