// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"fmt"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/beat"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

// The timing of the readings of the drives' health.
const (
	HealthEvery = time.Minute     // between two readings of a drive, if Config does not say
	healthLook  = 5 * time.Second // how soon a new drive is read for the first time
	// healthFor is how long a drive may take to answer before the report says that it does not.
	healthFor = 10 * time.Second
)

// sensors read the health of a node's drives.
type sensors struct{ root string }

// Smart reads a drive's own log; nil if it has none.
func (s sensors) Smart(path string) (*pb.SmartLog, error) { return drive.Smart(s.root, path) }

// IOs returns the counters that the kernel keeps of a device.
func (s sensors) IOs(path string) drive.IOs { return drive.CompletedIOs(s.root, path) }

// monitor reads the health of the node's drives. What the readings mean is decided by the manager.
// A drive that does not answer keeps one goroutine, and no other drive waits for it.
type monitor struct {
	hardware hardware
	every    time.Duration // between two readings of a drive

	mu     sync.Mutex
	drives map[string]*vitals // by path
}

// vitals are the readings of one drive.
type vitals struct {
	drive string // whose label the device has
	ios   drive.IOs
	began time.Time       // when the newest reading began
	next  *pb.DriveHealth // the reading under way, without what the drive has yet to answer; nil: none
	last  *pb.DriveHealth // the newest complete one; nil: none. Never changed once it is here
}

func newMonitor(h hardware, every time.Duration) *monitor {
	return &monitor{hardware: h, every: cmp.Or(every, HealthEvery), drives: map[string]*vitals{}}
}

// run reads until ctx ends. Readings that hang outlive it.
func (m *monitor) run(ctx context.Context, drives *openDrives) error {
	timer := beat.NewTicker(healthLook)
	defer timer.Stop()
	for {
		if devices, _, ok := drives.list(); ok {
			m.look(devices)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer.C:
		}
	}
}

// look begins the readings that are due, and forgets drives that are gone. A reading under way is
// kept until it ends, so that a drive never has two.
func (m *monitor) look(devices []*pb.Device) {
	m.mu.Lock()
	defer m.mu.Unlock()
	there := map[string]bool{}
	for _, d := range devices {
		if d.GetDriveId() == "" {
			continue
		}
		path := d.GetPath()
		there[path] = true
		v := m.drives[path]
		if v == nil || v.drive != d.GetDriveId() && v.next == nil {
			v = &vitals{drive: d.GetDriveId(), ios: m.hardware.IOs(path)}
			m.drives[path] = v
		}
		if v.next == nil && time.Since(v.began) >= m.every {
			v.begin(m.hardware.IOs(path))
			go m.read(path, v)
		}
	}
	for path, v := range m.drives {
		if !there[path] && v.next == nil {
			delete(m.drives, path)
		}
	}
}

func (v *vitals) begin(ios drive.IOs) {
	since := ios.Since(v.ios)
	v.began, v.ios = time.Now(), ios
	v.next = &pb.DriveHealth{Time: timestamppb.New(v.began), Ios: since.Count, IoBytes: since.Bytes}
	if since.Count > 0 {
		v.next.Latency = durationpb.New(since.Mean())
	}
}

// read waits for the drive's answer.
func (m *monitor) read(path string, v *vitals) {
	smart, err := m.hardware.Smart(path)
	m.mu.Lock()
	defer m.mu.Unlock()
	v.last, v.next = v.next, nil
	v.last.Smart = smart
	if err != nil {
		v.last.Unread = err.Error()
	}
}

// with returns the devices with the newest readings of their health.
func (m *monitor) with(devices []*pb.Device) []*pb.Device {
	m.mu.Lock()
	defer m.mu.Unlock()
	out := make([]*pb.Device, len(devices))
	for i, d := range devices {
		out[i] = d
		v := m.drives[d.GetPath()]
		if v == nil || v.drive != d.GetDriveId() {
			continue
		}
		if h := v.health(); h != nil {
			out[i] = proto.CloneOf(d)
			out[i].Health = h
		}
	}
	return out
}

// health is the newest reading; nil if there is none, or if the device says nothing at all.
func (v *vitals) health() *pb.DriveHealth {
	if v.next != nil && time.Since(v.began) >= healthFor {
		h := proto.CloneOf(v.next)
		h.Unread = fmt.Sprintf("it does not answer, since %s", v.began.UTC().Format(time.RFC3339))
		return h
	}
	if h := v.last; h.GetSmart() != nil || h.GetUnread() != "" || h.GetIos() > 0 {
		return h
	}
	return nil
}
