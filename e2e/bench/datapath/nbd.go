// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
)

// nbd is the Network Block Device protocol: fixed newstyle negotiation with
// NBD_OPT_GO, then simple replies
// (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md).
type nbd struct {
	export string
	fua    bool // writes are durable before they are answered
}

const (
	nbdOptionMagic  = 0x49484156454F5054
	nbdReplyMagic   = 0x3e889045565a9
	nbdRequestMagic = 0x25609513
	nbdSimpleMagic  = 0x67446698
	nbdOptGo        = 7
	nbdRepAck       = 1
	nbdRepError     = 1 << 31
	nbdFUA          = 1 << 16
)

func (n nbd) greet(c pipe) error {
	hello := make([]byte, 18)
	if _, err := io.ReadFull(c, hello); err != nil {
		return err
	}
	if string(hello[:8]) != "NBDMAGIC" || binary.BigEndian.Uint64(hello[8:]) != nbdOptionMagic {
		return errors.New("not an NBD server of the new style")
	}
	b := binary.BigEndian.AppendUint32(nil, 3) // fixed newstyle, no zeroes
	b = binary.BigEndian.AppendUint64(b, nbdOptionMagic)
	b = binary.BigEndian.AppendUint32(b, nbdOptGo)
	b = binary.BigEndian.AppendUint32(b, uint32(4+len(n.export)+2))
	b = binary.BigEndian.AppendUint32(b, uint32(len(n.export)))
	b = append(b, n.export...)
	b = binary.BigEndian.AppendUint16(b, 0) // no information asked for
	if _, err := c.Write(b); err != nil {
		return err
	}
	for {
		head := make([]byte, 20)
		if _, err := io.ReadFull(c, head); err != nil {
			return err
		}
		if binary.BigEndian.Uint64(head) != nbdReplyMagic {
			return errors.New("bad reply to an option")
		}
		kind := binary.BigEndian.Uint32(head[12:])
		text := make([]byte, min(binary.BigEndian.Uint32(head[16:]), 4096))
		if _, err := io.ReadFull(c, text); err != nil {
			return err
		}
		switch {
		case kind == nbdRepAck:
			return nil
		case kind&nbdRepError != 0:
			return fmt.Errorf("export %q refused: %#x %s", n.export, kind, text)
		}
	}
}

func (n nbd) request(b []byte, slot int, write bool, off int64, size int) []byte {
	at := len(b)
	length, command := 28, uint32(0)
	if write {
		length, command = length+size, 1
		if n.fua {
			command |= nbdFUA
		}
	}
	b = extend(b, length)
	binary.BigEndian.PutUint32(b[at:], nbdRequestMagic)
	binary.BigEndian.PutUint32(b[at+4:], command) // the flags are its upper half
	binary.BigEndian.PutUint64(b[at+8:], uint64(slot))
	binary.BigEndian.PutUint64(b[at+16:], uint64(off))
	binary.BigEndian.PutUint32(b[at+24:], uint32(size))
	return b
}

func (nbd) reply(b []byte, sizes []int) (slot, length int, err error) {
	if len(b) < 16 {
		return 0, 0, nil
	}
	slot = int(binary.BigEndian.Uint64(b[8:]))
	switch {
	case binary.BigEndian.Uint32(b) != nbdSimpleMagic || slot >= len(sizes):
		return 0, 0, errors.New("bad reply")
	case binary.BigEndian.Uint32(b[4:]) != 0:
		return 0, 0, fmt.Errorf("error %d", binary.BigEndian.Uint32(b[4:]))
	}
	return slot, 16 + sizes[slot], nil
}
