// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"time"
	"unsafe"
)

func addressOf(b []byte) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(b))) }

// wire is the part of a protocol that the load loop needs. Each request has one reply,
// which names the request's slot.
type wire interface {
	// greet does the handshake before the first request.
	greet(c pipe) error
	// request appends a request to b; a write's data is arbitrary.
	request(b []byte, slot int, write bool, off int64, size int) []byte
	// reply parses the header of a reply: its slot, and its total length, or 0 if b does
	// not hold the whole header yet.
	reply(b []byte, size []int) (slot, length int, err error)
}

// extend lengthens b by n arbitrary bytes.
func extend(b []byte, n int) []byte {
	for cap(b)-len(b) < n {
		b = append(b[:cap(b)], 0)[:len(b)]
	}
	return b[:len(b)+n]
}

// frames has the sizes of NVMe/TCP without its meaning. A request is a capsule of 72 bytes,
// with a write's data behind it. The answer is data with a header of 24 bytes, or a
// response capsule of 24 bytes. The first eight bytes hold size and slot.
type frames struct{}

const (
	capsule  = 72
	response = 24
	isWrite  = 1 << 31 // in the size
)

func (frames) greet(pipe) error { return nil }

func (frames) request(b []byte, slot int, write bool, _ int64, size int) []byte {
	at := len(b)
	head := uint32(size)
	if write {
		head |= isWrite
		b = extend(b, capsule+size)
	} else {
		b = extend(b, capsule)
	}
	binary.LittleEndian.PutUint32(b[at:], head)
	binary.LittleEndian.PutUint32(b[at+4:], uint32(slot))
	return b
}

func (frames) reply(b []byte, _ []int) (slot, length int, err error) {
	if len(b) < 8 {
		return 0, 0, nil
	}
	return int(binary.LittleEndian.Uint32(b[4:])), response + int(binary.LittleEndian.Uint32(b)), nil
}

// answer appends the replies to the requests at the start of b. It returns how many bytes
// of b it used, and how many more bytes of the last request's data to skip.
func (frames) answer(out, b []byte) (_ []byte, used, skip int) {
	for len(b)-used >= capsule {
		size := binary.LittleEndian.Uint32(b[used:])
		slot := binary.LittleEndian.Uint32(b[used+4:])
		n := int(size &^ isWrite)
		at := len(out)
		data := n
		if size&isWrite != 0 {
			data = 0
		}
		out = extend(out, response+data)
		binary.LittleEndian.PutUint32(out[at:], uint32(data))
		binary.LittleEndian.PutUint32(out[at+4:], slot)
		used += capsule
		if size&isWrite != 0 {
			if used += n; used > len(b) {
				return out, len(b), used - len(b)
			}
		}
	}
	return out, used, 0
}

// serveFrames answers frames on all connections of a listener. Without the runtime's poller
// it serves one connection at a time.
func serveFrames(l net.Listener, f form) error {
	for {
		c, err := l.Accept()
		if err != nil {
			return err
		}
		p, err := f.wrap(c)
		if err != nil {
			return err
		}
		if f != poller {
			echo(p)
			continue
		}
		go echo(p)
	}
}

// echo serves one connection until it ends. It answers a write after its header, before all
// of its data has come; the difference is smaller than the measurement's precision.
func echo(c pipe) {
	defer c.Close()
	in, out := make([]byte, 1<<20), make([]byte, 0, 2<<20)
	have, skip := 0, 0
	for {
		n, err := c.Read(in[have:])
		if err != nil {
			return
		}
		have += n
		passed := min(skip, have)
		skip -= passed
		answered, used, more := frames{}.answer(out[:0], in[passed:have])
		skip += more
		have = copy(in, in[passed+used:have])
		out = answered
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				return
			}
		}
	}
}

// drive keeps depth requests in flight on one connection until the time is up.
//
// Long: this loop is the measuring instrument, and a call in it would be measured too.
//
// Branches: for the same reason.
func drive(c pipe, w wire, j job) (result, error) {
	var r result
	if err := w.greet(c); err != nil {
		return r, fmt.Errorf("greet: %w", err)
	}
	var h histogram
	random := newOffsets(j)
	sent, sizes := make([]time.Time, j.Depth), make([]int, j.Depth)
	in, out := make([]byte, 1<<20), make([]byte, 0, 2<<20)
	now := time.Now()
	for slot := range j.Depth {
		if !j.Write {
			sizes[slot] = j.Size
		}
		off, _ := random.next() // there are more places than slots
		out = w.request(out, slot, j.Write, off, j.Size)
		sent[slot] = now
	}
	began, end := now, now.Add(j.duration())
	have, skip, under := 0, 0, j.Depth
	for under > 0 {
		if len(out) > 0 {
			if _, err := c.Write(out); err != nil {
				return r, err
			}
			out = out[:0]
		}
		n, err := c.Read(in[have:])
		if err == io.EOF {
			err = io.ErrUnexpectedEOF
		}
		if err != nil {
			return r, err
		}
		have += n
		now = time.Now()
		at := min(skip, have)
		skip -= at
		for at < have && skip == 0 {
			slot, length, err := w.reply(in[at:have], sizes)
			if err != nil {
				return r, err
			}
			if length == 0 {
				break
			}
			if at += length; at > have { // the rest of it is on its way
				at, skip = have, at-have
			}
			h.add(now.Sub(sent[slot]))
			off, more := random.next()
			if !more || now.After(end) {
				under--
				continue
			}
			out = w.request(out, slot, j.Write, off, j.Size)
			sent[slot] = now
		}
		have = copy(in, in[at:have])
	}
	r.fill(&h, j.took(began))
	return r, nil
}
