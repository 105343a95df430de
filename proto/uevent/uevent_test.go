// SPDX-License-Identifier: Apache-2.0

package uevent

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestParse(t *testing.T) {
	message := "add@/devices/virtual/block/loop0\x00ACTION=add\x00DEVPATH=/devices/virtual/block/loop0\x00SUBSYSTEM=block\x00DEVNAME=loop0\x00EMPTY=\x00"
	want := Event{Action: "add", Path: "/devices/virtual/block/loop0", Vars: map[string]string{
		"ACTION": "add", "DEVPATH": "/devices/virtual/block/loop0", "SUBSYSTEM": "block", "DEVNAME": "loop0", "EMPTY": "",
	}}
	got, ok := Parse([]byte(message))
	if diff := cmp.Diff(want, got); !ok || diff != "" {
		t.Errorf("Parse = %v (-want +got):\n%s", ok, diff)
	}
	for _, bad := range []string{"", "\x00", "libudev\x00\xfe\xed\xca\xfe", "add", "@/x", "add@x"} {
		if e, ok := Parse([]byte(bad)); ok {
			t.Errorf("Parse(%q) = %+v, want none", bad, e)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte("add@/x\x00A=b\x00"))
	f.Fuzz(func(t *testing.T, b []byte) {
		if e, ok := Parse(b); ok && (e.Action == "" || e.Path == "" || e.Vars == nil) {
			t.Errorf("Parse(%q) = %+v", b, e)
		}
	})
}

func TestWatchEndsWithItsContext(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error)
	go func() { ended <- Watch(ctx, func(Event) {}) }()
	time.AfterFunc(50*time.Millisecond, cancel)
	select {
	case err := <-ended:
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Skipf("no kernel events here: %v", err)
		}
	case <-time.After(5 * time.Second):
		t.Fatal("Watch continues after its context has ended")
	}
}
