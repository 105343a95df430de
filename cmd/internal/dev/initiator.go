// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/initiator"
	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/pb"
)

// noBlockDevice is the --block-device value for none.
const noBlockDevice = "none"

// chooseDevice decides how volumes are shown. none is the reason if this machine can make no
// device.
func chooseDevice(wish string, abilities []blockdev.Ability) (kind blockdev.Kind, none string, err error) {
	if wish == noBlockDevice {
		return "", "--block-device none", nil
	}
	if kind, err = blockdev.ParseKind(wish); err != nil {
		return "", "", cli.UsageError{Err: fmt.Errorf("--block-device: %w", err)}
	}
	for _, a := range abilities {
		if a.Kind == kind && !a.Usable {
			return "", "", fmt.Errorf("--block-device %s: %s; to enable it: %s", kind, a.Reason, cmp.Or(a.Fix, "it cannot be enabled"))
		}
	}
	if kind != blockdev.Auto {
		return kind, "", nil
	}
	if best, ok := blockdev.Choose(abilities); ok {
		return best, "", nil
	}
	return "", abilities[len(abilities)-1].Reason, nil // the last kind is the one that almost every kernel has
}

// wayOf says how a kind of block device is made here.
func wayOf(kind blockdev.Kind, abilities []blockdev.Ability) string {
	for _, a := range abilities {
		switch {
		case a.Kind != kind:
		case a.Ring:
			return string(kind) + " over io_uring"
		case a.Faster != "":
			return string(kind) + " (weft doctor says how to make them faster)"
		}
	}
	return string(kind)
}

// initiator is the part that makes block devices of volumes, or serves them where this machine can
// make none.
func (d *cluster) initiator() (daemon.Part, error) {
	release, err := daemon.KernelText("/proc/sys/kernel/osrelease")
	if err != nil {
		return daemon.Part{}, fmt.Errorf("read the kernel's release: %w", err)
	}
	config := initiator.Config{
		Node: d.node, Version: d.dir.version, Kernel: release, Manager: pb.NewAgentsClient(d.conn),
		StateDir: d.dir.in("initiator"), RunDir: d.dir.runDir(), Log: d.log.With("initiator", d.node),
		Datapath: initiator.User, Dial: d.dir.dialTarget, Support: d.support,
	}
	abilities := blockdev.Probe()
	kind, none, err := chooseDevice(d.options.device, abilities)
	if err != nil {
		return daemon.Part{}, err
	}
	config.BlockDevice = kind
	d.devices = "block devices through " + wayOf(kind, abilities)
	end := func(context.Context) error { return nil }
	if none != "" {
		server, err := newVolumeServer(d.log)
		if err != nil {
			return daemon.Part{}, err
		}
		config.Export, end = server.export, server.close
		d.devices = fmt.Sprintf("no block devices (%s); attach gives NVMe/TCP namespaces instead", none)
	}
	agent, err := initiator.New(config)
	if err != nil {
		return daemon.Part{}, err
	}
	return daemon.Part{Name: "initiator", Run: func(ctx context.Context) error {
		err := agent.Run(ctx)
		closing, cancel := context.WithTimeout(context.WithoutCancel(ctx), cli.CallTimeout)
		defer cancel()
		return errors.Join(err, end(closing))
	}}, nil
}

// runDir is for state that must not outlive a boot; each directory has its own.
func (d *directory) runDir() string {
	if os.Geteuid() != 0 {
		return d.in("run") // there are no block devices, so it stays empty
	}
	sum := sha256.Sum256([]byte(d.path))
	return filepath.Join("/run/weft/dev", hex.EncodeToString(sum[:6]))
}

// awaitUnmounts returns when no volume of this node is mounted: ending earlier would remove the
// disk under a file system.
func (d *cluster) awaitUnmounts(ctx context.Context, api pb.ManagerClient) error {
	said := ""
	tick := time.NewTicker(cli.PollEvery)
	defer tick.Stop()
	for {
		list, err := api.ListAttachments(ctx, &pb.ListAttachmentsRequest{})
		if err != nil {
			return err
		}
		table, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil {
			return err
		}
		var mounts []string
		for _, a := range list.GetAttachments() {
			if a.GetNode() == string(d.node) && a.GetDevice() != "" {
				mounts = append(mounts, mountsOf(a.GetDevice(), string(table))...)
			}
		}
		if len(mounts) == 0 {
			return nil
		}
		if now := strings.Join(mounts, ", "); now != said {
			said = now
			d.out.Say("waiting for %s to be unmounted (press Ctrl-C again to remove the devices anyway)", now)
		}
		<-tick.C
	}
}

// deadMounts are file systems on devices of a killed run. Their volumes get new devices.
func (d *directory) deadMounts() (points []string) {
	table, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return nil
	}
	loops, _ := filepath.Glob("/sys/block/loop*/loop/backing_file")
	for _, file := range loops {
		backing, err := os.ReadFile(file)
		if err == nil && strings.HasPrefix(string(backing), d.runDir()+"/") {
			points = append(points, mountsOf("/dev/"+strings.Split(file, "/")[3], string(table))...)
		}
	}
	return points
}

// mountsOf returns the mount points of a device in a /proc/self/mountinfo.
func mountsOf(device, table string) []string {
	names := []string{device}
	if real, err := filepath.EvalSymlinks(device); err == nil {
		names = append(names, real)
	}
	var points []string
	for line := range strings.Lines(table) {
		before, after, ok := strings.Cut(line, " - ")
		fields, source := strings.Fields(before), strings.Fields(after)
		if ok && len(fields) > 4 && len(source) > 1 && slices.Contains(names, source[1]) {
			points = append(points, fields[4])
		}
	}
	return points
}
