// SPDX-License-Identifier: Apache-2.0

package failover

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

const (
	volume     = "db1"
	copies     = 2
	volumeSize = 1 << 30
	driveSize  = 8 << 30
	// patience is how long any step may take.
	patience = time.Minute
)

// cluster is a manager, two targets, and a client that writes.
type cluster struct {
	parent  string // of dir; empty: the system's
	dir     string
	daemons []*daemon // in the order of their start
	targets []*daemon
	address string // of the manager
	conn    *grpc.ClientConn
	manager pb.ManagerClient
	client  *client
	thin    bool // its volumes are thin
}

func newCluster(ctx context.Context, weft string, rails int, thin bool) (c *cluster, retErr error) {
	c = &cluster{thin: thin}
	defer func() {
		if retErr != nil {
			retErr = errors.Join(retErr, c.close())
		}
	}()
	if err := c.begin(ctx, weft, rails); err != nil {
		return c, err
	}
	var err error
	if c.client, err = newClient(c.dir, c.conn); err != nil {
		return c, err
	}
	return c, c.attach(ctx, volume, clientName)
}

// begin starts the manager and the targets.
func (c *cluster) begin(ctx context.Context, weft string, rails int) error {
	var err error
	if c.dir, err = os.MkdirTemp(c.parent, "weft-failover-"); err != nil {
		return err
	}
	if c.address, err = operator.FreeAddress(); err != nil {
		return err
	}
	store := filepath.Join(c.dir, "store")
	if out, err := program(weft, "volmgr", "init", "--data-dir", store).CombinedOutput(); err != nil {
		return fmt.Errorf("weft volmgr init: %w: %s", err, out)
	}
	if _, err := c.run("manager", program(weft, "volmgr", "--data-dir", store, "--listen", c.address)); err != nil {
		return err
	}
	if c.conn, err = grpc.NewClient(c.address, grpc.WithTransportCredentials(insecure.NewCredentials())); err != nil {
		return err
	}
	c.manager = pages.Client(c.conn)
	for i := range copies {
		if err := c.addTarget(ctx, weft, c.address, fmt.Sprintf("t%d", i+1), rails); err != nil {
			return err
		}
	}
	return nil
}

// program is a weft command in this environment without its settings.
func program(weft string, args ...string) *exec.Cmd {
	cmd := exec.Command(weft, args...)
	cmd.Env = append(operator.Environment(), operator.PlainTCP)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	return cmd
}

func (c *cluster) addTarget(ctx context.Context, weft, manager, name string, rails int) error {
	drive := filepath.Join(c.dir, name+".drive")
	if err := errors.Join(os.WriteFile(drive, nil, 0o600), os.Truncate(drive, driveSize)); err != nil {
		return err
	}
	args := []string{"target", "--node", name, "--manager", manager, "--datapath", "user", "--drive-file", drive}
	var portals []string
	for i := range rails {
		address, err := operator.FreeAddress()
		if err != nil {
			return err
		}
		portals = append(portals, address)
		args = append(args, "--portal", fmt.Sprintf("tcp://%s#rail%d", address, i+1))
	}
	t, err := c.run(name, program(weft, args...))
	if err != nil {
		return err
	}
	t.portals = portals
	c.targets = append(c.targets, t)
	return c.eventually(ctx, "the drive of "+name, func(ctx context.Context) error {
		d, err := c.manager.AddDrive(ctx, &pb.AddDriveRequest{Node: name, Device: drive})
		if err == nil && d.GetState() != pb.DriveState_DRIVE_STATE_READY {
			err = fmt.Errorf("it is %v", d.GetState())
		}
		return err
	})
}

// attach creates a volume, attaches it, and waits until it is in use.
func (c *cluster) attach(ctx context.Context, volume, node string) error {
	err := c.eventually(ctx, "the volume", func(ctx context.Context) error {
		v, err := c.manager.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: volume, SizeBytes: volumeSize, Copies: copies, Stripes: 1, Thin: c.thin})
		if err == nil && v.GetState() != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.GetState())
		}
		return err
	})
	if err != nil {
		return err
	}
	if err := c.eventually(ctx, "the attachment", func(ctx context.Context) error {
		_, err := c.manager.Attach(ctx, &pb.AttachRequest{Volume: volume, Node: node})
		return err
	}); err != nil {
		return err
	}
	return c.healthy(ctx, volume)
}

// healthy waits until a volume is written, and both copies are in sync.
func (c *cluster) healthy(ctx context.Context, volume string) error {
	return c.eventually(ctx, "a healthy volume", func(ctx context.Context) error {
		v, err := c.manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		switch {
		case err != nil:
			return err
		case v.GetHealth() != pb.Health_HEALTH_HEALTHY:
			return fmt.Errorf("it is %v", v.GetHealth())
		case c.client != nil && !c.client.writer.writes():
			return errors.New("nobody writes")
		}
		return nil
	})
}

// eventually repeats try until it returns no error.
func (c *cluster) eventually(ctx context.Context, what string, try func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	for {
		err := try(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%s: %w", what, err)
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// explain returns what `weft explain` says of the volume.
func (c *cluster) explain(ctx context.Context) string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 5*time.Second)
	defer cancel()
	e, err := c.manager.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
	if err != nil {
		return err.Error()
	}
	return strings.Join(slices.Concat([]string{e.GetSummary()}, e.GetFacts(), e.GetWaits()), "\n  ")
}

// close ends everything and removes the files.
func (c *cluster) close() error {
	if c.client != nil {
		c.client.close()
	}
	for _, d := range slices.Backward(c.daemons) {
		_ = d.end(syscall.SIGKILL) // it may have ended before
		d.notices.Close()
	}
	if c.conn != nil {
		c.conn.Close()
	}
	return os.RemoveAll(c.dir)
}

// daemon is a program that is started again and again, as systemd would.
type daemon struct {
	args    *exec.Cmd
	log     string
	notices *net.UnixConn // what it tells systemd
	process *os.Process   // the one that systemd takes for the daemon
	portals []string      // of a target
}

func (c *cluster) run(name string, args *exec.Cmd) (_ *daemon, err error) {
	d := &daemon{args: args, log: filepath.Join(c.dir, name+".log")}
	socket := filepath.Join(c.dir, name+".notify")
	if d.notices, err = net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"}); err != nil {
		return nil, err
	}
	d.args.Env = append(d.args.Env, "NOTIFY_SOCKET="+socket)
	c.daemons = append(c.daemons, d)
	// The next process of a daemon has no other parent when the one before it has ended.
	return d, errors.Join(unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), d.start())
}

func (d *daemon) start() error {
	log, err := os.OpenFile(d.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(d.args.Path, d.args.Args[1:]...)
	cmd.Env, cmd.SysProcAttr, cmd.Stderr = d.args.Env, d.args.SysProcAttr, log
	err = cmd.Start()
	d.process = cmd.Process
	return err
}

// end sends a signal that ends the process, and waits for that.
func (d *daemon) end(signal syscall.Signal) error {
	if d.process == nil {
		return os.ErrProcessDone
	}
	if err := d.process.Signal(signal); err != nil {
		return err
	}
	d.process.Wait() //nolint:errcheck // it says only which signal it was
	return nil
}

// handOver has the daemon hand over to its next process, and waits until that is done.
func (d *daemon) handOver() error {
	if err := errors.Join(d.notices.SetReadDeadline(time.Now().Add(patience)), d.process.Signal(syscall.SIGUSR2)); err != nil {
		return err
	}
	for notice := make([]byte, 4096); ; {
		n, err := d.notices.Read(notice)
		if err != nil {
			return fmt.Errorf("it does not say which process is the next one: %w", err)
		}
		text, main := strings.CutPrefix(string(notice[:n]), "MAINPID=")
		if !main {
			continue // READY=1, for example
		}
		pid, err := strconv.Atoi(text)
		if err != nil {
			return err
		}
		before := d.process
		if d.process, err = os.FindProcess(pid); err != nil {
			return err
		}
		_, err = before.Wait()
		return err
	}
}
