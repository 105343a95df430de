// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"slices"
	"strings"
	"testing"
	"testing/quick"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// kernelTables are lines as `dmsetup table` prints them on 6.1.
var kernelTables = []string{
	"0 131072 linear 8:16 2048",
	"0 262144 striped 2 256 253:0 0 253:1 0",
	"0 65536 mirror core 1 1024 2 7:0 0 7:1 0",
	"0 65536 mirror core 2 1024 nosync 2 7:0 0 7:1 0 1 handle_errors",
	"0 122880 mirror disk 3 7:2 1024 nosync 2 259:1 8192 259:3 8192 1 handle_errors",
	"0 122880 mirror disk 2 7:2 1024 2 259:1 0 253:7 0 2 handle_errors keep_log",
	"0 65536 error",
	"0 2048 zero\n2048 2048 linear 8:16 0",
	"0 65536 delay 8:16 0 500",
	"0 65536 flakey 253:3 0 0 1 1 error_writes",
	"0 65536 flakey 253:3 0 5 1 0",
	"0 65536 flakey 253:3 8 0 1 1 error_writes",
}

func TestTableStringAndParseAreInverses(t *testing.T) {
	for _, text := range kernelTables {
		table, err := ParseTable(text)
		if err != nil || table.String() != text || table.Check() != nil {
			t.Errorf("ParseTable(%q) = %q, %v, check %v; want the same again", text, table, err, table.Check())
		}
	}
	for _, bad := range []string{
		"0", "0 1", "x 1 error", "0 -1 error", "0 99999999999999999999 error", "0 36028797018963968 error",
		"0 1 linear", "0 1 linear 8:16", "0 1 linear 8:16 0 0", "0 8 striped 3 8 8:1 0", "0 8 striped -1 8",
		"0 8 mirror", "0 8 mirror disk 1 8 2 8:1 0 8:2 0", "0 8 mirror clog 1 8 2 8:1 0 8:2 0", "0 8 mirror core 2 8 maybe 1 8:1 0",
		"0 8 mirror core 1 8 1 8:1 0 1 lose_data", "0 8 mirror core 1 8 1 8:1 0 2 handle_errors", "0 8 mirror core 4000000000 8",
	} {
		if got, err := ParseTable(bad); err == nil {
			t.Errorf("ParseTable(%q) = %v, want an error", bad, got)
		}
	}
}

func TestMirrorStatusStringAndParseAreInverses(t *testing.T) {
	for text, want := range map[string]MirrorStatus{
		"2 259:1 259:3 116/120 1 AD 1 core": {
			Legs: []LegStatus{{"259:1", Alive}, {"259:3", WriteError}}, InSync: 116, Total: 120, LogHealth: Alive,
		},
		"3 7:0 7:1 7:2 8/8 1 SRF 3 disk 7:3 D": {
			Legs: []LegStatus{{"7:0", SyncError}, {"7:1", ReadError}, {"7:2", FlushError}}, InSync: 8, Total: 8,
			LogDevice: "7:3", LogHealth: WriteError,
		},
	} {
		got, err := ParseMirrorStatus(text)
		if d := cmp.Diff(want, got); err != nil || d != "" || got.String() != text {
			t.Errorf("ParseMirrorStatus(%q) = %v, %v; want %v", text, got, err, want)
		}
	}
	for _, bad := range []string{
		"", "2 7:0", "2 7:0 7:1 8/8 1 A 1 core", "2 7:0 7:1 9/8 1 AA 1 core", "2 7:0 7:1 8 1 AA 1 core", "2 7:0 7:1 8/8 2 AA 1 core",
		"2 7:0 7:1 8/8 1 AX 1 core", "2 7:0 7:1 8/8 1 AA 3 disk 7:3", "2 7:0 7:1 8/8 1 AA 3 disk 7:3 AA", "2 7:0 7:1 8/8 1 AA 1 core more",
		"4000000000 7:0", "0 8/8 1", "-1 8/8 1 1 core",
	} {
		if got, err := ParseMirrorStatus(bad); err == nil {
			t.Errorf("ParseMirrorStatus(%q) = %v, want an error", bad, got)
		}
	}
}

func TestNumbersAreCodedAsTheKernelDoes(t *testing.T) {
	if err := quick.Check(func(major uint16, minor uint32) bool {
		n := block.DeviceNumber{Major: uint32(major & 0xfff), Minor: minor & 0xfffff}
		return decodeNumber(encodeNumber(n)) == n
	}, nil); err != nil {
		t.Error(err)
	}
}

// exact bytes, as include/uapi/linux/dm-ioctl.h lays them out on a little-endian machine.
func TestHeaderHasTheKernelsLayout(t *testing.T) {
	if order.Uint16([]byte{1, 0}) != 1 {
		t.Skip("the bytes below are little-endian")
	}
	b := make([]byte, headerSize)
	h := header{
		version: [3]uint32{4, 0, 0}, dataSize: 16384, dataStart: 312, targetCount: 3, openCount: 5, flags: 0x802,
		eventNr: 0x4e0000, dev: 0xfd03, name: "weft", uuid: "weft-vol",
	}
	h.encode(b)
	want := make([]byte, 312)
	copy(want, "\x04\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00"+"\x00\x40\x00\x00"+"\x38\x01\x00\x00"+
		"\x03\x00\x00\x00"+"\x05\x00\x00\x00"+"\x02\x08\x00\x00"+"\x00\x00\x4e\x00"+"\x00\x00\x00\x00"+"\x03\xfd\x00\x00\x00\x00\x00\x00")
	copy(want[48:], "weft")
	copy(want[176:], "weft-vol")
	if d := cmp.Diff(want, b); d != "" {
		t.Errorf("encode: -want +got\n%s", d)
	}
	if got, err := decodeHeader(b); err != nil || got != h {
		t.Errorf("decodeHeader = %+v, %v; want %+v", got, err, h)
	}
}

func TestDiffRemovesUsersFirst(t *testing.T) {
	state := func(name string, minor uint32, below ...Ref) State {
		var table Table
		for i, r := range below {
			table = append(table, Row{block.Size(i) * block.MiB, block.MiB, Linear{Device: r}})
		}
		return State{Info{Name: name, Number: block.DeviceNumber{Major: 253, Minor: minor}, Live: true}, table}
	}
	got := []State{state("a", 0, "8:0"), state("b", 1, "253:0"), state("c", 2, "b", "253:3"), state("d", 3, "a")}
	var order []string
	for _, s := range Diff(got, nil) {
		order = append(order, s.Device.Name)
	}
	at := func(name string) int { return slices.Index(order, name) }
	if len(order) != 4 || at("c") > at("b") || at("b") > at("a") || at("c") > at("d") || at("d") > at("a") {
		t.Errorf("removal order %v, want c before b and d, these before a", order)
	}
}

func TestDiffFindsWhatACrashLeft(t *testing.T) {
	table := Whole(block.MiB, Linear{Device: "8:0"})
	other := Whole(block.MiB, Linear{Device: "8:1"})
	want := []Device{{Name: "a", UUID: "u", Table: table}}
	for _, test := range []struct {
		state State
		ops   string
	}{
		{State{Info{Name: "a", UUID: "u"}, nil}, "reload"},
		{State{Info{Name: "a", UUID: "u", Inactive: true}, nil}, "reload"},
		{State{Info{Name: "a", UUID: "u", Live: true}, table}, ""},
		{State{Info{Name: "a", UUID: "u", Live: true, Suspended: true}, table}, "resume"},
		{State{Info{Name: "a", UUID: "u", Live: true, Inactive: true}, table}, "clear"},
		{State{Info{Name: "a", UUID: "u", Live: true, Inactive: true, Suspended: true}, table}, "clear resume"},
		{State{Info{Name: "a", UUID: "u", Live: true, Inactive: true, Suspended: true}, other}, "reload"},
		{State{Info{Name: "a", UUID: "other", Live: true}, table}, "remove create"},
	} {
		if got := opsOf(Diff([]State{test.state}, want)); got != test.ops {
			t.Errorf("Diff(%+v) = %q, want %q", test.state, got, test.ops)
		}
	}
}

func TestASuspendedMirrorIsLoadedAnew(t *testing.T) {
	table := Whole(block.MiB, Mirror{Log: Log{Device: "7:0", Region: block.MiB, Sync: NoSync}, Legs: []Leg{{"8:0", 0}, {"8:1", 0}}, HandleErrors: true})
	got := []State{{Info{Name: "a", UUID: "u", Live: true, Suspended: true}, table}}
	if ops := opsOf(Diff(got, []Device{{Name: "a", UUID: "u", Table: table}})); ops != "reload" {
		t.Errorf("Diff of a suspended mirror = %q, want a reload", ops)
	}
}

func opsOf(steps []Step) string {
	var ops []string
	for _, s := range steps {
		ops = append(ops, string(s.Op))
	}
	return strings.Join(ops, " ")
}

func FuzzParseTable(f *testing.F) {
	for _, text := range kernelTables {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		table, err := ParseTable(text)
		if err != nil {
			return
		}
		again, err := ParseTable(table.String())
		if err != nil || !again.Equal(table) {
			t.Errorf("ParseTable(%q) = %v, %v; want it again", table, again, err)
		}
	})
}

func FuzzParseMirrorStatus(f *testing.F) {
	f.Add("2 259:1 259:3 116/120 1 AD 1 core")
	f.Add("3 7:0 7:1 7:2 8/8 1 SRF 3 disk 7:3 D")
	f.Fuzz(func(t *testing.T, text string) {
		s, err := ParseMirrorStatus(text)
		if err != nil {
			return
		}
		if again, err := ParseMirrorStatus(s.String()); err != nil || cmp.Diff(s, again) != "" {
			t.Errorf("ParseMirrorStatus(%q) = %v, %v; want it again", s, again, err)
		}
	})
}

func FuzzDecodeRows(f *testing.F) {
	f.Add(encodeTable(Whole(block.MiB, Linear{Device: "8:16"})), uint32(1))
	f.Add([]byte{}, uint32(1<<31))
	f.Fuzz(func(t *testing.T, b []byte, count uint32) {
		rows, err := decodeRows(b, count)
		if err == nil && len(rows) != int(count) {
			t.Errorf("decodeRows of %d = %d rows", count, len(rows))
		}
		for _, r := range rows {
			_, _ = r.row()
		}
		_ = walk(b, 8, 12, func(e []byte) { _ = cString(e[12:]) })
		_ = walk(b, 0, 16, func(e []byte) { _ = cString(e[16:]) })
	})
}
