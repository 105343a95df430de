// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"encoding/hex"
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/nvmetcp"
)

// guestDrive is QEMU's NVMe drive, which answers Get Log Page 02h.
const guestDrive = "/dev/nvme0n1"

func TestTheKernelPassesAHealthLogOn(t *testing.T) {
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("needs an NVMe drive: it runs in a virtual machine")
	}
	smart, err := Smart("/", guestDrive)
	must(t, err)
	if smart.GetCelsius() < 1 || smart.GetCelsius() > 100 || smart.GetCriticalWarning() != 0 {
		t.Errorf("the health log of %s is %v", guestDrive, smart)
	}
	f, err := os.Open("/dev/nvme0")
	must(t, err)
	defer f.Close()
	page, err := logPage(f, nvmetcp.GetLog{ID: nvmetcp.LogSmart, NSID: nvmetcp.AllNamespaces, Length: nvmetcp.SmartSize})
	must(t, err)
	t.Logf("%v, from\n%s", smart, hex.Dump(page))
	if _, err := logPage(f, nvmetcp.GetLog{ID: 0xbf, NSID: nvmetcp.AllNamespaces, Length: nvmetcp.SmartSize}); err == nil {
		t.Error("a log page that does not exist was read")
	}
	before := CompletedIOs("/", guestDrive)
	d, err := OpenDevice(guestDrive, ReadOnly)
	must(t, err)
	_, err = d.ReadAt(make([]byte, 4096), 0)
	must(t, errors.Join(err, d.Close()))
	if n := CompletedIOs("/", guestDrive).Since(before); n.Count == 0 {
		t.Errorf("after a read the counters have grown by %v", n)
	}
}

// A device that takes no NVMe commands says so, and nothing is made up.
func TestAnotherDeviceIsNoController(t *testing.T) {
	f, err := os.Open(os.DevNull)
	must(t, err)
	defer f.Close()
	if page, err := logPage(f, nvmetcp.GetLog{ID: nvmetcp.LogSmart, Length: nvmetcp.SmartSize}); err == nil || errors.Is(err, unix.EFAULT) {
		t.Errorf("%s answered %x, %v", os.DevNull, page, err)
	}
}
