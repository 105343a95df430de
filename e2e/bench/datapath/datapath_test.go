// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/initiator/blockdev"
)

func TestHistogramIsRightToAnEighth(t *testing.T) {
	var h histogram
	var all []time.Duration
	r := rand.New(rand.NewPCG(1, 2))
	for range 20_000 {
		d := time.Duration(r.ExpFloat64() * float64(200*time.Microsecond))
		h.add(d)
		all = append(all, d)
	}
	slices.Sort(all)
	for _, q := range []float64{0.01, 0.5, 0.9, 0.99, 0.999} {
		want := all[int(q*float64(len(all)))]
		if got := h.quantile(q); got < want*7/8 || got > want*9/8 {
			t.Errorf("quantile(%v) = %v, want %v to an eighth", q, got, want)
		}
	}
	if got, want := h.most(), all[len(all)-1]; got < want*7/8 || got > want*9/8 {
		t.Errorf("most() = %v, want %v to an eighth", got, want)
	}
	for n := range uint64(100_000) {
		if b := bucket(n); floor(b) > n || floor(b+1) <= n {
			t.Fatalf("%d is in bucket %d, which is [%d, %d)", n, b, floor(b), floor(b+1))
		}
	}
}

func listen(t *testing.T) net.Listener {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

func jobs() (all []job) {
	for _, write := range []bool{false, true} {
		for _, j := range []job{{Size: 4096, Depth: 1}, {Size: 4096, Depth: 32, Random: true}, {Size: 128 << 10, Depth: 8}} {
			j.Write, j.Span, j.Seconds = write, 8<<20, 0.05
			all = append(all, j)
		}
	}
	return all
}

// TestMain lets the test program act as one of the processes, as the benchmark does.
func TestMain(m *testing.M) {
	if len(os.Args) > 2 && os.Args[1] == Role {
		if err := Process(os.Args[2:]); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

func TestBareFramesAreAnsweredOneForOne(t *testing.T) {
	client, err := start(-1, "client")
	if err != nil {
		t.Fatal(err)
	}
	defer client.stop()
	for _, f := range []form{poller, blocking, busy} {
		s, err := bareFrames(f, -1)
		if err != nil {
			t.Fatal(err)
		}
		defer s.stop()
		for _, j := range jobs() {
			j.Kind, j.Form, j.Address = "frames", f, s.job.Address
			var r result
			if err := client.ask(0, j, &r); err != nil || r.Err != "" || r.IOPS == 0 || r.P50 == 0 || r.P99 < r.P50 {
				t.Errorf("%+v: %+v, %v", j, r, err)
			}
		}
		if u, err := s.used(); err != nil || u.CPU == 0 {
			t.Errorf("%s server has used %+v, %v", f, u, err)
		}
	}
}

func TestWeftTakesTheSameJobs(t *testing.T) {
	d, err := filled()
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	if err := serveDevice(l, d); err != nil {
		t.Fatal(err)
	}
	kinds := []job{{Kind: "host"}, {Kind: "volume", Stripes: 1, Copies: 2}, {Kind: "volume", Stripes: 2, Copies: 2}}
	for _, kind := range kinds {
		for _, j := range jobs() {
			j.Kind, j.Stripes, j.Copies, j.Address = kind.Kind, kind.Stripes, kind.Copies, l.Addr().String()
			if r := work(j); r.Err != "" || r.IOPS == 0 {
				t.Errorf("%+v: %+v", j, r)
			}
		}
	}
}

func TestABlockDeviceTakesTheSameJobs(t *testing.T) {
	if a := bestAbility(); !a.Usable {
		t.Skip(a.Reason)
	}
	d, err := filled()
	if err != nil {
		t.Fatal(err)
	}
	l := listen(t)
	if err := serveDevice(l, d); err != nil {
		t.Fatal(err)
	}
	s, err := ours("device", job{Kind: "device"}, -1, "device", l.Addr().String(), "1", "2")
	if err != nil {
		t.Fatal(err)
	}
	defer s.stop()
	for _, j := range jobs() {
		j.Kind, j.Address = s.job.Kind, s.job.Address
		if r := work(j); r.Err != "" || r.IOPS == 0 {
			t.Errorf("%+v: %+v", j, r)
		}
	}
	if u, err := s.used(); err != nil || u.CPU == 0 {
		t.Errorf("the process of the device has used %+v, %v", u, err)
	}
}

func TestTheBareFUSEServerTakesTheSameJobs(t *testing.T) {
	if a := bestAbility(); a.Kind != blockdev.FUSE || !a.Usable {
		t.Skipf("needs FUSE: %s", a.Reason)
	}
	if _, err := exec.LookPath("gcc"); err != nil {
		t.Skip(err)
	}
	for _, uring := range []bool{false, true} {
		var s *server
		err := withFUSE(uring, func() (err error) { s, err = bareFUSE(t.TempDir(), uring); return err })
		if uring && errors.Is(err, fs.ErrNotExist) {
			t.Skip(err)
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(s.stop)
		for _, j := range jobs() {
			j.Kind, j.Address = s.job.Kind, s.job.Address
			if r := work(j); r.Err != "" || r.IOPS == 0 {
				t.Errorf("%s: %+v: %+v", s.name, j, r)
			}
		}
	}
}

func TestNBDRepliesAreTakenApart(t *testing.T) {
	good := []byte{0x67, 0x44, 0x66, 0x98, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1}
	sizes := []int{0, 4096}
	if slot, n, err := (nbd{}).reply(good, sizes); slot != 1 || n != 16+4096 || err != nil {
		t.Errorf("reply = %d, %d, %v; want slot 1 with 4096 bytes of data", slot, n, err)
	}
	if _, n, err := (nbd{}).reply(good[:15], sizes); n != 0 || err != nil {
		t.Errorf("reply of 15 bytes = %d, %v; want to wait for more", n, err)
	}
	for name, at := range map[string]int{"magic": 0, "error": 7, "slot": 15} {
		bad := slices.Clone(good)
		bad[at] ^= 0x40
		if _, _, err := (nbd{}).reply(bad, sizes); err == nil {
			t.Errorf("a reply with a bad %s is accepted", name)
		}
	}
}

func TestTheOutputOfSPDKsClientIsUnderstood(t *testing.T) {
	r, err := parsePerf(`
Latency summary for TCP (addr:127.0.0.1 subnqn:x) NSID 1 from core 1:
=================================================================================
 50.00000% :   12.902us
 99.00000% :   32.100us
 99.90000% :   55.200us
========================================================
                                                                           Latency(us)
Device Information                     :       IOPS      MiB/s    Average        min        max
TCP  (addr:127.0.0.1) NSID 1 from core 1:   72330.00     282.54      13.21      10.02     300.00
Total                                    :   72330.50     282.54      13.21      10.02     300.00
`)
	if err != nil || r.IOPS != 72330.5 || r.P50 != 12902*time.Nanosecond || r.P99 != 32100*time.Nanosecond || r.P999 != 55200*time.Nanosecond {
		t.Errorf("%+v, %v", r, err)
	}
	if _, err := parsePerf("EAL: no memory"); err == nil {
		t.Error("output without a total is accepted")
	}
}

func TestAWorseRatioIsFoundOnlyBeyondTheSpread(t *testing.T) {
	row := func(server string, ratio, least, most float64) Row {
		return Row{Section: "in memory", Workload: "w", Server: server, Ratio: ratio, Least: least, Most: most}
	}
	old := &Results{Rows: []Row{row("weft", 1, 0.95, 1.05), row("RAID1", 1, 0.9, 1.1), row("tgt", 1, 1, 1), row("RAID10", 1, 1, 1)}}
	now := &Results{Rows: []Row{row("weft", 0.8, 0.75, 0.9), row("RAID1", 0.8, 0.7, 0.95), row("tgt", 0.1, 0.1, 0.1), row("RAID10", 0.96, 0.96, 0.96), row("new", 1, 1, 1)}}
	path := t.TempDir() + "/results"
	if err := now.write(path); err != nil {
		t.Fatal(err)
	}
	now, err := ReadResults(path)
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if n := Compare(&out, old, now); n != 1 {
		t.Errorf("%d of Weft's rows are worse, want 1 (weft; RAID1's spreads overlap, RAID10 lost 4 %%, tgt is not ours):\n%s", n, &out)
	}
}
