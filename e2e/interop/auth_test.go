// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"fmt"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

func newKey(t *testing.T, h dhchap.Hash) dhchap.Key {
	t.Helper()
	k, err := dhchap.Generate(h, nil)
	must(t, err)
	return k
}

// proves connects with keys and writes a block, which proves that authentication worked.
func proves(t *testing.T, l *lab, a access) {
	t.Helper()
	a.host = testHost
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &a})
	c := l.connect(t, s, options{hostKey: a.hostKey, controllerKey: a.controllerKey})
	must(t, block.WriteAt(c.device(1), pattern(unit, 1), 0))
	c.disconnect()
}

func keysOfEachKind(t *testing.T, l *lab) {
	for kind := dhchap.Hash(0); kind <= dhchap.SHA512; kind++ {
		t.Run(fmt.Sprint(kind), func(t *testing.T) { proves(t, l, access{hostKey: newKey(t, kind)}) })
	}
}

func hashesAndGroups(t *testing.T, l *lab) {
	for h := dhchap.SHA256; h <= dhchap.SHA512; h++ {
		t.Run(fmt.Sprint(h), func(t *testing.T) {
			proves(t, l, access{hostKey: newKey(t, h), hash: h})
		})
	}
	for g := dhchap.FFDHE2048; g <= dhchap.FFDHE8192; g++ {
		if g == dhchap.FFDHE6144 && !(l.host.ours() && l.target.ours()) {
			continue // ffdhe6144 takes Linux half a minute per queue in an emulated machine
		}
		t.Run(fmt.Sprint(g), func(t *testing.T) {
			proves(t, l, access{hostKey: newKey(t, dhchap.SHA256), group: g})
		})
	}
}

func bothProve(t *testing.T, l *lab) {
	for _, g := range []dhchap.Group{dhchap.Null, dhchap.FFDHE2048} {
		t.Run(fmt.Sprint(g), func(t *testing.T) {
			proves(t, l, access{hostKey: newKey(t, dhchap.SHA256), controllerKey: newKey(t, dhchap.SHA384), group: g})
		})
	}
}

func wrongKeys(t *testing.T, l *lab) {
	a := access{host: testHost, hostKey: newKey(t, dhchap.SHA256), controllerKey: newKey(t, dhchap.SHA256)}
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &a})
	for what, o := range map[string]options{
		"a host with no key":                         {},
		"a host with another key":                    {hostKey: newKey(t, dhchap.SHA256)},
		"a host that expects another controller key": {hostKey: a.hostKey, controllerKey: newKey(t, dhchap.SHA256)},
	} {
		l.refused(t, s, o, what)
	}
	c := l.connect(t, s, options{hostKey: a.hostKey, controllerKey: a.controllerKey})
	must(t, block.WriteAt(c.device(1), pattern(unit, 1), 0))
}
