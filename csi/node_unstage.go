// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
)

// NodeUnstageVolume unmounts the staging path, and answers when nothing on the node
// uses the volume's file system any more.
func (s *nodeServer) NodeUnstageVolume(ctx context.Context, r *csi.NodeUnstageVolumeRequest) (*csi.NodeUnstageVolumeResponse, error) {
	id, path := r.GetVolumeId(), r.GetStagingTargetPath()
	if err := missingID(id); err != nil {
		return nil, err
	}
	if err := s.checkPath("staging_target_path", path); err != nil {
		return nil, err
	}
	err := s.run(ctx, id, "NodeUnstageVolume", func(ctx context.Context, t *task) error {
		return s.unstage(ctx, t, id, path)
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeUnstageVolumeResponse{}, nil
}

func (s *nodeServer) unstage(ctx context.Context, t *task, id, path string) error {
	path, err := s.kernel.Resolve(path)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	was, err := s.unmountAll(ctx, t, id, path, s.publishedFrom)
	if err != nil {
		return err
	}
	// If nothing was mounted, an earlier call may have unmounted it and found it still in use, or
	// it was a raw device: then the manager knows the device.
	device, live, err := s.liveDevice(ctx, id, was)
	if err != nil || !live {
		return err
	}
	if err := s.stillUsed(id, device); err != nil {
		return err
	}
	return s.stillClaimed(ctx, id, device)
}

// publishedFrom refuses to unmount a staging path whose file system is also at targets: the next
// call needs this mount to see what is in use.
func (s *nodeServer) publishedFrom(all mount.Table, m mount.Mount) error {
	if m.Root != "/" {
		return nil
	}
	if others := all.FileSystemOn(m.Device, all.Place(m)); len(others) > 0 {
		return fmt.Errorf("it is published on %s", others.Points())
	}
	return nil
}

// liveDevice is the volume's device on this node: the unmounted one, or else the one that the
// manager names; live is false if it can no longer reach the volume, or none is known.
func (s *nodeServer) liveDevice(ctx context.Context, id string, was *block.DeviceNumber) (device block.DeviceNumber, live bool, err error) {
	if was != nil {
		dead, err := s.superseded(ctx, id, *was)
		// Without the manager a device counts as live: the checks on this node decide.
		return *was, err != nil || !dead, nil
	}
	v, err := s.volume(ctx, id)
	if status.Code(err) == codes.NotFound {
		return device, false, nil
	}
	if err != nil {
		return device, false, err
	}
	a := attachmentTo(v, string(s.cfg.Node))
	if a == nil || a.DeviceNumber == "" {
		return device, false, nil
	}
	if device, err = block.ParseDeviceNumber(a.DeviceNumber); err != nil {
		return device, false, status.Error(codes.Unavailable, err.Error())
	}
	return device, true, nil
}

// stillUsed refuses as long as a device's file system is mounted anywhere, or its node at a target.
// A loop device over it does not count: it is the kubelet's own, for a raw volume.
func (s *nodeServer) stillUsed(id string, device block.DeviceNumber) error {
	all, err := s.kernel.Mounts()
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	here := append(all.FileSystemOn(device), s.nodesOf(all, device)...)
	users, err := s.kernel.MountsElsewhere(device)
	if err != nil {
		return status.Error(codes.Unavailable, err.Error())
	}
	if len(here) > 0 {
		users = append(users, "the mount on "+here.Points())
	}
	if len(users) > 0 {
		return status.Errorf(codes.FailedPrecondition, "volume %s: its device %s is still in use: %s", id, device, strings.Join(users, ", "))
	}
	return nil
}

// stillClaimed refuses as long as someone holds a device exclusively. A file system may be live
// without being mounted anywhere: an unmount that hangs has removed the mount first. Only an
// existing attachment can tell which device to check.
func (s *nodeServer) stillClaimed(ctx context.Context, id string, device block.DeviceNumber) error {
	v, err := s.volume(ctx, id)
	if err != nil {
		return nil
	}
	a := attachmentTo(v, string(s.cfg.Node))
	if a.GetDeviceNumber() != device.String() {
		return nil
	}
	d, err := s.kernel.Open(a.Device)
	if err != nil {
		return nil // then it cannot be open
	}
	defer d.Close()
	if d.Number() != device {
		return nil
	}
	if busy, err := d.Busy(); err == nil && busy {
		return status.Errorf(codes.FailedPrecondition, "volume %s: its device %s is still in use by something that this process cannot see: a file system that is being unmounted, or another device stacked on it", id, a.Device)
	}
	return nil
}

// nodesOf returns the mounts of a device's node.
func (s *nodeServer) nodesOf(all mount.Table, device block.DeviceNumber, without ...mount.Place) mount.Table {
	return all.Distinct(without, func(m mount.Mount) bool {
		if !m.MayBeNode() {
			return false
		}
		node, ok := s.kernel.Node(m.Point)
		return ok && node == device
	})
}

// unmountAll removes all mounts at a path, without looking at the path: a dead file system answers
// with an error, which does not mean "nothing is mounted". It returns the device that was there, if
// any. check may refuse.
func (s *nodeServer) unmountAll(ctx context.Context, t *task, id, path string, check func(mount.Table, mount.Mount) error) (was *block.DeviceNumber, err error) {
	for {
		all, err := s.kernel.Mounts()
		if err != nil {
			return was, status.Error(codes.Unavailable, err.Error())
		}
		m, mounted := all.At(path)
		if !mounted {
			return was, nil
		}
		if err := t.next(ctx, "unmount %s", path); err != nil {
			return was, err
		}
		device := s.deviceOf(m)
		err = check(all, m)
		if err == nil {
			err = s.kernel.Unmount(path, false)
		}
		switch {
		case err == nil, errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.EINVAL):
		default:
			if err := s.unmountHeld(ctx, id, m, device, err); err != nil {
				return was, err
			}
		}
		was = &device
	}
}

// unmountHeld handles a mount that is still in use. If its device no longer reaches the volume, the
// mount is detached under its users, so that a node that comes back gets rid of it: their writes
// have long been refused. Otherwise the users are named; a mount is never detached under data that
// may be on its way.
func (s *nodeServer) unmountHeld(ctx context.Context, id string, m mount.Mount, device block.DeviceNumber, cause error) error {
	dead, err := s.superseded(ctx, id, device)
	if err == nil && dead {
		logOf(ctx).Warn("detaching the mount of an earlier attachment although it is in use", "point", m.Point, "device", device.String(), "cause", cause)
		if err := s.kernel.Unmount(m.Point, true); err != nil {
			return status.Error(codes.Unavailable, err.Error())
		}
		return nil
	}
	text := fmt.Sprintf("volume %s: unmount %s: %v", id, m.Point, cause)
	if errors.Is(cause, unix.EBUSY) {
		holders := s.kernel.Holders(m)
		if len(holders) == 0 {
			holders = []string{"something that this process cannot see"}
		}
		text += "; held by " + strings.Join(holders, ", ")
	}
	if err != nil {
		text += fmt.Sprintf("; whether it is still attached is unknown: %v", err)
	}
	return status.Error(codes.FailedPrecondition, text)
}
