// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// passage takes a descriptor from an unshared thread to the process.
type passage struct{ in, out int }

func newPassage() (*passage, error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("make a pair of sockets: %w", err)
	}
	return &passage{fds[0], fds[1]}, nil
}

// send sends a descriptor of the calling thread, which must have been given p.in.
func (p *passage) send(fd int) error {
	if err := unix.Sendmsg(p.in, []byte{0}, unix.UnixRights(fd), nil, 0); err != nil {
		return fmt.Errorf("pass a descriptor to the process: %w", err)
	}
	return nil
}

// receive returns the descriptor that was sent, registered as serving.
func (p *passage) receive() (int, error) {
	fds, err := serving.open(func() ([]int, error) {
		space := make([]byte, unix.CmsgSpace(4))
		_, n, _, _, err := unix.Recvmsg(p.out, make([]byte, 1), space, unix.MSG_CMSG_CLOEXEC)
		if err != nil {
			return nil, err
		}
		messages, err := unix.ParseSocketControlMessage(space[:n])
		if err != nil || len(messages) != 1 {
			return nil, errors.Join(err, errors.New("no descriptor came"))
		}
		return unix.ParseUnixRights(&messages[0])
	})
	if err != nil {
		return -1, fmt.Errorf("receive a descriptor: %w", err)
	}
	return fds[0], nil
}

func (p *passage) close() { closeAll([]int{p.in, p.out}) }
