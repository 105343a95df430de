// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func ring(t *testing.T, flags uint32) *uring {
	t.Helper()
	r, err := newURing(8, flags)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skipf("no io_uring here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.close)
	return r
}

func TestARingWaitsForAnEvent(t *testing.T) {
	for _, flags := range []uint32{0, uringSQE128} {
		r := ring(t, flags)
		event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(event)
		zero := uint64(0)
		woken := ublkMemory(&zero)
		defer woken.free()
		for round := range uint64(20) { // more than the ring has entries
			s := r.next()
			s.opcode, s.fd, s.addr, s.len, s.userData = uringOpRead, int32(event), woken.addr(), 8, 100+round
			if err := r.enter(false); err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(time.Millisecond, func() { unix.Write(event, []byte{7, 0, 0, 0, 0, 0, 0, 0}) })
			ends := 0
			for ends == 0 {
				if err := r.enter(true); err != nil {
					t.Fatal(err)
				}
				r.ended(func(data uint64, res int32) {
					ends++
					if data != 100+round || res != 8 || *(*uint64)(woken.pointer()) != 7 {
						t.Errorf("round %d ended as %d with %d, read %d", round, data, res, *(*uint64)(woken.pointer()))
					}
				})
			}
		}
	}
}

func TestARefusedCommandEnds(t *testing.T) {
	r := ring(t, uringSQE128)
	s := r.next()
	s.opcode, s.fd, s.off = uringOpCmd, -1, 1
	ends := false
	for !ends {
		if err := r.enter(true); err != nil {
			t.Fatal(err)
		}
		r.ended(func(_ uint64, res int32) { ends = res < 0 })
	}
}

// The kernel checks some of these sizes, and silently misinterprets others.
func TestTheDriversStructsHaveItsSizes(t *testing.T) {
	for what, c := range map[string][2]uintptr{
		"io_uring_params":       {unsafe.Sizeof(uringParams{}), 120},
		"io_uring_sqe":          {unsafe.Sizeof(uringSQE{}), 64},
		"io_uring_cqe":          {unsafe.Sizeof(uringCQE{}), 16},
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

// A mapping would keep the ring as long as any thread of a killed process lives.
func TestARingIsNotMapped(t *testing.T) {
	var own uring
	own.entrySize = 64
	if err := own.ownMemory(256, 0); err != nil {
		t.Skipf("this kernel takes no memory of ours for a ring: %v", err)
	}
	own.close()
	ring(t, 0)
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(maps), "io_uring") {
		t.Error("the ring is mapped")
	}
}

func TestARingTakesMessagesOfOtherThreads(t *testing.T) {
	for _, flags := range []uint32{0, fuseRingFlags} {
		done := make(chan error, 1)
		go onOwnThread(func() {
			done <- func() error {
				r, err := newURing(8, flags)
				if err != nil {
					return err
				}
				defer r.close()
				if err := r.message(0); err != nil {
					return err
				}
				got, want := uint64(0), uint64(0)
				for round := range uint64(50) { // more than the ring has entries
					if round > 0 {
						time.AfterFunc(time.Millisecond, func() { _ = r.message(round) })
					}
					if err := r.enter(true); err != nil {
						return err
					}
					r.ended(func(data uint64, _ int32) { got += data; want += round })
				}
				if got != want {
					return fmt.Errorf("messages add up to %d, want %d", got, want)
				}
				return nil
			}()
		})
		if err := <-done; errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
			t.Skipf("this kernel's rings take no messages: %v", err)
		} else if err != nil {
			t.Error(err)
		}
	}
}
