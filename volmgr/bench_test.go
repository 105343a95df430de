// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/parts"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/evidence"
	"weft.dev/weft/volmgr/store"
)

// The benchmarks of `make bench PART=manager`. Each does its work once per run, whatever
// b.N, and reports what it measured; agents, callers and the manager share the machine.

// sizeOf is how many volumes a benchmark has, unless the environment says otherwise.
func sizeOf(b *testing.B, usual int) int {
	text := os.Getenv("VOLUMES")
	if text == "" {
		return usual
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		b.Fatal(err)
	}
	return n
}

type latencies []time.Duration

func (l latencies) report(b *testing.B, what string) {
	slices.Sort(l)
	for name, at := range map[string]int{"p50": len(l) / 2, "p99": len(l) * 99 / 100, "max": len(l) - 1} {
		b.ReportMetric(float64(l[at].Nanoseconds())/1e6, what+"-"+name+"-ms")
	}
}

// inParallel calls f for 0 to n-1 from several callers, and returns how long each call took.
func inParallel(callers, n int, f func(i int)) latencies {
	all := make(latencies, n)
	next := make(chan int)
	var group sync.WaitGroup
	for range callers {
		group.Go(func() {
			for i := range next {
				begin := time.Now()
				f(i)
				all[i] = time.Since(begin)
			}
		})
	}
	for i := range n {
		next <- i
	}
	close(next)
	group.Wait()
	return all
}

// agentLoop is an agent that acts on the newest wanted state, as the real ones do: those that
// came meanwhile are left out.
func agentLoop[Report, Wanted parts.State](stream *parts.Stream[Report, Wanted], report Report, next func(Report, Wanted) Report) {
	var mu sync.Mutex
	var newest Wanted
	news := make(chan bool, 1)
	go func() {
		defer close(news)
		for {
			wanted, err := stream.Recv()
			if err != nil {
				return
			}
			mu.Lock()
			newest = wanted
			mu.Unlock()
			select {
			case news <- true:
			default:
			}
		}
	}()
	second := time.NewTicker(time.Second)
	defer second.Stop()
	for stream.Send(report) == nil {
		select {
		case _, more := <-news:
			if !more {
				return
			}
			mu.Lock()
			wanted := newest
			mu.Unlock()
			report = next(report, wanted)
		case <-second.C:
		}
	}
	for range news {
	}
}

const (
	benchDrives = 10 // of each target
	// benchRound is how long a target takes to carry out a wanted state. A real one writes and
	// syncs its drives' labels. What comes meanwhile waits for the next round.
	benchRound = 20 * time.Millisecond
)

func benchTarget(ctx context.Context, agents pb.AgentsClient, name string) {
	newBenchAgent(name).run(ctx, agents)
}

// benchAgent is a target whose stream may end and begin again: it keeps its drives, and what it has
// carved.
type benchAgent struct {
	name   string
	drives map[string]*pb.WantedDrive
	done   map[*pb.WantedLeg]carved
	last   *pb.TargetReport
}

func newBenchAgent(name string) *benchAgent {
	a := &benchAgent{name: name, drives: map[string]*pb.WantedDrive{}, done: map[*pb.WantedLeg]carved{}}
	a.last = a.base()
	return a
}

func (a *benchAgent) base() *pb.TargetReport {
	r := &pb.TargetReport{Node: a.name, BootId: "boot-" + a.name, Scale: parts.Understood(),
		Portals: []*pb.Portal{{Transport: pb.Transport_TRANSPORT_TCP, Address: "192.0.2.1", Port: 4420}}}
	for i := range benchDrives {
		path := fmt.Sprintf("/dev/nvme%dn1", i)
		r.Devices = append(r.Devices, &pb.Device{Path: path, Serial: a.name + path, Wwid: "wwid-" + a.name + path, SizeBytes: fakeExtents << 28, BlockSize: 512})
	}
	return r
}

// run reports until the stream ends.
func (a *benchAgent) run(ctx context.Context, agents pb.AgentsClient) {
	open, err := agents.Target(ctx)
	if err != nil {
		return
	}
	agentLoop(parts.Reporting(open), a.last, func(_ *pb.TargetReport, w *pb.TargetWanted) *pb.TargetReport {
		time.Sleep(benchRound)
		for _, d := range w.Drives {
			a.drives[d.DriveId] = d
		}
		a.last = obeyed(a.base(), a.drives, a.done, w)
		return a.last
	})
}

// carved is what a target reports of a leg.
type carved struct {
	label  *pb.LegLabel
	report *pb.LegReport
}

// obeyed is the report of a target that has done all that is wanted. What it said of a leg that
// is wanted as before it says again.
func obeyed(r *pb.TargetReport, drives map[string]*pb.WantedDrive, done map[*pb.WantedLeg]carved, w *pb.TargetWanted) *pb.TargetReport {
	r.Generation, r.ClusterId, r.Admissions = w.Generation, w.ClusterId, w.Admissions
	r.Legs = make([]*pb.LegReport, 0, len(w.Legs))
	on := map[string]*pb.DriveReport{}
	for _, device := range r.Devices {
		for id, d := range drives {
			if d.Device == device.Path {
				on[id] = &pb.DriveReport{DriveId: id, ClusterId: w.ClusterId, Device: d.Device, Extents: fakeExtents}
				device.DriveId = id
				r.Drives = append(r.Drives, on[id])
			}
		}
	}
	for _, l := range w.Legs {
		if l.Remove {
			continue
		}
		leg, ok := done[l]
		if !ok {
			leg = carved{&pb.LegLabel{LegId: l.LegId, Column: l.Column, Copy: l.Copy, Extents: l.Extents, Zeroed: true, Revision: l.Revision, Volume: l.Volume},
				&pb.LegReport{LegId: l.LegId, Ready: true, SizeBytes: l.SizeBytes}}
			done[l] = leg
		}
		on[l.DriveId].Legs = append(on[l.DriveId].Legs, leg.label)
		r.Legs = append(r.Legs, leg.report)
	}
	for _, x := range w.Exports {
		e := &pb.ExportReport{Nqn: x.Nqn, Ready: true}
		for _, n := range x.Namespaces {
			e.LegIds = append(e.LegIds, n.LegId)
		}
		r.Exports = append(r.Exports, e)
	}
	return r
}

// benchCluster starts 10 targets of 10 drives, and a host.
func benchCluster(ctx context.Context, r *rig) {
	for i := range 10 {
		name := fmt.Sprintf("t%d", i)
		go benchTarget(ctx, r.agents, name)
		for d := range benchDrives {
			eventually(r.t, name+"'s drive is added", func() bool {
				_, err := r.AddDrive(ctx, &pb.AddDriveRequest{Node: name, Device: fmt.Sprintf("/dev/nvme%dn1", d)})
				return err == nil
			})
		}
	}
	go r.fakeInitiator(ctx, "c1")
	eventually(r.t, "all drives are ready", func() bool {
		s, err := r.GetStatus(ctx, &pb.GetStatusRequest{})
		return err == nil && s.Drives == 10*benchDrives && s.DrivesNotReady == 0 && s.Nodes == 11
	})
}

// What volumes cost through the API, with 10 targets and so many volumes that each has
// thousands of legs.
func BenchmarkVolumesThroughTheAPI(b *testing.B) {
	volumes := sizeOf(b, 10_000)
	const more, attached = 2000, 200
	r := newRig(b)
	ctx, cancel := context.WithCancel(b.Context())
	defer cancel()
	benchCluster(ctx, r)
	create := func(i int) {
		if _, err := r.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: fmt.Sprintf("v%06d", i), SizeBytes: 1 << 20, Copies: 2, Stripes: 1}); err != nil {
			b.Error(err)
		}
	}
	ready := func(i int) {
		eventually(b, "the last volume is ready", func() bool { return r.volume(fmt.Sprintf("v%06d", i)).State == pb.VolumeState_VOLUME_STATE_READY })
	}
	inParallel(64, volumes, create)
	ready(volumes - 1)
	used, begin := cpu(b), time.Now()
	l := inParallel(64, more, func(i int) { create(volumes + i) })
	b.ReportMetric(more/time.Since(begin).Seconds(), "creates/s")
	b.ReportMetric(float64((cpu(b)-used).Microseconds())/more, "cpu-µs/create")
	l.report(b, "create")
	begin = time.Now()
	ready(volumes + more - 1)
	b.ReportMetric(time.Since(begin).Seconds()*1e3, "ready-after-ms")
	time.Sleep(time.Second)

	used = cpu(b)
	l = inParallel(1, attached, func(i int) {
		name := fmt.Sprintf("v%06d", i*(volumes/attached))
		if _, err := r.Attach(ctx, &pb.AttachRequest{Volume: name, Node: "c1"}); err != nil {
			b.Error(err)
		}
		for is := r.attached(name); !is(); {
			time.Sleep(time.Millisecond)
		}
	})
	b.ReportMetric(float64((cpu(b)-used).Microseconds())/attached, "cpu-µs/attach")
	l.report(b, "attach")
	begin = time.Now()
	if _, err := r.ListVolumes(ctx, &pb.ListVolumesRequest{}); err != nil {
		b.Error(err)
	}
	b.ReportMetric(time.Since(begin).Seconds()*1e3, "list-ms")
	b.ReportMetric(0, "ns/op")
}

// What a list of all volumes costs a host that waits for the record of a lost leg.
func BenchmarkRecordOfALostLegWhileVolumesAreListed(b *testing.B) {
	volumes := sizeOf(b, 100_000)
	const attached = 400
	agents, manager := filledManager(b, volumes, attached)
	all, err := manager.ListAttachments(b.Context(), &pb.ListAttachmentsRequest{})
	if err != nil || len(all.Attachments) != attached {
		b.Fatalf("%d attachments, %v", len(all.GetAttachments()), err)
	}
	var recorded latencies
	record := func(i int) {
		a := all.Attachments[i]
		v, err := manager.GetVolume(b.Context(), &pb.GetVolumeRequest{Volume: a.VolumeId})
		if err != nil {
			b.Fatal(err)
		}
		begin := time.Now()
		_, err = agents.RecordStale(b.Context(), &pb.RecordStaleRequest{Node: a.Node, VolumeId: a.VolumeId, Epoch: a.Epoch, LegIds: []string{v.Legs[1].Id}, Reason: "bench"})
		if err != nil {
			b.Fatal(err)
		}
		took := time.Since(begin)
		recorded = append(recorded, took)
		time.Sleep(5 * time.Millisecond)
	}
	recorded = nil
	for i := range attached / 2 {
		record(i)
	}
	alone := recorded
	ctx, cancel := context.WithCancel(b.Context())
	var group sync.WaitGroup
	lists := 0
	var listed time.Duration
	group.Go(func() {
		for ctx.Err() == nil {
			begin := time.Now()
			l, err := manager.ListVolumes(ctx, &pb.ListVolumesRequest{})
			if err != nil {
				return
			}
			if len(l.Volumes) != volumes {
				b.Errorf("%d volumes are listed", len(l.Volumes))
			}
			lists, listed = lists+1, listed+time.Since(begin)
		}
	})
	recorded = nil
	for i := attached / 2; i < attached; i++ {
		record(i)
	}
	cancel()
	group.Wait()
	alone.report(b, "alone")
	recorded.report(b, "listing")
	slices.Sort(alone)
	slices.Sort(recorded)
	b.ReportMetric(float64((recorded[len(recorded)/2]-alone[len(alone)/2]).Nanoseconds())/1e6, "delay-p50-ms")
	b.ReportMetric(float64((recorded[len(recorded)*99/100]-alone[len(alone)*99/100]).Nanoseconds())/1e6, "delay-p99-ms")
	if lists > 0 {
		b.ReportMetric(listed.Seconds()*1e3/float64(lists), "list-ms")
	}
	b.ReportMetric(0, "ns/op")
}

// filledManager runs a manager whose state has this many volumes on 100 drives of 10 targets,
// some of them attached to a host. The agents have reported once and are gone.
func filledManager(b *testing.B, volumes, attached int) (pb.AgentsClient, pb.ManagerClient) {
	b.Helper()
	begin := time.Now()
	f := newFill(b)
	f.targets(10, benchDrives)
	for i := range volumes {
		f.step(cluster.CreateVolume{Name: block.VolumeName(fmt.Sprintf("v%06d", i)), Size: block.GiB, Copies: 2, Stripes: 1, Seed: newSeed()})
		if i%10_000 == 9999 {
			f.report()
		}
	}
	f.report()
	for i := range attached {
		f.step(cluster.Attach{Volume: fmt.Sprintf("v%06d", i*(volumes/attached)), Node: "c1"})
	}
	f.report()
	f.report()
	dir, quiet := filepath.Join(b.TempDir(), "store"), slog.New(slog.DiscardHandler)
	if err := store.Create(dir, f.state.Records(), quiet); err != nil {
		b.Fatal(err)
	}
	records, err := store.Open(dir, quiet)
	if err != nil {
		b.Fatal(err)
	}
	m := newManager(Config{Dir: dir}.withDefaults(), alone{records}, f.state)
	ctx, cancel := context.WithCancel(context.Background())
	var group sync.WaitGroup
	group.Go(func() {
		if err := m.Run(ctx); err != nil {
			b.Error(err)
		}
	})
	conn, stop := serveOn(b, func(r grpc.ServiceRegistrar) { m.Register(r) })
	b.Cleanup(func() {
		cancel()
		stop()
		group.Wait()
		_ = m.Close()
	})
	runtime.GC()
	b.Logf("%d volumes in %v", volumes, time.Since(begin).Round(time.Second))
	return pb.NewAgentsClient(conn), pages.Client(conn)
}

// fill makes a large state, step by step.
type fill struct {
	b     *testing.B
	state *cluster.State
	nodes []block.NodeName
	now   time.Time
}

func newFill(b *testing.B) *fill {
	state, _ := cluster.New(block.ClusterID{UUID: newUUID()})
	return &fill{b: b, state: state, now: time.Now()}
}

func (f *fill) step(in cluster.Input) any {
	f.b.Helper()
	out, err := f.state.Step(f.now, in)
	if err != nil {
		f.b.Fatalf("%T: %v", in, err)
	}
	return out.Result
}

func (f *fill) targets(n, drives int) {
	for i := range n {
		name := block.NodeName(fmt.Sprintf("t%d", i))
		f.nodes = append(f.nodes, name)
		f.step(cluster.TargetReported{Session: 1, Report: f.seen(name, drives)})
		for d := range drives {
			f.step(cluster.AddDrive{Node: name, Device: fmt.Sprintf("/dev/nvme%dn1", d), Seed: newSeed()})
		}
	}
	f.report()
}

func (f *fill) seen(name block.NodeName, drives int) cluster.TargetReport {
	r := cluster.TargetReport{Node: name, BootID: "b", Portals: []block.Portal{{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}}}
	for d := range drives {
		path := fmt.Sprintf("/dev/nvme%dn1", d)
		r.Devices = append(r.Devices, cluster.Device{Path: path, Serial: string(name) + path, WWID: string(name) + path, Size: fakeExtents << 28, BlockSize: 512})
	}
	return r
}

// report has every target, and then the host, report that it has done what is wanted.
func (f *fill) report() {
	for _, name := range f.nodes {
		w := f.state.WantedTarget(name)
		r := f.seen(name, benchDrives)
		r.Generation, r.ClusterID, r.Admissions = w.Generation, w.ClusterID, w.Admissions
		labels := map[block.DriveID][]evidence.LegLabel{}
		for _, l := range w.Legs {
			labels[l.Drive] = append(labels[l.Drive], evidence.LegLabel{Leg: l.Leg, Column: l.Column, Copy: l.Copy, Image: l.Image, Zeroed: true, Revision: l.Revision, Volume: l.Volume})
			r.Legs = append(r.Legs, cluster.LegReport{Leg: l.Leg, Ready: true, Size: l.Size})
		}
		for _, d := range f.state.Drives(name) {
			r.Drives = append(r.Drives, cluster.DriveReport{Drive: d.ID, Cluster: w.ClusterID, Device: d.Device, Extents: fakeExtents, Legs: labels[d.ID]})
		}
		for _, x := range w.Exports {
			e := cluster.ExportReport{NQN: x.NQN, Ready: true}
			for _, n := range x.Namespaces {
				e.Legs = append(e.Legs, n.Leg)
			}
			r.Exports = append(r.Exports, e)
		}
		f.step(cluster.TargetReported{Session: 1, Report: r})
	}
	w := f.state.WantedInitiator("c1")
	r := cluster.InitiatorReport{Node: "c1", BootID: "b", Host: block.HostFromID(block.UUID{0: 1, 6: 0x40, 8: 0x80}), Generation: w.Generation}
	for _, a := range w.Attachments {
		r.Attachments = append(r.Attachments, cluster.AttachmentReport{Volume: a.Volume, Epoch: a.Epoch, Grant: a.Grant, Phase: cluster.PhaseServing, Device: "/dev/weft/x", Size: a.Size})
	}
	f.step(cluster.InitiatorReported{Session: 1, Report: r})
}
