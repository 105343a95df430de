// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// A volatile drive has a write cache that is lost with the power of its machine, as that of a drive without capacitors
// is. QEMU has none, and what it has written survives its end in the host's page cache. So it reaches the drive's file
// through a server in this process, by the protocol NBD
// (https://github.com/NetworkBlockDevice/nbd/blob/master/doc/proto.md). The server keeps what was written in memory
// until a flush, and writes with FUA to the file. When QEMU is killed, each block of 4 KiB that was not flushed is lost
// or not, at random: a drive may have written any part of its cache. When QEMU ends in order, it flushes first.
type volatile struct {
	file   *os.File
	size   int64
	listen net.Listener
	path   string // of the socket
	ended  chan struct{}

	mu     sync.Mutex
	cache  map[int64]*[cached]byte // by offset: not flushed
	losses int                     // blocks that were lost, over all power cuts
}

// cached is the unit of the cache, in bytes.
const cached = 4096

// newVolatile serves a drive's file at a socket beside it until close.
func newVolatile(path string) (*volatile, error) {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	info, err := f.Stat()
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	v := &volatile{file: f, size: info.Size(), path: path + ".nbd", ended: make(chan struct{}), cache: map[int64]*[cached]byte{}}
	if v.listen, err = net.Listen("unix", v.path); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	go v.run()
	return v, nil
}

// run serves one QEMU after another: the next one sees what the one before has left.
func (v *volatile) run() {
	defer close(v.ended)
	for {
		c, err := v.listen.Accept()
		if err != nil {
			return
		}
		err = v.serve(c)
		c.Close()
		v.powerCut()
		if err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) && !errors.Is(err, unix.ECONNRESET) && !errors.Is(err, unix.EPIPE) {
			fmt.Fprintf(os.Stderr, "volatile drive %s: %v\n", v.path, err)
		}
	}
}

// close ends the server. QEMU has ended.
func (v *volatile) close() error {
	err := v.listen.Close()
	<-v.ended
	return errors.Join(err, v.file.Close())
}

// lost is how many blocks power cuts have lost so far.
func (v *volatile) lost() int {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.losses
}

// powerCut loses some of what was not flushed.
func (v *volatile) powerCut() {
	v.mu.Lock()
	defer v.mu.Unlock()
	for at, block := range v.cache {
		if rand.IntN(2) == 0 {
			v.losses++
		} else if _, err := v.file.WriteAt(block[:], at); err != nil {
			fmt.Fprintf(os.Stderr, "volatile drive %s: %v\n", v.path, err)
		}
	}
	clear(v.cache)
}

// The parts of NBD that QEMU's client uses.
const (
	nbdMagic       = 0x4e42444d41474943 // "NBDMAGIC"
	nbdOptionMagic = 0x49484156454f5054 // "IHAVEOPT"
	nbdReplyMagic  = 0x3e889045565a9
	nbdRequest     = 0x25609513
	nbdReply       = 0x67446698

	nbdFixed, nbdNoZeroes           = 1, 2
	nbdExport, nbdAbort, nbdGo      = 1, 2, 7
	nbdAck, nbdInfo, nbdUnsupported = 1, 3, 1<<31 | 1

	nbdRead, nbdWrite, nbdDisconnect, nbdFlush, nbdTrim, nbdZeroes = 0, 1, 2, 3, 4, 6

	nbdFUA = 1
	// It has flags, and takes flushes, FUA, trims and writes of zeroes.
	nbdFlags = 1 | 1<<2 | 1<<3 | 1<<5 | 1<<6
)

// serve serves a connection until it ends.
func (v *volatile) serve(c net.Conn) error {
	if err := v.greet(c); err != nil {
		return err
	}
	header := make([]byte, 28)
	var data []byte
	for {
		if _, err := io.ReadFull(c, header); err != nil {
			return err
		}
		if binary.BigEndian.Uint32(header) != nbdRequest {
			return errors.New("not a request of NBD")
		}
		flags, command := binary.BigEndian.Uint16(header[4:]), binary.BigEndian.Uint16(header[6:])
		off, length := int64(binary.BigEndian.Uint64(header[16:])), int(binary.BigEndian.Uint32(header[24:]))
		if command == nbdDisconnect {
			return nil
		}
		if command == nbdRead || command == nbdWrite {
			if cap(data) < length {
				data = make([]byte, length)
			}
			data = data[:length]
		}
		if command == nbdWrite {
			if _, err := io.ReadFull(c, data); err != nil {
				return err
			}
		}
		var failed uint32
		if err := v.do(command, flags&nbdFUA != 0, off, length, data); err != nil {
			failed = uint32(unix.EIO)
		}
		reply := binary.BigEndian.AppendUint32(nil, nbdReply)
		reply = binary.BigEndian.AppendUint32(reply, failed)
		reply = append(reply, header[8:16]...)
		if command == nbdRead && failed == 0 {
			reply = append(reply, data...)
		}
		if _, err := c.Write(reply); err != nil {
			return err
		}
	}
}

// greet is the negotiation, in its fixed new style.
func (v *volatile) greet(c net.Conn) error {
	hello := binary.BigEndian.AppendUint64(nil, nbdMagic)
	hello = binary.BigEndian.AppendUint64(hello, nbdOptionMagic)
	hello = binary.BigEndian.AppendUint16(hello, nbdFixed|nbdNoZeroes)
	if _, err := c.Write(hello); err != nil {
		return err
	}
	if _, err := io.ReadFull(c, make([]byte, 4)); err != nil { // the client's flags
		return err
	}
	export := binary.BigEndian.AppendUint64(nil, uint64(v.size))
	export = binary.BigEndian.AppendUint16(export, nbdFlags)
	for {
		head := make([]byte, 16)
		if _, err := io.ReadFull(c, head); err != nil {
			return err
		}
		option := binary.BigEndian.Uint32(head[8:])
		if _, err := io.CopyN(io.Discard, c, int64(binary.BigEndian.Uint32(head[12:]))); err != nil {
			return err
		}
		reply := func(kind uint32, data []byte) error {
			b := binary.BigEndian.AppendUint64(nil, nbdReplyMagic)
			b = binary.BigEndian.AppendUint32(b, option)
			b = binary.BigEndian.AppendUint32(b, kind)
			b = binary.BigEndian.AppendUint32(b, uint32(len(data)))
			_, err := c.Write(append(b, data...))
			return err
		}
		switch option {
		case nbdGo: // information 0 is about the export
			return errors.Join(reply(nbdInfo, append([]byte{0, 0}, export...)), reply(nbdAck, nil))
		case nbdExport:
			_, err := c.Write(export)
			return err
		case nbdAbort:
			return errors.Join(reply(nbdAck, nil), io.EOF)
		}
		if err := reply(nbdUnsupported, nil); err != nil {
			return err
		}
	}
}

// do carries out a command. A write takes data, and a read fills it.
func (v *volatile) do(command uint16, durable bool, off int64, length int, data []byte) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if command == nbdFlush {
		return v.flush(0, v.size)
	}
	if off < 0 || off+int64(length) > v.size {
		return fmt.Errorf("%d bytes at %d: the drive has %d", length, off, v.size)
	}
	switch command {
	case nbdRead:
		return v.read(data, off)
	case nbdWrite:
		if err := v.write(data, off); err != nil || !durable {
			return err
		}
		return v.flush(off, off+int64(length))
	case nbdTrim, nbdZeroes:
		return v.zero(off, int64(length))
	}
	return fmt.Errorf("command %d of NBD is not known", command)
}

// zero makes a range zeroes, durably: it may be the whole drive.
func (v *volatile) zero(off, length int64) error {
	for at, block := range v.cache {
		if from, to := max(off, at), min(off+length, at+cached); from < to {
			clear(block[from-at : to-at])
		}
	}
	return unix.Fallocate(int(v.file.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, off, length)
}

func (v *volatile) read(data []byte, off int64) error {
	if _, err := v.file.ReadAt(data, off); err != nil {
		return err
	}
	for at := off / cached * cached; at < off+int64(len(data)); at += cached {
		if block := v.cache[at]; block != nil {
			copy(data[max(0, at-off):], block[max(0, off-at):])
		}
	}
	return nil
}

func (v *volatile) write(data []byte, off int64) error {
	for at := off / cached * cached; at < off+int64(len(data)); at += cached {
		block := v.cache[at]
		if block == nil {
			block = &[cached]byte{}
			if _, err := v.file.ReadAt(block[:], at); err != nil {
				return err
			}
			v.cache[at] = block
		}
		copy(block[max(0, off-at):], data[max(0, at-off):])
	}
	return nil
}

// flush writes the cached blocks of a range to the file.
func (v *volatile) flush(off, end int64) error {
	for at, block := range v.cache {
		if at+cached <= off || at >= end {
			continue
		}
		if _, err := v.file.WriteAt(block[:], at); err != nil {
			return err
		}
		delete(v.cache, at)
	}
	return nil
}
