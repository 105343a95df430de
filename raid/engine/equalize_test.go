// SPDX-License-Identifier: Apache-2.0

package engine

import (
	"context"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// worn is a leg that can not be read.
type worn struct{ *memory }

func (w worn) Submit(io *block.IO) {
	if io.Op == block.OpRead {
		io.Complete(block.ErrMedium)
		return
	}
	w.memory.Submit(io)
}

func TestTheOnlyCopyNeedNotBeReadToBeEqual(t *testing.T) {
	cfg := Config{Layout: layout(2, 2, block.DefaultChunk), Size: 4 * block.MiB}
	legs := memories(cfg)
	v := volume(t, cfg, worn{legs[0].(*memory)}, nil, legs[2], legs[3])
	copy(legs[2].(*memory).data, fill(4096, 1))
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	if err := v.Equalize(ctx); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(v, fill(4096, 2), 0); err != nil {
		t.Fatal(err)
	}
}
