// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"errors"
	"os"
	"testing"
	"time"

	spec "github.com/container-storage-interface/spec/lib/go/csi"
	"golang.org/x/sys/unix"

	"weft.dev/weft/csi"
	"weft.dev/weft/proto/pb"
)

// Data written to a raw volume, by a pod or by hand, must not be taken for an empty volume
// when a file system is requested later, wherever the data is. That changes only when an
// operator declares the data unused.
func TestDataOfARawDeviceIsNotFormatted(t *testing.T) {
	needDevices(t)
	for name, write := range map[string]func(*podVolume, *cluster){"a pod's": writeAsAPod, "written by hand": writeByHand} {
		for _, recorded := range []string{"", "formatting ext4"} {
			t.Run(name+", recorded "+recorded, func(t *testing.T) {
				t.Parallel()
				c := newCluster(t, []string{"t1", "t2"}, []string{"n1"})
				controller := c.controller(csi.Config{})
				id := c.newVolume(controller, raw)
				c.record(id, recorded)
				write(c.onNode("n1", controller, id, raw), c)
				if is := c.volume(id).Formatted; is != "raw" {
					t.Errorf("recorded is %q", is)
				}

				pod := c.onNode("n1", controller, id, fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, "ext4"))
				pod.attach()
				refused(t, "stage as a file system", pod.stage(), "raw device", "--formatted none")
				if _, err := c.manager.UpdateVolume(t.Context(), &pb.UpdateVolumeRequest{Volume: id, Formatted: "none"}); err == nil {
					t.Error("the record of an attached volume was cleared")
				}
				pod.detach()
				c.record(id, "none")
				pod.attach()
				pod.mount()
				pod.unmount()
				pod.detach()
				c.nothingMounted()
			})
		}
	}
}

func (c *cluster) record(id, formatted string) {
	c.t.Helper()
	if _, err := c.manager.UpdateVolume(c.t.Context(), &pb.UpdateVolumeRequest{Volume: id, Formatted: formatted}); err != nil {
		c.t.Fatal(err)
	}
}

func writeAsAPod(p *podVolume, _ *cluster) {
	p.t.Helper()
	p.attach()
	p.mount()
	writeInTheMiddle(p.t, p.target)
	p.unmount()
	p.detach()
}

func writeByHand(p *podVolume, c *cluster) {
	p.t.Helper()
	if _, err := c.manager.Attach(p.t.Context(), &pb.AttachRequest{Volume: p.id, Node: p.node}); err != nil {
		p.t.Fatal(err)
	}
	c.attached(p.id, p.node)
	writeInTheMiddle(p.t, c.volume(p.id).Attachment.Device)
	p.detach()
}

// writeInTheMiddle writes to a place where no file system has its signature.
func writeInTheMiddle(t testing.TB, device string) {
	t.Helper()
	f, err := os.OpenFile(device, os.O_RDWR|unix.O_SYNC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteAt([]byte("data of a data base"), 10<<20)
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// If a volume was granted to a node that was lost before it made the file system, the next
// node makes it.
func TestANodeThatIsLostBeforeItFormatsLeavesAnEmptyVolume(t *testing.T) {
	needDevices(t)
	c := newCluster(t, []string{"t1", "t2"}, []string{"n1", "n2"})
	controller := c.controller(csi.Config{DetachGrace: time.Second})
	writer := fileSystem(spec.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER, "ext4")
	id := c.newVolume(controller, writer)
	lost := c.onNode("n1", controller, id, writer)
	lost.attach()
	c.attached(id, "n1")
	c.nodes["n1"]()
	lost.detach()
	if is := c.volume(id).Formatted; is != "" {
		t.Errorf("recorded is %q", is)
	}
	next := c.onNode("n2", controller, id, writer)
	next.attach()
	next.mount()
	next.unmount()
	next.detach()
	c.nothingMounted()
}
