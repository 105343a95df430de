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
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

type devOptions struct {
	dir       string
	manager   string // where to answer; empty: where the last run did, or at a free port
	targets   int
	driveSize string
	device    string // how volumes are given out
	logLevel  string
}

func newDev(g *globals) *cobra.Command {
	var o devOptions
	cmd := &cobra.Command{
		Use:   "dev",
		Short: "Run a whole cluster in one process, to try Weft on this machine",
		Long: `Runs a volume manager, some targets with a drive each, and an initiator, all in
this process and in user space: no kernel module of NVMe is needed, and nothing
has to be set up. The drives are sparse files in a directory; what is written to
them, and all volumes, are there again at the next run. It ends with Ctrl-C.

Other weft commands find it by themselves if no other manager answers at the
default address; else it prints the WEFT_MANAGER that leads to it. To see what a
failure does, stop a target while its volume is written.

To give volumes out as block devices it needs root, and ublk, nbd, or FUSE and
loop devices in the kernel. Without them it says so, and attach gives NVMe/TCP
namespaces instead, at the loopback address.`,
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
	cmd.Flags().IntVar(&o.targets, "targets", 0, "`number` of targets (default: 3, or as many as there are)")
	cmd.Flags().StringVar(&o.driveSize, "drive-size", "4GiB", "`size` of the drives that are made")
	cmd.Flags().StringVar(&o.device, "block-device", string(blockdev.Auto), "what volumes are given out through: `ublk`, nbd, fuse, auto for the best there is, or none")
	cmd.Flags().StringVar(&o.logLevel, "log-level", "info", "least `level` that is written to the log in the directory")
	cmd.AddCommand(
		newDevTargetVerb(&o, "stop", "Take a target of weft dev down, to see a failure",
			"Takes a target of the weft dev that runs down, as a crash would: its connections\nend, and nobody answers any more. Its drive keeps what is on it."),
		newDevTargetVerb(&o, "start", "Start a target of weft dev that was stopped",
			"Starts a target of the weft dev that runs again. Legs on it that miss writes\nget what they miss."),
		newDevStop(&o),
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
	conn    *grpc.ClientConn
	targets *devTargets
	devices string // how volumes are reached
	started time.Time
}

func runDev(ctx context.Context, o devOptions, g *globals) (retErr error) {
	started := time.Now()
	path, err := devPath(o.dir)
	if err != nil {
		return err
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
	d := &dev{options: o, dir: dir, node: block.NodeName(name), log: log, out: g.out(), started: started}
	return d.run(ctx)
}

// run brings the cluster up, and down again in the reverse order when ctx ends or
// somebody asks for it.
func (d *dev) run(ctx context.Context) error {
	// A terminal that is closed is a reason to end in order, and none to fall over:
	// disks may be mounted.
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGHUP)
	defer stop()
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	listener, err := d.listen()
	if err != nil {
		return err
	}
	defer listener.Close()
	if d.conn, err = daemon.Dial(d.dir.state.Manager, daemon.TLSFiles{}); err != nil {
		return err
	}
	defer d.conn.Close()
	d.targets = newDevTargets(d.dir, pb.NewAgentsClient(d.conn), d.log, &room{dir: d.dir.path, tell: d.tell})
	for _, point := range d.dir.deadMounts() { // before the initiator takes the devices away
		d.tell("the file system at %s ended with a run that was killed: unmount it, and mount its volume again", point)
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

// listen opens the manager's address, and finds free ones for the portals. What
// was taken before is taken again if it is free; an address that was asked for is
// taken or none.
func (d *dev) listen() (net.Listener, error) {
	addresses := []string{cmp.Or(d.dir.state.Manager, defaultManager), anyPort}
	if d.options.manager != "" {
		addresses = []string{d.options.manager}
	}
	listener, err := listenFirst(addresses)
	if err != nil {
		return nil, fmt.Errorf("--manager: %w", err)
	}
	d.dir.state.Manager = listener.Addr().String()
	for i := range d.dir.state.Targets {
		t := &d.dir.state.Targets[i]
		l, err := listenFirst([]string{cmp.Or(t.Portal, anyPort), anyPort})
		if err != nil {
			return nil, errors.Join(err, listener.Close())
		}
		defer l.Close() // when all have different ones
		t.Portal = l.Addr().String()
	}
	return listener, d.dir.save()
}

// anyPort is a free one that only this machine reaches.
const anyPort = "127.0.0.1:0"

// listenFirst opens the first address that can be had.
func listenFirst(addresses []string) (l net.Listener, err error) {
	for _, a := range addresses {
		if l, err = net.Listen("tcp", a); err == nil {
			return l, nil
		}
	}
	return nil, err
}

// startPatience is how long a start may take without a word.
const startPatience = 5 * time.Second

// session is what an operator would do: give new drives to the cluster, and at the
// end see to it that nothing is mounted. The initiator then lets the volumes go,
// and makes them again in the next run.
func (d *dev) session(ctx context.Context) error {
	api := pb.NewManagerClient(d.conn)
	quiet := &output{stdout: io.Discard, stderr: io.Discard, now: time.Now}
	slow := time.AfterFunc(startPatience, func() { d.tell("still starting; %s tells more", d.dir.in("log")) })
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
		state = "as it was left"
		if list, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{}); err == nil && len(list.GetVolumes()) > 0 {
			var names []string
			for _, v := range list.GetVolumes() {
				names = append(names, v.GetName())
			}
			state += ", with " + strings.Join(names, ", ")
		}
	}
	d.tell("a cluster in %s, %s, ready after %v", d.dir.path, state, time.Since(d.started).Round(10*time.Millisecond))
	d.tell("manager    %s", d.dir.state.Manager)
	for _, t := range d.dir.state.Targets {
		d.tell("target %-3s tcp://%s, drive %s", t.Name, t.Portal, d.dir.in(t.Drive))
	}
	d.tell("initiator  %s: %s", d.node, d.devices)
	d.tell("log        %s", d.dir.in("log"))
	if d.dir.state.Manager != defaultManager {
		d.tell("for other weft commands: export WEFT_MANAGER=%s", d.dir.state.Manager)
	}
	d.tell("try: weft volume create db1 --size 1GiB --stripes 2 --copies 2 --wait, weft attach db1; Ctrl-C ends")
}
