// SPDX-License-Identifier: Apache-2.0

package block

import (
	"strings"
	"testing"
	"testing/quick"
)

func TestSizePrintsAndParses(t *testing.T) {
	for text, want := range map[string]Size{
		"0": 0, "512": 512, "4k": 4 * KiB, "4KiB": 4 * KiB, "4KB": 4000, "1.5 GiB": 1536 * MiB,
		"10GiB": 10 * GiB, "10g": 10 * GiB, "2TB": 2e12, "16777215TiB": 16777215 * TiB,
	} {
		got, err := ParseSize(text)
		if err != nil || got != want {
			t.Errorf("ParseSize(%q) = %d, %v; want %d", text, got, err, want)
		}
	}
	for _, text := range []string{"", "GiB", "-1", "10 apples", "1e400GiB", "99999999999PiB", "10GiBs", "0x10"} {
		if got, err := ParseSize(text); err == nil {
			t.Errorf("ParseSize(%q) = %v, want an error", text, got)
		}
	}
	if err := quick.Check(func(n uint64) bool {
		got, err := ParseSize(Size(n).String())
		return err == nil && got == Size(n)
	}, &quick.Config{MaxCount: 20_000}); err != nil { // one in 256 is a number of quarters
		t.Error(err)
	}
}

func TestUUIDStringAndParseAreInverses(t *testing.T) {
	if err := quick.Check(func(u UUID) bool {
		got, err := ParseUUID(u.String())
		return err == nil && got == u
	}, nil); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "x", strings.Repeat("0", 36), "00000000-0000-0000-0000-00000000000g"} {
		if _, err := ParseUUID(bad); err == nil {
			t.Errorf("ParseUUID(%q) succeeded", bad)
		}
	}
}

func TestDeviceNumberStringAndParseAreInverses(t *testing.T) {
	if got, err := ParseDeviceNumber("253:4"); err != nil || got != (DeviceNumber{253, 4}) {
		t.Errorf("ParseDeviceNumber(253:4) = %v, %v", got, err)
	}
	if err := quick.Check(func(n DeviceNumber) bool {
		got, err := ParseDeviceNumber(n.String())
		return err == nil && got == n
	}, nil); err != nil {
		t.Error(err)
	}
	for _, bad := range []string{"", "8", "8:", ":8", "8:16:1", "08:1", "+8:1", "8:-1", "8:1\n", "99999999999:0", "weft-c0"} {
		if got, err := ParseDeviceNumber(bad); err == nil {
			t.Errorf("ParseDeviceNumber(%q) = %v, want an error", bad, got)
		}
	}
}

func TestSubsystemNQNAndParseAreInverses(t *testing.T) {
	if err := quick.Check(func(v VolumeID, e Epoch, grant uint64, id UUID) bool {
		h := HostFromID(id)
		nqn := SharedNQN(v, e, grant, h, "gpu-1.example")
		gotV, gotE, gotHost, target, err := ParseSubsystemNQN(nqn)
		_, checked := ParseNQN(string(nqn))
		return err == nil && gotV == v && gotE == e && gotHost == h.Short() && target == "gpu-1.example" && checked == nil && nqn.Ours() &&
			nqn.Grant() == grant && SubsystemNQN(v, e, h, "gpu-1.example") == SharedNQN(v, e, 0, h, "gpu-1.example")
	}, nil); err != nil {
		t.Error(err)
	}
	for _, bad := range []NQN{"", "nqn.2014-08.org.nvmexpress.discovery", nqnPrefix, nqnPrefix + "a.1.b", nqnPrefix + "a.b.c.d",
		SubsystemNQN(VolumeID{}, 1, Host{}, "t1")[:len(nqnPrefix)+36] + ".1-x.00000000.t1"} {
		if _, _, _, _, err := ParseSubsystemNQN(bad); err == nil {
			t.Errorf("ParseSubsystemNQN(%q) succeeded", bad)
		}
	}
}

func TestNamespaceIdentityNeverRepeats(t *testing.T) {
	seen := map[UUID]bool{}
	for leg := range byte(10) {
		for epoch := range Epoch(10) {
			for revision := range uint64(10) {
				u := NamespaceUUID(LegID{UUID{leg}}, epoch, revision)
				if seen[u] {
					t.Fatalf("NamespaceUUID(%d, %d, %d) repeats %v", leg, epoch, revision, u)
				}
				seen[u] = true
			}
		}
	}
}

func TestPortalStringAndParseAreInverses(t *testing.T) {
	for text, want := range map[string]Portal{
		"192.0.2.1":                   {TCP, "192.0.2.1", 4420, ""},
		"192.0.2.1:4421":              {TCP, "192.0.2.1", 4421, ""},
		"rdma://192.0.2.1:4420#rail0": {RDMA, "192.0.2.1", 4420, "rail0"},
		"tcp://[2001:db8::1]:4420":    {TCP, "2001:db8::1", 4420, ""},
		"2001:db8::1":                 {TCP, "2001:db8::1", 4420, ""},
	} {
		got, err := ParsePortal(text)
		if err != nil || got != want {
			t.Errorf("ParsePortal(%q) = %v, %v; want %v", text, got, err, want)
		}
		if again, err := ParsePortal(got.String()); err != nil || again != got {
			t.Errorf("ParsePortal(%q) = %v, %v; want %v", got.String(), again, err, got)
		}
	}
	for _, bad := range []string{"", "fc://x", "[::1", "192.0.2.1:0", "192.0.2.1:99999", "a b"} {
		if got, err := ParsePortal(bad); err == nil {
			t.Errorf("ParsePortal(%q) = %v, want an error", bad, got)
		}
	}
}

func TestLegsOfALayoutHoldTheVolume(t *testing.T) {
	if err := quick.Check(func(size uint64, stripes, chunkShift uint8) bool {
		l := Layout{Stripes: int(stripes%MaxStripes) + 1, Copies: 1, Chunk: 4 * KiB << (chunkShift % 13)}
		volume := Size(size % uint64(100*TiB))
		leg := l.LegSize(volume)
		return l.Check() == nil && leg*Size(l.Stripes) >= volume && leg%l.Chunk == 0 && leg%MiB == 0 &&
			Size(l.LegExtents(volume))*ExtentSize >= leg
	}, nil); err != nil {
		t.Error(err)
	}
}

func TestAllZero(t *testing.T) {
	for n := range 70 {
		p := make([]byte, n)
		if !AllZero(p) {
			t.Errorf("%d zeroes are not all zero", n)
		}
		for i := range p {
			p[i] = 1
			if AllZero(p) {
				t.Errorf("a one at %d of %d is not noticed", i, n)
			}
			p[i] = 0
		}
	}
}
