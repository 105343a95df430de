// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-only

package written

import "encoding/binary"

// This file is the program that the kernel runs, and an assembler of the few instructions that it
// consists of (Linux, Documentation/bpf/instruction-set.rst). The kernel gets it under the GPL.

// A device's memory is an array of words of 64 bits.
const (
	wordShift   = 0 // the logarithm of the size of a region in bytes
	wordTooLong = 1 // the number of I/Os that were too long to be marked
	wordRegions = 2 // the first of those with a bit for each region
)

// mostWords is how many words one I/O may mark: 1 GiB with regions of 64 KiB. The kernel refuses a
// program without such a limit. Longer ones, which can be discards, are counted.
const mostWords = 256

// layout says where the kernel has what the program reads.
type layout struct {
	opf, bdev, sector, size int // of struct bio
	dev                     int // of struct block_device
}

// The registers: r0 is what a helper returns, r1 to r5 its arguments, which it destroys, r6 to r9 stay,
// and r10 is the end of the stack.
const (
	r0 = iota
	r1
	r2
	r3
	r4
	r5
	r6
	r7
	r8
	r9
	r10
)

// Parts of opcodes.
const (
	opLoad64  = 0x79 // dst = *(u64 *)(src + off)
	opLoad32  = 0x61
	opStore64 = 0x7b // *(u64 *)(dst + off) = src
	opStore32 = 0x63
	opAtomic  = 0xdb // *(u64 *)(dst + off) op= src, atomically; imm is the operation
	opMap     = 0x18 // dst = map; takes two instructions
	opCall    = 0x85
	opExit    = 0x95
	ofReg     = 0x08 // the operand is src, not imm
	alu       = 0x07 // on 64 bits
	jump      = 0x05
	add, sub  = 0x00, 0x10
	or, and   = 0x40, 0x50
	lsh, rsh  = 0x60, 0x70
	mov       = 0xb0
	jeq, jne  = 0x10, 0x50
	jgt, jlt  = 0x20, 0xa0
	mapFD     = 1 // src of opMap: imm is a file descriptor
	lookup    = 1 // the helper bpf_map_lookup_elem
)

type instruction struct {
	op, dst, src uint8
	off          int16
	imm          int32
	to           string // the label that it jumps to
}

// assembler collects instructions. Labels are resolved at the end.
type assembler struct {
	code   []instruction
	labels map[string]int
}

func (a *assembler) add(i instruction) { a.code = append(a.code, i) }
func (a *assembler) label(name string) { a.labels[name] = len(a.code) }
func (a *assembler) reg(op, dst, src uint8) {
	a.add(instruction{op: alu | ofReg | op, dst: dst, src: src})
}
func (a *assembler) imm(op, dst uint8, n int32) { a.add(instruction{op: alu | op, dst: dst, imm: n}) }
func (a *assembler) load(op, dst, src uint8, off int) {
	a.add(instruction{op: op, dst: dst, src: src, off: int16(off)})
}
func (a *assembler) store(op, src uint8, off int) {
	a.add(instruction{op: op, dst: r10, src: src, off: int16(off)})
}
func (a *assembler) jumpImm(op, dst uint8, n int32, to string) {
	a.add(instruction{op: jump | op, dst: dst, imm: n, to: to})
}
func (a *assembler) jumpReg(op, dst, src uint8, to string) {
	a.add(instruction{op: jump | ofReg | op, dst: dst, src: src, to: to})
}

// find looks up a key in a map. The key is in r1 and goes to the stack at -4; r0 is the answer. The
// map is in register in, or else a file descriptor.
func (a *assembler) find(in uint8, fd int) {
	a.store(opStore32, r1, -4)
	if in == r0 {
		a.add(instruction{op: opMap, dst: r1, src: mapFD, imm: int32(fd)})
		a.add(instruction{})
	} else {
		a.reg(mov, r1, in)
	}
	a.reg(mov, r2, r10)
	a.imm(add, r2, -4)
	a.add(instruction{op: opCall, imm: lookup})
	a.jumpImm(jeq, r0, 0, "end")
}

// assemble makes the program. Its argument is that of the tracepoint block_bio_queue, a struct bio;
// devices is the file descriptor of a map from device numbers to their memory.
//
// Long: a program in order.
func assemble(l layout, devices int) []byte {
	a := &assembler{labels: map[string]int{}}
	a.load(opLoad64, r6, r1, 0)
	a.load(opLoad32, r1, r6, l.opf)
	a.imm(and, r1, 1) // odd operations write: op_is_write
	a.jumpImm(jeq, r1, 0, "end")
	a.load(opLoad64, r2, r6, l.bdev)
	a.load(opLoad32, r1, r2, l.dev)
	a.find(r0, devices)
	a.reg(mov, r8, r0)
	a.imm(mov, r1, wordShift)
	a.find(r8, 0)
	a.load(opLoad64, r1, r0, 0)
	a.load(opLoad64, r2, r6, l.sector)
	a.load(opLoad32, r7, r6, l.size)
	a.jumpImm(jeq, r7, 0, "end") // a flush
	a.imm(lsh, r2, 9)
	a.reg(add, r7, r2)
	a.imm(sub, r7, 1)
	a.reg(mov, r6, r2)
	a.reg(rsh, r6, r1) // the first region
	a.reg(rsh, r7, r1) // the last
	a.imm(mov, r9, 0)  // words that are done

	a.label("word")
	a.reg(mov, r1, r6)
	a.imm(rsh, r1, 6)
	a.reg(add, r1, r9)
	a.reg(mov, r2, r7)
	a.imm(rsh, r2, 6)
	a.jumpReg(jgt, r1, r2, "end")
	a.imm(mov, r3, -1) // the bits of this word: see raid.WordMask
	a.jumpImm(jne, r9, 0, "not first")
	a.reg(mov, r4, r6)
	a.imm(and, r4, 63)
	a.reg(lsh, r3, r4)
	a.label("not first")
	a.jumpReg(jne, r1, r2, "not last")
	a.reg(mov, r4, r7)
	a.imm(and, r4, 63)
	a.imm(mov, r5, 63)
	a.reg(sub, r5, r4)
	a.imm(mov, r4, -1)
	a.reg(rsh, r4, r5)
	a.reg(and, r3, r4)
	a.label("not last")
	a.store(opStore64, r3, -16)
	a.imm(add, r1, wordRegions)
	a.find(r8, 0) // behind the end: the device refuses the I/O
	a.load(opLoad64, r3, r10, -16)
	a.load(opLoad64, r1, r0, 0)
	a.reg(and, r1, r3)
	a.jumpReg(jeq, r1, r3, "marked") // most are, and need no write
	a.add(instruction{op: opAtomic, dst: r0, src: r3, imm: or})
	a.label("marked")
	a.imm(add, r9, 1)
	a.jumpImm(jlt, r9, mostWords, "word")

	a.reg(mov, r1, r6)
	a.imm(rsh, r1, 6)
	a.reg(add, r1, r9)
	a.imm(rsh, r7, 6)
	a.jumpReg(jgt, r1, r7, "end")
	a.imm(mov, r1, wordTooLong)
	a.find(r8, 0)
	a.imm(mov, r1, 1)
	a.add(instruction{op: opAtomic, dst: r0, src: r1, imm: add})
	a.label("end")
	a.imm(mov, r0, 0)
	a.add(instruction{op: opExit})
	return a.encode()
}

func (a *assembler) encode() []byte {
	var b []byte
	for at, i := range a.code {
		if i.to != "" {
			i.off = int16(a.labels[i.to] - at - 1)
		}
		b = append(b, i.op, i.dst|i.src<<4)
		b = binary.NativeEndian.AppendUint16(b, uint16(i.off))
		b = binary.NativeEndian.AppendUint32(b, uint32(i.imm))
	}
	return b
}
