// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"math/bits"
	"os"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
	"weft.dev/weft/proto/block"
)

// The commands of /dev/ublk-control (linux/ublk_cmd.h).
const (
	ublkGetDevInfo    = 0x02
	ublkAddDev        = 0x04
	ublkDelDev        = 0x05
	ublkStartDev      = 0x06
	ublkStopDev       = 0x07
	ublkSetParams     = 0x08
	ublkStartRecovery = 0x10
	ublkEndRecovery   = 0x11
	ublkUpdateSize    = 0x15 // from Linux 6.16 on

	ublkFetch  = 0x20
	ublkCommit = 0x21

	ublkRecovery        = 1 << 3 // flags of the device
	ublkRecoveryReissue = 1 << 4
	ublkIoctlEncode     = 1 << 6
)

// ublkCode encodes a command like an ioctl, as newer kernels require; kernels before Linux 6.4
// know only the plain number.
func ublkCode(number uint32, size uintptr, encoded bool) uint32 {
	if !encoded {
		return number
	}
	direction := uint32(3) // read and write
	if number == ublkGetDevInfo {
		direction = 2
	}
	return direction<<30 | uint32(size)<<16 | 'u'<<8 | number
}

// ublkInfo is struct ublksrv_ctrl_dev_info.
type ublkInfo struct {
	queues, depth, state, _ uint16
	maxIO                   uint32
	id                      uint32
	pid                     int32
	_                       uint32
	flags, serverFlags      uint64
	uid, gid                uint32
	_                       [2]uint64
}

// ublkParams is the part of struct ublk_params that is used.
type ublkParams struct {
	len, types uint32

	attrs                             uint32
	logical, physical, optimal, minIO uint8 // as powers of two
	maxSectors, _                     uint32
	sectors, _                        uint64

	_, discardUnit                    uint32
	maxDiscardSectors, maxZeroSectors uint32
	maxDiscardSegments, _             uint16
	_                                 uint32
}

const (
	ublkParamBasic   = 1 << 0
	ublkParamDiscard = 1 << 1

	ublkAttrReadOnly = 1 << 0
	ublkAttrCache    = 1 << 2
	ublkAttrFUA      = 1 << 3
)

func ublkParamsOf(g block.Geometry, maxIO uint32) ublkParams {
	shift := func(s block.Size) uint8 { return uint8(bits.TrailingZeros64(uint64(s))) }
	p := ublkParams{
		len: uint32(unsafe.Sizeof(ublkParams{})), types: ublkParamBasic,
		logical: shift(g.BlockSize), physical: shift(max(g.BlockSize, 4096)), optimal: shift(max(g.BlockSize, 4096)), minIO: shift(max(g.BlockSize, 4096)),
		maxSectors: maxIO / uint32(block.SectorSize), sectors: g.Size.Sectors(),
	}
	if g.VolatileCache {
		p.attrs = ublkAttrCache | ublkAttrFUA
	}
	if g.ReadOnly {
		p.attrs |= ublkAttrReadOnly
	}
	if g.DiscardUnit > 0 {
		most := uint32(block.GiB.Sectors())
		p.types |= ublkParamDiscard
		p.discardUnit = uint32(max(g.DiscardUnit, g.BlockSize))
		p.maxDiscardSectors, p.maxZeroSectors, p.maxDiscardSegments = most, most, 1
	}
	return p
}

// ublkCommand is struct ublksrv_ctrl_cmd.
type ublkCommand struct {
	id     uint32
	queue  uint16
	len    uint16
	addr   uint64
	data   uint64
	path   uint16
	_      uint16
	_      uint32
	number uint32 // the command itself, not part of the struct
}

const ublkCommandSize = 32

// ublkControl is /dev/ublk-control with a ring to send commands on. Use its methods from one
// thread, and an unshared one: starting a device reads from it.
type ublkControl struct {
	ring    *uring.Ring
	fd      int
	encoded bool
}

// withUBLK calls f with the control device, on an unshared thread.
func withUBLK(sys system, f func(*ublkControl) error) error {
	return unshared(func() error {
		fd, err := unix.Open(sys.control("ublk-control"), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open ublk-control: %w", err)
		}
		defer unix.Close(fd)
		ring, err := uring.New(4, uring.SQE128)
		if err != nil {
			return err
		}
		defer ring.Close()
		return f(&ublkControl{ring: ring, fd: fd, encoded: true})
	})
}

// do sends a command and waits for its completion. Kernels that do not know the newer encoding
// get the older one.
func (c *ublkControl) do(cmd ublkCommand) error {
	res, err := c.send(cmd)
	if err != nil {
		return err
	}
	if c.encoded && (res == -int32(unix.EOPNOTSUPP) || res == -int32(unix.EINVAL)) && cmd.number < ublkUpdateSize {
		c.encoded = false
		again, err := c.send(cmd)
		if err != nil {
			return err
		}
		if c.encoded = again == -int32(unix.EOPNOTSUPP); !c.encoded {
			res = again
		}
	}
	if res < 0 {
		return unix.Errno(-res)
	}
	return nil
}

func (c *ublkControl) send(cmd ublkCommand) (int32, error) {
	s := c.ring.Next()
	s.Opcode, s.FD, s.Off = uring.OpCmd, int32(c.fd), uint64(ublkCode(cmd.number, ublkCommandSize, c.encoded))
	copy(unsafe.Slice(&s.Cmd[0], ublkCommandSize), unsafe.Slice((*byte)(unsafe.Pointer(&cmd)), ublkCommandSize))
	return c.ring.Do()
}

func (c *ublkControl) add(info *ublkInfo) error {
	memory := ublkMemory(info)
	defer memory.free()
	if err := c.do(ublkCommand{number: ublkAddDev, id: info.id, queue: ^uint16(0), len: uint16(unsafe.Sizeof(*info)), addr: memory.addr()}); err != nil {
		return fmt.Errorf("add a ublk device: %w", err)
	}
	*info = *(*ublkInfo)(memory.pointer())
	return nil
}

func (c *ublkControl) info(id uint32) (info ublkInfo, err error) {
	memory := ublkMemory(&info)
	defer memory.free()
	if err := c.do(ublkCommand{number: ublkGetDevInfo, id: id, queue: ^uint16(0), len: uint16(unsafe.Sizeof(info)), addr: memory.addr()}); err != nil {
		return info, fmt.Errorf("read ublk device %d: %w", id, err)
	}
	return *(*ublkInfo)(memory.pointer()), nil
}

func (c *ublkControl) setParams(id uint32, p ublkParams) error {
	memory := ublkMemory(&p)
	defer memory.free()
	if err := c.do(ublkCommand{number: ublkSetParams, id: id, queue: ^uint16(0), len: uint16(unsafe.Sizeof(p)), addr: memory.addr()}); err != nil {
		return fmt.Errorf("set up ublk device %d: %w", id, err)
	}
	return nil
}

// simple sends a command that takes a number and returns nothing.
func (c *ublkControl) simple(what string, number, id uint32, data uint64) error {
	if err := c.do(ublkCommand{number: number, id: id, queue: ^uint16(0), data: data}); err != nil {
		return fmt.Errorf("%s ublk device %d: %w", what, id, err)
	}
	return nil
}

func (c *ublkControl) start(id uint32) error {
	return c.simple("start", ublkStartDev, id, uint64(os.Getpid()))
}

// remove ends a device and deletes it. It waits until the device's users have closed it, or
// the ring is closed.
func (c *ublkControl) remove(id uint32) error {
	err := errors.Join(c.simple("stop", ublkStopDev, id, 0), c.simple("delete", ublkDelDev, id, 0))
	if errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// kernelMemory is memory whose address the kernel gets as a number; it is not Go's, which
// could move or reclaim it.
type kernelMemory []byte

func ublkMemory[T any](v *T) kernelMemory {
	m, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON)
	if err != nil {
		panic(fmt.Sprintf("map one page: %v", err))
	}
	*(*T)(unsafe.Pointer(&m[0])) = *v
	return m
}

func (m kernelMemory) pointer() unsafe.Pointer { return unsafe.Pointer(&m[0]) }
func (m kernelMemory) addr() uint64            { return uint64(uintptr(m.pointer())) }
func (m kernelMemory) free()                   { _ = unix.Munmap(m) }
