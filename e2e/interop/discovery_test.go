// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/uevent"
)

// speaker is a discovery controller that speaks for other targets, and has no subsystem itself.
type speaker struct {
	target  *controller.Target
	address string
	service string
}

func newSpeaker(t *testing.T) speaker {
	t.Helper()
	target, err := controller.New(controller.Config{Log: slog.New(slog.NewTextHandler(t.Output(), nil))})
	must(t, err)
	t.Cleanup(func() { must(t, target.Close(soon(t))) })
	l, err := net.Listen("tcp", "127.0.0.1:0")
	must(t, err)
	_, err = target.Serve(l, controller.PortConfig{ID: 1})
	must(t, err)
	address, service, _ := net.SplitHostPort(l.Addr().String())
	return speaker{target, address, service}
}

// tell tells testHost of subsystems, and nobody else of anything.
func (d speaker) tell(t *testing.T, a access, all ...served) {
	t.Helper()
	h := controller.DiscoveredHost{Host: controller.Host{NQN: testHost.NQN, HostKey: a.hostKey, ControllerKey: a.controllerKey}}
	for _, s := range all {
		address, service, _ := net.SplitHostPort(s.portal(0))
		h.Entries = append(h.Entries, nvmetcp.DiscoveryEntry{
			Transport: nvmetcp.TransportTCP, Family: nvmetcp.FamilyIPv4, Type: nvmetcp.SubsystemNVM, Requirements: nvmetcp.NoFlowControl,
			PortID: 1, ControllerID: nvmetcp.DynamicController, AdminQueue: nvmetcp.MinAdminQueue, Service: service, Address: address, Subsystem: s.nqn(),
		})
	}
	must(t, d.target.Discover([]controller.DiscoveredHost{h}))
}

// as are the arguments with which nvme-cli asks, as a host.
func (d speaker) as(h block.Host) []string {
	return []string{"-t", "tcp", "-a", d.address, "-s", d.service, "-q", string(h.NQN), "-I", h.ID.String()}
}

// names are the subsystems that nvme discover shows to a host.
func (d speaker) names(t *testing.T, h block.Host) string {
	t.Helper()
	var names []string
	records, _ := fields(t, append([]string{"discover"}, d.as(h)...)...)["records"].([]any)
	for _, r := range records {
		names = append(names, fmt.Sprint(r.(map[string]any)["subnqn"]))
	}
	return strings.Join(names, " ")
}

// discoverySpeaksForOthers tests nvme-cli on a host without Weft's agent. The host finds its volumes at a
// port that serves none itself.
func discoverySpeaksForOthers(t *testing.T, l *lab) {
	d := newSpeaker(t)
	one := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &access{host: testHost}})
	two := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &access{host: testHost}})
	d.tell(t, access{}, one, two)
	if got, want := d.names(t, testHost), fmt.Sprintf("%s %s", one.nqn(), two.nqn()); got != want {
		t.Errorf("nvme discover shows %q, want %q", got, want)
	}
	if out := run(t, "nvme", append([]string{"discover"}, d.as(otherHost)...)...); strings.Contains(out, string(one.nqn())) || strings.Contains(out, string(two.nqn())) {
		t.Errorf("nvme discover shows another host\n%s", out)
	}
	t.Cleanup(func() { _, _ = tryRun("nvme", "disconnect-all") })
	run(t, "nvme", append([]string{"connect-all"}, d.as(testHost)...)...)
	for _, s := range []served{one, two} {
		c := &linuxSession{t: t, name: s.nqn()}
		must(t, block.WriteAt(c.device(1), pattern(unit, 1), 0))
		must(t, block.ReadAt(c.device(1), make([]byte, unit), 0))
	}
	run(t, "nvme", "disconnect-all")
	left, err := filepath.Glob("/sys/class/nvme/nvme*") // controllers; a subsystem stays as long as its device is open
	if must(t, err); len(left) > 0 {
		t.Errorf("after nvme disconnect-all there is %s\n%s", left, run(t, "nvme", "list-subsys"))
	}
	d.tell(t, access{}, two)
	if got := d.names(t, testHost); got != string(two.nqn()) {
		t.Errorf("after a detach, nvme discover shows %q", got)
	}
}

// discoveryTellsOfChanges: the kernel takes the event from a connection that stays, and tells udev.
func discoveryTellsOfChanges(t *testing.T, l *lab) {
	d := newSpeaker(t)
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}})
	d.tell(t, access{})
	o := options{}.withDefaults(s)
	instance, err := fabricsConnect(optionLine(discoveryNQN, net.JoinHostPort(d.address, d.service), o))
	must(t, err)
	c := &linuxSession{t: t, name: discoveryNQN, dirs: []string{fmt.Sprintf("/sys/class/nvme/nvme%d", instance)}}
	t.Cleanup(c.disconnect)
	device := fmt.Sprintf("/dev/nvme%d", instance)
	records := func() string {
		page := run(t, "nvme", "get-log", device, "--log-id=0x70", "--log-len=1024", "--raw-binary")
		return fmt.Sprint(page[8])
	}
	if got := records(); got != "0" {
		t.Fatalf("the log has %s records at first", got)
	}
	var told atomic.Bool
	ctx := soon(t)
	go func() {
		_ = uevent.Watch(ctx, func(e uevent.Event) {
			if e.Vars["NVME_AEN"] == "0x70f002" { // a notice: the discovery log has changed
				told.Store(true)
			}
		})
	}()
	time.Sleep(100 * time.Millisecond) // it listens
	d.tell(t, access{}, s)
	eventually(t, "a change of the discovery log is told", told.Load)
	if got := records(); got != "1" {
		t.Errorf("after the event, the log has %s records", got)
	}
}

// discoveryAsksForProof: a host with a key is told nothing without it.
func discoveryAsksForProof(t *testing.T, l *lab) {
	d := newSpeaker(t)
	a := access{host: testHost, hostKey: newKey(t, 1), controllerKey: newKey(t, 1)}
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &a})
	d.tell(t, a, s)
	if out, err := tryRun("nvme", append([]string{"discover"}, d.as(testHost)...)...); err == nil || strings.Contains(out, string(s.nqn())) {
		t.Errorf("without its key, the host is told\n%s", out)
	}
	o := options{hostKey: a.hostKey, controllerKey: a.controllerKey}.withDefaults(s)
	instance, err := fabricsConnect(optionLine(discoveryNQN, net.JoinHostPort(d.address, d.service), o))
	must(t, err)
	c := &linuxSession{t: t, name: discoveryNQN, dirs: []string{fmt.Sprintf("/sys/class/nvme/nvme%d", instance)}}
	t.Cleanup(c.disconnect)
	page := run(t, "nvme", "get-log", fmt.Sprintf("/dev/nvme%d", instance), "--log-id=0x70", "--log-len=2048", "--raw-binary")
	if !strings.Contains(page, string(s.nqn())) {
		t.Error("with its key, the host is not told of its subsystem")
	}
}
