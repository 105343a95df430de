// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"encoding/binary"
	"math"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
)

// sickPage is a page with a different value in each field, written from the specification's table.
func sickPage() []byte {
	page := make([]byte, 512)
	page[0] = 0b101                                  // critical warning
	binary.LittleEndian.PutUint16(page[1:], 273+71)  // composite temperature
	page[3], page[4], page[5] = 8, 10, 103           // spare, its threshold, percentage used
	binary.LittleEndian.PutUint64(page[32:], 4)      // data units read
	binary.LittleEndian.PutUint64(page[48:], 5)      // written
	binary.LittleEndian.PutUint64(page[128:], 26000) // power on hours
	binary.LittleEndian.PutUint64(page[144:], 17)    // unsafe shutdowns
	binary.LittleEndian.PutUint64(page[160:], 12)    // media and data integrity errors
	binary.LittleEndian.PutUint64(page[176:], 29)    // error information log entries
	return page
}

func TestTheFieldsOfAHealthLogAreWhereTheSpecificationPutsThem(t *testing.T) {
	got, err := decodeSmart(sickPage())
	must(t, err)
	want := &pb.SmartLog{
		CriticalWarning: 5, Celsius: 71, SparePercent: 8, SpareThresholdPercent: 10, UsedPercent: 103,
		ReadBytes: 4 * 512000, WrittenBytes: 5 * 512000, PowerOnHours: 26000, UnsafeShutdowns: 17, MediaErrors: 12, ErrorEntries: 29,
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
		t.Errorf("decoded page (-want +got):\n%s", diff)
	}
	if _, err := decodeSmart(sickPage()[:511]); err == nil {
		t.Error("a page of 511 bytes was accepted")
	}
}

// The recorded pages are what drives have answered: testdata/smart/NAME.bin.
func TestRecordedHealthLogsAreRead(t *testing.T) {
	for name, want := range map[string]*pb.SmartLog{
		"qemu": {Celsius: 50, ReadBytes: 512000}, // QEMU 7.2's nvme device, read by Linux 6.1
	} {
		page, err := os.ReadFile(filepath.Join("testdata/smart", name+".bin"))
		must(t, err)
		got, err := decodeSmart(page)
		must(t, err)
		if diff := cmp.Diff(want, got, protocmp.Transform()); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func FuzzSmart(f *testing.F) {
	f.Add(sickPage())
	f.Add([]byte{})
	recorded, err := filepath.Glob("testdata/smart/*.bin")
	if err != nil {
		f.Fatal(err)
	}
	for _, path := range recorded {
		page, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(page)
	}
	f.Fuzz(func(t *testing.T, page []byte) {
		got, err := decodeSmart(page)
		if (err == nil) != (len(page) >= nvmetcp.SmartSize) {
			t.Fatalf("a page of %d bytes: %v", len(page), err)
		}
		if err != nil {
			return
		}
		units := binary.LittleEndian.Uint64(page[32:])
		if product := float64(units) * 512000; float64(got.GetReadBytes()) < math.Min(product, math.MaxUint64)*0.999 {
			t.Errorf("%d units are %d bytes", units, got.GetReadBytes())
		}
		if c := got.GetCelsius(); c < -273 || c > 65535-273 {
			t.Errorf("temperature %d °C", c)
		}
	})
}

func TestTheKernelsCountersOfADevice(t *testing.T) {
	const stat = "  339000   142 20992832   55340   412000  5210 52992001   98000   0   61000  160320   0 0 0 0 120 900\n"
	got, err := parseStat(stat)
	if want := (IOs{751000, 73984833 * 512, 153340 * time.Millisecond}); err != nil || got != want {
		t.Errorf("parseStat = %v, %v, want %v", got, err, want)
	}
	for _, bad := range []string{"", "1 2 3 4 5 6 7", "1 2 3 x 5 6 7 8", "1 2 3 -4 5 6 7 8"} {
		if got, err := parseStat(bad); err == nil {
			t.Errorf("parseStat(%q) = %v, want an error", bad, got)
		}
	}
	if got := (IOs{300, 5000, 4 * time.Second}).Since(IOs{100, 2000, time.Second}); got != (IOs{200, 3000, 3 * time.Second}) || got.Mean() != 15*time.Millisecond {
		t.Errorf("200 more in 3 s are %v with a mean of %v", got, got.Mean())
	}
	if got := (IOs{5, 512, time.Second}).Since(IOs{100, 512, 2 * time.Second}); got != (IOs{5, 512, time.Second}) {
		t.Errorf("since a counter that was higher: %v, want all of the new device's", got)
	}
	if got := (IOs{}).Mean(); got != 0 {
		t.Errorf("the mean of nothing is %v", got)
	}
}

func FuzzStat(f *testing.F) {
	f.Add("339000 142 20992832 55340 412000 5210 52992001 98000 0 61000 160320")
	f.Add("1 2 3 4")
	f.Add("9007199254740991 0 0 9007199254740991 9007199254740991 0 0 9007199254740991")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := parseStat(text)
		if err == nil && (n.Time < 0 || n.Mean() < 0) {
			t.Errorf("parseStat(%q) = %v", text, n)
		}
	})
}

func TestTheControllerOfANamespace(t *testing.T) {
	m := newMachine(t)
	controller := "sys/devices/pci0000:00/0000:01:00.0/nvme/nvme0"
	m.disk("nvme0n1", "pci0000:00/0000:01:00.0/nvme/nvme0", nil)
	m.files(controller, map[string]string{"transport": "pcie"})
	m.link("../..", controller+"/block/nvme0n1/device")
	m.files(controller+"/block/nvme0n1/nvme0n1p2", map[string]string{"partition": "2", "stat": "1 0 8 3 2 0 8 4 0 0 0"})
	m.link("../../devices/pci0000:00/0000:01:00.0/nvme/nvme0/block/nvme0n1", "sys/class/block/nvme0n1")
	m.link("../../devices/pci0000:00/0000:01:00.0/nvme/nvme0/block/nvme0n1/nvme0n1p2", "sys/class/block/nvme0n1p2")
	m.disk("sda", "pci0000:00/ata1", nil)
	m.link("../../block/sda", "sys/class/block/sda")
	s := sysfs(m.root)
	for _, path := range []string{"/dev/nvme0n1", "/dev/nvme0n1p2"} {
		if got := s.controller(s.diskOf(path)); got != "nvme0" {
			t.Errorf("the controller of %s is %q, want nvme0", path, got)
		}
	}
	if got := CompletedIOs(m.root, "/dev/nvme0n1p2"); got != (IOs{3, 16 * 512, 7 * time.Millisecond}) {
		t.Errorf("the partition's counters are %v", got)
	}
	if got := CompletedIOs(m.root, "/dev/sda"); got != (IOs{}) {
		t.Errorf("the counters of a device without any are %v", got)
	}
	if smart, err := Smart(m.root, "/dev/sda"); smart != nil || err != nil {
		t.Errorf("the health log of a disk that is not NVMe = %v, %v, want none", smart, err)
	}
	if _, err := Smart(m.root, "/dev/nvme0n1"); err == nil {
		t.Error("a controller without a device file answered")
	}
	m.file("dev/nvme0", "not a controller")
	if _, err := Smart(m.root, "/dev/nvme0n1"); err == nil {
		t.Error("a regular file answered as a controller")
	}
}
