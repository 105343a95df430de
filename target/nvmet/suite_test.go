// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math/rand/v2"
	"os"
	"path"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/nvmet/nvmettest"
)

// place is an nvmet to run the suite on, and the devices that it can export.
type place struct {
	tree    *Tree
	devices []string
}

// The suite's names for foreign objects.
const (
	foreignNQN  block.NQN = "nqn.2024-01.org.example:theirs"
	foreignHost block.NQN = "nqn.2014-08.org.nvmexpress:uuid:99999999-0000-4000-8000-000000000000"
)

func TestSuiteOnTheFake(t *testing.T) {
	suite(t, func(t *testing.T) place {
		devices := []string{"/dev/ram0", "/dev/ram1", "/dev/ram2", "/dev/ram3", "/dev/ram4", "/dev/ram5", "/dev/ram6", "/dev/ram7"}
		tree, err := OpenOn(nvmettest.Root, nvmettest.New(devices...))
		if err != nil {
			t.Fatal(err)
		}
		return place{tree, devices}
	})
}

// TestSuiteOnTheKernel empties nvmet, so it runs only in a machine made for it (WEFT_GUEST is set
// there): as root, with nvmet and nvmet-tcp loaded, and eight unused block devices: modprobe brd
// rd_nr=8.
func TestSuiteOnTheKernel(t *testing.T) {
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("not in a test machine: see e2e/kernel_test.go")
	}
	root := "/sys/kernel/config/nvmet"
	var devices []string
	for i := range 8 {
		devices = append(devices, fmt.Sprintf("/dev/ram%d", i))
	}
	for _, needed := range append(devices, root) {
		if _, err := os.Stat(needed); err != nil {
			t.Skipf("no kernel target here: %v", err)
		}
	}
	suite(t, func(t *testing.T) place {
		tree, err := Open(root)
		if err != nil {
			t.Fatal(err)
		}
		p := place{tree, devices}
		p.clean(t)
		t.Cleanup(func() { p.clean(t) })
		return p
	})
}

func suite(t *testing.T, at func(t *testing.T) place) {
	for name, test := range map[string]func(*testing.T, place){
		"WhatIsWantedIsReadBack":           wantedIsReadBack,
		"AnyConfigIsReachedFromAnyOther":   anyFromAny,
		"ACrashAfterAnyStepIsMadeGood":     crashAnywhere,
		"WhatOthersMadeStays":              othersStay,
		"AForeignListenerIsAConflict":      foreignListener,
		"AForeignExportIsAConflict":        foreignExport,
		"ALeftOverHalfOfAPortIsReplaced":   halfPort,
		"AnAliasOfANamespaceIsRemoved":     aliasNamespace,
		"LinksOnForeignPortsAreFencedToo":  foreignPortLink,
		"AnotherHostMakesTheSubsystemAnew": extraHost,
		"KernelRefusals":                   refusals,
		"ASizeCanBeReadAgain":              sizeReadAgain,
		"AHostGetsItsKeysBeforeItsLink":    keysFirst,
	} {
		t.Run(name, func(t *testing.T) { test(t, at(t)) })
	}
}

// ---- the tests ----

func wantedIsReadBack(t *testing.T, p place) {
	want := p.config(sub(1, 1, 1, p.devices[0], p.devices[1]), sub(2, 1, 2, p.devices[2]))
	p.reach(t, want)
	p.expect(t, want)
	if steps := Diff(p.read(t), want); len(steps) > 0 {
		t.Errorf("Diff(reached, want) = %v, want no steps", steps)
	}
	p.reach(t, Config{})
	if got := p.read(t); len(got.Subsystems)+len(got.Ports)+len(got.Hosts) > 0 {
		t.Errorf("after removing all: Read() = %+v, want nothing", got)
	}
}

func anyFromAny(t *testing.T, p place) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 25 {
		want := p.random(r)
		p.reach(t, want)
		p.expect(t, want)
	}
}

func crashAnywhere(t *testing.T, p place) {
	a := p.config(sub(1, 1, 1, p.devices[0], p.devices[1]), sub(2, 1, 2, p.devices[2]), sub(3, 7, 1, p.devices[5]))
	b := p.config(sub(1, 2, 2, p.devices[0], p.devices[1]), sub(2, 1, 2, p.devices[3], p.devices[4]))
	for _, way := range []struct{ from, to Config }{{Config{}, a}, {a, b}, {b, a}, {a, Config{}}} {
		for cut := range 200 {
			p.reach(t, way.from)
			p.expect(t, way.from)
			done := p.stepsOnly(t, way.to, cut)
			p.reach(t, way.to)
			p.expect(t, way.to)
			if t.Failed() {
				t.Fatalf("cut after %d steps", cut)
			}
			if done < cut {
				break // the plan has no more steps
			}
		}
	}
}

func othersStay(t *testing.T, p place) {
	p.makeForeign(t, "7", "4477", foreignNQN, p.devices[7])
	before := foreignPart(p.read(t))
	r := rand.New(rand.NewPCG(3, 4))
	p.devices = p.devices[:6]
	for range 5 {
		p.reach(t, p.random(r))
	}
	p.reach(t, Config{})
	if diff := cmp.Diff(before, foreignPart(p.read(t))); diff != "" {
		t.Errorf("what others made has changed (-before +after):\n%s", diff)
	}
}

func foreignListener(t *testing.T, p place) {
	p.makeForeign(t, "7", "4470", foreignNQN, p.devices[7]) // 4470 is our portal
	want := p.config(sub(1, 1, 1, p.devices[0]))
	got := p.read(t)
	if c := Conflicts(got, want); len(c) != 1 || !strings.Contains(c[0].Cause, "port 7") {
		t.Errorf("Conflicts = %v, want one that names port 7", c)
	}
	p.reach(t, want)
	if got := p.read(t); got.Linked(want.Subsystems[0].NQN) {
		// One of the two portals is taken, the other one is ours.
		for _, port := range got.Ports {
			if !port.Ours() && port.links(want.Subsystems[0].NQN) {
				t.Errorf("port %d is not ours and links %s", port.ID, want.Subsystems[0].NQN)
			}
		}
	} else {
		t.Errorf("nothing links %s, want the free portal to", want.Subsystems[0].NQN)
	}
	// When the foreign objects are gone, the portal is used.
	p.removeForeign(t)
	p.reach(t, want)
	p.expect(t, want)
}

func foreignExport(t *testing.T, p place) {
	p.makeForeign(t, "7", "4477", foreignNQN, p.devices[0])
	want := p.config(sub(1, 1, 1, p.devices[0]))
	if c := Conflicts(p.read(t), want); len(c) != 1 || !strings.Contains(c[0].Cause, string(foreignNQN)) {
		t.Errorf("Conflicts = %v, want one that names %s", c, foreignNQN)
	}
	p.reach(t, want)
	got := p.read(t)
	if by := got.devices()[p.devices[0]]; len(by) != 1 || by[0] != foreignNQN {
		t.Errorf("%s is exported by %v, want %s alone", p.devices[0], by, foreignNQN)
	}
	if got.Linked(want.Subsystems[0].NQN) {
		t.Error("a subsystem without its namespace is offered")
	}
}

func halfPort(t *testing.T, p place) {
	p.do(t, Step{Op: Mkdir, Path: portPath(FirstPortID)})
	p.do(t, Step{Op: Write, Path: portPath(FirstPortID) + "/addr_trtype", Arg: "tcp"})
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	p.expect(t, want)
}

func aliasNamespace(t *testing.T, p place) {
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	p.do(t, Step{Op: Mkdir, Path: subsystemPath(want.Subsystems[0].NQN) + "/namespaces/0x5"})
	p.reach(t, want)
	p.expect(t, want)
}

func foreignPortLink(t *testing.T, p place) {
	p.makeForeign(t, "7", "4477", foreignNQN, p.devices[7])
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	nqn := want.Subsystems[0].NQN
	p.do(t, Step{Op: Symlink, Path: "ports/7/subsystems/alias", Arg: subsystemPath(nqn)})
	p.reach(t, Config{})
	if _, there := p.read(t).Subsystem(nqn); there {
		t.Errorf("%s is still there", nqn)
	}
}

func extraHost(t *testing.T, p place) {
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	nqn := want.Subsystems[0].NQN
	p.do(t, Step{Op: Mkdir, Path: hostPath(foreignHost)})
	p.do(t, Step{Op: Symlink, Path: subsystemPath(nqn) + "/allowed_hosts/" + string(foreignHost), Arg: hostPath(foreignHost)})
	steps := Diff(p.read(t), want)
	if last := steps[len(steps)-1]; last.Op != Rmdir || last.Path != subsystemPath(nqn) {
		t.Errorf("Diff ends with %v, want the removal of the subsystem", last)
	}
	p.reach(t, want)
	p.expect(t, want)
}

// keysFirst also replaces keys, and is cut after each step.
func keysFirst(t *testing.T, p place) {
	able, err := p.tree.Authenticates()
	if err != nil {
		t.Fatal(err)
	}
	if hosts := p.read(t).Hosts; slices.Contains(hosts, block.NQN(path.Base(probe))) {
		t.Errorf("hosts %v: asking has left one", hosts)
	}
	if !able { // Linux 6.1 as Debian builds it
		host := hostPath(foreignHost)
		p.do(t, Step{Op: Mkdir, Path: host})
		if err := p.tree.Do(t.Context(), Step{Op: Write, Path: host + "/dhchap_key", Arg: "secret"}); err == nil {
			t.Error("Authenticates says no, and yet a host takes a key")
		}
		p.do(t, Step{Op: Rmdir, Path: host})
		return
	}
	keyed := func(epoch, n byte) Config {
		s := sub(1, epoch, 1, p.devices[0])
		h := block.ProvenHost(s.NQN).NQN
		s.AllowedHosts = []Link{LinkTo(h)}
		secret := bytes.Repeat([]byte{n}, block.SecretSize)
		keys, err := block.ParseKeys(secret, append([]byte{9}, secret[1:]...))
		if err != nil {
			t.Fatal(err)
		}
		c := p.config(s)
		text, err := KeysOf(keys)
		if err != nil {
			t.Fatal(err)
		}
		c.Keys = map[block.NQN]Keys{h: text}
		return c
	}
	a, b, c := keyed(1, 1), keyed(1, 2), keyed(2, 3)
	for _, way := range []struct{ from, to Config }{{Config{}, a}, {a, b}, {b, c}, {a, Config{}}} {
		for cut := range 100 {
			p.reach(t, way.from)
			done := p.stepsOnly(t, way.to, cut)
			got := p.read(t)
			for h := range got.hostsInUse() {
				if k := got.Keys[h]; k.Host.IsZero() || k.Controller.IsZero() {
					t.Fatalf("cut after %d steps: host %s is linked, and its keys are %v", cut, h, k)
				}
			}
			p.reach(t, way.to)
			p.expect(t, way.to)
			if !maps.Equal(way.to.Keys, p.read(t).Keys) {
				t.Fatalf("cut after %d steps: the keys are not as wanted", cut)
			}
			if done < cut {
				break
			}
		}
	}
	for _, s := range Diff(Config{}, a) {
		if text := fmt.Sprintf("%v %+v", s, s); strings.Contains(text, "DHHC") {
			t.Errorf("a step shows a key: %s", text)
		}
	}
	p.reach(t, a)
	file := path.Join(p.tree.root, hostPath(a.Subsystems[0].AllowedHosts[0].To), "dhchap_key")
	if info, err := os.Stat(file); err == nil && info.Mode().Perm() != 0o600 { // the fake is in no file system
		t.Errorf("%s has mode %v: others can read it", file, info.Mode())
	}
	bad := Step{Op: Write, Path: hostPath(a.Subsystems[0].AllowedHosts[0].To) + "/dhchap_key", Arg: "secret"}
	if err := p.tree.Do(t.Context(), bad); !errors.Is(err, unix.EINVAL) {
		t.Errorf("Do(%v) = %v, want %v", bad, err, unix.EINVAL)
	}
	p.reach(t, Config{})
	if hosts := p.read(t).Hosts; len(hosts) > 0 {
		t.Errorf("hosts %v are left", hosts)
	}
}

func sizeReadAgain(t *testing.T, p place) {
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	p.do(t, Revalidate(want.Subsystems[0].NQN, want.Subsystems[0].Namespaces[0]))
	p.expect(t, want)
}

// refusals pins the errno of each operation that configfs refuses, here and on
// the kernel.
func refusals(t *testing.T, p place) {
	want := p.config(sub(1, 1, 1, p.devices[0]))
	p.reach(t, want)
	s, host := subsystemPath(want.Subsystems[0].NQN), hostPath(want.Subsystems[0].AllowedHosts[0].To)
	port := portPath(p.read(t).Ports[0].ID)
	for _, c := range []struct {
		step Step
		want error
	}{
		{Step{Op: Mkdir, Path: s}, unix.EEXIST},
		{Step{Op: Mkdir, Path: "subsystems/nqn.2014-08.org.nvmexpress.discovery"}, unix.EINVAL},
		{Step{Op: Mkdir, Path: s + "/namespaces/0"}, unix.EINVAL},
		{Step{Op: Mkdir, Path: s + "/namespaces/4294967295"}, unix.EINVAL},
		{Step{Op: Mkdir, Path: s + "/namespaces/abc"}, unix.EINVAL},
		{Step{Op: Mkdir, Path: s + "/allowed_hosts/x"}, unix.EPERM},
		{Step{Op: Mkdir, Path: "ports/65536"}, unix.EINVAL},
		{Step{Op: Rmdir, Path: s}, unix.EBUSY},
		{Step{Op: Rmdir, Path: s + "/namespaces"}, unix.EPERM},
		{Step{Op: Rmdir, Path: host}, unix.EBUSY},
		{Step{Op: Rmdir, Path: port}, unix.ENOTEMPTY},
		{Step{Op: Rmdir, Path: "hosts/none"}, unix.ENOENT},
		{Step{Op: Write, Path: s + "/namespaces/1/device_path", Arg: "/dev/ram1"}, unix.EBUSY},
		{Step{Op: Write, Path: s + "/namespaces/1/device_uuid", Arg: id(1).String()}, unix.EBUSY},
		{Step{Op: Write, Path: s + "/attr_allow_any_host", Arg: "1"}, unix.EINVAL},
		{Step{Op: Write, Path: s + "/attr_cntlid_min", Arg: "0"}, unix.EINVAL},
		{Step{Op: Write, Path: s + "/attr_serial", Arg: "123456789012345678901"}, unix.EINVAL},
		{Step{Op: Write, Path: port + "/addr_traddr", Arg: "127.0.0.2"}, unix.EACCES},
		{Step{Op: Symlink, Path: s + "/allowed_hosts/other", Arg: host}, unix.EEXIST},
		{Step{Op: Symlink, Path: s + "/allowed_hosts/bad", Arg: s}, unix.EINVAL},
		{Step{Op: Symlink, Path: s + "/allowed_hosts/none", Arg: "hosts/none"}, unix.ENOENT},
		{Step{Op: Symlink, Path: port + "/subsystems/again", Arg: s}, unix.EEXIST},
		{Step{Op: Unlink, Path: port + "/subsystems/none"}, unix.ENOENT},
		{Step{Op: Write, Path: s + "/namespaces/1/revalidate_size", Arg: "0"}, unix.EINVAL},
	} {
		err := p.tree.Do(t.Context(), c.step)
		if !errors.Is(err, c.want) {
			t.Errorf("Do(%v) = %v, want %v", c.step, err, c.want)
		}
		if e, ok := errors.AsType[*Error](err); err != nil && (!ok || e.Path != c.step.Path || e.Op != c.step.Op) {
			t.Errorf("Do(%v) = %#v, want an *Error with its step", c.step, err)
		}
	}
	n := s + "/namespaces/9"
	p.do(t, Step{Op: Mkdir, Path: n})
	for _, c := range []struct {
		step Step
		want error
	}{
		{Step{Op: Write, Path: n + "/enable", Arg: "1"}, unix.EINVAL},
		{Revalidate(want.Subsystems[0].NQN, Namespace{NSID: 9}), unix.EINVAL}, // not enabled
		{Step{Op: Write, Path: n + "/device_uuid", Arg: "zz"}, unix.EINVAL},
	} {
		if err := p.tree.Do(t.Context(), c.step); !errors.Is(err, c.want) {
			t.Errorf("Do(%v) = %v, want %v", c.step, err, c.want)
		}
	}
	p.do(t, Step{Op: Write, Path: n + "/device_path", Arg: "/dev/none"})
	if err := p.tree.Do(t.Context(), Step{Op: Write, Path: n + "/enable", Arg: "1"}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("enabling a device that is not there: %v, want %v", err, fs.ErrNotExist)
	}
}

// ---- tools ----

func id(n byte) block.UUID { return block.UUIDFromRandom([16]byte{n}) }

// sub is the subsystem of volume v at an epoch for a host, with one namespace per device.
func sub(v, epoch, host byte, devices ...string) Subsystem {
	volume, h := block.VolumeID{UUID: id(v)}, block.HostFromID(id(100+host))
	s := Subsystem{
		NQN:    block.SubsystemNQN(volume, block.Epoch(epoch), h, "t1"),
		Serial: block.SerialNumber(volume), Model: Model,
		CntlidMin: DefaultCntlidMin, CntlidMax: DefaultCntlidMax,
		AllowedHosts: []Link{LinkTo(h.NQN)},
	}
	for i, d := range devices {
		u := block.NamespaceUUID(block.LegID{UUID: id(v)}, block.Epoch(epoch), uint64(i))
		s.Namespaces = append(s.Namespaces, Namespace{NSID: uint32(1 + i*4), Device: d, UUID: u, NGUID: u, Enabled: true})
	}
	return s
}

// config offers all subsystems on both of the suite's portals.
func (p place) config(subsystems ...Subsystem) Config {
	c := Config{Subsystems: subsystems}
	var links []Link
	for _, s := range subsystems {
		links = append(links, LinkTo(s.NQN))
	}
	for _, port := range []uint16{4470, 4471} {
		c.Ports = append(c.Ports, Port{Portal: block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: port, Rail: "r"}, Subsystems: links})
	}
	return c
}

func (p place) random(r *rand.Rand) Config {
	devices := slices.Clone(p.devices)
	r.Shuffle(len(devices), func(i, j int) { devices[i], devices[j] = devices[j], devices[i] })
	var subsystems []Subsystem
	for v := range byte(4) {
		n := min(r.IntN(4), len(devices))
		if r.IntN(3) == 0 {
			continue
		}
		s := sub(v, byte(r.IntN(2)), byte(r.IntN(2)), devices[:n]...)
		s.CntlidMin += uint16(r.IntN(2)) * 500
		subsystems, devices = append(subsystems, s), devices[n:]
	}
	c := p.config(subsystems...)
	c.Ports = c.Ports[:1+r.IntN(2)]
	return c
}

func (p place) read(t *testing.T) Config {
	t.Helper()
	c, err := p.tree.Read(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func (p place) do(t *testing.T, s Step) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if err := p.tree.Do(ctx, s); err != nil {
		t.Fatalf("Do(%v) = %v", s, err)
	}
}

// reach applies Diff until no step is left, which must happen.
func (p place) reach(t *testing.T, want Config) {
	t.Helper()
	if err := want.Check(); err != nil {
		t.Fatal(err)
	}
	for range 10 {
		steps := Diff(p.read(t), want)
		if len(steps) == 0 {
			return
		}
		for _, s := range steps {
			p.do(t, s)
		}
	}
	t.Fatalf("no end in sight: Diff = %v", Diff(p.read(t), want))
}

// stepsOnly does at most n steps towards want, and returns how many it did.
func (p place) stepsOnly(t *testing.T, want Config, n int) int {
	t.Helper()
	done := 0
	for range 10 {
		steps := Diff(p.read(t), want)
		if len(steps) == 0 {
			break
		}
		for _, s := range steps {
			if done == n {
				return done
			}
			p.do(t, s)
			done++
		}
	}
	return done
}

// expect compares our objects, in what a wanted Config states.
func (p place) expect(t *testing.T, want Config) {
	t.Helper()
	if diff := cmp.Diff(ours(want), ours(p.read(t))); diff != "" {
		t.Errorf("Read() is not what was wanted (-want +got):\n%s", diff)
	}
}

// ours leaves out foreign objects, and what a wanted Config does not state.
func ours(c Config) Config {
	var out Config
	used := c.hostsInUse()
	for _, s := range c.sorted().Subsystems {
		if s.NQN.Ours() {
			out.Subsystems = append(out.Subsystems, s)
		}
	}
	for _, p := range c.Ports {
		if p.ID == 0 || p.Ours() {
			p.ID, p.Portal.Rail = 0, ""
			out.Ports = append(out.Ports, p)
		}
	}
	for h := range used {
		out.Hosts = append(out.Hosts, h)
	}
	return out.sorted()
}

func foreignPart(c Config) Config {
	var out Config
	for _, s := range c.Subsystems {
		if !s.NQN.Ours() {
			out.Subsystems = append(out.Subsystems, s)
		}
	}
	for _, p := range c.Ports {
		if !p.Ours() {
			out.Ports = append(out.Ports, p)
		}
	}
	for _, h := range c.Hosts {
		if h == foreignHost {
			out.Hosts = append(out.Hosts, h)
		}
	}
	return out
}

// makeForeign makes a listening port with a subsystem as another program would.
func (p place) makeForeign(t *testing.T, port, svcid string, nqn block.NQN, device string) {
	t.Helper()
	s := subsystemPath(nqn)
	for _, step := range []Step{
		{Op: Mkdir, Path: hostPath(foreignHost)},
		{Op: Mkdir, Path: s},
		{Op: Mkdir, Path: s + "/namespaces/1"},
		{Op: Write, Path: s + "/namespaces/1/device_path", Arg: device},
		{Op: Write, Path: s + "/namespaces/1/enable", Arg: "1"},
		{Op: Symlink, Path: s + "/allowed_hosts/them", Arg: hostPath(foreignHost)},
		{Op: Mkdir, Path: "ports/" + port},
		{Op: Write, Path: "ports/" + port + "/addr_trtype", Arg: "tcp"},
		{Op: Write, Path: "ports/" + port + "/addr_adrfam", Arg: "ipv4"},
		{Op: Write, Path: "ports/" + port + "/addr_traddr", Arg: "127.0.0.1"},
		{Op: Write, Path: "ports/" + port + "/addr_trsvcid", Arg: svcid},
		{Op: Symlink, Path: "ports/" + port + "/subsystems/theirs", Arg: s},
	} {
		p.do(t, step)
	}
}

func (p place) removeForeign(t *testing.T) {
	t.Helper()
	s := subsystemPath(foreignNQN)
	for _, step := range []Step{
		{Op: Unlink, Path: "ports/7/subsystems/theirs"},
		{Op: Rmdir, Path: "ports/7"},
		{Op: Unlink, Path: s + "/allowed_hosts/them"},
		{Op: Rmdir, Path: s + "/namespaces/1"},
		{Op: Rmdir, Path: s},
		{Op: Rmdir, Path: hostPath(foreignHost)},
	} {
		p.do(t, step)
	}
}

// clean leaves a real nvmet empty: the kernel outlives the test.
func (p place) clean(t *testing.T) {
	t.Helper()
	ctx := context.Background() // the test's own context has ended
	got, err := p.tree.Read(ctx)
	if err != nil {
		t.Fatal(err)
	}
	for _, port := range got.Ports {
		for _, l := range port.Subsystems {
			p.must(t, Step{Op: Unlink, Path: portPath(port.ID) + "/subsystems/" + l.Name})
		}
		p.must(t, Step{Op: Rmdir, Path: portPath(port.ID)})
	}
	for _, s := range got.Subsystems {
		for _, l := range s.AllowedHosts {
			p.must(t, Step{Op: Unlink, Path: subsystemPath(s.NQN) + "/allowed_hosts/" + l.Name})
		}
		for _, ns := range s.Namespaces {
			p.must(t, Step{Op: Rmdir, Path: namespacePath(s.NQN, ns)})
		}
		p.must(t, Step{Op: Rmdir, Path: subsystemPath(s.NQN)})
	}
	for _, h := range got.Hosts {
		p.must(t, Step{Op: Rmdir, Path: hostPath(h)})
	}
}

func (p place) must(t *testing.T, s Step) {
	t.Helper()
	if err := p.tree.Do(context.Background(), s); err != nil {
		t.Errorf("clean up: %v", err)
	}
}
