// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// linuxCases are cases about programs and files of Linux's host.
func linuxCases() []testCase {
	return []testCase{
		{"003 a discovery controller is kept alive", discoveryKeptAlive, nil},
		{"030 discovery's generation counter grows with each change", generationGrows, nil},
		{"discovery speaks for other targets: nvme discover, connect-all, disconnect-all", discoverySpeaksForOthers, ourTargetAlone},
		{"discovery tells of changes", discoveryTellsOfChanges, ourTargetAlone},
		{"discovery asks for a proof", discoveryAsksForProof, provesToDiscovery},
		{"012 a file system is made and filled", fileSystem, nil},
		{"021,028 nvme list and list-subsys show it", nvmeLists, nil},
		{"nvme id-ctrl and id-ns say what it is", nvmeIdentifies, nil},
		{"023,025 nvme smart-log, error-log, fw-log, effects-log are read", nvmeLogs, nil},
		{"nvme ana-log shows the states of a port", nvmeANALog, nil},
		{"026 nvme ns-descs shows the UUID", nvmeDescriptors, nil},
		{"what becomes of a flush whose path is lost", flushesAreLost, ourTargetAlone},
		{"029 nvme read, write, compare, flush, dsm, write-zeroes", nvmeCommands, nil},
		{"027,053 nvme ns-rescan under load", rescanUnderLoad, nil},
		{"047 read, write and poll queues", queueTypes, nil},
		{"nvme connect, connect-all and disconnect", nvmeConnects, nil},
		{"054 reservations", reservations, ourTargetOnly},
		{"045 a live host proves itself again", proveAgain, provesAgain},
	}
}

func provesAgain(l *lab) string {
	if !l.target.ours() {
		return "nvmet does not report when a host has authenticated"
	}
	return bothAuthenticate(l)
}

// ourTargetAlone: nvmet's discovery speaks for itself alone.
func ourTargetAlone(l *lab) string {
	if !l.target.ours() {
		return "nvmet has no entries of other targets"
	}
	return ""
}

func provesToDiscovery(l *lab) string {
	if why := ourTargetAlone(l); why != "" {
		return why
	}
	return bothAuthenticate(l)
}

func ourTargetOnly(l *lab) string {
	if !l.target.ours() {
		return "nvmet has no reservations before 6.13"
	}
	return ""
}

func generationGrows(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, allow: &access{host: testHost}, ports: 2})
	last := -1
	grows := func(after string, id block.Host) {
		t.Helper()
		address, service, _ := net.SplitHostPort(s.portal(0))
		log := fields(t, "discover", "-t", "tcp", "-a", address, "-s", service, "-q", string(id.NQN), "-I", id.ID.String())
		n, ok := log["genctr"].(float64)
		if !ok || int(n) <= last {
			t.Errorf("the generation is %v after %s, and was %d before", log["genctr"], after, last)
		}
		last = int(n)
	}
	grows("the start", testHost)
	s.unlink(1)
	grows("a port lost the subsystem", testHost)
	s.link(1)
	grows("a port got the subsystem", testHost)
	s.allow(access{host: otherHost})
	grows("another host is allowed", otherHost)
}

// upLinux is up; it also returns the names of the block device and the character device.
func upLinux(t *testing.T, l *lab, size int64) (s served, c *linuxSession, ns, ctrl string) {
	t.Helper()
	s, session, _ := l.up(t, size, options{})
	c = session.(*linuxSession)
	return s, c, c.path(1), "/dev/" + filepath.Base(c.dirs[0])
}

// fields parses the JSON output of nvme-cli.
func fields(t *testing.T, args ...string) map[string]any {
	t.Helper()
	out := run(t, "nvme", append(args, "-o", "json")...)
	var f map[string]any
	if err := json.Unmarshal([]byte(out), &f); err != nil {
		t.Fatalf("nvme %s: %v in\n%s", strings.Join(args, " "), err, out)
	}
	return f
}

func want(t *testing.T, f map[string]any, key string, value any) {
	t.Helper()
	if got := strings.TrimSpace(fmt.Sprint(f[key])); got != fmt.Sprint(value) {
		t.Errorf("%s is %v, want %v", key, got, value)
	}
}

func nvmeLists(t *testing.T, l *lab) {
	s, c, ns, _ := upLinux(t, l, 4*mib)
	out := run(t, "nvme", "list")
	t.Log("\n" + out)
	if !strings.Contains(out, ns) {
		t.Errorf("nvme list does not show %s", ns)
	}
	model := "Linux"
	if l.target.ours() {
		model = "Weft"
	}
	if !strings.Contains(out, model) {
		t.Errorf("nvme list does not show the model %s", model)
	}
	out = run(t, "nvme", "list-subsys")
	t.Log("\n" + out)
	for _, part := range []string{string(s.nqn()), filepath.Base(c.dirs[0]), "tcp", "live"} {
		if !strings.Contains(out, part) {
			t.Errorf("nvme list-subsys does not show %q", part)
		}
	}
}

func nvmeIdentifies(t *testing.T, l *lab) {
	s, _, ns, ctrl := upLinux(t, l, 4*mib)
	id := fields(t, "id-ctrl", ctrl)
	t.Log(id)
	want(t, id, "subnqn", s.nqn())
	want(t, id, "sqes", 0x66)
	want(t, id, "cqes", 0x44)
	if n, _ := id["nn"].(float64); n < 1 {
		t.Errorf("nn is %v", id["nn"])
	}
	if v, _ := id["ver"].(float64); int(v) < 0x10300 {
		t.Errorf("ver is %#x", int(v))
	}
	if kas, _ := id["kas"].(float64); kas == 0 {
		t.Error("kas is 0: no keep alive")
	}
	id = fields(t, "id-ns", ns)
	t.Log(id)
	lbaf := id["lbafs"].([]any)[int(id["flbas"].(float64))].(map[string]any)
	blocks := float64(int(4*mib) >> int(lbaf["ds"].(float64)))
	want(t, id, "nsze", blocks)
	want(t, id, "ncap", blocks)
	want(t, id, "anagrpid", 1)
	if out := run(t, "nvme", "id-ctrl", "-H", ctrl); !strings.Contains(out, "[0:0]") {
		t.Errorf("nvme id-ctrl -H says\n%s", out)
	}
	run(t, "nvme", "list-ns", ctrl)
	run(t, "nvme", "get-feature", ctrl, "-f", "7", "-H")
}

func nvmeLogs(t *testing.T, l *lab) {
	_, _, _, ctrl := upLinux(t, l, 4*mib)
	smart := fields(t, "smart-log", ctrl)
	t.Log(smart)
	want(t, smart, "critical_warning", 0)
	want(t, smart, "percent_used", 0)
	if _, ok := smart["data_units_written"]; !ok {
		t.Error("smart-log has no data_units_written")
	}
	t.Log(fields(t, "error-log", ctrl))
	t.Log(fields(t, "fw-log", ctrl))
	// nvme-cli 2.3 cannot show the effects log of any fabrics controller, Linux's own
	// included.
	effects := run(t, "nvme", "get-log", ctrl, "--log-id=5", "--log-len=4096", "--raw-binary")
	if len(effects) != 4096 {
		t.Fatalf("the effects log has %d bytes", len(effects))
	}
	const identify, getFeatures, ioCommands = 6, 10, 256
	for _, command := range []int{identify, getFeatures, ioCommands + 0, ioCommands + 1, ioCommands + 2} { // flush, write, read
		if effects[4*command]&1 == 0 {
			t.Errorf("the effects log does not have command %d", command)
		}
	}
}

func nvmeANALog(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}, ports: 2})
	s.ana(1, nonOptimized)
	for port, state := range []string{"optimized", "non-optimized"} {
		c := l.connect(t, s, options{portals: []string{s.portal(port)}}).(*linuxSession)
		c.path(1)
		out := run(t, "nvme", "ana-log", "/dev/"+filepath.Base(c.dirs[0]))
		t.Log("\n" + out)
		if !strings.Contains(out, ":\t"+state+"\n") {
			t.Errorf("ana-log of port %d does not say %s", port, state)
		}
		c.disconnect()
	}
}

func nvmeDescriptors(t *testing.T, l *lab) {
	s, _, ns, _ := upLinux(t, l, mib)
	out := run(t, "nvme", "ns-descs", ns)
	t.Log("\n" + out)
	if !strings.Contains(out, s.uuid(1).String()) {
		t.Errorf("ns-descs does not show %v", s.uuid(1))
	}
}

func nvmeCommands(t *testing.T, l *lab) {
	_, _, ns, _ := upLinux(t, l, 4*mib)
	dir := t.TempDir()
	data, back := filepath.Join(dir, "data"), filepath.Join(dir, "back")
	must(t, os.WriteFile(data, pattern(4096, 5), 0o600))
	lba := lbaSize(ns)
	blocks := []string{fmt.Sprintf("--start-block=%d", 8192/lba), fmt.Sprintf("--block-count=%d", 4096/lba-1)} // 0's based
	do := func(command string, more ...string) {
		t.Helper()
		run(t, "nvme", append(append([]string{command, ns}, blocks...), more...)...)
	}
	do("write", "--data-size=4096", "--data="+data)
	if l.target.ours() { // nvmet has no Compare
		do("compare", "--data-size=4096", "--data="+data)
	}
	do("read", "--data-size=4096", "--data="+back)
	if got, err := os.ReadFile(back); err != nil || string(got) != string(pattern(4096, 5)) {
		t.Errorf("nvme read returns other data than nvme write wrote (%v)", err)
	}
	run(t, "nvme", "flush", ns)
	run(t, "nvme", "dsm", ns, "--ad", fmt.Sprintf("--blocks=%d", 4096/lba), fmt.Sprintf("--slbs=%d", 8192/lba))
	if !l.target.ours() {
		return // over a file on tmpfs nvmet has no Write Zeroes, and it never has Compare
	}
	do("write-zeroes")
	do("read", "--data-size=4096", "--data="+back)
	if got, err := os.ReadFile(back); err != nil || string(got) != string(make([]byte, 4096)) {
		t.Errorf("nvme write-zeroes does not zero (%v)", err)
	}
	if out, err := tryRun("nvme", append([]string{"compare", ns, "--data-size=4096", "--data=" + data}, blocks...)...); err == nil {
		t.Errorf("comparing different data succeeds: %s", out)
	}
}

func rescanUnderLoad(t *testing.T, l *lab) {
	_, c, _, ctrl := upLinux(t, l, 8*mib)
	w := load(t, c.device(1), 8*mib)
	for range 10 {
		run(t, "nvme", "ns-rescan", ctrl)
		w.moves(t)
	}
	w.end(t)
}

func fileSystem(t *testing.T, l *lab) {
	s, c, ns, _ := upLinux(t, l, 96*mib)
	dir := t.TempDir()
	run(t, "mkfs.ext4", "-q", ns)
	run(t, "mount", "-t", "ext4", ns, dir)
	mounted := true
	defer func() {
		if mounted {
			_, _ = tryRun("umount", dir)
		}
	}()
	run(t, "fio", "--name=verify", "--directory="+dir, "--direct=1", "--ioengine=libaio", "--iodepth=32",
		"--rw=randwrite", "--bsrange=4k-128k", "--size=32m", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1")
	must(t, os.WriteFile(filepath.Join(dir, "kept"), pattern(mib, 3), 0o600))
	run(t, "umount", dir)
	mounted = false
	c.disconnect()
	c = l.connect(t, s, options{}).(*linuxSession)
	ns = c.path(1)
	run(t, "e2fsck", "-fn", ns)
	run(t, "mount", "-t", "ext4", "-o", "ro", ns, dir)
	mounted = true
	if got, err := os.ReadFile(filepath.Join(dir, "kept")); err != nil || string(got) != string(pattern(mib, 3)) {
		t.Errorf("after a reconnect a file has changed (%v)", err)
	}
}

func discoveryKeptAlive(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}})
	o := options{keepAlive: time.Second}.withDefaults(s)
	instance, err := fabricsConnect(optionLine(discoveryNQN, s.portal(0), o))
	must(t, err)
	dir := fmt.Sprintf("/sys/class/nvme/nvme%d", instance)
	t.Cleanup(func() { _ = os.WriteFile(dir+"/delete_controller", []byte("1"), 0) })
	// Three keep-alive timeouts, without other load.
	for end := time.Now().Add(3 * time.Second); time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		if state := text(dir + "/state"); state != "live" {
			t.Fatalf("the discovery controller is %s", state)
		}
	}
}

func queueTypes(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 8 * mib}})
	o := options{queues: 1}.withDefaults(s)
	for _, more := range []string{"nr_write_queues=1", "nr_poll_queues=1", "nr_write_queues=1,nr_poll_queues=1"} {
		instance, err := fabricsConnect(optionLine(s.nqn(), s.portal(0), o) + "," + more)
		must(t, err)
		c := &linuxSession{t: t, name: s.nqn(), dirs: []string{fmt.Sprintf("/sys/class/nvme/nvme%d", instance)}}
		t.Cleanup(c.disconnect)
		if want := 2 + strings.Count(more, ","); c.queues(0) != want {
			t.Errorf("%s: %d queues, want %d", more, c.queues(0), want)
		}
		fioVerifies(t, c.path(1))
		c.disconnect()
	}
}

func nvmeConnects(t *testing.T, l *lab) {
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: mib}})
	address, service, _ := net.SplitHostPort(s.portal(0))
	where := []string{"-t", "tcp", "-a", address, "-s", service, "-q", string(testHost.NQN), "-I", testHost.ID.String()}
	c := &linuxSession{t: t, name: s.nqn()}
	run(t, "nvme", append([]string{"connect", "-n", string(s.nqn())}, where...)...)
	must(t, block.WriteAt(c.device(1), pattern(unit, 1), 0))
	out := run(t, "nvme", "disconnect", "-n", string(s.nqn()))
	if !strings.Contains(out, "disconnected 1 controller") {
		t.Errorf("nvme disconnect says %q", out)
	}
	run(t, "nvme", append([]string{"connect-all"}, where...)...)
	must(t, block.WriteAt(c.device(1), pattern(unit, 1), 0))
	run(t, "nvme", "disconnect", "-n", string(s.nqn()))
}

func reservations(t *testing.T, l *lab) {
	s, _, ns, _ := upLinux(t, l, mib)
	run(t, "nvme", "resv-register", ns, "--nrkey=0x1234", "--rrega=0")
	run(t, "nvme", "resv-acquire", ns, "--crkey=0x1234", "--rtype=1", "--racqa=0")
	report := run(t, "nvme", "resv-report", ns, "--eds", "-o", "json")
	t.Log("\n" + report)
	if !strings.Contains(report, "4660") {
		t.Error("resv-report does not show the key")
	}
	if _, err := tryRun("nvme", "resv-acquire", ns, "--crkey=0x9999", "--rtype=1", "--racqa=0"); err == nil {
		t.Error("a reservation is acquired with a key that was not registered")
	}
	// Another host may read but not write under write exclusive. One machine has only one
	// Linux host, so the other one is ours.
	other, err := ourHost{}.connect(t, s, options{host: otherHost})
	must(t, err)
	d := other.device(1)
	must(t, block.ReadAt(d, make([]byte, unit), 0))
	if err := block.WriteAt(d, pattern(unit, 1), 0); !errors.Is(err, nvmetcp.ReservationConflict) {
		t.Errorf("another host's write ends with %v", err)
	}
	run(t, "nvme", "resv-release", ns, "--crkey=0x1234", "--rtype=1", "--rrela=0")
	must(t, block.WriteAt(d, pattern(unit, 1), 0))
}

// proveAgain waits for each authentication before it changes a key. In Linux 6.12, if a
// connection ends during reauthentication, the recovery and the reauthentication wait for
// each other.
func proveAgain(t *testing.T, l *lab) {
	a := access{host: testHost, hostKey: newKey(t, dhchap.SHA256), controllerKey: newKey(t, dhchap.SHA256)}
	s := l.target.serve(t, spec{namespaces: map[uint32]int64{1: 8 * mib}, allow: &a}).(*ourSubsystem)
	c := l.connect(t, s, options{hostKey: a.hostKey, controllerKey: a.controllerKey}).(*linuxSession)
	w := load(t, c.device(1), 8*mib)
	w.moves(t)
	again := func(what string, prove func()) {
		t.Helper()
		before := s.proofs.Load()
		prove()
		eventually(t, what+": each queue is proved again", func() bool { return s.proofs.Load() == before+3 })
		w.moves(t)
	}
	write := func() {
		t.Helper()
		must(t, os.WriteFile(c.dirs[0]+"/dhchap_secret", []byte(a.hostKey.Representation()), 0))
	}
	again("the same key", write)
	a.hostKey = newKey(t, dhchap.SHA384)
	s.allow(a)
	again("another key", write)
	again("a reset", func() { c.reset(0) })
	w.end(t)
}
