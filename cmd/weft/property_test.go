// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"

	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// The flags of `weft volume create` and their defaults are those of the table; and each property is
// a field of the manager's request.
func TestVolumeCreateHasAFlagForEachProperty(t *testing.T) {
	flags := newVolumeCreate(&cli.Globals{}).Flags()
	fields := (&pb.CreateVolumeRequest{}).ProtoReflect().Descriptor().Fields()
	for _, p := range block.Properties() {
		if p.Flag == "" && p.Field == "" {
			continue // of a StorageClass alone
		}
		f := flags.Lookup(p.Flag)
		switch {
		case f == nil:
			t.Errorf("--%s is no flag", p.Flag)
		case p != block.PropertyChunk && p.Default != "" && f.DefValue != p.Default: // the manager chooses the chunk
			t.Errorf("--%s: default %q, want %q", p.Flag, f.DefValue, p.Default)
		}
		if fields.ByName(protoreflect.Name(p.Field)) == nil {
			t.Errorf("%s is no field of the request", p.Field)
		}
	}
}
