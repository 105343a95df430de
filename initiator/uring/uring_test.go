// SPDX-License-Identifier: Apache-2.0

package uring

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

func ring(t *testing.T, flags uint32) *Ring {
	t.Helper()
	r, err := New(8, flags)
	if errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
		t.Skipf("no io_uring here: %v", err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Close)
	return r
}

func TestARingWaitsForAnEvent(t *testing.T) {
	for _, flags := range []uint32{0, SQE128, SQE128 | CQE32} {
		r := ring(t, flags)
		event, err := unix.Eventfd(0, unix.EFD_CLOEXEC)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Close(event)
		woken, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
		if err != nil {
			t.Fatal(err)
		}
		defer unix.Munmap(woken)        //nolint:errcheck // the process ends
		for round := range uint64(20) { // more than the ring has entries
			s := r.Next()
			s.Opcode, s.FD, s.Addr, s.Len, s.UserData = OpRead, int32(event), uint64(uintptr(unsafe.Pointer(&woken[0]))), 8, 100+round
			if err := r.Enter(false); err != nil {
				t.Fatal(err)
			}
			time.AfterFunc(time.Millisecond, func() { unix.Write(event, []byte{7, 0, 0, 0, 0, 0, 0, 0}) })
			ends := 0
			for ends == 0 {
				if err := r.Enter(true); err != nil {
					t.Fatal(err)
				}
				r.Ended(func(data uint64, res int32) {
					ends++
					if data != 100+round || res != 8 || woken[0] != 7 {
						t.Errorf("round %d ended as %d with %d, read %d", round, data, res, woken[0])
					}
				})
			}
		}
	}
}

func TestARefusedCommandEnds(t *testing.T) {
	r := ring(t, SQE128)
	s := r.Next()
	s.Opcode, s.FD, s.Off = OpCmd, -1, 1
	if res, err := r.Do(); err != nil || res >= 0 {
		t.Errorf("Do = %d, %v; want a refusal", res, err)
	}
}

// A mapping would keep the ring as long as any thread of a killed process lives.
func TestARingIsNotMapped(t *testing.T) {
	own := newRing(0)
	if err := own.ownMemory(256, 0); err != nil {
		t.Skipf("this kernel takes no memory of ours for a ring: %v", err)
	}
	own.Close()
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
	for _, flags := range []uint32{0, SQE128 | SingleIssuer | DeferTaskrun} {
		done := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // SingleIssuer
			done <- func() error {
				r, err := New(8, flags)
				if err != nil {
					return err
				}
				defer r.Close()
				if err := r.Message(0); err != nil {
					return err
				}
				got, want := uint64(0), uint64(0)
				for round := range uint64(50) { // more than the ring has entries
					if round > 0 {
						time.AfterFunc(time.Millisecond, func() { _ = r.Message(round) })
					}
					if err := r.Enter(true); err != nil {
						return err
					}
					r.Ended(func(data uint64, _ int32) { got += data; want += round })
				}
				if got != want {
					return fmt.Errorf("messages add up to %d, want %d", got, want)
				}
				return nil
			}()
		}()
		if err := <-done; errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM) {
			t.Skipf("this kernel's rings take no messages: %v", err)
		} else if err != nil {
			t.Error(err)
		}
	}
}

// The kernel does not check all of these sizes.
func TestStructsHaveTheKernelsSizes(t *testing.T) {
	for what, c := range map[string][2]uintptr{
		"io_uring_params": {unsafe.Sizeof(params{}), 120},
		"io_uring_sqe":    {unsafe.Sizeof(SQE{}), 64},
		"io_uring_cqe":    {unsafe.Sizeof(CQE{}), 16},
	} {
		if c[0] != c[1] {
			t.Errorf("%s: %d bytes, want %d", what, c[0], c[1])
		}
	}
}
