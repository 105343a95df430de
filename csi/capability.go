// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

type accessMode = csi.VolumeCapability_AccessMode_Mode

// attachModes says how a volume is attached for each supported access mode. The node service limits
// how many pods of one node may write.
var attachModes = map[accessMode]pb.AttachMode{
	csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER:        pb.AttachMode_ATTACH_MODE_EXCLUSIVE,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY:   pb.AttachMode_ATTACH_MODE_EXCLUSIVE,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER: pb.AttachMode_ATTACH_MODE_EXCLUSIVE,
	csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER:  pb.AttachMode_ATTACH_MODE_EXCLUSIVE,
	csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY:    pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY,
	csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER:   pb.AttachMode_ATTACH_MODE_SHARED_BLOCK,
}

// attachMode says how a volume with this many copies is attached to a node. An error is
// InvalidArgument and says what is not supported.
func attachMode(c *csi.VolumeCapability, copies uint32) (pb.AttachMode, error) {
	if c == nil {
		return 0, status.Error(codes.InvalidArgument, "volume_capability: missing")
	}
	invalid := func(format string, args ...any) (pb.AttachMode, error) {
		return 0, status.Errorf(codes.InvalidArgument, "volume_capability: "+format, args...)
	}
	if c.GetBlock() == nil && c.GetMount() == nil {
		return invalid("access_type: missing: must be block or mount")
	}
	access := c.GetAccessMode().GetMode()
	mode, ok := attachModes[access]
	switch fs := c.GetMount().GetFsType(); {
	case !ok:
		return invalid("access_mode: %v is not supported", access)
	case fs != "" && !slices.Contains(fileSystems, fs):
		return invalid("fs_type: %q is not supported, only %s", fs, strings.Join(fileSystems, " and "))
	case mode == pb.AttachMode_ATTACH_MODE_SHARED_BLOCK && c.GetBlock() == nil:
		return invalid("access_mode: %v is supported only for raw block volumes: a file system has one writer", access)
	case mode == pb.AttachMode_ATTACH_MODE_SHARED_BLOCK && copies != 1:
		return invalid("access_mode: %v is supported only for volumes with one copy; this one has %d", access, copies)
	}
	return mode, nil
}

// checkCapabilities is attachMode for all capabilities that a volume is to have, together with the
// file system of its StorageClass.
func checkCapabilities(all []*csi.VolumeCapability, copies uint32, fsType string) error {
	if len(all) == 0 {
		return status.Error(codes.InvalidArgument, "volume_capabilities: missing")
	}
	for _, c := range all {
		if _, err := attachMode(c, copies); err != nil {
			return err
		}
		if fs := c.GetMount().GetFsType(); fs != "" && fsType != "" && fs != fsType {
			return status.Errorf(codes.InvalidArgument, "parameters: %s: %q, but the volume_capability asks for %q (set by the provisioner's --default-fstype): set %s in only one of them",
				paramFSType, fsType, fs, provisionerPrefix+"fstype")
		}
	}
	return nil
}

// onlyReads reports whether all of some capabilities are for reading.
func onlyReads(all []*csi.VolumeCapability) bool {
	return !slices.ContainsFunc(all, func(c *csi.VolumeCapability) bool {
		mode := c.GetAccessMode().GetMode()
		return mode != csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY && mode != csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY
	})
}
