// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/gpu"
	"weft.dev/weft/initiator/blockdev"
)

// plainBox is a machine with a distribution's kernel, from which a test may remove parts.
func plainBox(t *testing.T) doctor {
	t.Helper()
	d := doctor{root: t.TempDir(), devices: []blockdev.Ability{
		{Kind: blockdev.UBLK, Reason: "the kernel has no ublk driver loaded", Fix: "modprobe ublk_drv"},
		{Kind: blockdev.NBD, Usable: true, Reason: "the nbd driver is loaded", Survives: true},
		{Kind: blockdev.FUSE, Usable: true, Reason: "FUSE and loop devices are available"},
	}}
	d.put(t, "proc/sys/kernel/osrelease", "6.1.0-test\n")
	d.put(t, "lib/modules/6.1.0-test/modules.builtin", "kernel/fs/configfs/configfs.ko\n")
	d.put(t, "lib/modules/6.1.0-test/modules.dep", "k/nvmet.ko:\nk/nvmet-tcp.ko:\nk/dm-mod.ko:\nk/nvme-tcp.ko:\nk/nvme-fabrics.ko:\nk/dm-mirror.ko:\nk/loop.ko:\nk/tcp_diag.ko:\n")
	d.put(t, "proc/mounts", "tmpfs /run tmpfs rw 0 0\n")
	d.put(t, "proc/self/status", "CapEff:\t000001ffffffffff\n")
	return d
}

func (d doctor) put(t *testing.T, path, text string) {
	t.Helper()
	path = filepath.Join(d.root, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestDoctorSaysWhatAMachineCanDo(t *testing.T) {
	for name, change := range map[string]func(*doctor){
		"kernel": func(*doctor) {},
		"bare": func(d *doctor) {
			os.RemoveAll(filepath.Join(d.root, "lib"))
			d.devices[1] = blockdev.Ability{Kind: blockdev.NBD, Reason: "the kernel has no nbd driver loaded"}
			d.devices[2].Faster = "FUSE may not use io_uring: echo Y > /sys/module/fuse/parameters/enable_uring"
			for _, tool := range []string{"usr/bin/udevadm", "usr/sbin/lvm", "sbin/mdadm", "usr/lib/udev/rules.d/70-nvmf-autoconnect.rules"} {
				d.put(t, tool, "")
			}
			d.put(t, "etc/lvm/lvm.conf", "# global_filter = [ \"r|weft-|\" ]\n")
			d.put(t, "proc/mounts", "/dev/sda1 / ext4 rw 0 0\n")
			d.put(t, "proc/self/status", "CapEff:\t00000000a80425fb\n")
			d.put(t, "proc/sys/kernel/io_uring_disabled", "2\n")
		},
		"nobody": func(d *doctor) {
			d.euid = 1000
			d.devices = []blockdev.Ability{{Kind: blockdev.FUSE, Reason: "FUSE mounts and loop devices are for root only", Fix: "run as root"}}
		},
	} {
		d := plainBox(t)
		change(&d)
		for _, f := range []cli.Format{cli.FormatTable, cli.FormatJSON} {
			var stdout, stderr bytes.Buffer
			if err := runDoctor(d, &cli.Output{Format: f, Stdout: &stdout, Stderr: &stderr, Now: time.Now}); err != nil {
				t.Errorf("doctor of %s: %v", name, err)
			}
			golden(t, "doctor-"+name+"."+f.String(), stdout.Bytes())
			if stderr.Len() > 0 {
				t.Errorf("doctor of %s wrote %q to stderr, want nothing", name, stderr.String())
			}
		}
	}
}

func TestDoctorFindsWhatWasPutRight(t *testing.T) {
	d := plainBox(t)
	for path, text := range map[string]string{
		"usr/bin/udevadm": "", "usr/sbin/lvm": "", "sbin/mdadm": "",
		"etc/udev/rules.d/11-weft.rules": "", "etc/mdadm/mdadm.conf.d/weft.conf": "AUTO -all\n",
		"etc/lvm/lvmlocal.conf": "global_filter = [ \"r|^/dev/mapper/weft-|\" ]\n",
	} {
		d.put(t, path, text)
	}
	for _, f := range d.checks() {
		if !f.OK || f.Fix != "" || strings.Contains(f.Why, "not installed") {
			t.Errorf("%s: %+v, want it fine", f.Way, f)
		}
	}
}

func TestDoctorSeesMultipathThatIsOff(t *testing.T) {
	d := plainBox(t)
	d.put(t, "sys/module/nvme_core/parameters/multipath", "N\n")
	if got := d.look().Auto[1]; got.Datapath != datapathUser || got.BlockDevice != "nbd" {
		t.Errorf("without native multipath auto takes %+v, want user with nbd", got)
	}
}

func TestDoctorSeesThatTheAgentCanLoadWhatIsMissing(t *testing.T) {
	d := plainBox(t)
	d.devices = []blockdev.Ability{{Kind: blockdev.FUSE, Reason: "the kernel has no FUSE", Fix: "modprobe fuse", Modules: []string{"fuse"}}}
	if got := d.userInitiator(); !got.OK || !strings.Contains(got.Why, "the agent loads fuse") {
		t.Errorf("an initiator in user space that can load fuse: %+v", got)
	}
	d.euid = 1000
	if got := d.userInitiator(); got.OK || got.Fix == "" {
		t.Errorf("one that is not root: %+v, want that it cannot, and what to do", got)
	}
}

// A machine that somebody recorded is reported on as the machine itself was.
func TestDoctorReportsOnARecordedGPUMachine(t *testing.T) {
	from := filepath.Join("..", "internal", "gpu", "testdata", "weft.txtar")
	again := filepath.Join(t.TempDir(), "again.txtar")
	var first, second bytes.Buffer
	for _, c := range []struct {
		options gpuOptions
		to      *bytes.Buffer
	}{{gpuOptions{gpu: true, from: from, record: again}, &first}, {gpuOptions{gpu: true, from: again}, &second}} {
		if err := runDoctorGPU(c.options, "db1", &cli.Output{Format: cli.FormatJSON, Stdout: c.to, Now: time.Now}); err != nil {
			t.Fatal(err)
		}
	}
	if first.String() != second.String() {
		t.Errorf("from a recording of a recording: %s, want %s", second.String(), first.String())
	}
	if !strings.Contains(first.String(), `"verdict": "bounce"`) {
		t.Errorf("a Weft volume on device-mapper: %s, want a bounce", first.String())
	}
	if err := runDoctorGPU(gpuOptions{gpu: true, from: from}, "nosuch", &cli.Output{}); err == nil || !strings.Contains(err.Error(), "/dev/weft/nosuch") {
		t.Errorf("a volume that is not attached: %v, want an error that names it", err)
	}
}

// An initiator near to a GPU prefers the networks of that GPU's card, and starts without a preference
// where there are none.
func TestAnInitiatorPrefersTheNetworksNearToItsGPU(t *testing.T) {
	for which, want := range map[string]string{"": "[]", "0": "[203.0.113.0/24]", "7": "[]"} {
		archive, err := os.ReadFile(filepath.Join("..", "internal", "gpu", "testdata", "weft.txtar"))
		if err != nil {
			t.Fatal(err)
		}
		root, err := gpu.Tree(archive)
		if err != nil {
			t.Fatal(err)
		}
		var log bytes.Buffer
		got := nearGPU(root, which, slog.New(slog.NewTextHandler(&log, nil)))
		if fmt.Sprint(got) != want || (which == "7") != strings.Contains(log.String(), "WARN") {
			t.Errorf("--near-gpu %q prefers %v, want %s; it logged %q", which, got, want, log.String())
		}
	}
}
