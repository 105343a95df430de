// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"fmt"
	"math"
	"math/bits"
	"path/filepath"
	"runtime"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
)

// adminLimit is how long the kernel waits for the answer to an admin command before it resets the controller, instead
// of a minute. A process that is killed meanwhile does not end before that. And Linux 6.1 keeps a lost connection for
// so long: its error recovery waits for the keep-alive that has timed out, and looks at that again only when the next
// other command of the queue times out (BLK_EH_RESET_TIMER).
const adminLimit = 5 * time.Second

// Admin sends an admin command of Weft's own through a controller. Data goes to the target or comes from
// it, as the command says. The error of the target is an nvmetcp.Status. If ctx ends first the call is
// left behind: the kernel waits for the answer, and resets the controller if none comes within adminLimit.
func (t *Tree) Admin(ctx context.Context, c Controller, cmd nvmetcp.Command, data []byte) error {
	path, own := filepath.Join(t.dev, c.Name), append([]byte(nil), data...)
	object := fmt.Sprintf("%s, namespace %d", c.Name, cmd.NSID())
	err := t.await(ctx, "send an admin command to", object, func() error {
		fd, err := unix.Open(path, unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return &Error{Op: "open", Path: path, Err: err}
		}
		defer unix.Close(fd)
		return admin(fd, cmd, own)
	})
	if err == nil {
		copy(data, own)
	}
	return err
}

func admin(fd int, cmd nvmetcp.Command, data []byte) error {
	var pin runtime.Pinner
	defer pin.Unpin()
	if len(data) > 0 {
		pin.Pin(&data[0])
	}
	p := passed(cmd, data, adminLimit)
	status, _, errno := unix.Syscall(unix.SYS_IOCTL, uintptr(fd), ioctlAdmin, uintptr(unsafe.Pointer(&p)))
	if errno != 0 {
		return fmt.Errorf("send an admin command: %w", errno)
	}
	return nvmetcp.Status(status).Err()
}

// rangesPiece is the most bytes of one answer about ranges: room for 4095 of them.
const rangesPiece = 64 << 10

// Allocated asks through a controller which ranges of a head may hold data, from off on, in order. What it does not name
// before next reads as zeroes at some moment during the call; next is where the rest begins, the head's size if there
// is none. One call is about 65535 blocks at most, since a target may have to look at each for some time. The error of
// a target that does not know the command is an nvmetcp.Status.
func (t *Tree) Allocated(ctx context.Context, c Controller, h Head, off int64) (found []block.Range, next int64, err error) {
	size, err := t.number("block/" + h.Name + "/queue/logical_block_size")
	if err != nil {
		return nil, off, err
	}
	shift := uint8(bits.TrailingZeros64(size))
	end := min(int64(h.Size), off+math.MaxUint16<<shift)
	ask := nvmetcp.GetLBAStatus{NSID: h.NSID, Action: nvmetcp.LBAAllocated, Start: uint64(off) >> shift, Blocks: uint16((end - off) >> shift), Length: rangesPiece}
	data := make([]byte, rangesPiece)
	if err := t.Admin(ctx, c, ask.Command(), data); err != nil {
		return nil, off, err
	}
	list, err := nvmetcp.ParseLBAStatusList(data)
	if err == nil {
		found, next, err = list.In(off, end, shift)
	}
	if err != nil {
		return nil, off, fmt.Errorf("find the data of %s: %w", h.Name, err)
	}
	return found, next, nil
}
