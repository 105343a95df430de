// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/cmd/internal/relay"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/target"
	"weft.dev/weft/target/discovery"
)

type targetOptions struct {
	agentOptions
	portals  []string
	datapath string
	files    []string
	health   time.Duration

	discovery uint16
}

func newTarget(g *cli.Globals) *cobra.Command {
	var o targetOptions
	cmd := &cobra.Command{
		Use:   "target",
		Short: "Run the target agent, on machines that have drives",
		Long: `Run this machine's target agent. It adds drives, allocates legs of volumes on
them and exports the legs over NVMe-oF.

With --datapath kernel, nvmet serves the legs and keeps serving them when the
agent stops. This needs root, configfs, and the kernel modules nvmet, nvmet-tcp
and dm-mod; missing ones are loaded. What the kernel cannot serve, this process
does, at the second next port after each portal's: thin volumes, snapshots,
clones, and volumes with checksums.

With --datapath user, this process serves the legs itself over NVMe/TCP. Its
exports end with the process and return with it. It only needs permission to open
the drives, which may be files.

An agent whose exports are about to end asks hosts to leave them first, which
takes 3 seconds at most: in user space at each stop, in the kernel when systemd
shuts the machine down.

On SIGUSR2 the agent starts the installed program anew, with the same arguments,
and hands over to it once that is ready: hosts keep their legs and wait for a
moment. "systemctl reload weft-target" sends it. As the first process of a
container, the agent ignores the signal.

With --datapath auto, the agent uses the kernel where possible, and logs its
choice and the reason. Both paths serve the same drives, one at a time. If an
agent in user space finds exports in the kernel, it serves those there until the
manager withdraws them.`,
		Example: `  weft target --manager m1:4480 --join t1.token --portal tcp://192.0.2.11 --label rack=r1
  weft target --node t1 --portal tcp://192.0.2.11:4420 --portal tcp://[2001:db8::11]
  weft target --portal tcp://192.0.2.11#a --portal rdma://198.51.100.11#roce
  weft target --portal tcp://192.0.2.11 --datapath user --drive-file /srv/weft/drive1`,
		Args: cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.manager, o.tls, o.plain, o.role = g.Manager, g.TLS, g.Plain, access.Target
			return runTarget(cmd.Context(), o, g)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.stateDir, "state-dir", "/var/lib/weft/target", "`directory` that keeps this agent's key and certificate")
	cmd.Flags().StringArrayVar(&o.portals, "portal", nil, "`address` at which clients reach this node, tcp://ADDRESS[:4420][#RAIL] or rdma://…, or its network, tcp://198.51.100.0/24; may be repeated")
	cmd.Flags().StringVar(&o.datapath, "datapath", datapathAuto, "data `path`: kernel, user (this process) or auto")
	cmd.Flags().StringArrayVar(&o.files, "drive-file", nil, "`file` that can be added as a drive, with --datapath user; may be repeated")
	cmd.Flags().Uint16Var(&o.discovery, "discovery", discovery.Port, "TCP `port` at which the portals' addresses tell hosts without an agent of their volumes; 0: none")
	cmd.Flags().DurationVar(&o.health, "health-every", target.HealthEvery, "`time` between two readings of a drive's health, at least 5s")
	return cmd
}

func runTarget(ctx context.Context, o targetOptions, g *cli.Globals) error {
	portals, err := parsePortals(o.portals)
	if err != nil {
		return err
	}
	if o.health < 5*time.Second {
		return cli.UsageError{Err: fmt.Errorf("--health-every %v is too often", o.health), Hint: "use 5s or more"}
	}
	files, user, err := o.driveFiles()
	if err != nil {
		return err
	}
	r, err := relay.New()
	if err != nil {
		return err
	}
	o.takesOver = r.TakesOver()
	return r.Serve(ctx, func() error {
		return runAgent(ctx, o.agentOptions, g.Stderr, nil, func(b agentBase) (agent, error) {
			datapath, err := chooseDatapath(ctx, r.Datapath(o.datapath), user, b.log, kmod.Loader{}, modulesFor(portals)...)
			if err != nil {
				return nil, err
			}
			a, err := target.New(target.Config{
				Node: b.node, Labels: b.labels, Portals: portals, Manager: b.manager, Next: b.next, Version: version(), Log: b.log,
				Datapath: target.Datapath(datapath), Files: files, HealthEvery: o.health, Goodbye: goodbye(target.Datapath(datapath)),
				Support: b.support, HandsOver: relay.Followed(), Discovery: o.discovery,
			})
			if err != nil {
				return nil, err
			}
			return r.With(ctx, a, datapath, b.log)
		})
	})
}

// goodbye says when the exports of an agent end with it: in user space always. Those in the kernel
// outlive the agent, which may be restarted or replaced by another version, and end when the
// machine stops.
func goodbye(d target.Datapath) func(context.Context) bool {
	if d == target.User {
		return func(context.Context) bool { return true }
	}
	return daemon.MachineStops
}

// modulesFor lists the kernel modules that a target needs for its portals.
func modulesFor(portals []block.Portal) []kmod.Module {
	need := []kmod.Module{kmod.ConfigFS, kmod.Nvmet, kmod.NvmetTCP, kmod.DM}
	if slices.ContainsFunc(portals, func(p block.Portal) bool { return p.Transport == block.RDMA }) {
		need = append(need, kmod.NvmetRDMA)
	}
	return need
}

// driveFiles returns the absolute paths of --drive-file, and the reason, if any, that they require
// the user data path.
func (o *targetOptions) driveFiles() (files []string, user string, err error) {
	for _, f := range o.files {
		path, err := filepath.Abs(f)
		if err != nil {
			return nil, "", cli.UsageError{Err: fmt.Errorf("--drive-file: %w", err)}
		}
		if _, err := os.Stat(path); err != nil {
			return nil, "", cli.UsageError{Err: fmt.Errorf("--drive-file: %w", err), Hint: "create it first, for example: truncate -s 100G " + path}
		}
		files = append(files, path)
		user = "only the user-space data path accepts files as drives (--drive-file)"
	}
	return files, user, nil
}

func parsePortals(texts []string) ([]block.Portal, error) {
	if len(texts) == 0 {
		return nil, cli.UsageError{Err: fmt.Errorf("--portal: missing"), Hint: "give the address at which clients reach this node, such as --portal tcp://192.0.2.11"}
	}
	here, err := addressesHere()
	if err != nil {
		return nil, err
	}
	var portals []block.Portal
	for _, text := range texts {
		some, err := portalsOf(text, here)
		if err != nil {
			return nil, cli.UsageError{Err: fmt.Errorf("--portal: %w", err)}
		}
		portals = append(portals, some...)
	}
	return portals, nil
}
