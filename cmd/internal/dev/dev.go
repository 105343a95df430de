// SPDX-License-Identifier: Apache-2.0

// Package dev is "weft dev": a manager, a few targets and an initiator in one process, to try Weft
// on one machine. All its state is in one directory, which directory.go describes.
package dev

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

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/manager"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
)

type options struct {
	dir       string
	manager   string // address to listen on; empty: a socket in the directory
	plain     bool   // it may be one of TCP
	targets   int
	managers  int
	driveSize string
	device    string // the kind of device that shows volumes
	logLevel  string
	diagnose  func() []byte // what weft doctor prints here, for support bundles
}

// New makes the command. Diagnose returns what weft doctor prints.
func New(g *cli.Globals, diagnose func() []byte) *cobra.Command {
	o := options{diagnose: diagnose}
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
directory, which only its user can open. With --manager ADDRESS and
--insecure-plain-tcp the manager answers at that address instead, for everyone
who can reach it.

Block devices need root, and ublk, nbd, or FUSE with loop devices in the kernel.
Without them it says so, and attach gives NVMe/TCP namespaces at the loopback
address instead. Only a host that knows the URL can connect to them.`,
		Example: `  weft dev
  weft dev --dir /tmp/weft --targets 5 --drive-size 20GiB
  weft dev stop-target t2
  weft dev --managers 3`,
		Args: cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 {
				return cli.NeedsVerb(cmd, args)
			}
			if cmd.Flags().Changed("manager") {
				o.manager = g.Manager
			}
			o.plain = g.Plain
			return run(cmd.Context(), o, g)
		},
	}
	cmd.PersistentFlags().StringVar(&o.dir, "dir", "", "`directory` of drives and state (default: weft/dev in the user's state directory)")
	cmd.Flags().IntVar(&o.targets, "targets", 0, "`number` of targets (default: 3, or as many as exist)")
	cmd.Flags().IntVar(&o.managers, "managers", 0, "`number` of volume managers: 1, 3 or 5 (default: 1, or as many as exist)")
	cmd.Flags().StringVar(&o.driveSize, "drive-size", "4GiB", "`size` of new drives")
	cmd.Flags().StringVar(&o.device, "block-device", string(blockdev.Auto), "kind of block devices: `ublk`, nbd, fuse, auto for the best available, or none")
	cmd.Flags().StringVar(&o.logLevel, "log-level", "info", "lowest `level` that is written to the log in the directory")
	cmd.AddCommand(
		newTargetVerb(&o, "stop", "Stop a target of weft dev, to see a failure",
			"Stop a target of the running weft dev as a crash would: its connections end and\nnothing answers. Its drive keeps its data."),
		newTargetVerb(&o, "start", "Start a stopped target of weft dev",
			"Start a stopped target of the running weft dev again. Its legs receive the\nwrites that they missed."),
		newStopManager(&o, g), newStartManager(&o), newStop(&o), newRebuild(&o, g),
	)
	return cmd
}

// cluster is a cluster in one process.
type cluster struct {
	options options
	dir     *directory
	node    block.NodeName // the initiator's name
	log     *slog.Logger
	recent  *daemon.Recent
	out     *cli.Output
	manager string // its address, or the addresses of several
	conn    *managers.Conn
	several *managerSet // nil: one manager, in this process
	targets *targetSet
	devices string // the way to reach volumes
	started time.Time
}

// mostTargets bounds the targets in one process.
const mostTargets = 32

func run(ctx context.Context, o options, g *cli.Globals) error {
	return withCluster(o, g, func(d *cluster) error { return d.run(ctx) })
}

// check checks what needs no directory, and returns the size of drives.
func (o options) check() (size block.Size, err error) {
	if o.targets < 0 || o.targets > mostTargets {
		return 0, cli.UsageError{Err: fmt.Errorf("--targets %d: must be 1 to %d", o.targets, mostTargets)}
	}
	if o.managers < 0 || o.managers > mostManagers || o.managers > 0 && o.managers%2 == 0 {
		return 0, cli.UsageError{Err: fmt.Errorf("--managers %d: must be 1, 3 or 5", o.managers), Hint: "an even number survives no more losses than one less"}
	}
	size, err = block.ParseSize(o.driveSize)
	if err != nil {
		return 0, cli.UsageError{Err: fmt.Errorf("--drive-size: %w", err)}
	}
	if size < block.LeastDrive {
		return 0, cli.UsageError{Err: fmt.Errorf("--drive-size %v: must be at least %v", size, block.LeastDrive)}
	}
	return size, nil
}

// withCluster opens and locks the directory, calls do, and releases the directory.
func withCluster(o options, g *cli.Globals, do func(*cluster) error) (retErr error) {
	started := time.Now()
	path, err := pathOf(o.dir)
	if err != nil {
		return err
	}
	size, err := o.check()
	if err != nil {
		return err
	}
	dir, err := openDirectory(path, g.Version)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, dir.close()) }()
	if err := dir.growFor(o, size); err != nil {
		return err
	}
	file, err := dir.openLog()
	if err != nil {
		return err
	}
	defer file.Close()
	logging := daemon.Options{LogFormat: "text", LogLevel: o.logLevel}
	log, err := logging.Logger(file)
	if err != nil {
		return cli.UsageError{Err: err}
	}
	name, err := cli.NodeOrThis("")
	if err != nil {
		return err
	}
	if free, err := freeSpace(path); err == nil && free < spaceReserve {
		return fmt.Errorf("%s: %v is free there: `weft dev` needs %v at least", path, free, spaceReserve)
	}
	d := &cluster{options: o, dir: dir, node: block.NodeName(name), log: log, recent: logging.Recent, out: g.Out(), started: started}
	if dir.managers() > 1 {
		d.several = &managerSet{dir: dir, log: log, level: o.logLevel, file: file, tell: d.tell, running: map[string]*runningManager{}}
	}
	return do(d)
}

// growFor makes the targets and managers that are asked for.
func (d *directory) growFor(o options, size block.Size) error {
	if err := d.grow(cmp.Or(o.targets, max(3, len(d.state.Targets))), size); err != nil {
		return err
	}
	if err := d.growManagers(o.managers); err != nil {
		return err
	}
	if o.manager != "" && d.managers() > 1 {
		return cli.UsageError{Err: fmt.Errorf("--manager %s: several managers answer on sockets in the directory only", o.manager)}
	}
	return nil
}

// run starts the cluster, and stops it in the reverse order when ctx ends or a command asks for it.
func (d *cluster) run(ctx context.Context) error {
	// If the terminal is closed, end in order rather than abort: disks may be mounted.
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	if err := d.dir.needStore(ctx); err != nil {
		return err
	}
	listener, done, err := d.open(d.several == nil)
	if err != nil {
		return err
	}
	defer done()
	for _, point := range d.dir.deadMounts() { // before the initiator removes the devices
		d.tell("the file system at %s lost its device when an earlier run was killed: unmount it, and mount its volume again", point)
	}
	others := func() ([]daemon.Part, error) { return d.others(stop) }
	if d.several == nil {
		c := manager.Config{Options: daemon.Options{Recent: d.recent}, DataDir: d.dir.store(0), Version: d.dir.version}
		return c.Serve(ctx, listener, d.log, others)
	}
	parts, err := others()
	if err != nil {
		return err
	}
	return daemon.Run(ctx, d.log, append([]daemon.Part{{Name: "managers", Run: d.several.Run}}, parts...)...)
}

// others returns the parts that rely on the managers.
func (d *cluster) others(stop func()) ([]daemon.Part, error) {
	control, err := serveControl(d.dir, d.targets, d.several, pages.Client(d.conn), stop)
	if err != nil {
		return nil, err
	}
	initiator, err := d.initiator()
	if err != nil {
		return nil, err
	}
	return []daemon.Part{{Name: "targets", Run: d.targets.Run}, initiator, control, {Name: "session", Run: d.session}}, nil
}

// open makes what the targets need, and the listener of a manager in this process.
func (d *cluster) open(here bool) (listener net.Listener, done func(), err error) {
	d.manager = cmp.Or(d.options.manager, managerAddresses(d.dir.path, d.dir.managers()))
	closeListener := func() error { return nil }
	if here {
		if listener, err = d.listen(); err != nil {
			return nil, nil, err
		}
		closeListener = listener.Close
	}
	if d.conn, err = daemon.Dial(d.manager, daemon.TLSFiles{}); err != nil {
		return nil, nil, errors.Join(err, closeListener())
	}
	d.targets = newTargetSet(d.dir, pb.NewAgentsClient(d.conn), d.log, &spaceGuard{dir: d.dir.path, tell: d.tell})
	d.targets.support = d.support
	return listener, func() { d.conn.Close(); _ = closeListener() }, nil // the server has closed it
}

// support is what the agents tell in support bundles.
func (d *cluster) support(context.Context) []support.File {
	return []support.File{
		{Name: "doctor.txt", Data: d.options.diagnose()},
		{Name: "log.txt", Missing: "weft dev has one log for all its parts: " + d.dir.in("log")},
	}
}

// listen opens the manager's socket, or the address that was asked for.
func (d *cluster) listen() (net.Listener, error) {
	if d.options.manager == "" {
		return listenIn(managerSocket(d.dir.path, 0))
	}
	if !d.options.plain {
		return nil, cli.UsageError{Err: fmt.Errorf("--manager %s: everyone who reaches it could do everything with this cluster", d.manager), Hint: "leave it out to use a socket, or add --insecure-plain-tcp"}
	}
	listener, err := net.Listen("tcp", d.manager)
	if err != nil {
		return nil, fmt.Errorf("--manager: %w", err)
	}
	d.manager = listener.Addr().String()
	d.tell("the manager answers at %s: everyone who reaches it may do everything with this cluster", d.manager)
	return listener, nil
}

// managerSocket is the socket of one of a directory's managers.
func managerSocket(dir string, i int) string { return filepath.Join(dir, numbered("manager", i)) }

// LocalManager returns the addresses of the managers of this user's weft dev, if one runs in the
// default directory.
func LocalManager() (addresses string, ok bool) {
	dir := defaultPath()
	if dir == "" {
		return "", false
	}
	n := 0
	for i := range mostManagers {
		if _, err := os.Stat(managerSocket(dir, i)); err != nil {
			break
		}
		n, ok = i+1, ok || answers(managerSocket(dir, i))
	}
	return managerAddresses(dir, n), ok
}

// listenIn opens a socket in a directory of dev, which only its user can enter.
func listenIn(path string) (net.Listener, error) {
	listener, err := daemon.ListenUnix(path)
	if errors.Is(err, syscall.EINVAL) {
		err = fmt.Errorf("%w (a socket's path has at most 107 characters: use a shorter --dir)", err)
	}
	return listener, err
}

// answers reports whether a process listens at a socket.
func answers(path string) bool {
	conn, err := net.Dial("unix", path)
	if err != nil {
		return false
	}
	return conn.Close() == nil
}

// startPatience is how long a start may take without any message.
const startPatience = 5 * time.Second

// session does what an operator would do: it adds new drives to the cluster, and at the end makes
// sure that nothing is mounted. The initiator then releases the volumes, and attaches them again in
// the next run.
func (d *cluster) session(ctx context.Context) error {
	api := pages.Client(d.conn)
	quiet := &cli.Output{Stdout: io.Discard, Stderr: io.Discard, Now: time.Now}
	slow := time.AfterFunc(startPatience, func() { d.tell("still starting; see %s", d.dir.in("log")) })
	defer slow.Stop()
	if d.several != nil {
		if err := d.several.join(ctx, api, quiet); err != nil && ctx.Err() == nil {
			return err
		}
	}
	if err := d.dir.addDrives(ctx, api, quiet); err != nil && ctx.Err() == nil {
		return err
	}
	slow.Stop()
	d.greet(ctx, api)
	<-ctx.Done()
	d.tell("ending")
	return cmp.Or(d.awaitUnmounts(context.WithoutCancel(ctx), api), context.Cause(ctx))
}

func (d *cluster) tell(format string, args ...any) {
	fmt.Fprintf(d.out.Stdout, "weft dev: "+format+"\n", args...)
}

// greet lists what exists, and what to do with it.
func (d *cluster) greet(ctx context.Context, api pb.ManagerClient) {
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
	for i, address := range strings.Split(d.manager, ",") {
		name := ""
		if d.several != nil {
			name = managerName(i)
		}
		d.tell("manager %-2s %s", name, address)
	}
	for _, t := range d.dir.state.Targets {
		d.tell("target %-3s drive %s", t.Name, d.dir.in(t.Drive))
	}
	d.tell("initiator  %s: %s", d.node, d.devices)
	d.tell("log        %s", d.dir.in("log"))
	if d.manager != managerAddresses(defaultPath(), d.dir.managers()) {
		d.tell("for other weft commands: export WEFT_MANAGER=%s", d.manager)
	}
	if d.several != nil {
		d.tell("to lose the manager that leads: weft dev stop-manager%[1]s; to have it back: weft dev start-manager NAME%[1]s", d.flag())
	}
	d.tell("try: weft volume create db1 --size 1GiB --stripes 2 --copies 2 --wait, weft attach db1; Ctrl-C ends")
}

// flag returns the option with which other commands of dev find this directory.
func (d *cluster) flag() string {
	if d.dir.path == defaultPath() {
		return ""
	}
	return " --dir " + d.dir.path
}
