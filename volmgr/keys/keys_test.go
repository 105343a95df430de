// SPDX-License-Identifier: Apache-2.0

package keys

import (
	"fmt"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

func TestEachSubsystemHostAndDirectionHasItsOwnKey(t *testing.T) {
	a, b := Make([32]byte{1}), Make([32]byte{2})
	seen := map[block.Secret]string{}
	for _, m := range []Master{a, b} {
		for _, names := range [][2]block.NQN{{"nqn.a", "nqn.h"}, {"nqn.a", "nqn.i"}, {"nqn.b", "nqn.h"}, {"nqn.an", "qn.h"}} {
			k := m.Of(names[0], names[1])
			if again := m.Of(names[0], names[1]); again != k {
				t.Errorf("%v: asked twice, two answers", names)
			}
			for direction, s := range map[string]block.Secret{"host": k.Host, "controller": k.Controller} {
				at := fmt.Sprint(m == a, names, direction)
				if len(s.Reveal()) != block.SecretSize || seen[s] != "" {
					t.Errorf("%s: %d bytes, the same as of %q", at, len(s.Reveal()), seen[s])
				}
				seen[s] = at
			}
		}
	}
	if k := (Master{}).Of("nqn.a", "nqn.h"); !k.IsZero() {
		t.Error("keys were made without a master")
	}
}

func TestTheMasterIsReadBackAndShownToNobody(t *testing.T) {
	m := Make([32]byte{1})
	got, err := Parse(m.Encode())
	if err != nil || got != m {
		t.Errorf("read back: another master, %v", err)
	}
	for _, bad := range []string{"", "00", strings.Repeat("g", 64)} {
		if _, err := Parse([]byte(bad)); err == nil {
			t.Errorf("%q was read", bad)
		}
	}
	if shown := fmt.Sprintf("%v %+v %#v %s %x", m, m, m, m, m); strings.Contains(shown, string(m.Encode()[:8])) {
		t.Errorf("it shows: %s", shown)
	}
}
