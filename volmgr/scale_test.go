// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
)

// A node has 20 000 legs, so that its reports and wanted states are many times larger than
// one message may be. Its target connects, reports, admits and is fenced like any other.
func TestTwentyThousandLegsOnANode(t *testing.T) {
	const volumes, stripes = 2500, 8
	r := newRig(t)
	r.drives = 10 // a drive's label has room for some thousand legs
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	begin := time.Now()
	done := func(what string) {
		t.Logf("%s: %v", what, time.Since(begin).Round(time.Millisecond))
		begin = time.Now()
	}
	r.withAgents(ctx, "t1")
	r.createMany(ctx, volumes, stripes)
	eventually(t, "the last volume is ready", func() bool {
		return r.volume(fmt.Sprintf("v%05d", volumes-1)).State == pb.VolumeState_VOLUME_STATE_READY
	})
	done("20 000 legs")
	r.mu.Lock()
	size := proto.Size(r.reports["t1"])
	r.mu.Unlock()
	if size < 3*parts.MaxMessage/2 {
		t.Errorf("the report has %d bytes: no more than one message, so this tests nothing", size)
	}

	cancel() // all agents; their successors report the same drives to the next manager
	ctx, cancel = context.WithCancel(t.Context())
	defer cancel()
	r.restart()
	r.withAgents(ctx, "t1", "t2")
	done("manager and agents restarted")
	r.attachNew(ctx, "db1")
	done("made and attached")
	v := r.volume("db1")
	bad := v.Legs[0]
	if bad.Node != "t1" {
		bad = v.Legs[1]
	}
	record := &pb.RecordStaleRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Epoch, LegIds: []string{bad.Id}, Reason: "test"}
	if _, err := r.agents.RecordStale(ctx, record); err != nil {
		t.Fatal(err)
	}
	eventually(t, "t1 has drained the stale leg, and it is rebuilt", func() bool {
		for _, l := range r.volume("db1").Legs {
			if l.Id == bad.Id && l.State == pb.LegState_LEG_STATE_REBUILDING {
				bad = l
				return true
			}
		}
		return false
	})
	_, err := r.agents.RecordInSync(ctx, &pb.RecordInSyncRequest{Node: "c1", VolumeId: v.Id, Epoch: v.Epoch,
		Legs: []*pb.RebuiltLeg{{LegId: bad.Id, Revision: bad.Revision}}})
	if err != nil {
		t.Fatal(err)
	}
	done("recorded stale and in sync")
	if _, err := r.Detach(ctx, &pb.DetachRequest{Volume: "db1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is detached", func() bool { return r.volume("db1").Attachment == nil })
	if _, err := r.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: "db1"}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "db1 is deleted", func() bool {
		_, err := r.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
		return status.Code(err) == codes.NotFound
	})
	done("detached and deleted")
}

// createMany makes volumes of one copy.
func (r *rig) createMany(ctx context.Context, volumes, stripes int) {
	next := make(chan int)
	var group sync.WaitGroup
	for range 128 {
		group.Go(func() {
			for i := range next {
				create := &pb.CreateVolumeRequest{Name: fmt.Sprintf("v%05d", i), SizeBytes: uint64(stripes) << 20, Copies: 1, Stripes: uint32(stripes)}
				_, err := r.CreateVolume(ctx, create)
				for range 60 { // under the race detector, a target with so many legs reports too seldom to count as online
					if status.Code(err) != codes.ResourceExhausted {
						break
					}
					time.Sleep(time.Second)
					_, err = r.CreateVolume(ctx, create)
				}
				if err != nil {
					r.t.Error(err)
				}
			}
		})
	}
	for i := range volumes {
		next <- i
	}
	close(next)
	group.Wait()
}

// The cost of one second of a node with 20 000 legs at both ends, with and without a change
// on the node.
func BenchmarkReportOf20000Legs(b *testing.B) {
	r := newRig(b)
	r.drives = 10
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	agents, end := context.WithCancel(ctx)
	r.withAgents(agents, "t1")
	r.createMany(ctx, 2500, 8)
	eventually(b, "the last volume is ready", func() bool { return r.volume("v02499").State == pb.VolumeState_VOLUME_STATE_READY })
	end()
	report := r.reports["t1"]
	eventually(b, "the agents are gone", func() bool {
		n, err := r.ListNodes(ctx, &pb.ListNodesRequest{})
		return err == nil && !n.Nodes[1].Target.Online
	})
	open, err := r.agents.Target(ctx)
	if err != nil {
		b.Fatal(err)
	}
	counted := &counting{BidiStreamingClient: open}
	stream := parts.Reporting(counted)
	seen := func() time.Time {
		n, err := r.ListNodes(ctx, &pb.ListNodesRequest{})
		if err != nil {
			b.Fatal(err)
		}
		return n.Nodes[1].Target.Seen.AsTime()
	}
	say := func(changed bool) {
		if changed {
			report = proto.CloneOf(report)
			report.Legs[7].ZeroedBytes++
		}
		before := seen()
		counted.sent = 0
		if err := stream.Send(report); err != nil {
			b.Fatal(err)
		}
		eventually(b, "the report is in", func() bool { return !seen().Equal(before) })
	}
	say(true)
	if _, err := stream.Recv(); err != nil {
		b.Fatal(err)
	}
	for name, changed := range map[string]bool{"changed": true, "unchanged": false} {
		b.Run(name, func(b *testing.B) {
			before := cpu(b)
			for range b.N {
				say(changed)
			}
			b.ReportMetric(float64((cpu(b)-before).Microseconds())/float64(b.N), "µs-cpu/op")
			b.ReportMetric(float64(counted.sent), "bytes/op")
		})
	}
}

// counting counts the bytes that an agent sends.
type counting struct {
	grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted]
	sent int
}

func (c *counting) Send(m *pb.TargetReport) error {
	c.sent += proto.Size(m)
	return c.BidiStreamingClient.Send(m)
}

// cpu is the CPU time of all threads of this process.
func cpu(t testing.TB) time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		t.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
