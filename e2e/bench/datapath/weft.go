// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"runtime/pprof"
	"time"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/raid/engine"
)

// deviceSize is the size of the measured devices. Memory is allocated only for written
// blocks.
const deviceSize = 256 * block.MiB

var (
	subsystem = block.NQN("nqn.2026-11.dev.weft:bench")
	namespace = block.UUID{0: 0xbe, 6: 0x40, 8: 0x80}
	initiator = block.HostFromID(block.UUID{0: 0xc1, 6: 0x40, 8: 0x80})
)

// serveDevice serves one device through Weft's controller.
func serveDevice(l net.Listener, d block.Device) error {
	t, err := controller.New(controller.Config{})
	if err != nil {
		return err
	}
	s, err := t.AddSubsystem(controller.SubsystemConfig{NQN: subsystem, Serial: "bench", AllowAnyHost: true})
	if err != nil {
		return err
	}
	if err := s.AddNamespace(controller.NamespaceConfig{NSID: 1, UUID: namespace, Device: d}); err != nil {
		return err
	}
	_, err = t.Serve(l, controller.PortConfig{ID: 1, Link: []*controller.Subsystem{s}})
	return err
}

// filled is memory that has been written, like a device in use.
func filled() (block.Device, error) {
	m := ramdisk.New(deviceSize, 0)
	p := make([]byte, block.MiB)
	for i := range p {
		p[i] = byte(i * 7)
	}
	for off := int64(0); off < int64(deviceSize); off += int64(len(p)) {
		if err := block.WriteAt(m, p, off); err != nil {
			return nil, err
		}
	}
	return m, nil
}

// reach connects to a controller.
func reach(ctx context.Context, address string) (*host.Controller, block.Device, error) {
	c, err := host.Connect(ctx, host.Config{Portals: []string{address}, Subsystem: subsystem, Host: initiator, IOQueues: 1, QueueDepth: 129, KATO: -1})
	if err != nil {
		return nil, nil, err
	}
	d, err := c.Namespace(1, namespace)
	if err != nil {
		c.Cut()
		return nil, nil, err
	}
	return c, d, nil
}

// volume is a volume whose legs are all one controller's device. It measures the cost of
// the engine and of more copies; the data is not checked.
func volume(stripes, copies int, legs []block.Device) (*engine.Volume, error) {
	v, err := engine.New(engine.Config{Layout: block.Layout{Stripes: stripes, Copies: copies, Chunk: block.DefaultChunk}, Size: deviceSize})
	if err != nil {
		return nil, err
	}
	for i, d := range legs {
		if err := v.Add(i/copies, i%copies, d, engine.InSync, false); err != nil {
			return nil, fmt.Errorf("add leg: %w", err)
		}
	}
	return v, nil
}

// bestAbility returns the best way for export to make block devices here, or why there is
// none.
func bestAbility() (best blockdev.Ability) {
	for _, a := range blockdev.Probe() {
		if best = a; a.Usable {
			break
		}
	}
	return best
}

// reachVolume is a volume with one connection to the controller for each leg.
func reachVolume(ctx context.Context, address string, stripes, copies int) (_ block.Device, closed func() error, err error) {
	var hosts []*host.Controller
	var legs []block.Device
	cut := func() {
		for _, c := range hosts {
			c.Cut()
		}
	}
	defer func() {
		if err != nil {
			cut()
		}
	}()
	for range stripes * copies {
		c, d, err := reach(ctx, address)
		if err != nil {
			return nil, nil, err
		}
		hosts, legs = append(hosts, c), append(legs, d)
	}
	v, err := volume(stripes, copies, legs)
	if err != nil {
		return nil, nil, err
	}
	return v, func() error {
		defer cut()
		return inTime(v.Close)
	}, nil
}

// inTime calls f with a time limit of ten seconds.
func inTime(f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return f(ctx)
}

// export makes a kernel block device of a device, as `weft attach` does, and returns its
// path.
func export(ctx context.Context, d block.Device) (node string, closed func() error, err error) {
	dir, err := os.MkdirTemp("", "weft-bench-dev-*")
	if err != nil {
		return "", nil, err
	}
	e, err := blockdev.Export(ctx, d, blockdev.Options{Name: "bench", DevDir: dir, RunDir: dir + "/run"})
	if err != nil {
		return "", nil, errors.Join(err, os.RemoveAll(dir))
	}
	return e.Node(), func() error {
		err := inTime(func(ctx context.Context) error { return e.Close(ctx, false) })
		if err == nil {
			err = os.RemoveAll(dir)
		}
		return err
	}, nil
}

// loadDevice keeps depth IOs in flight on a device until the time is up.
func loadDevice(d block.Device, j job) (result, error) {
	type slot struct {
		block.IO
		sent time.Time
		h    histogram
	}
	var r result
	began := time.Now()
	end := began.Add(j.duration())
	slots, done := make([]slot, j.Depth), make(chan error, j.Depth)
	op := block.OpRead
	if j.Write {
		op = block.OpWrite
	}
	for i := range slots {
		s, random := &slots[i], newOffsets(j).share(i, j.Depth)
		s.IO = block.IO{Op: op, FUA: j.FUA, Len: int64(j.Size), Data: someData(j.Size)}
		s.Off, _ = random.next()
		s.Done = func(*block.IO) {
			now := time.Now()
			s.h.add(now.Sub(s.sent))
			off, more := random.next()
			if s.Err != nil || !more || now.After(end) {
				done <- s.Err
				return
			}
			s.Off, s.sent = off, now
			d.Submit(&s.IO)
		}
	}
	for i := range slots {
		slots[i].sent = time.Now()
		d.Submit(&slots[i].IO)
	}
	var err error
	for range slots {
		if e := <-done; e != nil {
			err = e
		}
	}
	var h histogram
	for i := range slots {
		h.merge(&slots[i].h)
	}
	r.fill(&h, j.took(began))
	return r, err
}

// profile writes a processor profile of this process to dir.
func profile(dir, role string) (stop func()) {
	f, err := os.Create(fmt.Sprintf("%s/%s-%d.pprof", dir, role, os.Getpid()))
	if err != nil {
		panic(err)
	}
	if err := pprof.StartCPUProfile(f); err != nil {
		panic(err)
	}
	return func() { pprof.StopCPUProfile(); f.Close() }
}
