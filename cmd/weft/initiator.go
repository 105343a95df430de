// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/gpu"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/initiator/userspace"
	"weft.dev/weft/proto/access"
)

// defaultStateDir is where an initiator agent keeps state that must outlive a boot.
const defaultStateDir = "/var/lib/weft/initiator"

type initiatorOptions struct {
	agentOptions
	runDir           string
	datapath, device string
	patience         time.Duration
	resumeWithin     time.Duration
	nearGPU          string
}

func newInitiator(g *cli.Globals) *cobra.Command {
	var o initiatorOptions
	cmd := &cobra.Command{
		Use:   "initiator",
		Short: "Run the initiator agent, on machines that use volumes",
		Long: `Run this machine's initiator agent. It makes the block devices of the volumes
attached here, /dev/weft/VOLUME, from their legs on the targets.

With --datapath kernel, the kernel's NVMe host and device-mapper do the work. The
devices keep serving when the agent stops, but if a leg is lost meanwhile, writes
wait until an agent is there to record the loss. This needs root and the kernel
modules nvme-tcp, dm-mod, dm-mirror, loop and tcp_diag; missing ones are loaded.

With --datapath user, this process does the work and provides the devices through
ublk, nbd, or FUSE with a loop device, whichever the kernel has. This needs root.
When the process ends, however it ends, the I/O of devices in use waits for the
next one, at most for --resume-within; then it fails. It also fails, at once, if
another host has had the volume meanwhile or acknowledged writes may be lost.

With --datapath auto, the agent uses the kernel where possible, and logs its
choice and the reason.`,
		Example: "  weft initiator --manager m1:4480 --join gpu1.token --label rack=r1",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.manager, o.tls, o.plain, o.role = g.Manager, g.TLS, g.Plain, access.Initiator
			return runInitiator(cmd.Context(), o, g)
		},
	}
	o.addFlags(cmd)
	cmd.Flags().StringVar(&o.stateDir, "state-dir", defaultStateDir, "`directory` that keeps this host's NVMe identity, its cluster, and its key and certificate")
	cmd.Flags().StringVar(&o.runDir, "run-dir", "/run/weft/initiator", "`directory` on a tmpfs, for state that must not outlive a boot")
	cmd.Flags().StringVar(&o.datapath, "datapath", datapathAuto, "data `path`: kernel, user (this process) or auto")
	cmd.Flags().StringVar(&o.device, "block-device", string(blockdev.Auto), "`kind` of block devices in user space: ublk, nbd, fuse, or auto for the best available")
	cmd.Flags().DurationVar(&o.patience, "target-patience", userspace.TargetPatience, "`time` after which a target that answers nothing and accepts no connections loses its legs; 300ms to 2s")
	cmd.Flags().DurationVar(&o.resumeWithin, "resume-within", 2*time.Minute, "`time` for which the I/O of devices in use waits for the next process when this one has ended, in user space; 0: it fails at once")
	cmd.Flags().StringVar(&o.nearGPU, "near-gpu", "", "prefer portals in the networks of the card nearest to this `GPU`, a number or a PCI address of weft doctor --gpu; the label rail goes first")
	cmd.AddCommand(newInitiatorLeave(g), newInitiatorHold(g))
	return cmd
}

func runInitiator(ctx context.Context, o initiatorOptions, g *cli.Globals) error {
	bootID, err := daemon.KernelText("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return fmt.Errorf("read the boot id: %w", err)
	}
	release, err := daemon.KernelText("/proc/sys/kernel/osrelease")
	if err != nil {
		return fmt.Errorf("read the kernel's release: %w", err)
	}
	kind, err := blockdev.ParseKind(o.device)
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--block-device: %w", err)}
	}
	if o.resumeWithin < 0 {
		return cli.UsageError{Err: fmt.Errorf("--resume-within %v: must not be negative", o.resumeWithin)}
	}
	holder, err := holderCommand(o.runDir, o.Options)
	if err != nil {
		return err
	}
	user := ""
	if kind != blockdev.Auto {
		user = "--block-device " + o.device + " is for user space only"
	}
	return runAgent(ctx, o.agentOptions, g.Stderr, nil, func(b agentBase) (agent, error) {
		datapath, err := chooseDatapath(ctx, o.datapath, user, b.log, kmod.Loader{},
			kmod.NvmeTCP, kmod.Fabrics, kmod.DM, kmod.DMMirror, kmod.Loop, kmod.TCPDiag)
		if err != nil {
			return nil, err
		}
		if datapath == datapathUser {
			if err := needDevice(ctx, kind, kmod.Loader{}, blockdev.Probe); err != nil {
				return nil, err
			}
		}
		return initiator.New(initiator.Config{
			Node: b.node, Labels: b.labels, Version: version(), Kernel: release, BootID: bootID,
			Manager: b.manager, Next: b.next, StateDir: o.stateDir, RunDir: o.runDir, Log: b.log,
			Datapath: initiator.Datapath(datapath), BlockDevice: kind, TargetPatience: o.patience,
			ResumeWithin: o.resumeWithin, Holder: holder,
			Support: b.support, Near: nearGPU(os.DirFS("/"), o.nearGPU, b.log), Networks: func(which string) ([]netip.Prefix, error) { return networksNear(os.DirFS("/"), which) },
		})
	})
}

// nearGPU lists the networks near to a GPU. A host that does not find them prefers none: a far card is
// better than no volume.
func nearGPU(root fs.FS, which string, log *slog.Logger) []netip.Prefix {
	if which == "" {
		return nil
	}
	near, err := networksNear(root, which)
	if err != nil {
		log.Warn("cannot tell which networks are near to the GPU; none is preferred", "gpu", which, "err", err)
		return nil
	}
	log.Info("networks near to the GPU are preferred", "gpu", which, "networks", near)
	return near
}

func networksNear(root fs.FS, which string) ([]netip.Prefix, error) {
	m, err := gpu.Read(root, "")
	if err != nil {
		return nil, err
	}
	return m.NetworksNear(which)
}

// holderLinger is how long a holder that an agent has started outlives what it holds.
const holderLinger = 10 * time.Second

type holdOptions struct {
	log            daemon.Options // without metrics
	runDir, devDir string
	stay           bool
}

func newInitiatorHold(g *cli.Globals) *cobra.Command {
	var o holdOptions
	cmd := &cobra.Command{
		Use:   "hold",
		Short: "Keep the block devices of an agent that dies for the next one",
		Long: `Keep the block devices of an initiator agent in user space while no agent runs:
it holds what the kernel would remove with the agent's process, and removes a
device whose agent does not come back within --resume-within.

An agent starts this command by itself where none runs for its --run-dir. A
service manager that ends all processes of a service with its main process, as
systemd does, has to run it as a service of its own, weft-initiator-hold.

Stopping it does no harm while the agent runs, which starts another one.`,
		Example: "  weft initiator hold --stay",
		Args:    cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			log, err := o.log.Logger(g.Stderr)
			if err != nil {
				return err
			}
			h := blockdev.HoldOptions{DevDir: o.devDir, RunDir: o.runDir, Log: log, Linger: holderLinger}
			if o.stay {
				h.Linger = 0
			}
			if err := blockdev.Hold(cmd.Context(), h); err != nil {
				return fmt.Errorf("initiator hold: %w", err)
			}
			return nil
		},
	}
	cmd.Flags().StringVar(&o.log.LogFormat, "log-format", "text", "`format` of the log on stderr: text or json")
	cmd.Flags().StringVar(&o.log.LogLevel, "log-level", "info", "lowest `level` that is logged: debug, info, warn or error")
	cmd.Flags().StringVar(&o.runDir, "run-dir", "/run/weft/initiator", "`directory` of the agent, for state that must not outlive a boot")
	cmd.Flags().StringVar(&o.devDir, "dev-dir", "/dev", "`directory` of the agent's block devices")
	cmd.Flags().BoolVar(&o.stay, "stay", false, "run also while there is nothing to hold, for a service manager")
	return cmd
}

// holderCommand is the command that runs a holder for the agents of a run directory, and logs as they do.
func holderCommand(runDir string, log daemon.Options) ([]string, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, fmt.Errorf("find this program: %w", err)
	}
	return []string{self, "initiator", "hold", "--run-dir", runDir, "--log-format", log.LogFormat, "--log-level", log.LogLevel}, nil
}
