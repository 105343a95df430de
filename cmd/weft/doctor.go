// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/gpu"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/cmd/internal/trees"
	"weft.dev/weft/initiator/blockdev"
)

func newDoctor(g *cli.Globals) *cobra.Command {
	var o gpuOptions
	var tree bool
	cmd := &cobra.Command{
		Use:   "doctor [PATH...]",
		Short: "Report what this machine supports and how to enable the rest",
		Long: `Inspect this machine without changing anything and without the manager: which
data paths a target and an initiator can use here, which one "auto" selects and
why, how to enable the others, whether other programs on the machine could
touch data inside legs and volumes, and what RDMA devices lack. Run it as the
user that runs the agents.

With --gpu, report whether GPUs and storage exchange data directly or through a
copy in host memory: the PCIe path, NUMA node and link of each GPU, network card
and NVMe drive, which are near to each other, what driver and kernel can do, and
a verdict for each GPU and path: "direct", "bounce" (through host memory) or
"not known", with the reasons and the next step. Paths are the Weft volumes
attached here and the local drives or, if PATH is given, that volume, mount
point, file or device. Run it as root, or access control of PCIe switches stays
unknown. Nothing is read or written but files of the kernel.

With --tree, read the trees of layers (thin legs, snapshots and clones) on the
drives that PATH names, files or devices, and print for each a verdict, its
layers with their space, and what is wrong. Nothing is changed. A tree in use
looks as after a crash. The exit code is 1 if a tree is damaged.`,
		Example: `  weft doctor
  weft doctor -o json
  weft doctor --gpu
  weft doctor --gpu /mnt/data
  weft doctor --gpu --record report.txtar
  weft doctor --tree /dev/nvme0n1`,
		Args: func(cmd *cobra.Command, args []string) error {
			if err := doctorUsage(tree, o.gpu, args); err != nil {
				return err
			}
			if tree || o.gpu && len(args) == 1 {
				return nil
			}
			return cli.Takes()(cmd, args)
		},
		RunE: func(_ *cobra.Command, args []string) error {
			if tree {
				return trees.Check(args, g.Out())
			}
			if o.gpu {
				return runDoctorGPU(o, strings.Join(args, ""), g.Out())
			}
			if o.record != "" || o.from != "" {
				return cli.UsageError{Err: errors.New("--record and --from are for --gpu"), Hint: "add --gpu"}
			}
			return runDoctor(doctor{euid: os.Geteuid(), devices: blockdev.Probe()}, g.Out())
		},
	}
	cmd.Flags().BoolVar(&o.gpu, "gpu", false, "report on GPUs and what is near to them")
	cmd.Flags().BoolVar(&tree, "tree", false, "check the trees of layers on the drives at PATH...")
	cmd.Flags().StringVar(&o.record, "record", "", "also write the files that --gpu reads to this `file`, to send with a question; look through it first")
	cmd.Flags().StringVar(&o.from, "from", "", "report on the machine that such a `file` is from")
	return cmd
}

// doctorUsage says why flags and paths do not fit.
func doctorUsage(tree, gpu bool, args []string) error {
	switch {
	case tree && gpu:
		return cli.UsageError{Err: errors.New("--tree and --gpu exclude each other"), Hint: "run weft doctor twice"}
	case tree && len(args) == 0:
		return cli.UsageError{Err: errors.New("--tree needs a path"), Hint: "name a drive: weft doctor --tree /dev/nvme0n1"}
	case !tree && !gpu && len(args) > 0:
		return cli.UsageError{Err: fmt.Errorf("unexpected argument %q", args[0]), Hint: "a path is for --gpu and --tree"}
	}
	return nil
}

type gpuOptions struct {
	gpu          bool
	record, from string
}

// runDoctorGPU reports on the GPUs of this machine, or of a recorded one.
func runDoctorGPU(o gpuOptions, at string, out *cli.Output) error {
	if at != "" && !strings.Contains(at, "/") {
		at = "/dev/weft/" + at
	}
	root := os.DirFS("/")
	if o.from != "" {
		archive, err := os.ReadFile(o.from)
		if err != nil {
			return err
		}
		if root, err = gpu.Tree(archive); err != nil {
			return fmt.Errorf("%s: %w", o.from, err)
		}
	} else if at != "" {
		var err error
		if at, err = filepath.Abs(at); err != nil {
			return err
		}
		if file, err := filepath.EvalSymlinks(at); err == nil && !strings.HasPrefix(at, "/dev/") {
			at = file
		}
	}
	m, err := gpu.Read(root, at)
	if err != nil {
		return err
	}
	if o.record != "" {
		archive, err := gpu.Record(root, at)
		if err != nil {
			return err
		}
		if err := os.WriteFile(o.record, archive, 0o644); err != nil {
			return err
		}
	}
	report := gpu.Of(m)
	return out.PrintValue(report, report.Print)
}

// doctor examines a machine.
type doctor struct {
	root    string // "" means "/"
	euid    int
	devices []blockdev.Ability
}

// diagnosis is everything that doctor reports. Its keys are stable.
type diagnosis struct {
	Kernel       string    `json:"kernel"`
	Root         bool      `json:"root"`
	Paths        []finding `json:"data_paths"`
	BlockDevices []finding `json:"block_devices"` // of the data path user
	Auto         []choice  `json:"auto"`
	Checks       []finding `json:"checks"`
}

// finding is one thing that works on this machine, or does not.
type finding struct {
	For string `json:"for,omitempty"` // target or initiator
	Way string `json:"name"`
	OK  bool   `json:"ok"`
	Why string `json:"reason"`
	Fix string `json:"fix"` // how to enable it; "" if it works, or cannot be enabled

	Faster string `json:"faster,omitempty"` // what would make it faster, if it works
}

// choice is the data path that an agent with --datapath auto uses.
type choice struct {
	For         string `json:"for"`
	Datapath    string `json:"datapath"`               // "" if none works
	BlockDevice string `json:"block_device,omitempty"` // of an initiator in user space
	Because     string `json:"because"`
}

func runDoctor(d doctor, out *cli.Output) error {
	found := d.look()
	return out.PrintValue(found, found.print)
}

// diagnose is what weft doctor prints for people on this machine.
func diagnose() []byte {
	var text bytes.Buffer
	doctor{euid: os.Geteuid(), devices: blockdev.Probe()}.look().print(&text)
	return text.Bytes()
}

func (d doctor) look() diagnosis {
	found := diagnosis{Kernel: d.text("proc/sys/kernel/osrelease"), Root: d.euid == 0, Checks: d.checks()}
	for _, a := range d.devices {
		f := finding{Way: string(a.Kind), OK: a.Usable, Why: a.Reason, Fix: a.Fix, Faster: a.Faster}
		if a.Usable && a.Survives {
			f.Why += "; I/O can wait for a restarting agent"
		}
		found.BlockDevices = append(found.BlockDevices, f)
	}
	target := d.kernel("target", kmod.ConfigFS, kmod.Nvmet, kmod.NvmetTCP, kmod.DM)
	initiator := d.kernel("initiator", kmod.NvmeTCP, kmod.Fabrics, kmod.DM, kmod.DMMirror, kmod.Loop, kmod.TCPDiag)
	if initiator.OK && d.text("sys/module/nvme_core/parameters/multipath") == "N" {
		initiator.OK, initiator.Why, initiator.Fix = false, "native NVMe multipath is off", "remove nvme_core.multipath=N from the kernel's command line and reboot"
	}
	user := d.userInitiator()
	found.Paths = []finding{
		target, {For: "target", Way: datapathUser, OK: true, Why: "serves drives that it may open, and files, in its own process"},
		initiator, user,
	}
	found.Auto = []choice{d.auto(target, found.Paths[1]), d.auto(initiator, user)}
	if found.Auto[1].Datapath == datapathUser {
		device, _ := blockdev.Choose(d.devices)
		found.Auto[1].BlockDevice = string(device)
	}
	return found
}

// kernel says whether an agent can use the kernel's NVMe-oF.
func (d doctor) kernel(what string, need ...kmod.Module) finding {
	f := finding{For: what, Way: datapathKernel}
	var load, never []string
	state := kmod.Present
	for _, m := range need {
		switch s := (kmod.Loader{Root: d.root}).StateOf(m); s {
		case kmod.Present:
		case kmod.Loadable:
			load = append(load, m.Name)
		default:
			never = append(never, m.Name)
			state = max(state, s)
		}
	}
	switch {
	case state == kmod.NoModules:
		f.Why = "the kernel lacks " + strings.Join(never, ", ") + ", and no modules are installed for it"
		f.Fix = "install the modules of kernel " + d.text("proc/sys/kernel/osrelease") + ", or boot a distribution's kernel"
	case state == kmod.NotBuilt:
		f.Why = "the kernel was built without " + strings.Join(never, ", ")
		f.Fix = "boot a kernel that has them, such as the distribution's generic one"
	case d.euid != 0:
		f.Why, f.Fix = "not root", "run the agent as root"
	case len(load) > 0:
		f.OK, f.Why = true, "the kernel supports it; the agent loads "+strings.Join(load, ", ")
	default:
		f.OK, f.Why = true, "the kernel supports it"
	}
	return f
}

func (d doctor) userInitiator() finding {
	f := finding{For: "initiator", Way: datapathUser}
	if device, ok := blockdev.Choose(d.devices); ok {
		f.OK, f.Why = true, "provides volumes through "+string(device)
		return f
	}
	for _, a := range d.devices {
		if d.euid == 0 && len(a.Modules) > 0 {
			f.OK, f.Why = true, fmt.Sprintf("provides volumes through %s; the agent loads %s", a.Kind, strings.Join(a.Modules, ", "))
			return f
		}
	}
	f.Why = "no kind of block device is available (see below)"
	for _, a := range d.devices {
		if a.Fix != "" {
			f.Fix = a.Fix
		}
	}
	return f
}

// auto decides as chooseDatapath does.
func (d doctor) auto(kernel, user finding) choice {
	switch {
	case kernel.OK:
		return choice{For: kernel.For, Datapath: datapathKernel, Because: kernel.Why}
	case user.OK:
		return choice{For: kernel.For, Datapath: datapathUser, Because: "not in the kernel: " + kernel.Why}
	}
	return choice{For: kernel.For, Because: kernel.Why + "; in user space: " + user.Why}
}

// print writes the report for people.
func (found diagnosis) print(w io.Writer) {
	who := "as root"
	if !found.Root {
		who = "without root"
	}
	fmt.Fprintf(w, "kernel %s, checked %s\n\n", found.Kernel, who)
	var rows [][]string
	for _, f := range found.Paths {
		rows = append(rows, []string{f.For, f.Way, f.word("yes", "no"), f.Why})
	}
	for _, f := range found.BlockDevices {
		rows = append(rows, []string{"block device", f.Way, f.word("yes", "no"), f.Why})
	}
	cli.Table(w, "FOR WAY WORKS WHY", rows...)
	fmt.Fprintln(w)
	for _, c := range found.Auto {
		fmt.Fprintf(w, "--datapath auto: the %s %s\n", c.For, c.sentence())
	}
	printFixes(w, "\nto enable the others:\n", found.Paths, found.BlockDevices)
	printFaster(w, "\nto make block devices faster:\n", found.BlockDevices)
	fmt.Fprintln(w)
	rows = nil
	for _, f := range found.Checks {
		rows = append(rows, []string{f.Way, f.word("ok", "problem"), f.Why})
	}
	cli.Table(w, "CHECK STATE WHY", rows...)
	printFixes(w, "\nto correct the problems:\n", found.Checks)
}

// sentence says what an agent chooses and why, without repeating "auto" and the agent's name.
func (c choice) sentence() string {
	switch c.Datapath {
	case "":
		return "cannot run: in the kernel: " + c.Because
	case datapathKernel:
		return "uses the kernel: " + c.Because
	}
	how := "works in user space"
	if c.BlockDevice != "" {
		how += " with " + c.BlockDevice
	}
	return how + ", " + c.Because
}

func (f finding) word(yes, no string) string {
	if f.OK {
		return yes
	}
	return no
}

func printFixes(w io.Writer, heading string, lists ...[]finding) {
	for _, list := range lists {
		for _, f := range list {
			if f.OK || f.Fix == "" {
				continue
			}
			fmt.Fprint(w, heading)
			heading = ""
			fmt.Fprintf(w, "  %s: %s\n", strings.TrimSpace(f.For+" "+f.Way), f.Fix)
		}
	}
}

func printFaster(w io.Writer, heading string, list []finding) {
	for _, f := range list {
		if f.Faster != "" {
			fmt.Fprintf(w, "%s  %s: %s\n", heading, f.Way, f.Faster)
			heading = ""
		}
	}
}
