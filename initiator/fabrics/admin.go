// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/nvmetcp"
)

// passthrough is struct nvme_passthru_cmd (Linux, include/uapi/linux/nvme_ioctl.h).
type passthrough struct {
	opcode, flags        uint8
	_                    uint16
	nsid, cdw2, cdw3     uint32
	metadata, address    uint64
	metadataLen, dataLen uint32
	cdw                  [6]uint32 // 10 to 15
	timeout, result      uint32
}

// The ioctls that pass a command through (the same file).
const (
	ioctlAdmin = 0xc0484e41 // NVME_IOCTL_ADMIN_CMD, of a controller
	ioctlIO    = 0xc0484e43 // NVME_IOCTL_IO_CMD, of a namespace or a head
)

// ErrNoAnswer says that the kernel itself has ended a command: no path was live, or the connection was
// lost before the target answered.
var ErrNoAnswer = errors.New("the target has not answered")

// Admin sends an admin command of Weft's own through a controller. Data goes to the target or comes from
// it, as the command says. The error of the target is an nvmetcp.Status. If ctx ends first the call is
// left behind: the kernel waits for the answer, and resets the controller if none comes for a minute.
func (t *Tree) Admin(ctx context.Context, c Controller, cmd nvmetcp.Command, data []byte) error {
	path, own := filepath.Join(t.dev, c.Name), append([]byte(nil), data...)
	object := fmt.Sprintf("%s, namespace %d", c.Name, cmd.NSID())
	err := t.await(ctx, "send an admin command to", object, func() error {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return &Error{Op: "open", Path: path, Err: err}
		}
		defer unix.Close(fd)
		return pass(fd, ioctlAdmin, cmd, own, 0)
	})
	if err == nil {
		copy(data, own)
	}
	return err
}

// Answered reports whether the outcome of a command is the target's word: success, or a status. Everything else
// happened on this host.
func Answered(err error) bool {
	_, status := errors.AsType[nvmetcp.Status](err)
	return err == nil || status
}

// pass sends a command and waits for its answer, for limit at most (0: as long as the kernel does); then the
// kernel resets the controller. The kernel does not repeat such commands, nor keep them while there is no
// path. So the wait, which no signal ends, is short.
func pass(fd int, ioctl uintptr, cmd nvmetcp.Command, data []byte, limit time.Duration) error {
	p := passthrough{opcode: uint8(cmd.Opcode()), nsid: cmd.NSID(), dataLen: uint32(len(data)), timeout: uint32(limit.Milliseconds())}
	for i := range p.cdw {
		p.cdw[i] = cmd.CDW(10 + i)
	}
	var pin runtime.Pinner
	defer pin.Unpin()
	if len(data) > 0 {
		pin.Pin(&data[0])
		p.address = uint64(uintptr(unsafe.Pointer(&data[0])))
	}
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctl, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return fmt.Errorf("%w: %w", ErrNoAnswer, errno)
	}
	switch s := nvmetcp.Status(status); s.Code() {
	case nvmetcp.HostPathingError, nvmetcp.HostAborted: // what the kernel itself says
		return fmt.Errorf("%w: %v", ErrNoAnswer, s)
	default:
		return s.Err()
	}
}
