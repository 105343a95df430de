// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// namesake makes a device of another volume of the name db1, as another cluster's agent would; first ends it.
func (w *world) namesake() (first func()) {
	w.t.Helper()
	disk, link := filepath.Join(w.dir, "sys/block/dm-99"), filepath.Join(w.dir, "dev/weft/db1")
	err := errors.Join(os.MkdirAll(disk, 0o755), os.MkdirAll(filepath.Dir(link), 0o755), os.Symlink("../dm-99", link))
	if err != nil {
		w.t.Fatal(err)
	}
	return func() {
		w.t.Helper()
		if to, err := os.Readlink(link); err != nil || to != "../dm-99" {
			w.t.Errorf("the first volume's name leads to %q, %v; want ../dm-99", to, err)
		}
		if err := errors.Join(os.Remove(link), os.RemoveAll(disk)); err != nil {
			w.t.Fatal(err)
		}
	}
}

// named checks the name of the device, as it is reported and as it is in /dev.
func (w *world) named(when string, name block.VolumeName) {
	w.t.Helper()
	want := filepath.Join(w.dir, "dev/weft", string(name))
	if a := w.until(serving); a.Device != want {
		w.t.Errorf("%s: reported device = %q, want %q", when, a.Device, want)
	}
	if to, err := os.Readlink(want); err != nil || to != linkTo(w.find("weft-"+w.volume.String()).Number) {
		w.t.Errorf("%s: link = %q, %v; want it to lead to the device", when, to, err)
	}
}

func TestTheSecondVolumeOfANameGetsAnother(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		first := w.namesake()
		w.attach()
		stop := w.start()
		other := block.VolumeName("db1").Beside(w.volume)
		w.named("beside the first", other)

		first()
		stop()
		stop = w.start()
		w.named("after a restart without the first", other)

		stop()
		if err := os.Remove(filepath.Join(w.dir, "dev/weft", string(other))); err != nil { // as a boot does
			t.Fatal(err)
		}
		w.start()
		w.named("when its name has to be made again", other)

		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(clean)
		w.change(func(all *pb.InitiatorWanted) { all.Attachments = nil })
		time.Sleep(5 * time.Second)
		w.empty()
		w.mu.Lock()
		w.epoch = 2
		w.mu.Unlock()
		w.attach()
		w.named("attached again", "db1")
	})
}

func TestADeviceWhoseOtherNameCannotBeNotedIsNotNamed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, 1, 2)
		defer w.namesake()()
		w.attach()
		names := filepath.Join(w.dir, "state/names")
		if err := errors.Join(os.MkdirAll(filepath.Dir(names), 0o755), os.WriteFile(names, nil, 0o600)); err != nil {
			t.Fatal(err)
		}
		w.start()
		time.Sleep(10 * time.Second)
		if a := w.attachment(); a.Device != "" || a.Phase == serving {
			t.Errorf("without a note: %v, want no device", a)
		}
		if err := os.Remove(names); err != nil {
			t.Fatal(err)
		}
		w.named("once it can be noted", block.VolumeName("db1").Beside(w.volume))
	})
}
