// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// parameters are those of a StorageClass, with their defaults filled in. The
// words are those of "weft volume create".
type parameters struct {
	copies, stripes uint32 // stripes 0 lets the manager choose
	chunk           block.Size
	pool, spread    string
	transport       string
	fsType          string            // empty: what the capability says, or the node's default
	about           map[string]string // whom the volume is for, from the provisioner
}

const (
	paramCopies    = "copies"
	paramStripes   = "stripes"
	paramChunk     = "chunkSize"
	paramPool      = "pool"
	paramSpread    = "spread"
	paramTransport = "transport"
	paramFSType    = "fsType"
)

// fileSystems are those that the node service makes and grows.
var fileSystems = []string{"ext4", "xfs"}

// provisionerPrefix begins keys that sidecars set and no administrator. Those of
// --extra-create-metadata and --extra-modify-metadata say whom a volume is for.
const provisionerPrefix = "csi.storage.k8s.io/"

var metadataKeys = []string{
	provisionerPrefix + "pvc/name", provisionerPrefix + "pvc/namespace", provisionerPrefix + "pv/name",
}

// parseParameters checks each; an error is InvalidArgument and names the key.
func parseParameters(given map[string]string) (parameters, error) {
	p := parameters{copies: 2, chunk: block.DefaultChunk, pool: "default", spread: "node", transport: "auto", about: map[string]string{}}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if err := p.set(key, given[key]); err != nil {
			return p, status.Errorf(codes.InvalidArgument, "parameters: %s: %v", key, err)
		}
	}
	return p, nil
}

// classParameters are a StorageClass' parameters as the provisioner gives them to
// CreateVolume. To GetCapacity it gives them all, also those that are for itself
// and other sidecars: the class' file system, names of secrets.
func classParameters(all map[string]string) map[string]string {
	ours := maps.Clone(all)
	maps.DeleteFunc(ours, func(key, _ string) bool {
		return strings.HasPrefix(key, provisionerPrefix) && !slices.Contains(metadataKeys, key)
	})
	return ours
}

func (p *parameters) set(key, value string) (err error) {
	switch key {
	case paramCopies:
		p.copies, err = parseCount(value, 1, block.MaxCopies)
	case paramStripes:
		p.stripes, err = parseCount(value, 0, block.MaxStripes)
	case paramChunk:
		if p.chunk, err = block.ParseSize(value); err == nil {
			err = block.Layout{Stripes: 1, Copies: 1, Chunk: p.chunk}.Check()
		}
	case paramPool:
		p.pool, err = value, given(value)
	case paramSpread:
		p.spread, err = value, given(value)
	case paramTransport:
		p.transport, err = value, oneOf(value, "tcp", "auto")
	case paramFSType:
		p.fsType, err = value, oneOf(value, fileSystems...)
	default:
		if !slices.Contains(metadataKeys, key) {
			return fmt.Errorf("not known; known are %s, %s, %s, %s, %s, %s and %s",
				paramCopies, paramStripes, paramChunk, paramPool, paramSpread, paramTransport, paramFSType)
		}
		p.about[key] = value
	}
	return err
}

func parseCount(value string, least, most uint64) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n < least || n > most {
		return 0, fmt.Errorf("%q: must be a number from %d to %d", value, least, most)
	}
	return uint32(n), nil
}

func given(value string) error {
	if value == "" {
		return fmt.Errorf("empty")
	}
	return nil
}

func oneOf(value string, allowed ...string) error {
	if !slices.Contains(allowed, value) {
		return fmt.Errorf("%q: must be %s", value, strings.Join(allowed, " or "))
	}
	return nil
}

// text is what the parameters ask for in one line, the same however it was said.
func (p parameters) text(place placement) string {
	fields := []string{
		fmt.Sprintf("%s=%d", paramCopies, p.copies), fmt.Sprintf("%s=%d", paramStripes, p.stripes),
		fmt.Sprintf("%s=%d", paramChunk, uint64(p.chunk)), paramPool + "=" + p.pool, paramSpread + "=" + p.spread,
		paramTransport + "=" + p.transport, paramFSType + "=" + p.fsType, "topology=" + place.text(),
	}
	return strings.Join(fields, ",")
}

// volumeContext is what the node is told of the volume at each call.
func (p parameters) volumeContext() map[string]string {
	if p.fsType == "" {
		return nil
	}
	return map[string]string{contextFSType: p.fsType}
}

// mutableLabel begins the parameters that may change while a volume is used: each
// is a label of the volume. An empty value takes the label away.
const mutableLabel = "labels."

// parseMutable checks the parameters of a VolumeAttributesClass; an error is
// InvalidArgument and names the key.
func parseMutable(given map[string]string) (*pb.UpdateVolumeRequest, error) {
	update := &pb.UpdateVolumeRequest{SetLabels: map[string]string{}}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		label, ok := strings.CutPrefix(key, mutableLabel)
		switch {
		case slices.Contains(metadataKeys, key):
		case !ok || label == "":
			return nil, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s: cannot be changed; %sKEY can, a label of the volume", key, mutableLabel)
		case strings.HasPrefix(label, ownLabels), strings.HasPrefix(label, provisionerPrefix), strings.HasPrefix(label, "weft.dev/"):
			return nil, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s: the label is reserved for Weft", key)
		case given[key] == "":
			update.RemoveLabels = append(update.RemoveLabels, label)
		default:
			update.SetLabels[label] = given[key]
		}
	}
	return update, nil
}
