// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Role is the first argument of a process that Patience starts; Process runs it.
const Role = "patience-process"

const (
	hostRole   = "host"
	burnerRole = "burner"
)

// Process runs a process of Patience until it is killed.
func Process(args []string) error {
	switch {
	case len(args) == 1 && args[0] == burnerRole:
		for spins := uint64(1); ; spins++ {
			if spins == 0 { // after centuries
				return nil
			}
		}
	case len(args) == 2 && args[0] == hostRole:
		var o hostOptions
		if err := json.Unmarshal([]byte(args[1]), &o); err != nil {
			return err
		}
		return runHost(o)
	}
	return fmt.Errorf("no such role: %q", args)
}

// runHost is an initiator agent whose volume is under load. It says each second what was seen.
func runHost(o hostOptions) error {
	conn, err := grpc.NewClient(o.Manager, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	h := &tally{}
	agent, err := initiator.New(initiator.Config{
		Node: block.NodeName(o.Node), Version: "bench", Kernel: "bench", Manager: pb.NewAgentsClient(conn),
		StateDir: filepath.Join(o.Dir, "state"), RunDir: filepath.Join(o.Dir, "run"), Datapath: initiator.User, Log: slog.New(alarms{h}),
		TargetPatience: o.Patience, FailOver: failOverOf(o.Patience),
		Export: func(_ context.Context, volume block.Device, _ userspace.Of) (userspace.Exported, error) {
			for i := range o.Workers {
				go h.work(volume, i)
			}
			return used{}, nil
		},
	})
	if err != nil {
		return err
	}
	go h.tell()
	return agent.Run(context.Background())
}

// tally counts what happened in the present second.
type tally struct {
	mu  sync.Mutex
	now second
}

func (t *tally) add(f func(*second)) {
	t.mu.Lock()
	defer t.mu.Unlock()
	f(&t.now)
}

// tell says once a second what happened.
func (t *tally) tell() {
	out := json.NewEncoder(os.Stderr)
	for range time.Tick(time.Second) {
		t.mu.Lock()
		said := t.now
		t.now = second{}
		t.mu.Unlock()
		out.Encode(said) //nolint:errcheck // the parent misses the line
	}
}

// work does one I/O after the other: two writes for each read, of 4 to 128 KiB, most of them small.
func (t *tally) work(volume block.Device, worker int) {
	const area = 16 << 20
	data := make([]byte, 128<<10)
	for i := 0; ; i++ {
		size := 4096 << max(0, rand.IntN(12)-6)
		off := int64(worker%32)*area + rand.Int64N((area-int64(size))/4096)*4096
		began := time.Now()
		var err error
		if i%3 == 0 {
			err = block.ReadAt(volume, data[:size], off)
		} else {
			err = block.WriteAt(volume, data[:size], off)
		}
		took := time.Since(began)
		t.add(func(s *second) {
			s.IOs++
			s.Longest = max(s.Longest, took)
			if err != nil {
				s.Err = err.Error()
			}
		})
		if err != nil {
			if errors.Is(err, block.ErrGone) {
				return
			}
			time.Sleep(time.Second)
		}
	}
}

// alarms takes what is counted from the agent's log.
type alarms struct{ *tally }

// Enabled implements slog.Handler.
func (alarms) Enabled(context.Context, slog.Level) bool { return true }

// WithAttrs implements slog.Handler.
func (a alarms) WithAttrs([]slog.Attr) slog.Handler { return a }

// WithGroup implements slog.Handler.
func (a alarms) WithGroup(string) slog.Handler { return a }

// Handle counts the messages of packages initiator/keeper and initiator/userspace.
func (a alarms) Handle(_ context.Context, r slog.Record) error {
	switch r.Message {
	case "leg lost":
		a.add(func(s *second) { s.Lost++ })
	case "path is silent; moving to another portal":
		a.add(func(s *second) { s.Moved++ })
	case "path was silent":
		r.Attrs(func(attr slog.Attr) bool {
			if attr.Key == "silent" {
				a.add(func(s *second) { s.Silence = max(s.Silence, attr.Value.Duration()) })
			}
			return true
		})
	}
	return nil
}
