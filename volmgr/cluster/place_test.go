// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"fmt"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// The nsid and uuid by which hosts know a leg must not change while the manager is upgraded.
// For a leg without a recorded place they are those of the first versions, spelled out here.
func TestLegsOfAnOlderStoreKeepTheirNamespaces(t *testing.T) {
	s := grid(1, 3, 1, fixed(4096))
	if _, err := s.Step(time.Unix(1, 0), CreateVolume{Name: "db1", Size: 64 * block.GiB, Copies: 3, Stripes: 64, Seed: testSeed(1)}); err != nil {
		t.Fatal(err)
	}
	old := s.Records()
	for i := range old {
		for p := range maxPlaces + 1 {
			old[i].Value = bytes.ReplaceAll(old[i].Value, fmt.Appendf(nil, `,"place":%d}`, p), []byte("}"))
		}
	}
	loaded, err := Load(old)
	if err != nil {
		t.Fatal(err)
	}
	v := loaded.volumes.Get(loaded.idOf("db1")).clone()
	for i := range v.Legs {
		l := &v.Legs[i]
		if l.Place != 0 {
			t.Fatalf("%v has a place: the store is not an old one", l)
		}
		for l.Revision = 0; l.Revision < 7; l.Revision++ {
			if got, want := v.nsid(l), uint32(1+l.Column*4+l.Copy+256*int(l.Revision%3)); got != want {
				t.Errorf("%v at revision %d has nsid %d, want %d", l, l.Revision, got, want)
			}
		}
	}
	if got := fmt.Sprint(v.nsid(&Leg{Column: 63, Copy: 2, Revision: 2}), v.nsid(&Leg{Revision: 1}), v.nsid(&Leg{Column: 1, Copy: 1, Revision: 3})); got != "767 257 6" {
		t.Errorf("nsids %s, want 767 257 6", got)
	}
}

// A subsystem has the legs of one volume on one node. With any layout their namespace
// numbers differ from each other and from those of earlier revisions, and nvmet can report
// all of them.
func TestNamespacesOfManyMembersDiffer(t *testing.T) {
	for _, in := range []CreateVolume{
		{Copies: 3, Stripes: 64},
		{Data: 4, Parity: 2, Stripes: 64},
		{Data: 28, Parity: 4, Stripes: 32},
	} {
		in.Name, in.Size, in.Seed = "db1", 64*block.GiB, testSeed(2)
		s := grid(1, in.Copies+in.Data+in.Parity, 1, fixed(4096))
		in, err := in.normal()
		if err != nil {
			t.Fatal(err)
		}
		step := newTx(s, time.Unix(1, 0))
		if _, err := in.create(step); err != nil {
			t.Fatal(err)
		}
		step.commit()
		v := s.volumes.Get(s.idOf("db1")).clone()
		if err := v.check(); err != nil {
			t.Errorf("%v: %v", v.Layout, err)
		}
		seen := map[string]bool{}
		for i := range v.Legs {
			l := &v.Legs[i]
			for l.Revision = range uint64(3) {
				n := v.nsid(l)
				at := fmt.Sprintf("%s %d", l.Node, n)
				if n < 1 || n > 1024 || seen[at] {
					t.Fatalf("%v: %v has nsid %d, which is taken or not 1 to 1024", v.Layout, l, n)
				}
				seen[at] = true
			}
		}
	}
}

func TestLegsOfOnePlaceAreRefused(t *testing.T) {
	v := Volume{Layout: block.Layout{Stripes: 1, Copies: 2, Chunk: block.MiB}, Legs: []Leg{{Node: "t1", Copy: 1}, {Node: "t1", Place: 2}}}
	if v.check() == nil {
		t.Error("two legs on t1 share place 2, and nothing was said")
	}
	if v.Legs[1].Place = 3; v.check() != nil {
		t.Errorf("places 2 and 3: %v", v.check())
	}
}
