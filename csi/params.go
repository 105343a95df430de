// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// parameters are those of a StorageClass, with defaults filled in. Their names are those of "weft
// volume create".
type parameters struct {
	copies, stripes uint32 // stripes 0 lets the manager choose
	chunk           block.Size
	pool, spread    string
	authentication  string
	integrity       bool
	thin            bool
	transport       string
	fsType          string            // empty: taken from the capability, or the node's default
	about           map[string]string // the claim that the volume is for, from the provisioner
}

// The names of parameters come from the table of properties.
var (
	paramCopies  = block.PropertyCopies.Parameter
	paramStripes = block.PropertyStripes.Parameter
	paramChunk   = block.PropertyChunk.Parameter
	paramPool    = block.PropertyPool.Parameter
	paramSpread  = block.PropertySpread.Parameter

	paramAuthentication = block.PropertyAuthentication.Parameter
	paramIntegrity      = block.PropertyIntegrity.Parameter
	paramThin           = block.PropertyThin.Parameter

	paramTransport = block.PropertyTransport.Parameter
	paramFSType    = block.PropertyFileSystem.Parameter

	paramScrubEvery = "scrubEvery"
)

// fileSystems are the ones that the node service can make and grow.
var fileSystems = block.PropertyFileSystem.Words()

// provisionerPrefix begins keys that sidecars set, never an administrator. Those of
// --extra-create-metadata and --extra-modify-metadata name the claim that a volume is for.
const provisionerPrefix = "csi.storage.k8s.io/"

var metadataKeys = []string{
	provisionerPrefix + "pvc/name", provisionerPrefix + "pvc/namespace", provisionerPrefix + "pv/name",
}

// parseParameters checks each one; an error is InvalidArgument and names the key.
func parseParameters(given map[string]string) (parameters, error) {
	p := parameters{
		copies: block.DefaultCopies, chunk: block.DefaultChunk, pool: block.DefaultPool, spread: block.DefaultSpread,
		authentication: block.PropertyAuthentication.Default,
		transport:      block.PropertyTransport.Default, about: map[string]string{},
	}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		if err := p.set(key, given[key]); err != nil {
			return p, status.Errorf(codes.InvalidArgument, "parameters: %s: %v", key, err)
		}
	}
	return p, nil
}

// classParameters returns a StorageClass's parameters as the provisioner passes them to
// CreateVolume. To GetCapacity it passes all of them, including those for itself and other
// sidecars: the class's file system, names of secrets.
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
		p.copies, err = parseCount(value, block.PropertyCopies)
	case paramStripes:
		p.stripes, err = parseCount(value, block.PropertyStripes)
	case paramChunk:
		if p.chunk, err = block.ParseSize(value); err == nil {
			err = block.Layout{Stripes: 1, Copies: 1, Chunk: p.chunk}.Check()
		}
	case paramPool:
		p.pool, err = value, given(value)
	case paramSpread:
		p.spread, err = value, given(value)
	case paramAuthentication:
		p.authentication, err = value, oneOf(value, block.PropertyAuthentication.Words()...)
	case paramIntegrity:
		p.integrity, err = value == "true", oneOf(value, block.PropertyIntegrity.Words()...)
	case paramThin:
		p.thin, err = value == "true", oneOf(value, block.PropertyThin.Words()...)
	case paramTransport:
		p.transport, err = value, oneOf(value, block.PropertyTransport.Words()...)
	case paramFSType:
		p.fsType, err = value, oneOf(value, fileSystems...)
	default:
		if !slices.Contains(metadataKeys, key) {
			known := volumeParameters()
			last := len(known) - 1
			return fmt.Errorf("not known; known are %s and %s", strings.Join(known[:last], ", "), known[last])
		}
		p.about[key] = value
	}
	return err
}

// volumeParameters lists the parameters of a StorageClass.
func volumeParameters() (names []string) {
	for _, p := range block.Properties() {
		if p.Parameter != "" {
			names = append(names, p.Parameter)
		}
	}
	return names
}

func parseCount(value string, p block.Property) (uint32, error) {
	n, err := strconv.ParseUint(value, 10, 32)
	if err != nil || n > math.MaxInt32 || !p.Allows(int(n)) {
		return 0, fmt.Errorf("%q: must be a number from %s", value, p.Bounds())
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

// text is the meaning of the parameters in one line, the same for every spelling.
func (p parameters) text(place placement) string {
	fields := []string{
		fmt.Sprintf("%s=%d", paramCopies, p.copies), fmt.Sprintf("%s=%d", paramStripes, p.stripes),
		fmt.Sprintf("%s=%d", paramChunk, uint64(p.chunk)), paramPool + "=" + p.pool, paramSpread + "=" + p.spread,
		paramTransport + "=" + p.transport, paramFSType + "=" + p.fsType, "topology=" + place.text(),
	}
	if p.integrity { // volumes from before do not say it
		fields = append(fields, paramIntegrity+"=true")
	}
	return strings.Join(fields, ",")
}

// volumeContext is what each call tells the node about the volume.
func (p parameters) volumeContext() map[string]string {
	if p.fsType == "" {
		return nil
	}
	return map[string]string{contextFSType: p.fsType}
}

// mutableLabel begins those parameters that may change while a volume is in use and are labels of
// the volume. An empty value removes the label.
const mutableLabel = "labels."

// mutable are the other ones, named as the flags of "weft volume set".
var mutable = map[string]func(u *pb.UpdateVolumeRequest, value string) error{
	paramCopies: func(u *pb.UpdateVolumeRequest, value string) (err error) {
		u.Copies, err = parseCount(value, block.PropertyCopies)
		return err
	},
	paramAuthentication: func(u *pb.UpdateVolumeRequest, value string) error {
		u.Authentication = value
		return oneOf(value, block.PropertyAuthentication.Words()...)
	},
	"rebuildRate": func(u *pb.UpdateVolumeRequest, value string) (err error) {
		u.RebuildBytesPerSecond, err = parseRate(value, block.MinRebuildRate)
		return err
	},
	paramScrubEvery: func(u *pb.UpdateVolumeRequest, value string) error {
		every, err := block.ParseInterval(value)
		if err == nil && every != 0 && (every < block.MinScrubEvery || every > block.MaxScrubEvery) {
			err = fmt.Errorf("%q: must be at least an hour and at most ten years, or %s for never", value, block.Off)
		}
		u.ScrubEverySeconds = proto.Uint64(uint64(every / time.Second))
		return err
	},
	"scrubRate": func(u *pb.UpdateVolumeRequest, value string) (err error) {
		u.ScrubBytesPerSecond, err = parseRate(value, block.MinScrubRate)
		return err
	},
}

// parseRate reads a rate within the manager's bounds: it refuses another one only when the volume is there.
func parseRate(value string, least block.Size) (*uint64, error) {
	rate, err := block.ParseRate(value)
	if err == nil && rate != 0 && rate < least {
		err = fmt.Errorf("%q: must be at least %v, or %s for no limit", value, least, block.Off)
	}
	return proto.Uint64(uint64(rate)), err
}

// parseMutable checks the parameters of a VolumeAttributesClass; an error is
// InvalidArgument and names the key.
func parseMutable(given map[string]string) (*pb.UpdateVolumeRequest, error) {
	update := &pb.UpdateVolumeRequest{SetLabels: map[string]string{}}
	for _, key := range slices.Sorted(maps.Keys(given)) {
		label, ok := strings.CutPrefix(key, mutableLabel)
		set := mutable[key]
		switch {
		case slices.Contains(metadataKeys, key):
		case set != nil:
			if err := set(update, given[key]); err != nil {
				return nil, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s: %v", key, err)
			}
		case !ok || label == "":
			known := slices.Sorted(maps.Keys(mutable))
			return nil, status.Errorf(codes.InvalidArgument, "mutable_parameters: %s: cannot be changed; %s and %sKEY (a label of the volume) can", key, strings.Join(known, ", "), mutableLabel)
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

const (
	minSize     = block.MiB // the manager's smallest volume
	roundSize   = block.MiB
	sizeUnit    = 4 * block.KiB // the manager accepts no other sizes
	defaultSize = block.GiB     // if a CO asks for no size
)

// sizeRange is the size that a CO asks for; limit 0 means no limit.
type sizeRange struct {
	required, limit block.Size
}

// parseRange checks a range; an error is InvalidArgument, or OutOfRange if no volume can have such
// a size.
func parseRange(r *csi.CapacityRange) (sizeRange, error) {
	required, limit := r.GetRequiredBytes(), r.GetLimitBytes()
	switch {
	case required < 0 || limit < 0:
		return sizeRange{}, status.Errorf(codes.InvalidArgument, "capacity_range: %d to %d bytes: must not be negative", required, limit)
	case limit > 0 && limit < required:
		return sizeRange{}, status.Errorf(codes.InvalidArgument, "capacity_range: limit_bytes %d is below required_bytes %d", limit, required)
	case required > math.MaxInt64-int64(roundSize):
		return sizeRange{}, status.Errorf(codes.OutOfRange, "capacity_range: required_bytes %d is more than a volume can have", required)
	}
	return sizeRange{block.Size(required), block.Size(limit)}, nil
}

// choose returns the size of a new volume for this range: the required one, or else the default,
// rounded up to whole MiB, or to a smaller unit if the limit is close.
func (r sizeRange) choose() (block.Size, error) {
	want := r.required
	if want == 0 {
		want = defaultSize
		if r.limit > 0 {
			want = min(want, r.limit/sizeUnit*sizeUnit)
		}
	}
	want = max(want, minSize)
	for _, unit := range []block.Size{roundSize, sizeUnit} {
		if size := want.RoundUp(unit); r.limit == 0 || size <= r.limit {
			return size, nil
		}
	}
	return 0, status.Errorf(codes.OutOfRange, "capacity_range: no size from %d to %d bytes is possible: sizes are multiples of %v, and at least %v",
		uint64(r.required), uint64(r.limit), sizeUnit, minSize)
}

// holds reports whether a volume of this size satisfies the range.
func (r sizeRange) holds(size block.Size) bool {
	return size >= r.required && (r.limit == 0 || size <= r.limit)
}
