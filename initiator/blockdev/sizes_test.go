// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"testing"
	"unsafe"
)

// The kernel checks some of these sizes, and silently misinterprets others.
func TestTheDriversStructsHaveItsSizes(t *testing.T) {
	for what, c := range map[string][2]uintptr{
		"ublksrv_ctrl_dev_info": {unsafe.Sizeof(ublkInfo{}), 64},
		"ublk_params":           {unsafe.Sizeof(ublkParams{}), 64},
		"ublksrv_io_desc":       {unsafe.Sizeof(ublkDesc{}), 24},
		"ublksrv_ctrl_cmd":      {unsafe.Offsetof(ublkCommand{}.number), ublkCommandSize},
		"fuse_uring_req_header": {unsafe.Offsetof(fuseEntryHeader{}.memory), fuseEntryHeaderSize},
		"a header's room":       {unsafe.Sizeof(fuseEntryHeader{}), 512},
		"discard":               {unsafe.Offsetof(ublkParams{}.discardUnit), 44},
		"dev_sectors":           {unsafe.Offsetof(ublkParams{}.sectors), 24},
	} {
		if c[0] != c[1] {
			t.Errorf("%s: %d bytes, want %d", what, c[0], c[1])
		}
	}
	if got := ublkCode(ublkAddDev, ublkCommandSize, true); got != 0xc0207504 {
		t.Errorf("ADD_DEV = %#x, want 0xc0207504", got)
	}
	if got := ublkCode(ublkGetDevInfo, ublkCommandSize, true); got != 0x80207502 {
		t.Errorf("GET_DEV_INFO = %#x, want 0x80207502", got)
	}
	if got := ublkCode(ublkFetch, 16, true); got != 0xc0107520 {
		t.Errorf("FETCH_REQ = %#x, want 0xc0107520", got)
	}
}
