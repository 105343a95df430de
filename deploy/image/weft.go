// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"os"

	"weft.dev/weft/deploy/binary"
)

// weftFiles is the layer with our own program and the licenses of everything in it.
func weftFiles(ctx context.Context, program string) (tree, error) {
	content, err := os.ReadFile(program)
	if err != nil {
		return nil, err
	}
	if err := binary.Static(program); err != nil {
		return nil, err
	}
	t := tree{"usr/bin/weft": {mode: 0o755, content: content}}
	licences, err := binary.Licences(ctx)
	for name, text := range licences {
		t["usr/share/doc/weft/"+name] = file{mode: 0o644, content: text}
	}
	return t, err
}
