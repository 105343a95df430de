// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

func TestPropertiesAreToldApartAndTheirDefaultsAreAllowed(t *testing.T) {
	seen := map[string]bool{}
	for _, p := range Properties() {
		for _, name := range []string{"field " + p.Field, "flag " + p.Flag, "parameter " + p.Parameter} {
			if seen[name] {
				t.Errorf("two properties are %s", name)
			}
			seen[name] = !strings.HasSuffix(name, " ")
		}
		if words := p.Words(); len(words) > 0 && !slices.Contains(words, p.Default) {
			t.Errorf("%s: default %q is none of %v", p.Parameter, p.Default, words)
		}
		var n int
		if p.Most == 0 {
			continue
		}
		if _, err := fmt.Sscan(p.Default, &n); err != nil || !p.Allows(n) || p.Allows(int(p.Most)+1) || p.Allows(int(p.Least)-1) {
			t.Errorf("%s: default %q, bounds %s", p.Field, p.Default, p.Bounds())
		}
	}
	if size, err := ParseSize(PropertyChunk.Default); err != nil || size != DefaultChunk {
		t.Errorf("chunk default %q is %v, %v", PropertyChunk.Default, size, err)
	}
	if got, ok := ParameterOf("chunk_bytes"); got != "chunkSize" || !ok {
		t.Errorf("chunk_bytes is filled by %q", got)
	}
	if got, ok := FlagOf("chunk_bytes"); got != "chunk-size" || !ok {
		t.Errorf("chunk_bytes is filled by --%s", got)
	}
	if got, ok := FlagOf("seed"); ok {
		t.Errorf("an unknown field is filled by --%s", got)
	}
	if got, ok := ParameterOf("size_bytes"); ok {
		t.Errorf("size_bytes is filled by %q, want by no parameter", got)
	}
}
