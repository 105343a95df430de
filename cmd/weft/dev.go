// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

type devOptions struct {
	dir       string
	manager   string // where to answer; empty: at a socket in the directory
	targets   int
	driveSize string
	device    string // how volumes are given out
	logLevel  string
}

func newDev(g *globals) *cobra.Command {
	var o devOptions
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a complete cluster in one process, to try Weft on this machine",
		Long: `Run a volume manager, a few targets with one drive each, and an initiator, all
in this process and in user space. No NVMe kernel module and no setup is needed.
The drives are sparse files in a directory; volumes and their data are there
again at the next run. Press Ctrl-C to end it.

Other weft commands of the same user find it by themselves; with --dir it prints
the WEFT_MANAGER to set. To see what a failure does, stop a target while a
program writes to a volume.

Nobody else can reach it: manager and targets answer on sockets in the
directory, which only its user can open. With --manager ADDRESS the manager
answers at that address instead, for everyone who can reach it.

Block devices need root, and ublk, nbd, or FUSE with loop devices in the kernel.
Without them it says so, and attach gives NVMe/TCP namespaces at the loopback
address instead. Only a host that knows the URL can connect to them.`,
		Example: `  weft dev
  weft dev --dir /tmp/weft --targets 5 --drive-size 20GiB
  weft dev stop-target t2`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return needsVerb(cmd, args)
			}
			if cmd.Flags().Changed("manager") {
				o.manager = g.manager
			}
			return runDev(cmd.Context(), o, g)
		},
	}
	cmd.PersistentFlags().StringVar(&o.dir, "dir", "", "`directory` of drives and state (default: weft/dev in the user's state directory)")
	cmd.Flags().IntVar(&o.targets, "targets", 0, "`number` of targets (default: 3, or as many as exist)")
	cmd.Flags().StringVar(&o.driveSize, "drive-size", "4GiB", "`size` of new drives")
	cmd.Flags().StringVar(&o.device, "block-device", string(blockdev.Auto), "kind of block devices: `ublk`, nbd, fuse, auto for the best available, or none")
	cmd.Flags().StringVar(&o.logLevel, "log-level", "info", "lowest `level` that is written to the log in the directory")
	cmd.AddCommand(
		newDevTargetVerb(&o, "stop", "Stop a target of weft dev, to see a failure",
			"Stop a target of the running weft dev as a crash would: its connections end and\nnothing answers. Its drive keeps its data."),
		newDevTargetVerb(&o, "start", "Start a stopped target of weft dev",
			"Start a stopped target of the running weft dev again. Its legs receive the\nwrites that they missed."),
		newDevStop(&o), newDevRebuild(&o, g),
	)
	return cmd
}

// dev is a cluster in one process.
type dev struct {
	options devOptions
	dir     *devDir
	node    block.NodeName // of the initiator
	log     *slog.Logger
	out     *output
	manager string // its address
	conn    *grpc.ClientConn
	targets *devTargets
	devices string // how volumes are reached
	started time.Time
}

// mostDevTargets bounds what one process runs to try Weft.
const mostDevTargets = 32

func runDev(ctx context.Context, o devOptions, g *globals) error {
	return withDev(o, g, func(d *dev) error { return d.run(ctx) })
}

// withDev opens the directory, alone, and gives it back when do is through.
func withDev(o devOptions, g *globals, do func(*dev) error) (retErr error) {
	started := time.Now()
	path, err := devPath(o.dir)
	if err != nil {
		return err
	}
	if o.targets < 0 || o.targets > mostDevTargets {
		return usageError{err: fmt.Errorf("--targets %d: must be 1 to %d", o.targets, mostDevTargets)}
	}
	size, err := block.ParseSize(o.driveSize)
	if err != nil {
		return usageError{err: fmt.Errorf("--drive-size: %w", err)}
	}
	dir, err := openDevDir(path)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, dir.close()) }()
	if err := dir.grow(cmp.Or(o.targets, max(3, len(dir.state.Targets))), size); err != nil {
		return err
	}
	file, err := dir.openLog()
	if err != nil {
		return err
	}
	defer file.Close()
	log, err := (&daemon.Options{LogFormat: "text", LogLevel: o.logLevel}).Logger(file)
	if err != nil {
		return usageError{err: err}
	}
	name, err := nodeOrThis("")
	if err != nil {
		return err
	}
	if free, err := freeSpace(path); err == nil && free < roomKept {
		return fmt.Errorf("%s: %v is free there: `weft dev` needs %v at least", path, free, roomKept)
	}
	return do(&dev{options: o, dir: dir, node: block.NodeName(name), log: log, out: g.out(), started: started})
}

// run brings the cluster up, and down again in the reverse order when ctx ends or
// somebody asks for it.
func (d *dev) run(ctx context.Context) error {
	// A terminal that is closed is a reason to end in order, and none to fall over:
	// disks may be mounted.
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if err := d.dir.needStore(ctx); err != nil {
		return err
	}
	listener, done, err := d.open()
	if err != nil {
		return err
	}
	defer done()
	for _, point := range d.dir.deadMounts() { // before the initiator takes the devices away
		d.tell("the file system at %s lost its device when an earlier run was killed: unmount it, and mount its volume again", point)
	}
	manager := volmgrOptions{dataDir: d.dir.in("volmgr")}
	return manager.serveWith(ctx, listener, d.log, func() ([]daemon.Part, error) {
		control, err := serveControl(d.dir, d.targets, stop)
		if err != nil {
			return nil, err
		}
		initiator, err := d.initiator()
		if err != nil {
			return nil, err
		}
		return []daemon.Part{{Name: "targets", Run: d.targets.Run}, initiator, control, {Name: "session", Run: d.session}}, nil
	})
}

// open makes what a manager and targets need.
func (d *dev) open() (listener net.Listener, done func(), err error) {
	if listener, err = d.listen(); err != nil {
		return nil, nil, err
	}
	if d.conn, err = daemon.Dial(d.manager, daemon.TLSFiles{}); err != nil {
		return nil, nil, errors.Join(err, listener.Close())
	}
	d.targets = newDevTargets(d.dir, pb.NewAgentsClient(d.conn), d.log, &room{dir: d.dir.path, tell: d.tell})
	return listener, func() { d.conn.Close(); listener.Close() }, nil
}

// listen opens the manager's socket, or the address that was asked for.
func (d *dev) listen() (net.Listener, error) {
	d.manager = cmp.Or(d.options.manager, daemon.Unix+devSocket(d.dir.path))
	if path, socket := strings.CutPrefix(d.manager, daemon.Unix); socket {
		return listenDev(path)
	}
	listener, err := net.Listen("tcp", d.manager)
	if err != nil {
		return nil, fmt.Errorf("--manager: %w", err)
	}
	d.manager = listener.Addr().String()
	d.tell("the manager answers at %s: everyone who reaches it may do everything with this cluster", d.manager)
	return listener, nil
}

// devSocket is where the manager of a directory answers.
func devSocket(dir string) string { return filepath.Join(dir, "manager") }

// listenDev opens a socket in a directory of dev, which is its user's alone.
func listenDev(path string) (net.Listener, error) {
	listener, err := listenUnix(path)
	if errors.Is(err, syscall.EINVAL) {
		err = fmt.Errorf("%w (a socket's path has at most 107 characters: use a shorter --dir)", err)
	}
	return listener, err
}

// answers reports whether somebody listens at a socket.
func answers(path string) bool {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// startPatience is how long a start may take without a word.
const startPatience = 5 * time.Second

// session is what an operator would do: give new drives to the cluster, and at the
// end see to it that nothing is mounted. The initiator then lets the volumes go,
// and makes them again in the next run.
func (d *dev) session(ctx context.Context) error {
	api := pages.Client(d.conn)
	quiet := &output{stdout: io.Discard, stderr: io.Discard, now: time.Now}
	slow := time.AfterFunc(startPatience, func() { d.tell("still starting; see %s", d.dir.in("log")) })
	defer slow.Stop()
	if err := d.dir.addDrives(ctx, api, quiet); err != nil && ctx.Err() == nil {
		return err
	}
	slow.Stop()
	d.greet(ctx, api)
	<-ctx.Done()
	d.tell("ending")
	return cmp.Or(d.awaitUnmounts(context.WithoutCancel(ctx), api), context.Cause(ctx))
}

func (d *dev) tell(format string, args ...any) {
	fmt.Fprintf(d.out.stdout, "weft dev: "+format+"\n", args...)
}

// greet says what there is, and what to do with it.
func (d *dev) greet(ctx context.Context, api pb.ManagerClient) {
	if ctx.Err() != nil {
		return
	}
	state := "new"
	if !d.dir.fresh {
		state = "as the last run left it"
		if list, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{}); err == nil && len(list.GetVolumes()) > 0 {
			var names []string
			for _, v := range list.GetVolumes() {
				names = append(names, v.GetName())
			}
			state += ", with " + strings.Join(names, ", ")
		}
	}
	d.tell("a cluster in %s, %s, ready after %v", d.dir.path, state, time.Since(d.started).Round(10*time.Millisecond))
	d.tell("manager    %s", d.manager)
	for _, t := range d.dir.state.Targets {
		d.tell("target %-3s drive %s", t.Name, d.dir.in(t.Drive))
	}
	d.tell("initiator  %s: %s", d.node, d.devices)
	d.tell("log        %s", d.dir.in("log"))
	if d.manager != daemon.Unix+devSocket(defaultDevDir()) {
		d.tell("for other weft commands: export WEFT_MANAGER=%s", d.manager)
	}
	d.tell("try: weft volume create db1 --size 1GiB --stripes 2 --copies 2 --wait, weft attach db1; Ctrl-C ends")
}
