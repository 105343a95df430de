// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"weft.dev/weft/proto/block"
)

// fakeKernel imitates drivers/md/dm-ioctl.c, down to the bytes of its answers. The suite
// runs over it where the real device mapper is not available.
type fakeKernel struct {
	mu      sync.Mutex
	devices map[string]*fakeDevice
	disks   map[block.DeviceNumber]block.Size // block devices that are not mapped
	minors  uint32
	events  chan struct{} // closed and replaced at each event
}

type fakeDevice struct {
	Info
	live, inactive []rawRow
	opened         int            // by programs
	failed         map[int]Health // legs of a mirror
	counts         *fakeCounts    // nil: it does not count
	deferred       bool
}

const fakeMajor = 253

func newFakeKernel(disks map[block.DeviceNumber]block.Size) *fakeKernel {
	return &fakeKernel{devices: map[string]*fakeDevice{}, disks: disks, events: make(chan struct{})}
}

func (k *fakeKernel) close() error { return nil }

func (k *fakeKernel) ioctl(cmd uint32, buf []byte) error {
	k.mu.Lock()
	defer k.mu.Unlock()
	h, err := decodeHeader(buf)
	if err != nil || h.version[0] != 4 || int(h.dataSize) != len(buf) {
		return syscall.EINVAL
	}
	data, err := k.do(cmd, &h, buf[headerSize:])
	if err != nil {
		return err
	}
	h.version = [3]uint32{4, 47, 0}
	h.flags &^= flagBufferFull
	if len(data) > len(buf)-headerSize {
		h.flags |= flagBufferFull
		data = nil
	}
	h.dataSize = uint32(headerSize + len(data))
	clear(buf[:headerSize])
	h.encode(buf)
	copy(buf[headerSize:], data)
	return nil
}

func (k *fakeKernel) do(cmd uint32, h *header, payload []byte) ([]byte, error) {
	switch cmd {
	case cmdVersion:
		return nil, nil
	case cmdListVersions:
		return k.versions(), nil
	case cmdListDevices:
		return k.list(), nil
	case cmdCreate:
		return nil, k.create(h)
	}
	d := k.devices[h.name]
	if d == nil {
		return nil, syscall.ENXIO
	}
	defer k.answer(h, d)
	switch cmd {
	case cmdDevStatus:
	case cmdTableLoad:
		return nil, k.load(d, h, payload)
	case cmdTableClear:
		d.inactive = nil
	case cmdSuspend:
		return nil, k.suspend(d, h.flags)
	case cmdRemove:
		return nil, k.remove(d, h.flags)
	case cmdRename:
		return nil, k.rename(d, h, cString(payload))
	case cmdTableStatus:
		if h.flags&flagStatusTable != 0 {
			return encodeRows(d.live, h), nil
		}
		return encodeRows(k.status(d), h), nil
	case cmdTableDeps:
		return k.deps(d), nil
	case cmdMessage:
		text := cString(payload[8:])
		if !strings.HasPrefix(text, "@stats_") {
			return nil, syscall.EINVAL // what all our targets say
		}
		answer, err := d.stats(text)
		h.flags |= flagDataOut
		return append([]byte(answer), 0), err
	default:
		return nil, syscall.ENOTTY
	}
	return nil, nil
}

// answer fills in the state of a device that is part of each answer (__dev_status).
func (k *fakeKernel) answer(h *header, d *fakeDevice) {
	h.name, h.uuid, h.dev, h.eventNr = d.Name, d.UUID, encodeNumber(d.Number), d.EventNr
	h.openCount = int32(k.openCount(d))
	h.flags &= flagStatusTable | flagDataOut
	for flag, on := range map[uint32]bool{flagSuspend: d.Suspended, flagActive: d.live != nil, flagInactive: d.inactive != nil} {
		if on {
			h.flags |= flag
		}
	}
}

func (k *fakeKernel) openCount(d *fakeDevice) int {
	n := d.opened
	for _, user := range k.devices {
		for _, table := range [][]rawRow{user.live, user.inactive} {
			if slices.Contains(refsOf(table), RefTo(d.Number)) {
				n++
			}
		}
	}
	return n
}

func refsOf(rows []rawRow) []Ref {
	var t Table
	for _, raw := range rows {
		r, err := raw.row()
		if err != nil {
			panic(err)
		}
		t = append(t, r)
	}
	return t.Refs()
}

func (k *fakeKernel) create(h *header) error {
	for _, d := range k.devices {
		if d.Name == h.name || d.UUID != "" && d.UUID == h.uuid {
			return syscall.EBUSY
		}
	}
	d := &fakeDevice{Info: Info{Name: h.name, UUID: h.uuid, Number: block.DeviceNumber{Major: fakeMajor, Minor: k.minors}}}
	k.minors++
	k.devices[h.name] = d
	k.answer(h, d)
	return nil
}

// load checks what the targets' constructors check.
func (k *fakeKernel) load(d *fakeDevice, h *header, payload []byte) error {
	var rows []rawRow
	for range h.targetCount {
		r, next, err := decodeSpec(payload)
		if err != nil {
			return syscall.EINVAL
		}
		row, err := r.row()
		if err != nil || (Table{{Length: row.Length, Target: row.Target}}).Check() != nil {
			return syscall.EINVAL
		}
		if _, other := row.Target.(Other); other {
			return syscall.EINVAL
		}
		for _, ref := range refsOf([]rawRow{r}) {
			if n, ok := ref.Number(); !ok || n == d.Number || !k.exists(n) {
				return syscall.ENODEV
			}
		}
		rows = append(rows, r)
		payload = payload[next:]
	}
	d.inactive = rows
	return nil
}

func (k *fakeKernel) exists(n block.DeviceNumber) bool {
	_, disk := k.disks[n]
	return disk || slices.ContainsFunc(k.sorted(), func(d *fakeDevice) bool { return d.Number == n })
}

func (k *fakeKernel) sorted() []*fakeDevice {
	var all []*fakeDevice
	for _, d := range k.devices {
		all = append(all, d)
	}
	slices.SortFunc(all, func(a, b *fakeDevice) int { return cmp.Compare(a.Number.Minor, b.Number.Minor) })
	return all
}

func decodeSpec(b []byte) (r rawRow, next uint32, err error) {
	rows, err := decodeRows(b, 1)
	if err != nil {
		return r, 0, err
	}
	next = order.Uint32(b[20:])
	if next < specSize || int(next) > len(b) {
		return r, 0, syscall.EINVAL
	}
	return rows[0], next, nil
}

func (k *fakeKernel) suspend(d *fakeDevice, flags uint32) error {
	if flags&flagSuspend != 0 {
		d.Suspended = true
		return nil
	}
	if d.inactive != nil {
		d.live, d.inactive, d.failed = d.inactive, nil, nil
	}
	if d.live == nil {
		return syscall.EINVAL
	}
	d.Suspended = false
	return nil
}

func (k *fakeKernel) remove(d *fakeDevice, flags uint32) error {
	if k.openCount(d) > 0 {
		if flags&flagDeferredRemove == 0 {
			return syscall.EBUSY
		}
		d.deferred = true
		return nil
	}
	delete(k.devices, d.Name)
	k.raise(d)
	return nil
}

func (k *fakeKernel) rename(d *fakeDevice, h *header, to string) error {
	if k.devices[to] != nil {
		return syscall.EBUSY
	}
	delete(k.devices, d.Name)
	d.Name = to
	k.devices[to] = d
	return nil
}

func (k *fakeKernel) raise(d *fakeDevice) {
	d.EventNr++
	close(k.events)
	k.events = make(chan struct{})
}

// failLeg does what a mirror does when a write to a leg fails.
func (k *fakeKernel) failLeg(name string, leg int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.devices[name]
	if d.failed == nil {
		d.failed = map[int]Health{}
	}
	d.failed[leg] = WriteError
	k.raise(d)
}

func (k *fakeKernel) open(name string, delta int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	d := k.devices[name]
	d.opened += delta
	if d.deferred && k.openCount(d) == 0 {
		delete(k.devices, name)
	}
}

func (k *fakeKernel) status(d *fakeDevice) []rawRow {
	rows := slices.Clone(d.live)
	for i := range rows {
		rows[i].params = d.statusOf(rows[i])
	}
	return rows
}

func (d *fakeDevice) statusOf(raw rawRow) string {
	r, err := raw.row()
	if err != nil {
		panic(err)
	}
	m, ok := r.Target.(Mirror)
	if !ok {
		return ""
	}
	total := uint64((r.Length + m.Log.Region - 1) / m.Log.Region)
	s := MirrorStatus{InSync: total - uint64(len(d.failed)), Total: total, LogDevice: m.Log.Device, LogHealth: Alive}
	for i, l := range m.Legs {
		s.Legs = append(s.Legs, LegStatus{l.Device, cmp.Or(d.failed[i], Alive)})
	}
	return s.String()
}

// encodeRows encodes the answer to TABLE_STATUS.
func encodeRows(rows []rawRow, h *header) []byte {
	h.targetCount = uint32(len(rows))
	var b []byte
	for _, r := range rows {
		spec := make([]byte, (specSize+len(r.params)+1+7)&^7)
		order.PutUint64(spec[0:], r.start)
		order.PutUint64(spec[8:], r.length)
		order.PutUint32(spec[20:], uint32(len(b)+len(spec)))
		copy(spec[24:], r.kind)
		copy(spec[specSize:], r.params)
		b = append(b, spec...)
	}
	return b
}

func (k *fakeKernel) deps(d *fakeDevice) []byte {
	refs := refsOf(d.live)
	b := make([]byte, 8, 8+8*len(refs))
	order.PutUint32(b, uint32(len(refs)))
	for _, r := range refs {
		n, _ := r.Number()
		b = order.AppendUint64(b, encodeNumber(n))
	}
	return b
}

func (k *fakeKernel) versions() []byte {
	var b []byte
	names := []string{"error", "linear", "mirror", "striped", "zero"}
	for i, name := range names {
		e := make([]byte, (16+len(name)+1+7)&^7)
		if i+1 < len(names) {
			order.PutUint32(e, uint32(len(e)))
		}
		order.PutUint32(e[4:], 1)
		order.PutUint32(e[8:], uint32(i))
		copy(e[16:], name)
		b = append(b, e...)
	}
	return b
}

func (k *fakeKernel) list() []byte {
	var b []byte
	all := k.sorted()
	for i, d := range all {
		e := make([]byte, (12+len(d.Name)+1+7)&^7)
		order.PutUint64(e, encodeNumber(d.Number))
		if i+1 < len(all) {
			order.PutUint32(e[8:], uint32(len(e)))
		}
		copy(e[12:], d.Name)
		b = append(b, e...)
	}
	if len(all) == 0 {
		b = make([]byte, 16)
	}
	return b
}

func (k *fakeKernel) watch(ctx context.Context, changed func() (bool, error)) error {
	for range 1000 {
		k.mu.Lock()
		events := k.events
		k.mu.Unlock()
		if done, err := changed(); done || err != nil {
			return err
		}
		select {
		case <-events:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return fmt.Errorf("no end of events")
}

// fakeWorld is a fake kernel with disks.
func fakeWorld(t *testing.T) *world {
	disks := map[block.DeviceNumber]block.Size{}
	for i := range uint32(6) {
		disks[block.DeviceNumber{Major: 7, Minor: i}] = diskSize
	}
	k := newFakeKernel(disks)
	w := &world{kernel: k, client: &Client{k}, prefix: "weft-test-"}
	for i := range uint32(6) {
		w.disks = append(w.disks, RefTo(block.DeviceNumber{Major: 7, Minor: i}))
	}
	w.hold = func(name string) func() {
		k.open(name, 1)
		return func() { k.open(name, -1) }
	}
	w.failLeg = func(name string) { k.failLeg(name, 1) }
	w.ios = k.countIOs
	t.Cleanup(func() {
		for _, d := range k.sorted() {
			if strings.HasPrefix(d.Name, w.prefix) {
				t.Errorf("device %s was left", d.Name)
			}
		}
	})
	return w
}
