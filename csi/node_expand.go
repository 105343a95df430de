// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/pb"
)

// NodeExpandVolume waits until the device has the requested size, and grows the file system on it
// while it is in use. Users of a raw device have to notice the new size themselves.
func (s *nodeServer) NodeExpandVolume(ctx context.Context, r *csi.NodeExpandVolumeRequest) (*csi.NodeExpandVolumeResponse, error) {
	id, path := r.GetVolumeId(), r.GetVolumePath()
	if err := missingID(id); err != nil {
		return nil, err
	}
	switch {
	case path == "":
		return nil, status.Error(codes.InvalidArgument, "volume_path: missing")
	case !filepath.IsAbs(path): // csi-sanity treats this as a missing volume
		return nil, status.Errorf(codes.NotFound, "volume %s: not at %q, which is not an absolute path", id, path)
	}
	if err := s.checkPath("volume_path", path); err != nil {
		return nil, err
	}
	bytes, err := parseRange(r.GetCapacityRange())
	if err != nil {
		return nil, err
	}
	var size uint64
	err = s.run(ctx, id, "NodeExpandVolume", func(ctx context.Context, t *task) (err error) {
		size, err = s.expand(ctx, t, id, path, uint64(bytes.required))
		return err
	})
	if err != nil {
		return nil, err
	}
	return &csi.NodeExpandVolumeResponse{CapacityBytes: clamp(size)}, nil
}

func (s *nodeServer) expand(ctx context.Context, t *task, id, path string, required uint64) (size uint64, err error) {
	v, now, err := s.reported(ctx, id)
	if err != nil {
		return 0, err
	}
	m, err := s.mountAt(path)
	if err != nil {
		return 0, err
	}
	device := s.deviceOf(m)
	if now == nil || now.DeviceNumber != device.String() {
		return 0, status.Errorf(codes.FailedPrecondition, "volume %s: device %s, which is not the volume's, is mounted on %s", v.Name, device, m.Point)
	}
	a := attachment{volume: v, Attachment: now, number: device}
	if size, err = s.awaitSize(ctx, a, cmp.Or(required, v.SizeBytes)); err != nil {
		return 0, err
	}
	if device != m.Device {
		return size, nil
	}
	// A target may be read-only while its file system is not: then the file system is grown where
	// it is writable. One that is read-only everywhere stays as it is.
	all, err := s.kernel.Mounts()
	if err != nil {
		return 0, unavailable(a, err)
	}
	writable := slices.DeleteFunc(all.FileSystemOn(device), mount.Mount.ReadOnly)
	if len(writable) == 0 {
		return size, nil
	}
	d, err := s.open(ctx, a)
	if err != nil {
		return 0, err
	}
	defer d.Close()
	if err := s.grow(ctx, t, d, m.FSType, writable[0].Point); err != nil {
		if _, ok := status.FromError(err); ok {
			return 0, err
		}
		if errors.Is(err, errGrowsUnmounted) {
			return 0, status.Errorf(codes.FailedPrecondition, "volume %s: %v", v.Name, err)
		}
		return 0, status.Errorf(codes.Internal, "volume %s: %v", v.Name, err)
	}
	return size, nil
}

// reported waits until the agent has told the manager which device the volume has here, which a manager that has just
// begun does not know. Without that, the answer would say that another device is mounted, and the kubelet would not ask
// again. The attachment is nil if there is none.
func (s *nodeServer) reported(ctx context.Context, id string) (v *pb.Volume, now *pb.Attachment, err error) {
	err = await(ctx, fmt.Sprintf("grow volume %s on this node", id), func() (string, error) {
		if v, err = s.volume(ctx, id); err != nil {
			return "", err
		}
		if now = attachmentTo(v, string(s.cfg.Node)); now != nil && now.DeviceNumber == "" {
			return "the initiator agent of node " + now.Node + " to report its device", nil
		}
		return "", nil
	})
	return v, now, err
}

// awaitSize waits until a device has at least a size, and returns its size.
func (s *nodeServer) awaitSize(ctx context.Context, a attachment, least uint64) (size uint64, err error) {
	doing := fmt.Sprintf("grow volume %s on this node", a.volume.Name)
	err = await(ctx, doing, func() (string, error) {
		if size, err = s.kernel.Size(a.number); err != nil {
			return "", unavailable(a, err)
		}
		if size >= least {
			return "", nil
		}
		return fmt.Sprintf("its device, which has %d bytes, to grow to %d", size, least), nil
	})
	return size, err
}
