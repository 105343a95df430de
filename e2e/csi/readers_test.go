// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/pb"
)

// A writer synced data, and then its node was lost: the data may be only in the journal.
// Readers of the shared volume either see it, or are refused with a message that says how
// to make it visible.
func TestReadersSeeWhatWasSyncedBeforeACrash(t *testing.T) {
	needDevices(t)
	for _, fsType := range []string{"ext4", "xfs"} {
		for copies := range 2 {
			t.Run(fmt.Sprint(fsType, copies+1), func(t *testing.T) {
				t.Parallel()
				readersAfterACrash(t, fsType, copies+1)
			})
		}
	}
}

func readersAfterACrash(t *testing.T, fsType string, copies int) {
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	controller := c.controller(csi.Config{DetachGrace: time.Second})
	writer := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, fsType)
	readers := fileSystem(spec.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY, "")
	id := c.newVolumeOf(controller, writer, copies)
	old := c.onNode("n1", controller, id, writer)
	old.attach()
	old.mount()
	syncFile(t, filepath.Join(old.target, "data"), "acknowledged")
	c.nodes["n1"]()
	old.detach()

	next := c.onNode("n2", controller, id, readers)
	if copies > 1 {
		_, err := controller.ControllerPublishVolume(within(t, 30*time.Second), &spec.ControllerPublishVolumeRequest{VolumeId: id, NodeId: "n2", VolumeCapability: readers})
		refused(t, "publish to readers", err, "copies may differ", "mount its file system there for writing")
		// Following only half of the message makes the copies equal, but leaves the
		// journal.
		if _, err := c.manager.Attach(t.Context(), &pb.AttachRequest{Volume: id, Node: "n2"}); err != nil {
			t.Fatal(err)
		}
		c.attached(id, "n2")
		next.detach()
	}
	next.attach()
	refused(t, "stage for readers", next.stage(), "journal", "ReadWriteOnce")
	next.unmount()
	next.detach()

	remedy := c.onNode("n2", controller, id, writer)
	remedy.attach()
	remedy.mount()
	remedy.unmount()
	remedy.detach()
	next.attach()
	next.mount()
	if got, err := os.ReadFile(filepath.Join(next.target, "data")); err != nil || string(got) != "acknowledged" {
		t.Errorf("a reader finds %q, %v", got, err)
	}
	next.unmount()
	next.detach()
	old.unmount()
	c.nothingMounted()
}

// syncFile writes a file and syncs it.
func syncFile(t *testing.T, path, text string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(text)
	if err := errors.Join(err, f.Sync(), f.Close()); err != nil {
		t.Fatal(err)
	}
}

// refused checks that a call failed with FailedPrecondition and the given words.
func refused(t *testing.T, doing string, err error, words ...string) {
	t.Helper()
	if status.Code(err) != codes.FailedPrecondition {
		t.Fatalf("%s = %v, want FailedPrecondition", doing, err)
	}
	for _, word := range words {
		if !strings.Contains(err.Error(), word) {
			t.Errorf("%s = %v, want it to say %q", doing, err, word)
		}
	}
}
