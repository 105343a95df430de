// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"errors"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
)

// While a commit is under way nobody is told of what it holds: not who asked, no
// reader, no watcher, and no agent.
func TestNothingIsToldBeforeItIsDurable(t *testing.T) {
	r := newRig(t)
	disk := make(chan struct{}) // closed: it does not hang any more
	goesOn := sync.OnceFunc(func() { close(disk) })
	defer goesOn()
	hangs := make(chan struct{}, 1)
	r.adjust = func(m *Manager) {
		m.cfg.Commit = func(records []cluster.Record, commit func([]cluster.Record) error) error {
			for _, record := range records {
				if strings.HasPrefix(record.Key, "d/") { // a drive's: the one that is added below
					poke(hangs)
					<-disk
				}
			}
			return commit(records)
		}
	}
	r.restart()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	agent, err := r.agents.Target(ctx)
	if err != nil {
		t.Fatal(err)
	}
	report := &pb.TargetReport{Node: "t1", BootId: "1", Devices: []*pb.Device{{Path: "/dev/nvme0n1", SizeBytes: 10 << 30}}}
	if err := agent.Send(report); err != nil {
		t.Fatal(err)
	}
	if w, err := agent.Recv(); err != nil || len(w.Drives) > 0 {
		t.Fatal(w, err)
	}
	watch, err := r.WatchEvents(ctx, &pb.WatchEventsRequest{Object: "drive /dev/nvme0n1 on t1"})
	if err != nil {
		t.Fatal(err)
	}
	told := make(chan string, 4)
	tell := func(who string, call func() error) {
		go func() {
			if err := call(); err != nil {
				who += ": " + err.Error()
			}
			told <- who
		}()
	}
	tell("who asked", func() error {
		_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: "t1", Device: "/dev/nvme0n1"})
		return err
	})
	<-hangs
	tell("the agent", func() error { _, err := agent.Recv(); return err })
	tell("a watcher", func() error { _, err := watch.Recv(); return err })
	tell("a reader", func() error { _, err := r.ListDrives(ctx, &pb.ListDrivesRequest{}); return err })
	select {
	case who := <-told:
		t.Fatalf("%s was told before the commit", who)
	case <-time.After(500 * time.Millisecond):
	}
	goesOn()
	for range 4 {
		if who := <-told; strings.Contains(who, ":") {
			t.Errorf("after the commit: %s", who)
		}
	}
}

// After a commit that fails the state is ahead of the disk: nobody is told anything
// any more, and the process has to end.
func TestAFailedCommitEndsTheManager(t *testing.T) {
	m, err := New(Config{Dir: initialized(t)})
	if err != nil {
		t.Fatal(err)
	}
	defer m.Close()
	full := errors.New("no space left on device")
	m.cfg.Commit = func([]cluster.Record, func([]cluster.Record) error) error { return full }
	ended := make(chan error, 1)
	go func() { ended <- m.Run(t.Context()) }()
	if pool, err := m.CreatePool(t.Context(), &pb.CreatePoolRequest{Name: "gold"}); status.Code(err) != codes.Unavailable {
		t.Errorf("CreatePool = %v, %v; want UNAVAILABLE", pool, err)
	}
	if err := <-ended; !errors.Is(err, full) {
		t.Errorf("Run = %v, want what the disk said", err)
	}
	if pools, err := m.ListPools(t.Context(), &pb.ListPoolsRequest{}); status.Code(err) != codes.Unavailable {
		t.Errorf("ListPools after that = %v, %v; want UNAVAILABLE", pools, err)
	}
}
