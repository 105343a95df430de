// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"testing"
)

// A message that was parsed is appended as the same bytes, except for reserved and unknown
// fields and bytes behind the message. Parsed again, it is the same message.
func FuzzMessage(f *testing.F) {
	for _, l := range layouts {
		f.Add(l.msg.Append(nil))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		m, err := parse(b)
		if err != nil {
			return
		}
		first := m.Append(nil)
		again, err := parse(first)
		if err != nil {
			t.Fatalf("%x was parsed as %+v, but its encoding is not parsed: %v", b, m, err)
		}
		if second := again.Append(nil); !bytes.Equal(first, second) {
			t.Fatalf("%x becomes %x, then %x", b, first, second)
		}
	})
}

func FuzzKey(f *testing.F) {
	f.Add("DHHC-1:00:" + exampleSecret + ":")
	f.Add("DHHC-1:03:" + exampleSecret + ":")
	f.Fuzz(func(t *testing.T, s string) {
		k, err := ParseKey(s)
		if err == nil && k.Representation() != s {
			t.Fatalf("%q was parsed, but is written as %q", s, k.Representation())
		}
	})
}

// A peer that knows no key never authenticates, whatever it sends: neither end is done, and
// every answer is a message of bounded size.
func FuzzExchange(f *testing.F) {
	for _, l := range layouts {
		f.Add(l.msg.Append(nil), l.msg.Append(nil), l.msg.Append(nil))
	}
	n := Negotiate{Transaction: 7, Hashes: []Hash{SHA256}, Groups: []Group{Null}}
	r := Reply{Transaction: 7, Sequence: 1, Proof: make([]byte, 32), Challenge: make([]byte, 32)}
	c := Challenge{Transaction: 7, Hash: SHA256, Sequence: 3, Value: make([]byte, 32)}
	s := Success1{Transaction: 7, HashLen: 32, Proof: make([]byte, 32)}
	f.Add(n.Append(nil), r.Append(nil), r.Append(nil))
	f.Add(c.Append(nil), s.Append(nil), s.Append(nil))
	f.Fuzz(func(t *testing.T, a, b, c []byte) {
		cfg := config(t)
		cfg.ControllerKey = key(t, SHA256, 2)
		host, controller := ends(t, cfg, cfg)
		if _, _, err := host.Step(nil); err != nil {
			t.Fatal(err)
		}
		for name, end := range map[string]stepper{"host": host, "controller": controller} {
			failed := false
			for _, m := range [][]byte{a, b, c} {
				if m == nil {
					m = []byte{}
				}
				out, done, err := end.Step(m)
				if done {
					t.Fatalf("%s is done", name)
				}
				if failed && err == nil {
					t.Fatalf("%s continues after a failure", name)
				}
				failed = err != nil
				if len(out) > MaxMessage {
					t.Fatalf("%s answers with %d bytes", name, len(out))
				}
				if out != nil {
					if _, err := parse(out); err != nil {
						t.Fatalf("%s answers with an invalid message: %v", name, err)
					}
				}
			}
		}
	})
}
