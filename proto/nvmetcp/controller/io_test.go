// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"bytes"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
)

func TestWhatWasWrittenIsRead(t *testing.T) {
	for _, digests := range []int{0, 1, 2, 3} {
		t.Run(fmt.Sprint("digests ", digests), func(t *testing.T) {
			w := newWorld(t)
			h := w.attach(hostA, func(p *peer) {
				p.ic.HeaderDigest, p.ic.DataDigest = digests&1 != 0, digests&2 != 0
			})
			for i, n := range []int{4096, 8192, 16384, 20480, 131072, 1 << 20} {
				data := pattern(n, byte(i))
				h.io.must(h.io.write(uint64(i), data))
				got := make([]byte, n)
				h.io.must(h.io.read(uint64(i), got))
				if !bytes.Equal(got, data) {
					t.Errorf("%d bytes differ from those written", n)
				}
				h.io.must(h.io.flush())
			}
		})
	}
}

func TestDataBeginsWhereTheHostWantsIt(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA, func(p *peer) { p.ic.HPDA = 31 }) // the Reader checks the padding
	h.io.must(h.io.read(0, make([]byte, 8192)))
}

func TestARangeOutsideOfTheNamespaceIsRefused(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	last := uint64(devSize/4096) - 1
	h.io.must(h.io.read(last, make([]byte, 4096)))
	h.io.want(h.io.read(last, make([]byte, 8192)), nvmetcp.LBAOutOfRange)
	h.io.want(h.io.read(1<<63, make([]byte, 4096)), nvmetcp.LBAOutOfRange)
	h.io.want(h.io.write(1<<52, make([]byte, 4096)), nvmetcp.LBAOutOfRange)
}

func TestCompareTellsWhatDiffers(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	for _, n := range []int{4096, 65536} {
		data := pattern(n, 3)
		h.io.must(h.io.write(2, data))
		compare := func() nvmetcp.Status {
			sgl := nvmetcp.Transport(uint32(n))
			if n <= 16<<10 {
				sgl = nvmetcp.InCapsule(uint32(n))
			}
			return h.io.do(ioCommand(nvmetcp.IOCompare, 2, uint32(n/4096), sgl), data, nil)
		}
		h.io.must(compare())
		data[n-1] ^= 1
		h.io.want(compare(), nvmetcp.CompareFailure)
	}
}

func TestZeroedAndDeallocatedBlocks(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	data := pattern(1<<20, 5)
	h.io.must(h.io.write(0, data))
	zero := ioCommand(nvmetcp.IOWriteZeroes, 1, 2, nvmetcp.Transport(0))
	h.io.must(h.io.do(zero, nil, nil))
	clear(data[4096 : 3*4096])

	ranges := nvmetcp.Range{Start: 10, Blocks: 1}.Append(nil)
	ranges = nvmetcp.Range{Start: 20, Blocks: 2}.Append(ranges)
	dsm := ioCommand(nvmetcp.IODatasetManagement, 0, 0, nvmetcp.InCapsule(4096))
	dsm.SetCDW(10, 1)
	dsm.SetCDW(11, nvmetcp.DatasetDeallocate)
	h.io.must(h.io.do(dsm, append(ranges, make([]byte, 4096-len(ranges))...), nil)) // as Linux sends it
	clear(data[10*4096 : 11*4096])
	clear(data[20*4096 : 22*4096])

	got := make([]byte, len(data))
	h.io.must(h.io.read(0, got))
	if !bytes.Equal(got, data) {
		t.Error("blocks outside of the range were zeroed")
	}

	dsm.SetSGL(nvmetcp.InCapsule(16))
	h.io.want(h.io.do(dsm, ranges[:16], nil), nvmetcp.InvalidSGLLength)
	dsm.SetCDW(10, 0)
	h.io.want(h.io.do(dsm, nvmetcp.Range{Start: 1 << 40, Blocks: 1}.Append(nil), nil), nvmetcp.LBAOutOfRange)
	zero.SetSLBA(1 << 40)
	h.io.want(h.io.do(zero, nil, nil), nvmetcp.LBAOutOfRange)
}

func TestAReadOnlyNamespaceIsOnlyRead(t *testing.T) {
	w := newWorld(t)
	if err := w.sub.AddNamespace(NamespaceConfig{NSID: 2, Device: w.device, ReadOnly: true}); err != nil {
		t.Fatal(err)
	}
	h := w.attach(hostA)
	on2 := func(c nvmetcp.Command) nvmetcp.Command { c.SetNSID(2); return c }
	h.io.want(h.io.do(on2(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096))), pattern(4096, 1), nil), nvmetcp.NamespaceWriteProtected)
	h.io.want(h.io.do(on2(ioCommand(nvmetcp.IOWriteZeroes, 0, 1, nvmetcp.Transport(0))), nil, nil), nvmetcp.NamespaceWriteProtected)
	h.io.must(h.io.do(on2(ioCommand(nvmetcp.IORead, 0, 1, nvmetcp.Transport(4096))), nil, make([]byte, 4096)))
	h.io.must(h.io.do(on2(ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0))), nil, nil))
}

// TestACommandWhoseDataDoesNotFitIsRefused also checks that the connection continues.
func TestACommandWhoseDataDoesNotFitIsRefused(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	data := make([]byte, 8192)
	h.io.want(h.io.do(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(8192)), data, nil), nvmetcp.InvalidSGLLength)
	h.io.want(h.io.do(ioCommand(nvmetcp.IORead, 0, 1, nvmetcp.Transport(8192)), nil, data), nvmetcp.InvalidSGLLength)
	h.io.want(h.io.do(ioCommand(nvmetcp.IORead, 0, 512, nvmetcp.Transport(2<<20)), nil, data), nvmetcp.InvalidField) // beyond MDTS
	offset := nvmetcp.InCapsule(4096)
	offset.Address = 8192
	h.io.want(h.io.do(ioCommand(nvmetcp.IOWrite, 0, 1, offset), data, nil), nvmetcp.InvalidSGLOffset)
	wrong := nvmetcp.SGL{Length: 4096, Kind: 0x40}
	h.io.want(h.io.do(ioCommand(nvmetcp.IOWrite, 0, 1, wrong), nil, nil), nvmetcp.InvalidSGLType)
	h.io.want(h.io.do(ioCommand(0x77, 0, 1, nvmetcp.Transport(0)), nil, nil), nvmetcp.InvalidOpcode)
	fused := ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0))
	fused[1] |= 1
	h.io.want(h.io.do(fused, nil, nil), nvmetcp.InvalidField)
	elsewhere := ioCommand(nvmetcp.IOFlush, 0, 0, nvmetcp.Transport(0))
	elsewhere.SetNSID(9)
	h.io.want(h.io.do(elsewhere, nil, nil), nvmetcp.InvalidNamespace)
	h.io.must(h.io.flush())
}

// TestDataInTheCapsuleMayHaveAnOffset: an ICDOFF of 0 leaves the offset to the SGL.
func TestDataInTheCapsuleMayHaveAnOffset(t *testing.T) {
	w := newWorld(t)
	h := w.attach(hostA)
	data := pattern(8192, 1)
	sgl := nvmetcp.InCapsule(4096)
	sgl.Address = 4096
	h.io.must(h.io.do(ioCommand(nvmetcp.IOWrite, 0, 1, sgl), data, nil))
	got := make([]byte, 4096)
	h.io.must(h.io.read(0, got))
	if !bytes.Equal(got, data[4096:]) {
		t.Error("the data was taken from a wrong offset")
	}
}

// TestADevicesErrorsHaveTheirStatus: errors are final (DNR). A retry by the host would only
// delay its use of the volume's other copies.
func TestADevicesErrorsHaveTheirStatus(t *testing.T) {
	for _, c := range []struct {
		err         error
		read, write nvmetcp.Status
	}{
		{block.ErrMedium, nvmetcp.UnrecoveredReadError, nvmetcp.WriteFault},
		{block.ErrChecksum, nvmetcp.GuardCheckError, nvmetcp.WriteFault},
		{block.ErrRange, nvmetcp.LBAOutOfRange, nvmetcp.LBAOutOfRange},
		{block.ErrReadOnly, nvmetcp.NamespaceWriteProtected, nvmetcp.NamespaceWriteProtected},
		{block.ErrUnsupported, nvmetcp.InvalidOpcode, nvmetcp.InvalidOpcode},
		{block.ErrGone, nvmetcp.InternalError, nvmetcp.InternalError},
	} {
		w := newWorldOn(t, failing{ramdisk.New(devSize, 4096), c.err})
		h := w.attach(hostA)
		for _, got := range [][2]nvmetcp.Status{{h.io.read(0, make([]byte, 4096)), c.read}, {h.io.write(0, make([]byte, 4096)), c.write}} {
			if got[0] != got[1]|nvmetcp.DNR {
				t.Errorf("%v: status %v, want %v", c.err, got[0], got[1])
			}
		}
	}
}

type failing struct {
	block.Device
	err error
}

func (f failing) Submit(io *block.IO) { io.Complete(fmt.Errorf("the drive: %w", f.err)) }

// TestADeviceWithALimitGetsParts: MaxIO is smaller than what a command may carry.
func TestADeviceWithALimitGetsParts(t *testing.T) {
	limited := &limitedDevice{Device: ramdisk.New(devSize, 4096)}
	w := newWorldOn(t, limited)
	h := w.attach(hostA)
	data := pattern(1<<20, 9)
	h.io.must(h.io.write(3, data))
	got := make([]byte, len(data))
	h.io.must(h.io.read(3, got))
	if !bytes.Equal(got, data) || limited.largest.Load() != 20480 {
		t.Errorf("parts of up to %d bytes, want 20480; equal: %v", limited.largest.Load(), bytes.Equal(got, data))
	}
}

type limitedDevice struct {
	block.Device
	largest atomic.Int64
}

func (l *limitedDevice) Geometry() block.Geometry {
	g := l.Device.Geometry()
	g.MaxIO = 20480 + 100
	return g
}

func (l *limitedDevice) Submit(io *block.IO) {
	if io.Len > l.largest.Load() {
		l.largest.Store(io.Len)
	}
	go l.Device.Submit(io)
}

// TestCompletionsComeInAnyOrder: a slow first command does not delay the later ones.
func TestCompletionsComeInAnyOrder(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	t.Cleanup(slow.release)
	h := w.attach(hostA)
	slow.hold(writes)
	first := h.io.begin(ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096)), pattern(4096, 1))
	slow.waitHeld(1)
	for range 5 {
		h.io.must(h.io.read(1, make([]byte, 4096)))
	}
	slow.release()
	h.io.must(h.io.serve(first, nil, nil))
}

// TestFUAReachesTheDevice: the host decides what must be durable.
func TestFUAReachesTheDevice(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	t.Cleanup(slow.release)
	h := w.attach(hostA)
	slow.hold(func(io *block.IO) bool { return io.FUA })
	h.io.must(h.io.write(0, pattern(4096, 1)))
	cmd := ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096))
	cmd.SetFUA()
	h.io.begin(cmd, pattern(4096, 1))
	zero := ioCommand(nvmetcp.IOWriteZeroes, 0, 1, nvmetcp.Transport(0))
	zero.SetFUA()
	h.io.begin(zero, nil)
	slow.waitHeld(2)
}

// TestIOTakesNoMemory: reads and writes allocate nothing.
func TestIOTakesNoMemory(t *testing.T) {
	if raceDetector {
		t.Skip("the race detector makes sync.Pool drop items")
	}
	w := newWorld(t)
	h := w.attach(hostA)
	data := make([]byte, 4096)
	rcmd := ioCommand(nvmetcp.IORead, 0, 1, nvmetcp.Transport(4096))
	wcmd := ioCommand(nvmetcp.IOWrite, 0, 1, nvmetcp.InCapsule(4096))
	do := func() {
		for range 10 {
			h.io.w.Command(&rcmd, nil)
			h.io.w.Command(&wcmd, data)
		}
		h.io.w.Flush()
		for range 20 {
			if _, err := h.io.r.Next(); err != nil {
				t.Fatal(err)
			}
		}
	}
	do()
	if n := testing.AllocsPerRun(100, do); n > 4 {
		t.Errorf("20 commands allocate %v times", n)
	}
}

// TestWithoutAWriteCacheWritesAreDurable: after a host has switched the cache off, each of
// its writes is on the medium before the answer.
func TestWithoutAWriteCacheWritesAreDurable(t *testing.T) {
	slow := newSlow(ramdisk.New(devSize, 4096))
	w := newWorldOn(t, slow)
	h := w.attach(hostA)
	var durable []bool
	slow.hold(func(io *block.IO) bool { durable = append(durable, io.FUA); return false })
	cache := func(on uint32) {
		t.Helper()
		h.admin.must(h.admin.do(nvmetcp.FeatureAccess{ID: nvmetcp.FeatureVolatileWriteCache, Value: on}.SetCommand(), nil, nil))
	}
	for _, on := range []uint32{1, 0, 1} {
		cache(on)
		h.io.must(h.io.write(0, pattern(4096, 1)))
		h.io.must(h.io.do(ioCommand(nvmetcp.IOWriteZeroes, 0, 1, nvmetcp.Transport(0)), nil, nil))
	}
	slow.mu.Lock()
	defer slow.mu.Unlock()
	if want := []bool{false, false, true, true, false, false}; !slices.Equal(durable, want) {
		t.Errorf("durable writes %v, want %v", durable, want)
	}
}
