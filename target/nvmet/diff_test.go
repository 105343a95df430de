// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

// text prints steps with short names, so that a test can be read.
func text(steps []Step) []string {
	a, b := sub(1, 1, 1), sub(1, 2, 2)
	short := strings.NewReplacer(
		string(a.NQN), "A", string(b.NQN), "B",
		string(a.AllowedHosts[0].To), "HA", string(b.AllowedHosts[0].To), "HB",
	)
	plain := strings.NewReplacer("subsystems/", "", "namespaces/", "")
	var out []string
	for _, s := range steps {
		out = append(out, plain.Replace(short.Replace(s.String())))
	}
	return out
}

func TestDiffCreatesWithTheLinkLast(t *testing.T) {
	want := place{}.config(sub(1, 1, 1, "/dev/x"))
	want.Ports = want.Ports[:1]
	u := want.Subsystems[0].Namespaces[0].UUID.String()
	expected := []string{
		"mkdir A",
		`write "` + block.SerialNumber(block.VolumeID{UUID: id(1)}) + `" to A/attr_serial`,
		`write "Weft" to A/attr_model`,
		"mkdir A/1",
		`write "/dev/x" to A/1/device_path`,
		`write "` + u + `" to A/1/device_uuid`,
		`write "` + u + `" to A/1/device_nguid`,
		`write "1" to A/1/enable`,
		"mkdir hosts/HA",
		"symlink A/allowed_hosts/HA to hosts/HA",
		"mkdir ports/22272",
		`write "tcp" to ports/22272/addr_trtype`,
		`write "ipv4" to ports/22272/addr_adrfam`,
		`write "127.0.0.1" to ports/22272/addr_traddr`,
		`write "4470" to ports/22272/addr_trsvcid`,
		"symlink ports/22272/A to A",
	}
	if diff := cmp.Diff(expected, text(Diff(Config{}, want))); diff != "" {
		t.Errorf("Diff(nothing, one export) (-want +got):\n%s", diff)
	}
}

func TestDiffCutsAllOffBeforeItDrains(t *testing.T) {
	got := place{}.config(sub(1, 1, 1, "/dev/x"), sub(1, 2, 2, "/dev/y"))
	for i := range got.Ports {
		got.Ports[i].ID = uint16(i + 1) // whoever made it
	}
	got.Hosts = []block.NQN{sub(1, 1, 1).AllowedHosts[0].To, sub(1, 2, 2).AllowedHosts[0].To}
	expected := []string{
		"unlink A/allowed_hosts/HA", "unlink ports/1/A", "unlink ports/2/A",
		"unlink B/allowed_hosts/HB", "unlink ports/1/B", "unlink ports/2/B",
		`write "0" to A/1/enable`, "rmdir A/1", "rmdir hosts/HA", "rmdir A",
		`write "0" to B/1/enable`, "rmdir B/1", "rmdir hosts/HB", "rmdir B",
	}
	if diff := cmp.Diff(expected, text(Diff(got, Config{}))); diff != "" {
		t.Errorf("Diff(two exports, nothing) (-want +got):\n%s", diff)
	}
}

// portsOf returns a configuration without its subsystems.
func portsOf(c Config) Config {
	ports := slices.Clone(c.Ports)
	for i := range ports {
		ports[i].Subsystems = nil
	}
	return Config{Ports: ports}
}

// A subsystem that is made again gets its host again, too: if it is given up in between, nothing is left.
func TestDiffMakesASubsystemAgainWithItsHost(t *testing.T) {
	got := place{}.config(sub(1, 1, 1, "/dev/x")).withPortIDs()
	got.Hosts = []block.NQN{sub(1, 1, 1).AllowedHosts[0].To}
	want := place{}.config(sub(1, 1, 1, "/dev/x"))
	want.Subsystems[0].CntlidMin, want.Subsystems[0].CntlidMax = HighIDs.Min, HighIDs.Max
	expected := []string{
		"unlink A/allowed_hosts/HA", "unlink ports/22272/A", "unlink ports/22273/A",
		`write "0" to A/1/enable`, "rmdir A/1", "rmdir hosts/HA", "rmdir A",
	}
	if diff := cmp.Diff(expected, text(Diff(got, want))); diff != "" {
		t.Errorf("Diff(an export, the same with other controller ids) (-want +got):\n%s", diff)
	}
	steps := text(Diff(portsOf(got), want))
	for _, step := range []string{`write "32760" to A/attr_cntlid_min`, "mkdir hosts/HA", "symlink ports/22272/A to A", "symlink ports/22273/A to A"} {
		if !slices.Contains(steps, step) {
			t.Errorf("the steps that make it again lack %q: %q", step, steps)
		}
	}
}

// The new epoch's export waits until the old one has been seen to be gone: if one plan made both, a
// drain that hangs would leave a device exported twice.
func TestDiffDoesNotExportADeviceBeforeTheOldExportIsGone(t *testing.T) {
	got := place{}.config(sub(1, 1, 1, "/dev/x"))
	got.Ports[0].ID, got.Ports[1].ID = FirstPortID, FirstPortID+1
	want := place{}.config(sub(1, 2, 2, "/dev/x"))
	for _, line := range text(Diff(got, want)) {
		if strings.Contains(line, "device_path") || strings.Contains(line, "symlink ports/") {
			t.Errorf("Diff(old epoch, new epoch) does %q while the old export stands", line)
		}
	}
}

func TestDiffAddsALegToALiveSubsystem(t *testing.T) {
	one, two := sub(1, 1, 1, "/dev/x"), sub(1, 1, 1, "/dev/x", "/dev/y")
	got, want := place{}.config(one), place{}.config(two)
	got.Ports[0].ID, got.Ports[1].ID = FirstPortID, FirstPortID+1
	got.Hosts = []block.NQN{one.AllowedHosts[0].To}
	lines := text(Diff(got, want))
	if len(lines) != 5 || lines[0] != "mkdir A/5" || lines[4] != `write "1" to A/5/enable` {
		t.Errorf("Diff = %v, want only namespace 5 made", lines)
	}
	lines = text(Diff(want.withPortIDs(), got))
	if !slices.Equal(lines, []string{`write "0" to A/5/enable`, "rmdir A/5"}) {
		t.Errorf("Diff = %v, want only namespace 5 removed", lines)
	}
}

func (c Config) withPortIDs() Config {
	c = c.sorted()
	for i := range c.Ports {
		c.Ports[i].ID = FirstPortID + uint16(i)
	}
	c.Hosts = nil
	for h := range c.hostsInUse() {
		c.Hosts = append(c.Hosts, h)
	}
	return c
}

// A leg that rejoins has a new identity: the old one is drained and removed first.
func TestDiffReplacesANamespaceOfAnotherRevision(t *testing.T) {
	old, revised := sub(1, 1, 1, "/dev/x"), sub(1, 1, 1, "/dev/x")
	revised.Namespaces[0].UUID, revised.Namespaces[0].NGUID = id(77), id(77)
	got, want := place{}.config(old).withPortIDs(), place{}.config(revised)
	if lines := text(Diff(got, want)); !slices.Equal(lines, []string{`write "0" to A/1/enable`, "rmdir A/1"}) {
		t.Errorf("Diff = %v, want the old namespace removed and nothing else yet", lines)
	}
	got.Subsystems[0].Namespaces = nil
	if lines := text(Diff(got, want)); len(lines) != 5 || lines[0] != "mkdir A/1" {
		t.Errorf("Diff = %v, want the new namespace made", lines)
	}
}

func TestCheckRefusesWhatTheKernelWouldAccept(t *testing.T) {
	good := func() Config { return place{}.config(sub(1, 1, 1, "/dev/x", "/dev/y")) }
	if err := good().Check(); err != nil {
		t.Fatalf("Check(good) = %v", err)
	}
	first := func(c *Config) *Subsystem { return &c.Subsystems[0] }
	for want, spoil := range map[string]func(*Config){
		"at most 223":                func(c *Config) { first(c).NQN += block.NQN(strings.Repeat("x", 200)) },
		"not a name that Weft gives": func(c *Config) { first(c).NQN = "nqn.2024-01.org.example:x" },
		"serial":                     func(c *Config) { first(c).Serial = strings.Repeat("1", 21) },
		"model":                      func(c *Config) { first(c).Model = "" },
		"cntlid":                     func(c *Config) { first(c).CntlidMin = 0 },
		"allow_any_host":             func(c *Config) { first(c).AllowAnyHost = true },
		"host":                       func(c *Config) { first(c).AllowedHosts = []Link{LinkTo("me")} },
		"namespace 0":                func(c *Config) { first(c).Namespaces[0].NSID = 0 },
		"namespace 4294967295":       func(c *Config) { first(c).Namespaces[0].NSID = 0xffffffff },
		"namespace 1: listed":        func(c *Config) { first(c).Namespaces[1].NSID = 1 },
		"/dev/x is also":             func(c *Config) { first(c).Namespaces[1].Device = "/dev/x" },
		"absolute":                   func(c *Config) { first(c).Namespaces[1].Device = "ram0" },
		"uuid":                       func(c *Config) { first(c).Namespaces[1].UUID = block.UUID{} },
		"must be enabled":            func(c *Config) { first(c).Namespaces[1].Enabled = false },
		"listed twice":               func(c *Config) { c.Subsystems = append(c.Subsystems, c.Subsystems[0]) },
		"not in the list":            func(c *Config) { c.Ports[0].Subsystems = []Link{LinkTo("nqn.x")} },
		"not one of ours":            func(c *Config) { c.Ports[0].ID = 1 },
	} {
		c := good()
		spoil(&c)
		if err := c.Check(); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("Check() = %v, want an error with %q", err, want)
		}
	}
}
