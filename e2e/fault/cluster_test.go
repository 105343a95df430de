// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	mathrand "math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target"
	"weft.dev/weft/target/drive"
	targetuser "weft.dev/weft/target/userspace"
)

// cluster is a manager, targets, clients, and the network and disks between them.
type cluster struct {
	t         tester
	dir       string
	log       *slog.Logger
	network   *network
	managers  []*managerHost
	members   int           // how many managers there are; 0: 1
	levels    []block.Level // that the managers know, in their order; nil: all know the newest. The store is from before levels
	quorum    bool          // they share their records; more than one always do
	stores    string        // the directory of their stores
	addresses string        // of all managers
	id        block.ClusterID
	targets   []*targetHost
	clients   []*clientHost
	user      *user
	clerk     *clerk       // nil: nobody calls the API all the time
	archive   *archive     // nil: nobody takes snapshots
	layout    block.Layout // of the volume
	integrity bool         // the volume keeps checksums
	thin      bool         // the volume is thin
	size      block.Size   // the size that it should have
	rails     []string     // of each target; empty: one without a name
	pass      func(time.Duration)
	random    *mathrand.Rand // chooses the behavior of the daemons' surroundings
	clock     atomic.Int64   // the error of the manager's wall clock
	applied   atomic.Uint64  // the newest entry of a quorum's log that a manager has committed

	operator     pb.ManagerClient
	hangUp       func() error
	lie          grpc.UnaryClientInterceptor                                   // intercepts the initiators' calls; nil: none
	overhear     grpc.StreamClientInterceptor                                  // intercepts the initiators' streams; nil: none
	lieOfShots   grpc.UnaryClientInterceptor                                   // intercepts the archive's calls; nil: none
	shows        func(volume block.Device, name block.VolumeName) block.Device // what hosts make of a volume; nil: the volume
	users        users                                                         // the users of the devices
	shotsEvery   time.Duration                                                 // how often, on average, the archive does something of each kind
	healAfter    time.Duration                                                 // of the managers; 0: the default
	began        time.Time
	historyMutex sync.Mutex
	history      []string
}

// users own the devices that clients make.
type users interface {
	// found is called when a client has made a device.
	found(at *machine, volume block.Device, name block.VolumeName) userspace.Exported
	// died is called when a client's process dies.
	died(at *machine)
	// nodes lists the clients that have the volume.
	nodes() []string
}

// export is a device that a client has made of a volume, as its user sees it.
type export struct {
	at     *machine
	volume block.Device
	name   block.VolumeName

	dead     chan struct{} // the client's process has died
	deadOnce sync.Once
	done     chan struct{} // it was closed
	doneOnce sync.Once
}

func newExport(at *machine, volume block.Device, name block.VolumeName) *export {
	return &export{at: at, volume: volume, name: name, dead: make(chan struct{}), done: make(chan struct{})}
}

func (d *export) Path() string   { return "/dev/weft/" + string(d.name) }
func (d *export) Number() string { return "7:4" }

// Done is also what a keeper checks in each turn.
func (d *export) Done() <-chan struct{} {
	d.at.awake()
	return d.done
}

// Resize does nothing: users ask the volume for its size.
func (d *export) Resize(context.Context) error { return nil }

func (d *export) Close(context.Context, bool) error {
	d.doneOnce.Do(func() { close(d.done) })
	return nil
}

func (d *export) die() { d.deadOnce.Do(func() { close(d.dead) }) }

// over reports whether the device can no longer be used.
func (d *export) over() bool {
	select {
	case <-d.dead:
	case <-d.done:
	default:
		return false
	}
	return true
}

// tester is a testing.TB, or a substitute that only records failures.
type tester interface {
	Helper()
	Logf(format string, args ...any)
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
	FailNow()
	Failed() bool
	TempDir() string
	ArtifactDir() string
	Cleanup(func())
}

// process is one run of a daemon.
type process struct {
	at    *machine
	stop  context.CancelFunc
	leave context.CancelCauseFunc // stop, with a cause
	done  chan struct{}
}

// run starts a daemon.
func run(at *machine, do func(context.Context)) *process {
	ctx, leave := context.WithCancelCause(context.Background())
	p := &process{at, func() { leave(nil) }, leave, make(chan struct{})}
	go func() {
		defer close(p.done)
		do(ctx)
	}()
	return p
}

// end waits until the process is completely gone, after the network has forgotten it.
func (p *process) end() {
	p.stop()
	<-p.done
}

const driveSize = 3 * 256 * block.MiB

// newCluster starts a manager and targets, and adds their drives. lie may corrupt a part of
// the cluster. Use it only in a synctest bubble.
func newCluster(t tester, targets, clients int, lie func(*cluster)) *cluster {
	t.Helper()
	c := &cluster{t: t, dir: scratch(t), log: logger(t), network: newNetwork(), size: volumeSize, shotsEvery: 1500 * time.Millisecond, began: time.Now()}
	c.pass, c.stores, c.random = time.Sleep, c.dir, mathrand.New(mathrand.NewPCG(3, 4))
	c.user = newUser(c)
	c.users = c.user
	for i := range targets {
		c.targets = append(c.targets, c.newTarget(fmt.Sprintf("t%d", i+1)))
	}
	for i := range clients {
		name := fmt.Sprintf("c%d", i+1)
		c.clients = append(c.clients, &clientHost{host: host{cluster: c, name: name}, dir: filepath.Join(c.dir, name)})
	}
	lie(c)
	c.quorum = c.quorum || c.members > 1
	c.newManagers()
	conn := c.dialManager(c.network.boot("operator"))
	c.operator, c.hangUp = pb.NewManagerClient(conn), conn.Close
	c.initStore()
	c.startManager()
	for _, h := range c.targets {
		h.start()
	}
	for _, h := range c.clients {
		h.start()
	}
	for _, h := range c.targets {
		c.eventually("drive of "+h.name, func(ctx context.Context) error {
			_, err := c.operator.AddDrive(ctx, &pb.AddDriveRequest{Node: h.name, Device: "/drive"})
			return err
		})
	}
	return c
}

// scratch returns a directory, in memory if possible: nothing here has to survive the machine.
func scratch(t tester) string {
	dir, err := os.MkdirTemp("/dev/shm", "weft-fault-")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func logger(t tester) *slog.Logger {
	if *logFile == "" {
		return slog.New(slog.DiscardHandler)
	}
	file, err := os.OpenFile(*logFile, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatalf("%v", err)
	}
	t.Cleanup(func() { file.Close() })
	return slog.New(slog.NewTextHandler(file, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// did logs a fault or a step, for people who investigate a failed run.
func (c *cluster) did(format string, args ...any) {
	c.historyMutex.Lock()
	defer c.historyMutex.Unlock()
	line := fmt.Sprintf("%9.3fs  ", time.Since(c.began).Seconds()) + fmt.Sprintf(format, args...)
	c.history = append(c.history, line)
	c.log.Info("FAULT", "line", line)
}

// count counts a fault by its name.
func (c *cluster) count(what string) {
	c.user.mu.Lock()
	defer c.user.mu.Unlock()
	c.user.counts[what]++
}

// close ends everything.
func (c *cluster) close() {
	c.archive.close()
	c.every((*user).stop)
	c.clerk.close()
	for _, h := range c.clients {
		h.kill()
	}
	for _, h := range c.targets {
		h.platter.well()
		h.kill()
	}
	c.killManager()
	for _, h := range c.clients {
		h.buried()
	}
	for _, h := range c.targets {
		h.buried()
		h.platter.powerOff() // nothing waits for it any more
	}
	if err := c.hangUp(); err != nil {
		c.t.Errorf("%v", err)
	}
	for _, h := range c.targets {
		h.platter.file.Close()
	}
}

// host is what targets and clients share.
type host struct {
	cluster *cluster
	name    string
	process *process // nil while it is down
	old     *process // its predecessor, already unknown to the network
	doubled bool     // a second agent was started beside it

	served atomic.Pointer[prometheus.Collector] // the metrics of its newest agent
}

// serve notes an agent whose metrics are served.
func (h *host) serve(metrics prometheus.Collector) { h.served.Store(&metrics) }

// machine is where the process runs; nil while it is down.
func (h *host) machine() *machine {
	if h.process == nil {
		return nil
	}
	return h.process.at
}

// supervised runs an agent, and restarts it when it has ended by itself. It may do so only if
// another agent ran beside it.
func (h *host) supervised(agent func() func(context.Context) error) func(context.Context) {
	one := agent()
	return func(ctx context.Context) {
		for {
			err := one(ctx)
			if ctx.Err() != nil {
				return
			}
			h.cluster.did("%s ended by itself: %v", h.name, err)
			if !h.doubled {
				h.cluster.t.Errorf("%s ended by itself: %v", h.name, err)
				return
			}
			time.Sleep(time.Second)
			one = agent()
		}
	}
}

// kill ends the process. Nothing that it sends gets out any more.
func (h *host) kill() {
	if h.process == nil {
		return
	}
	h.process.at.kill()
	h.process.stop()
	h.old, h.process = h.process, nil
}

// buried waits until the previous process is completely gone. This matters for its locks: the
// death of a real process would have released them.
func (h *host) buried() {
	if h.old != nil {
		h.old.end()
		h.old = nil
	}
}

// ---- targets ----

// targetHost is a machine with a drive.
type targetHost struct {
	host
	root    string
	platter *platter
	leaving atomic.Bool // it is asked to stop, and not killed
	running atomic.Pointer[target.Agent]
}

func (h *targetHost) String() string { return h.name }

func (c *cluster) newTarget(name string) *targetHost {
	c.t.Helper()
	h := &targetHost{host: host{cluster: c, name: name}, root: filepath.Join(c.dir, name)}
	path := filepath.Join(h.root, "drive")
	err := errors.Join(
		os.MkdirAll(filepath.Join(h.root, "proc/sys/kernel/random"), 0o700),
		os.WriteFile(filepath.Join(h.root, "proc/sys/kernel/osrelease"), []byte("6.1\n"), 0o600),
		os.WriteFile(path, nil, 0o600), os.Truncate(path, int64(driveSize)),
		h.newBoot(),
	)
	if err == nil {
		h.platter, err = newPlatter(path, true)
	}
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	return h
}

// newBoot gives the machine a new boot id.
func (h *targetHost) newBoot() error {
	var random [16]byte
	rand.Read(random[:])
	return os.WriteFile(filepath.Join(h.root, "proc/sys/kernel/random/boot_id"), []byte(block.UUIDFromRandom(random).String()+"\n"), 0o600)
}

func (h *targetHost) start() {
	c := h.cluster
	c.t.Helper()
	h.platter.set(h.platter.goOnLocked) // the previous process keeps the drive until the drive answers
	h.buried()
	at := c.network.boot(h.name)
	h.process = run(at, h.supervised(func() func(context.Context) error { return h.agent(at) }))
}

// kill ends the agent's process, and makes the drive answer it.
func (h *targetHost) kill() {
	h.host.kill()
	h.platter.killed()
}

// longestGoodbye is a little longer than an agent that is asked to stop serves on.
const longestGoodbye = 4 * time.Second

// leave stops the agent in order. A drive that hangs answers it at last: see platter.killed.
func (h *targetHost) leave() {
	h.leaving.Store(true)
	defer h.leaving.Store(false)
	defer time.AfterFunc(longestGoodbye, h.platter.killed).Stop()
	h.host.leave()
	h.platter.killed()
}

// handOver has the process hand over to its next one, as systemctl reload does, if that lives so long.
func (h *targetHost) handOver(lives bool) {
	old, agent := h.process, h.running.Load()
	at := old.at.beside()
	old.at.thaw()
	old.at.network.change(func() { old.at.heir = at })
	draft, err := agent.Draft()
	if err != nil {
		h.cluster.t.Errorf("%v", err)
	}
	old.leave(target.ErrHandOver)
	over := time.AfterFunc(longestGoodbye, h.platter.killed)
	<-old.done
	over.Stop()
	h.platter.killed() // what hangs keeps the drive until the process is gone
	old.at.kill()
	h.process = nil
	estate := agent.Estate()
	if !lives {
		if err := estate.Close(); err != nil {
			h.cluster.t.Errorf("%v", err)
		}
		at.kill()
		h.start()
		return
	}
	first := true
	h.process = run(at, h.supervised(func() func(context.Context) error {
		do := h.agent(at)
		if first {
			next := h.running.Load()
			if err := errors.Join(next.Prepare(context.Background(), draft), next.Inherit(estate)); err != nil {
				h.cluster.t.Errorf("%v", err)
			}
		}
		first = false
		return do
	}))
}

// agent returns one run of the agent.
func (h *targetHost) agent(at *machine) func(context.Context) error {
	c, grip := h.cluster, h.platter.lend(at)
	c.t.Helper()
	conn := c.dialManager(at, grpc.WithStreamInterceptor(h.tellOfCache))
	agent, err := target.New(target.Config{
		Node: block.NodeName(h.name), Portals: h.portals(),
		Manager: pb.NewAgentsClient(conn), Next: conn.Next, Version: "fault", Log: c.log.With("node", h.name), Root: h.root,
		Datapath: target.User, Files: []string{"/drive"}, FilesOnly: true, Newest: filepath.Join(h.root, "newest"),
		Goodbye: func(context.Context) bool { return h.leaving.Load() },
		Listen: func(p block.Portal) (net.Listener, error) {
			return at.listen(net.JoinHostPort(p.Address, fmt.Sprint(p.Port)))
		},
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, _, _ := net.SplitHostPort(address)
			return at.dial(ctx, host, address)
		},
		Medium: func(_ string, data block.Device) block.Device { return geometry{data, h.platter} },
		Calls:  func(_ string, kernel targetuser.Calls) targetuser.Calls { return calls{access{grip, true}, kernel} },
		Label:  func(_ string, m drive.Medium) drive.Medium { return label{m, access{grip, false}} },
	})
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	h.serve(agent)
	if at == nil || h.process == nil || h.process.at == at { // not a second one beside it
		h.running.Store(agent)
	}
	return func(ctx context.Context) error {
		defer conn.Close()
		return agent.Run(ctx)
	}
}

// portals are at each of the target's rails.
func (h *targetHost) portals() (all []block.Portal) {
	for _, rail := range h.cluster.rails {
		all = append(all, block.Portal{Transport: block.TCP, Address: h.name + "-" + rail, Port: block.DefaultPort, Rail: rail})
	}
	if len(all) == 0 {
		all = []block.Portal{{Transport: block.TCP, Address: h.name, Port: block.DefaultPort}}
	}
	return all
}

// reports are a target's reports to the manager, corrected to tell the truth about its drive's
// cache: the agent takes a file for a drive that has one.
type reports struct {
	grpc.ClientStream
	target *targetHost
}

func (h *targetHost) tellOfCache(ctx context.Context, d *grpc.StreamDesc, conn *grpc.ClientConn, method string, next grpc.Streamer, o ...grpc.CallOption) (grpc.ClientStream, error) {
	s, err := next(ctx, d, conn, method, o...)
	return reports{s, h}, err
}

func (r reports) SendMsg(m any) error {
	if report, ok := m.(*pb.TargetReport); ok {
		report = proto.CloneOf(report)
		p := r.target.platter
		p.mu.Lock()
		if p.problem != nil {
			report.Problems = append(report.Problems, p.problem)
		}
		for _, d := range report.GetDevices() {
			d.VolatileCache = p.volatile
			if p.smart != nil {
				d.Health = &pb.DriveHealth{Time: timestamppb.Now(), Smart: p.smart}
			}
		}
		p.mu.Unlock()
		m = report
	}
	return r.ClientStream.SendMsg(m)
}

// powerOff cuts the machine's power; its drive loses the content of its cache.
func (h *targetHost) powerOff(random *mathrand.Rand) {
	h.cluster.t.Helper()
	h.off(func() error { return h.platter.forget(random, sector) })
}

// loseAll is powerOff when all other machines lose power, too. The drive then writes only
// whole blocks, since there would be no copy to repair a torn one from.
func (h *targetHost) loseAll(random *mathrand.Rand) {
	h.cluster.t.Helper()
	h.off(func() error { return h.platter.forget(random, unit) })
}

func (h *targetHost) off(forget func() error) {
	h.cluster.t.Helper()
	h.platter.powerOff()
	if h.platter.volatile {
		h.cluster.archive.mayLose()
	}
	if h.process != nil {
		h.process.at.powerOff()
		h.old, h.process = h.process, nil
	}
	h.buried()
	if err := errors.Join(forget(), h.newBoot()); err != nil {
		h.cluster.t.Fatalf("%v", err)
	}
}

// ---- clients ----

// clientHost is a machine that may attach the volume.
type clientHost struct {
	host
	dir string
}

func (h *clientHost) start() {
	c := h.cluster
	c.t.Helper()
	h.buried()
	at := c.network.boot(h.name)
	h.process = run(at, h.supervised(func() func(context.Context) error { return h.agent(at) }))
}

// agent returns one run of the agent.
func (h *clientHost) agent(at *machine) func(context.Context) error {
	c := h.cluster
	c.t.Helper()
	options := []grpc.DialOption{grpc.WithChainUnaryInterceptor(c.noneLostForSpace)}
	if c.lie != nil {
		options = append(options, grpc.WithUnaryInterceptor(c.lie))
	}
	if c.overhear != nil {
		options = append(options, grpc.WithStreamInterceptor(c.overhear))
	}
	conn := c.dialManager(at, options...)
	agent, err := initiator.New(initiator.Config{
		Node: block.NodeName(h.name), Version: "fault", Kernel: "6.1", Manager: pb.NewAgentsClient(conn), Next: conn.Next,
		StateDir: h.dir, Datapath: initiator.User, IOQueues: 2, Log: c.log.With("node", h.name),
		Export: func(_ context.Context, volume block.Device, of userspace.Of) (userspace.Exported, error) {
			return c.users.found(at, volume, of.Name), nil
		},
		Dial: func(ctx context.Context, _, address string) (net.Conn, error) {
			host, _, err := net.SplitHostPort(address)
			if err != nil {
				return nil, err
			}
			conn, err := at.dial(ctx, host, address)
			if err != nil {
				return nil, err
			}
			return conn, nil
		},
	})
	if err != nil {
		c.t.Fatalf("%v", err)
	}
	h.serve(agent)
	return func(ctx context.Context) error {
		defer conn.Close()
		return agent.Run(ctx)
	}
}

// kill ends the agent's process, and with it its volumes and their users.
func (h *clientHost) kill() {
	if h.process == nil {
		return
	}
	h.cluster.users.died(h.process.at)
	h.host.kill()
}

// leave makes the agent's process shut down in order.
func (h *host) leave() {
	h.process.at.thaw()
	h.process.end()
	h.process.at.kill()
	h.process = nil
}

// ---- what an operator does and sees ----

const patience = 2 * time.Minute

// eventually retries until something succeeds. If it does not in time, the test ends with what
// the manager says of the volume.
func (c *cluster) eventually(what string, try func(ctx context.Context) error) {
	c.t.Helper()
	deadline := time.Now().Add(patience)
	for {
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		err := try(ctx)
		cancel()
		if err == nil {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: not within %v: %v\n%s", what, patience, err, c.explain())
		}
		c.pass(200 * time.Millisecond)
	}
}

const volumeName = "db1"

func (c *cluster) createVolume(layout block.Layout) {
	c.t.Helper()
	c.layout = layout
	c.eventually("create the volume", func(ctx context.Context) error {
		v, err := c.operator.CreateVolume(ctx, &pb.CreateVolumeRequest{
			Name: volumeName, SizeBytes: uint64(c.size), Copies: uint32(layout.Copies), Stripes: uint32(layout.Stripes), Integrity: c.integrity, Thin: c.thin,
		})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
}

func (c *cluster) attach(to *clientHost) {
	c.t.Helper()
	c.user.moveTo(to.name)
	c.eventually("attach to "+to.name, func(ctx context.Context) error {
		_, err := c.operator.Attach(ctx, &pb.AttachRequest{Volume: volumeName, Node: to.name})
		return err
	})
}

func (c *cluster) detach(from *clientHost, force bool) {
	c.t.Helper()
	c.eventually("detach", func(ctx context.Context) error {
		if _, err := c.operator.Detach(ctx, &pb.DetachRequest{Volume: volumeName, Node: from.name, Force: force}); err != nil {
			return err
		}
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		if err == nil && v.GetAttachment() != nil {
			err = fmt.Errorf("it is %v on %s", v.GetAttachment().GetState(), v.GetAttachment().GetNode())
		}
		return err
	})
}

// healthy returns when all faults are repaired and the user has the volume where it should be.
func (c *cluster) healthy() {
	c.t.Helper()
	c.eventually("all well", func(ctx context.Context) error {
		v, err := c.operator.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volumeName})
		switch {
		case err != nil:
			return err
		case v.GetHealth() != pb.Health_HEALTH_HEALTHY:
			return fmt.Errorf("the volume is %v", v.GetHealth())
		case v.GetAttachment().GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED || v.GetAttachment().GetNode() != c.user.node():
			return fmt.Errorf("the volume is %v on %q", v.GetAttachment().GetState(), v.GetAttachment().GetNode())
		case c.user.deviceSize() == 0:
			return errors.New("the user has no device")
		case v.GetSizeBytes() < uint64(c.size):
			return errors.Join(fmt.Errorf("the volume has %d bytes", v.GetSizeBytes()), c.expand(ctx))
		case v.GetSizeBytes() != uint64(c.user.deviceSize()) || v.GetSizeBytes() != v.GetAttachment().GetSizeBytes():
			return fmt.Errorf("the volume has %d bytes, its device %v, and %d were reported", v.GetSizeBytes(), c.user.deviceSize(), v.GetAttachment().GetSizeBytes())
		}
		s, err := c.operator.GetStatus(ctx, &pb.GetStatusRequest{})
		wrong := slices.DeleteFunc(s.GetWrong(), func(w string) bool { return strings.HasPrefix(w, "snapshot ") }) // copies of snapshots are awaited elsewhere
		if err == nil && len(wrong) > 0 {
			err = errors.New(wrong[0])
			if strings.Contains(err.Error(), "by its last scrub") {
				// What could not be read may have been written again since: another scrub tells.
				_, again := c.operator.ScrubVolume(ctx, &pb.ScrubVolumeRequest{Volume: volumeName})
				err = errors.Join(err, again)
			}
		}
		return err
	})
}

// expand asks for the size that the volume should have.
func (c *cluster) expand(ctx context.Context) error {
	_, err := c.operator.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: volumeName, SizeBytes: uint64(c.size)})
	return err
}

// explain returns what an operator would be told of the first volume, and of those that are not well.
func (c *cluster) explain() (text string) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	all, err := c.operator.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		text = fmt.Sprintf("volumes: %v\n", err)
	}
	for _, v := range all.GetVolumes() {
		if v.GetName() == volumeName || v.GetHealth() != pb.Health_HEALTH_HEALTHY {
			text += c.explainVolume(ctx, v.GetName())
		}
	}
	return text + c.explainDrives(ctx) + c.stacks()
}

// stacks keeps what all goroutines do, which is too long for the log, in a file that go test
// -artifacts keeps.
func (c *cluster) stacks() string {
	file, err := os.Create(filepath.Join(c.t.ArtifactDir(), "stacks.txt"))
	if err == nil {
		err = errors.Join(pprof.Lookup("goroutine").WriteTo(file, 2), file.Close())
	}
	if err != nil {
		return fmt.Sprintf("stacks: %v\n", err)
	}
	return ""
}

func (c *cluster) explainDrives(ctx context.Context) (text string) {
	drives, err := c.operator.ListDrives(ctx, &pb.ListDrivesRequest{})
	if err != nil {
		return fmt.Sprintf("drives: %v\n", err)
	}
	for _, d := range drives.GetDrives() {
		text += fmt.Sprintf("  drive of %s: %v %s\n", d.GetNode(), d.GetState(), d.GetReason())
	}
	return text
}

func (c *cluster) explainVolume(ctx context.Context, name string) (text string) {
	e, err := c.operator.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: name})
	if err != nil {
		text = fmt.Sprintf("explain %s: %v\n", name, err)
	}
	text += e.GetSummary() + "\n"
	for title, lines := range map[string][]string{"because": e.GetFacts(), "waiting for": e.GetWaits(), "you can": e.GetActions()} {
		for _, line := range lines {
			text += fmt.Sprintf("  %s: %s\n", title, line)
		}
	}
	return text
}
