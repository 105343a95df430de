// SPDX-License-Identifier: Apache-2.0

package crash

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target"
	"weft.dev/weft/volmgr"
)

var (
	size   = flag.Int("size", 2, "size of the volume in GiB")
	write  = flag.Duration("write", time.Second, "how long the first client writes")
	behind = flag.Duration("behind", 2*time.Millisecond, "how much later than the first target the second gets what the first client writes: when it is killed, the copies differ")
	within = flag.Duration("within", 10*time.Second, "how long it may take from the fence until the second client serves the volume")
	most   = flag.Int64("most", 5<<30, "how many bytes of each copy may be compared for it")
)

// lab is a manager and two targets with a drive each.
type lab struct {
	t       *testing.T
	dir     string
	log     *slog.Logger
	address string
	manager pb.ManagerClient
}

func newLab(t *testing.T, drive block.Size) *lab {
	t.Helper()
	l := &lab{t: t, dir: t.TempDir()}
	log, err := os.Create(filepath.Join(l.dir, "lab.log"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { log.Close() })
	l.log = slog.New(slog.NewTextHandler(log, nil))
	l.startManager()
	for i := range 2 {
		l.startTarget(fmt.Sprintf("t%d", i+1), drive)
	}
	return l
}

// run runs a daemon until the test ends.
func (l *lab) run(what string, do func(context.Context) error) {
	ctx, stop := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- do(ctx) }()
	l.t.Cleanup(func() {
		stop()
		if err := <-done; err != nil && !errors.Is(err, context.Canceled) {
			l.t.Errorf("%s: %v", what, err)
		}
	})
}

func (l *lab) startManager() {
	cfg := volmgr.Config{Dir: filepath.Join(l.dir, "manager"), Version: "test", Log: l.log.With("at", "manager")}
	if _, err := volmgr.Init(cfg); err != nil {
		l.t.Fatal(err)
	}
	manager, err := volmgr.New(cfg)
	if err != nil {
		l.t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		l.t.Fatal(err)
	}
	l.address = listener.Addr().String()
	server := grpc.NewServer()
	manager.Register(server)
	l.run("manager", func(ctx context.Context) error {
		go server.Serve(listener) //nolint:errcheck // it ends with Stop
		err := manager.Run(ctx)
		server.Stop()
		if ctx.Err() != nil {
			err = nil
		}
		return errors.Join(err, manager.Close())
	})
	l.manager = pages.Client(l.dial())
}

func (l *lab) dial() *grpc.ClientConn {
	conn, err := grpc.NewClient(l.address, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() { conn.Close() })
	return conn
}

func (l *lab) startTarget(name string, size block.Size) {
	l.t.Helper()
	drive := filepath.Join(l.dir, name+".drive")
	if err := errors.Join(os.WriteFile(drive, nil, 0o600), os.Truncate(drive, int64(size))); err != nil {
		l.t.Fatal(err)
	}
	address, err := operator.FreeAddress() // a portal must be known before a target listens on it
	if err != nil {
		l.t.Fatal(err)
	}
	at, err := netip.ParseAddrPort(address)
	if err != nil {
		l.t.Fatal(err)
	}
	agent, err := target.New(target.Config{
		Node: block.NodeName(name), Portals: []block.Portal{{Transport: block.TCP, Address: at.Addr().String(), Port: at.Port()}},
		Manager: pb.NewAgentsClient(l.dial()), Version: "test", Log: l.log.With("at", name),
		Datapath: target.User, Files: []string{drive}, FilesOnly: true,
	})
	if err != nil {
		l.t.Fatal(err)
	}
	l.run("target "+name, agent.Run)
	l.eventually("drive of "+name, func(ctx context.Context) error {
		d, err := l.manager.AddDrive(ctx, &pb.AddDriveRequest{Node: name, Device: drive})
		if err == nil && d.State != pb.DriveState_DRIVE_STATE_READY {
			err = fmt.Errorf("it is %v", d.State)
		}
		return err
	})
}

// eventually repeats ask until it returns no error.
func (l *lab) eventually(what string, ask func(context.Context) error) {
	l.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 2*time.Minute)
	defer cancel()
	for {
		err := ask(ctx)
		if err == nil {
			return
		}
		select {
		case <-ctx.Done():
			l.t.Fatalf("%s: %v", what, err)
		case <-time.After(10 * time.Millisecond):
		}
	}
}

// host is a client in a process of its own.
type host struct {
	process *exec.Cmd

	mu      sync.Mutex
	served  time.Time // when it had the volume
	in, out int64     // bytes that its legs had sent and received then
	wrote   int64
}

func (l *lab) startHost(name, writes string, behind time.Duration, more ...string) *host {
	l.t.Helper()
	h := &host{process: exec.Command("/proc/self/exe")}
	h.process.Env = append(append(os.Environ(), more...), clientName+"="+name, clientManager+"="+l.address, clientDir+"="+l.dir, clientWrites+"="+writes, clientBehind+"="+behind.String())
	h.process.Stderr = os.Stderr
	h.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	lines, err := h.process.StdoutPipe()
	if err == nil {
		err = h.process.Start()
	}
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(h.kill)
	go func() {
		for s := bufio.NewScanner(lines); s.Scan(); {
			h.hear(s.Text())
		}
	}()
	return h
}

func (h *host) hear(line string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if n, _ := fmt.Sscanf(line, "served %d %d", &h.in, &h.out); n == 2 {
		h.served = time.Now()
	}
	fmt.Sscanf(line, "wrote %d", &h.wrote) //nolint:errcheck // other lines leave it as it is
}

func (h *host) kill() {
	h.process.Process.Kill() //nolint:errcheck // it may have been killed before
	h.process.Wait()         //nolint:errcheck // it was killed
}

// attach attaches the volume, and returns when the host was granted it: when the fence was
// complete.
func (l *lab) attach(name string, h *host) (granted time.Time) {
	l.t.Helper()
	l.eventually("the volume on "+name, func(ctx context.Context) error {
		a, err := l.manager.Attach(ctx, &pb.AttachRequest{Volume: "db1", Node: name})
		if err != nil {
			return err
		}
		if s := a.GetState(); granted.IsZero() && (s == pb.AttachmentState_ATTACHMENT_STATE_GRANTED || s == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED) {
			granted = time.Now()
		}
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.served.IsZero() {
			return fmt.Errorf("%v: waits for %s", a.GetState(), a.GetWaitingFor())
		}
		return nil
	})
	return granted
}

func TestAVolumeIsServedSoonAfterItsClientWasKilled(t *testing.T) {
	volume := block.Size(*size) * block.GiB
	l := newLab(t, volume+2*block.GiB)
	first, second := l.startHost("c1", "yes", *behind), l.startHost("c2", "", 0)
	l.eventually("the volume", func(ctx context.Context) error {
		_, err := l.manager.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: "db1", SizeBytes: uint64(volume), Copies: 2})
		return err
	})
	l.attach("c1", first)
	time.Sleep(*write)
	first.kill()
	killed := time.Now()
	l.eventually("the forced detach", func(ctx context.Context) error {
		_, err := l.manager.Detach(ctx, &pb.DetachRequest{Volume: "db1", Node: "c1", Force: true})
		return err
	})
	granted := l.attach("c2", second)
	wait, compared := second.served.Sub(granted), second.in/2
	t.Logf("%v: killed after %d writes (%.0f a second); granted to the next host %v later, served %v after that; it compared %v of each copy and wrote %v",
		volume, first.wrote, float64(first.wrote)/write.Seconds(), granted.Sub(killed).Round(time.Millisecond), wait.Round(time.Millisecond),
		block.Size(compared).Short(), block.Size(second.out).Short())
	if first.wrote == 0 || wait > *within || compared > *most {
		t.Errorf("served %v after the fence, compared %d bytes; want at most %v and %d", wait, compared, *within, *most)
	}
	if *size <= 16 { // it takes too long for larger ones
		l.scrub()
	}
}

// scrub requires that the copies are equal, also where they were not compared.
func (l *lab) scrub() {
	l.t.Helper()
	l.eventually("the volume to be attached", func(ctx context.Context) error {
		_, err := l.manager.ScrubVolume(ctx, &pb.ScrubVolumeRequest{Volume: "db1"})
		return err
	})
	l.eventually("the comparison of all copies", func(ctx context.Context) error {
		v, err := l.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
		switch s := v.GetScrub(); {
		case err != nil:
			return err
		case s.GetFound() > 0:
			l.t.Fatalf("%d ranges of the copies differ", s.GetFound())
		case s.GetEnded() == nil || s.GetAloneBytes() > 0 || s.GetDoneBytes() < s.GetTotalBytes():
			return fmt.Errorf("%v", s)
		}
		return nil
	})
}
