// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/backend"
)

// suspicion is a test that may fail; it only records the failures.
type suspicion struct {
	*testing.T
	mu   sync.Mutex
	said []string
}

func (s *suspicion) Errorf(format string, args ...any) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.said = append(s.said, fmt.Sprintf(format, args...))
}

func (s *suspicion) Fatalf(format string, args ...any) {
	s.Errorf(format, args...)
	runtime.Goexit()
}

func (s *suspicion) FailNow() { runtime.Goexit() }

// Failed is always false, so that the history of an expected failure is not printed.
func (s *suspicion) Failed() bool                    { return false }
func (s *suspicion) Logf(format string, args ...any) {}

// suspect runs one life of a cluster, and returns its failures.
func suspect(t *testing.T, seed uint64, faults int, lie func(*cluster)) (said []string) {
	synctest.Test(t, func(t *testing.T) {
		s := &suspicion{T: t}
		ended := make(chan struct{})
		go func() {
			defer close(ended)
			life(s, seed, faults, lie)
		}()
		<-ended
		said = s.said
	})
	return said
}

// TestWhatLiesIsFoundOut makes a part of a cluster misbehave: a suite that did not notice that
// would notice nothing.
func TestWhatLiesIsFoundOut(t *testing.T) {
	lies := map[string]func(*cluster){
		"a drive answers some writes without doing them": func(c *cluster) {
			var n atomic.Int64
			c.targets[0].platter.lie = func(what op) bool { return what == opWrite && n.Add(1)%50 == 0 }
		},
		"drives do not flush": func(c *cluster) {
			for _, h := range c.targets {
				h.platter.lie = func(what op) bool { return what == opFlush }
			}
		},
		"the loss of a leg is not recorded": func(c *cluster) {
			c.lie = func(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
				if method == pb.Agents_RecordStale_FullMethodName {
					return nil
				}
				return next(ctx, method, request, reply, conn, o...)
			}
		},
	}
	for what, lie := range lies {
		t.Run(what, func(t *testing.T) {
			t.Parallel()
			for seed := uint64(1); seed <= 12; seed++ {
				if said := suspect(t, seed, 36, lie); len(said) > 0 {
					t.Logf("with seed %d: %s", seed, said[0])
					return
				}
			}
			t.Error("nobody noticed")
		})
	}
}

// TestPowerTakesWhatWasNotFlushed checks that the simulated medium behaves like a drive.
func TestPowerTakesWhatWasNotFlushed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "drive")
	if err := errors.Join(os.WriteFile(path, nil, 0o600), os.Truncate(path, 1<<20)); err != nil {
		t.Fatal(err)
	}
	p, err := newPlatter(path, true)
	if err != nil {
		t.Fatal(err)
	}
	defer p.file.Close()
	grip := p.lend(newNetwork().boot("t1"))
	file, err := backend.Open(path, backend.Options{Buffered: true, BlockSize: block.SectorSize,
		Calls: func(kernel backend.Calls) backend.Calls { return calls{access{grip, true}, kernel} }})
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	d := file
	const half = 256 * sector
	for _, step := range []error{
		block.WriteAt(d, bytes.Repeat([]byte{1}, int(2*half)), 0),
		block.Flush(d),
		block.WriteAt(d, bytes.Repeat([]byte{2}, int(half)), half),
		block.WriteAt(d, bytes.Repeat([]byte{3}, int(half)), half),
	} {
		if step != nil {
			t.Fatal(step)
		}
	}
	p.powerOff()
	if err := block.WriteAt(d, make([]byte, sector), 0); err == nil {
		t.Error("a drive without power takes a write")
	}
	if err := p.forget(rand.New(rand.NewPCG(1, 1)), sector); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 2*half)
	if _, err := p.file.ReadAt(got, 0); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(got[:half], bytes.Repeat([]byte{1}, int(half))) {
		t.Error("what was flushed is not there")
	}
	counts := map[byte]int{}
	for at := half; at < 2*half; at += sector {
		counts[got[at]]++
	}
	if len(counts) != 3 || counts[1]+counts[2]+counts[3] != 256 {
		t.Errorf("of sectors that were not flushed, by what they hold: %v; want some of each write", counts)
	}
}

// TestAClockStepLeavesWhatIsMeasured checks that setting the manager's clock acts as in a
// kernel.
func TestAClockStepLeavesWhatIsMeasured(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		before := stepped(time.Now(), 0)
		time.Sleep(time.Second)
		after := stepped(time.Now(), -time.Hour)
		if passed, wall := after.Sub(before), after.Round(0).Sub(before.Round(0)); passed != time.Second || wall != time.Second-time.Hour {
			t.Errorf("%v have passed, and %v on the wall; want 1s and -59m59s", passed, wall)
		}
	})
}
