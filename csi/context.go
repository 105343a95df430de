// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"strconv"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// contextFSType is the only key of a volume's context: the parameter fsType of its StorageClass. A
// file system named by the capability takes precedence.
const contextFSType = "fsType"

// The keys of a publish context, by which ControllerPublishVolume informs the node.
const (
	publishVolume = "volume" // the volume's name
	publishEpoch  = "epoch"
	publishMode   = "mode" // EXCLUSIVE, SHARED_READ_ONLY, SHARED_BLOCK
)

// publication is a publish context as values.
type publication struct {
	volume block.VolumeName
	// The epoch of the grant. It only grows, also when the host reboots: an attachment with a later
	// epoch belongs to the same publication.
	epoch block.Epoch
	mode  pb.AttachMode
}

func (p publication) context() map[string]string {
	return map[string]string{
		publishVolume: string(p.volume),
		publishEpoch:  strconv.FormatUint(uint64(p.epoch), 10),
		publishMode:   modeText(p.mode),
	}
}

// parsePublication is the inverse of context; an error names the key.
func parsePublication(context map[string]string) (publication, error) {
	name, err := block.ParseDeviceName(context[publishVolume])
	if err != nil {
		return publication{}, fmt.Errorf("publish_context[%s]: %w", publishVolume, err)
	}
	epoch, err := strconv.ParseUint(context[publishEpoch], 10, 64)
	if err != nil || epoch == 0 {
		return publication{}, fmt.Errorf("publish_context[%s]: %q is not an epoch", publishEpoch, context[publishEpoch])
	}
	mode, ok := pb.AttachMode_value[attachModePrefix+context[publishMode]]
	if !ok || mode == 0 {
		return publication{}, fmt.Errorf("publish_context[%s]: %q is not a mode", publishMode, context[publishMode])
	}
	return publication{volume: name, epoch: block.Epoch(epoch), mode: pb.AttachMode(mode)}, nil
}

const attachModePrefix = "ATTACH_MODE_"

func modeText(m pb.AttachMode) string { return m.String()[len(attachModePrefix):] }
