// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pb"
)

// three are three managers and two targets, each a process, and a host in this process that writes
// to a volume with a copy on each target.
type three struct {
	t         *testing.T
	program   string // that is started: weft or weft-next
	dir       string
	addresses []string
	managers  map[string]*exec.Cmd // by address
	targets   map[string]*exec.Cmd // by node
	api       pb.ManagerClient
	agents    *managers.Conn
	writer    *timedWriter
}

// onceBound is far more than anything here takes, also where the machine is busy. The figures are
// logged.
const onceBound = 15 * time.Second

func startThree(t *testing.T) *three {
	t.Helper()
	c := &three{t: t, program: "weft", dir: t.TempDir(), managers: map[string]*exec.Cmd{}, targets: map[string]*exec.Cmd{}, writer: &timedWriter{}}
	for range 3 {
		c.addresses = append(c.addresses, c.free())
	}
	c.must("volmgr", "init", "--data-dir", c.store(0))
	c.manager(0)
	c.eventually("the first manager leads", func() error { _, err := c.leader(); return err })
	for i := 1; i < 3; i++ {
		c.must("volmgr", "join", "--data-dir", c.store(i), "--listen", c.addresses[i])
		c.manager(i)
	}
	c.eventually("all of them vote", func() error { return c.voters(3) })
	for i := range 2 {
		c.target(fmt.Sprintf("t%d-of-%d", i+1, os.Getpid())) // a machine has one target of a name
	}
	var err error
	if c.agents, err = daemon.Dial(strings.Join(c.addresses, ","), daemon.TLSFiles{}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.agents.Close() })
	c.api = pb.NewManagerClient(c.agents)
	for node := range c.targets {
		c.eventually("the drive of "+node, func() error {
			d, err := c.api.AddDrive(t.Context(), &pb.AddDriveRequest{Node: node, Device: c.drive(node)})
			if err == nil && d.GetState() != pb.DriveState_DRIVE_STATE_READY {
				err = fmt.Errorf("it is %v", d.GetState())
			}
			return err
		})
	}
	c.host(c.agents)
	return c
}

func (c *three) free() string {
	c.t.Helper()
	address, err := operator.FreeAddress()
	if err != nil {
		c.t.Fatal(err)
	}
	return address
}

func (c *three) store(i int) string { return filepath.Join(c.dir, fmt.Sprintf("store%d", i+1)) }

func (c *three) drive(node string) string { return filepath.Join(c.dir, node+".drive") }

// start runs weft in the background until the end of the test.
func (c *three) start(name string, args ...string) *exec.Cmd {
	c.t.Helper()
	log, err := os.OpenFile(filepath.Join(c.dir, name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		c.t.Fatal(err)
	}
	defer log.Close()
	cmd := exec.Command(c.program, args...)
	cmd.Env, cmd.Stderr = c.environment(), log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() {
		kill(cmd)
		if text, err := os.ReadFile(log.Name()); err == nil && c.t.Failed() {
			c.t.Logf("%s:\n%s", name, text)
		}
	})
	return cmd
}

func kill(cmd *exec.Cmd) {
	_ = cmd.Process.Kill() // it may have ended
	_ = cmd.Wait()
}

func (c *three) environment() []string {
	return append(operator.Environment(), "WEFT_MANAGER="+strings.Join(c.addresses, ","), operator.PlainTCP)
}

func (c *three) manager(i int) {
	c.t.Helper()
	c.managers[c.addresses[i]] = c.start(fmt.Sprint("m", i+1), "volmgr", "--data-dir", c.store(i), "--listen", c.addresses[i])
}

func (c *three) target(node string) {
	c.t.Helper()
	if err := errors.Join(os.WriteFile(c.drive(node), nil, 0o600), os.Truncate(c.drive(node), 2<<30)); err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { // a target's notes end with the boot
		for _, kind := range []string{"lock", "newest"} {
			_ = os.Remove(fmt.Sprintf("/dev/weft/target-%s.%s", node, kind)) // it is not there for users who may not write there
		}
	})
	c.runTarget(node)
}

func (c *three) runTarget(node string) {
	c.targets[node] = c.start(node, "target", "--node", node, "--datapath", "user", "--drive-file", c.drive(node), "--portal", "tcp://"+c.free())
}

// weft runs a command as an operator does.
func (c *three) weft(args ...string) (string, error) {
	cmd := exec.Command("weft", args...)
	cmd.Env = c.environment()
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("weft %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return string(out), err
}

func (c *three) must(args ...string) string {
	c.t.Helper()
	out, err := c.weft(args...)
	if err != nil {
		c.t.Fatal(err)
	}
	return out
}

// members returns the lines of weft volmgr list whose role is one of roles.
func (c *three) members(roles ...string) (lines [][]string, err error) {
	out, err := c.weft("volmgr", "list")
	for line := range strings.Lines(out) {
		if f := strings.Fields(line); len(f) > 3 && slices.Contains(roles, f[2]) {
			lines = append(lines, f)
		}
	}
	return lines, err
}

func (c *three) voters(n int) error {
	lines, err := c.members("leader", "follower")
	if err == nil && len(lines) != n {
		err = fmt.Errorf("%d vote: %v", len(lines), lines)
	}
	return err
}

// leader returns the leader's address.
func (c *three) leader() (string, error) {
	lines, err := c.members("leader")
	if err != nil || len(lines) != 1 {
		return "", errors.Join(err, fmt.Errorf("%d lead", len(lines)))
	}
	return lines[0][1], nil
}

func (c *three) eventually(what string, try func() error) {
	c.t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = try(); err == nil {
			return
		}
	}
	c.t.Fatalf("still not: %s: %v", what, err)
}

// host runs an initiator agent, and writes to its volume.
func (c *three) host(conn grpc.ClientConnInterface) {
	c.t.Helper()
	agent, err := initiator.New(initiator.Config{
		Node: "c1", Version: "test", Kernel: "test", BootID: "boot-1", Manager: pb.NewAgentsClient(conn), Next: c.agents.Next,
		StateDir: filepath.Join(c.dir, "state"), RunDir: filepath.Join(c.dir, "run"), Datapath: initiator.User, Log: slog.New(slog.DiscardHandler),
		Export: func(_ context.Context, volume block.Device, of userspace.Of) (userspace.Exported, error) {
			if of.Name == "db1" {
				go c.writer.run(volume)
			}
			return inUse{}, nil
		},
	})
	if err != nil {
		c.t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { _ = agent.Run(ctx) })
	c.t.Cleanup(func() {
		c.writer.end()
		stop()
		running.Wait()
	})
	c.must("volume", "create", "db1", "--size", "1GiB", "--stripes", "1", "--copies", "2", "--wait")
	c.eventually("the attachment", func() error {
		_, err := c.api.Attach(c.t.Context(), &pb.AttachRequest{Volume: "db1", Node: "c1"})
		return err
	})
	c.healthy()
}

// healthy waits until both copies are in sync, and the volume is written.
func (c *three) healthy() {
	c.t.Helper()
	was := c.writer.acknowledged()
	c.eventually("a healthy volume", func() error {
		v, err := c.api.GetVolume(c.t.Context(), &pb.GetVolumeRequest{Volume: "db1"})
		if err == nil && (v.GetHealth() != pb.Health_HEALTH_HEALTHY || c.writer.acknowledged() < was+10) {
			err = fmt.Errorf("it is %v after %d writes", v.GetHealth(), c.writer.acknowledged())
		}
		return err
	})
}

// noErrors fails if a write has failed, and returns the longest one since the last call.
func (c *three) noErrors(what string) time.Duration {
	c.t.Helper()
	longest, err := c.writer.longest()
	if err != nil {
		c.t.Fatalf("%s: a write has failed: %v", what, err)
	}
	if longest > onceBound {
		c.t.Errorf("%s: a write took %v", what, longest)
	}
	return longest
}

// The loss of the leader stops neither I/O nor changes, and neither does the loss of the leader
// together with a target. A manager whose disk was lost comes back as a new one.
func TestTheLossOfTheLeaderUnderIO(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	c := startThree(t)
	c.noErrors("at first")

	leader, err := c.leader()
	if err != nil {
		t.Fatal(err)
	}
	kill(c.managers[leader])
	begin := time.Now()
	c.must("pool", "create", "gold")
	took := time.Since(begin)
	c.eventually("the agents follow", func() error {
		out, err := c.weft("node", "list")
		if strings.Count(out, " online") != 3 {
			err = errors.Join(err, errors.New(out))
		}
		return err
	})
	t.Logf("the leader is killed: a change is answered after %v, all agents follow after %v; the longest write took %v", took, time.Since(begin), c.noErrors("the leader is killed"))
	if took > onceBound {
		t.Errorf("a change took %v", took)
	}

	c.lostDisk(slices.Index(c.addresses, leader))
	c.healthy()
	c.noErrors("before the second loss")

	if leader, err = c.leader(); err != nil {
		t.Fatal(err)
	}
	kill(c.managers[leader])
	for _, target := range c.targets {
		kill(target)
		break
	}
	was := c.writer.acknowledged()
	c.eventually("the writes go on", func() error {
		if n := c.writer.acknowledged() - was; n < 100 {
			return fmt.Errorf("%d writes", n)
		}
		return nil
	})
	t.Logf("the leader and a target are killed: the longest write took %v", c.noErrors("the leader and a target are killed"))
}

// lostDisk brings a manager back whose disk was lost. Each command may be repeated.
func (c *three) lostDisk(i int) {
	c.t.Helper()
	if err := os.RemoveAll(c.store(i)); err != nil {
		c.t.Fatal(err)
	}
	for _, want := range []string{" is removed", " is no member: nothing to remove"} {
		if out := c.must("volmgr", "remove", c.addresses[i]); !strings.Contains(out, want) {
			c.t.Errorf("weft volmgr remove says %q, want %q", out, want)
		}
	}
	join := func(want string) {
		if out := c.must("volmgr", "join", "--data-dir", c.store(i), "--listen", c.addresses[i]); !strings.Contains(out, want) {
			c.t.Errorf("weft volmgr join says %q, want %q", out, want)
		}
	}
	join(" is added")
	join(" is added")
	c.manager(i)
	c.eventually("three vote again", func() error { return c.voters(3) })
	join(" is a member already")
}

// inUse is a volume in use.
type inUse struct{}

func (inUse) Path() string                      { return "/dev/null" }
func (inUse) Number() string                    { return "" }
func (inUse) Resize(context.Context) error      { return nil }
func (inUse) Close(context.Context, bool) error { return nil }
func (inUse) Done() <-chan struct{}             { return nil }

// timedWriter writes 4 KiB to random places of the first 16 MiB, one at a time, and remembers the
// longest write.
type timedWriter struct {
	mu    sync.Mutex
	began time.Time // of the write that is under way
	most  time.Duration
	count int
	ended bool
	err   error
}

func (w *timedWriter) run(volume block.Device) {
	data := make([]byte, 4096)
	for w.begin() {
		err := block.WriteAt(volume, data, rand.Int64N(4096)*4096)
		w.mu.Lock()
		w.most = max(w.most, time.Since(w.began))
		w.began = time.Time{}
		w.count++
		w.err, w.ended = err, w.ended || err != nil
		w.mu.Unlock()
		time.Sleep(time.Millisecond)
	}
}

func (w *timedWriter) begin() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.began = time.Now()
	return !w.ended
}

func (w *timedWriter) end() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.ended = true
}

func (w *timedWriter) acknowledged() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.count
}

// longest returns the longest write since the last call, and the error of the last one.
func (w *timedWriter) longest() (time.Duration, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	most := w.most
	if !w.began.IsZero() {
		most = max(most, time.Since(w.began))
	}
	w.most = 0
	return most, w.err
}
