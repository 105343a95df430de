// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"runtime"
	"slices"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/uring"
	"weft.dev/weft/proto/nvmetcp"
)

// passthrough is struct nvme_passthru_cmd, and struct nvme_uring_cmd, which has no result (Linux,
// include/uapi/linux/nvme_ioctl.h).
type passthrough struct {
	opcode, flags        uint8
	_                    uint16
	nsid, cdw2, cdw3     uint32
	metadata, address    uint64
	metadataLen, dataLen uint32
	cdw                  [6]uint32 // 10 to 15
	timeout, result      uint32    // timeout in milliseconds; 0: the kernel's own
}

const (
	ioctlAdmin = 0xc0484e41 // NVME_IOCTL_ADMIN_CMD
	uringIO    = 0xc0484e80 // NVME_URING_CMD_IO
)

func passed(cmd nvmetcp.Command, data []byte, limit time.Duration) passthrough {
	p := passthrough{opcode: uint8(cmd.Opcode()), nsid: cmd.NSID(), dataLen: uint32(len(data)), timeout: uint32(limit.Milliseconds())}
	for i := range p.cdw {
		p.cdw[i] = cmd.CDW(10 + i)
	}
	if len(data) > 0 {
		p.address = uint64(uintptr(unsafe.Pointer(&data[0])))
	}
	return p
}

// errNoAnswer says that a command is to be sent again: no path was live, the connection was lost before the target
// answered, or the answer was that it was not carried out.
var errNoAnswer = errors.New("the target has not answered")

// errNotPassed says that this kernel passes no commands of namespaces through io_uring.
var errNotPassed = errors.New("commands cannot be passed through here")

// errAbandoned says that it is not known whether a command has ended.
var errAbandoned = errors.New("the command is left to the kernel")

// pass sends a command through a head's character device (/dev/ng0n1), and waits for its answer for limit
// at most; then the kernel resets the controller. The kernel does not repeat such commands, nor keep them
// while there is no path.
//
// It goes through io_uring, and not NVME_IOCTL_IO_CMD, for two reasons. The ioctl holds the head's SRCU lock
// until the answer, and a new path becomes usable only when that is released (nvme_mpath_set_live); and no
// signal ends it, so that a process that was killed in it would stay until the answer. With io_uring both are so
// only while all tags of the path's queue are in use: then a worker of the kernel waits for one.
func (t *Tree) pass(generic int, cmd nvmetcp.Command, data []byte, limit time.Duration) error {
	ring, err := t.rings.get()
	if err != nil {
		return err
	}
	var pin runtime.Pinner
	if len(data) > 0 {
		pin.Pin(&data[0])
	}
	s := ring.Next()
	s.Opcode, s.FD, s.Off = uring.OpCmd, int32(generic), uringIO
	*(*passthrough)(unsafe.Pointer(&s.Cmd)) = passed(cmd, data, limit)
	runtime.LockOSThread() // the kernel completes a command on the thread that has submitted it
	result, err := ring.Do()
	runtime.UnlockOSThread()
	if err != nil { // the kernel may still write to data
		t.mu.Lock()
		t.abandoned = append(t.abandoned, &pin)
		t.mu.Unlock()
		ring.Close()
		return fmt.Errorf("%w: %w", errAbandoned, err)
	}
	pin.Unpin()
	t.rings.put(ring)
	return outcome(result)
}

// outcome is the error of a command with this result of io_uring: an errno, or a status. The kernel would send
// ordinary I/O again after some statuses, on another path or on the same one.
func outcome(result int32) error {
	switch status := nvmetcp.Status(result); {
	case result < 0 && refuses(unix.Errno(-result)):
		return fmt.Errorf("%w: %w", errNotPassed, unix.Errno(-result))
	case result < 0:
		return fmt.Errorf("%w: %w", errNoAnswer, unix.Errno(-result))
	case status.IsPath() && !status.DNR(), status.Retryable():
		return fmt.Errorf("%w: %w", errNoAnswer, status)
	default:
		return status.Err()
	}
}

// refuses reports whether an error of io_uring means that it does not pass commands here: its driver cannot, or a
// policy forbids it.
func refuses(err error) bool {
	return slices.ContainsFunc([]error{unix.EOPNOTSUPP, unix.ENOTTY, unix.ENOSYS, unix.EPERM, unix.EACCES}, func(e error) bool { return errors.Is(err, e) })
}

// rings keeps rings without a command for the next ones: the kernel takes a while to end a ring.
type rings chan *uring.Ring

func (r rings) get() (*uring.Ring, error) {
	select {
	case ring := <-r:
		return ring, nil
	default:
	}
	ring, err := uring.New(1, uring.SQE128|uring.CQE32)
	if err != nil && (refuses(err) || errors.Is(err, unix.EINVAL)) { // EINVAL: not in such sizes
		return nil, fmt.Errorf("%w: %w", errNotPassed, err)
	}
	return ring, err
}

func (r rings) put(ring *uring.Ring) {
	select {
	case r <- ring:
	default:
		ring.Close()
	}
}
