// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pb"
)

// mostCommands is how many commands the guide may need, for three nodes and a client.
const mostCommands = 9

// The guide's commands make a closed cluster of three new machines and a client, word for word. Then
// a stranger looks at all ports, and one node is lost.
func TestScenarioThreeNodesInstalledClosed(t *testing.T) {
	deb := packageOf(t)
	commands := commandsBelow(t, threeNodes)
	if n := strings.Count(commands, "\n"); n > mostCommands {
		t.Errorf("the guide has %d commands, want at most %d", n, mostCommands)
	}
	s := newSite(t, deb)
	begin := time.Now()
	if out, err := s.types(commands); err != nil || t.Failed() {
		t.Fatalf("%v\n%s\n%s", err, out, s.journals())
	}
	t.Logf("the commands took %v", time.Since(begin).Round(time.Second))
	s.allManagersVote()
	s.write("before")
	s.strangerLearnsNothing()
	s.losesNode("n1")
}

// site is the machines of the guide, at its addresses.
type site struct {
	*desk
	all      map[string]machine
	stranger *vm.Machine
}

// addresses are those of the guide's machines; the last one is nobody's.
var addresses = map[string]string{"n1": "192.0.2.11", "n2": "192.0.2.12", "n3": "192.0.2.13", "gpu1": "192.0.2.21", "stranger": "192.0.2.66"}

func newSite(t *testing.T, deb string) *site {
	t.Helper()
	c := vm.NewCluster(t)
	s := &site{all: map[string]machine{}, stranger: c.Machine("stranger", vm.Modules("nvme_tcp"))}
	boot := []*vm.Machine{s.stranger}
	for _, name := range []string{"n1", "n2", "n3", "gpu1"} {
		options := []vm.MachineOption{vm.Userland(), vm.Memory(640)}
		if name != "gpu1" {
			options = append(options, vm.NVMe("128GiB", "drive-"+name)) // sparse
		}
		m := machine{c.Machine(name, options...), t}
		s.all[name], boot = m, append(boot, m.Machine)
	}
	s.desk = newDesk(t, s.all)
	if out, err := exec.CommandContext(t.Context(), "cp", deb, filepath.Join(s.dir, "weft_test.deb")).CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	c.Boot(t.Context(), boot...)
	if _, err := s.stranger.Shell(t.Context(), "ip addr add "+addresses["stranger"]+"/24 dev eth0"); err != nil {
		t.Fatal(err)
	}
	s.each(func(m machine) {
		m.network(addresses[m.Name()])
		m.do("cat >> /etc/hosts <<'EOF'\n" + names() + "EOF")
		m.settled()
	})
	return s
}

// names is what a name server would know.
func names() string {
	var lines strings.Builder
	for name, address := range addresses {
		fmt.Fprintf(&lines, "%s %s\n", address, name)
	}
	return lines.String()
}

// each does the same on all machines of the cluster.
func (s *site) each(do func(machine)) {
	s.t.Helper()
	var all sync.WaitGroup
	for _, m := range s.all {
		all.Go(func() { do(m) })
	}
	all.Wait()
	if s.t.Failed() { // in one of them
		s.t.FailNow()
	}
}

func (s *site) journals() string {
	var text strings.Builder
	for name, m := range s.all {
		if m.Running() {
			fmt.Fprintf(&text, "%s:\n%s\n", name, m.journal())
		}
	}
	return text.String()
}

// allManagersVote waits until three managers vote, and nothing is wrong. A volume that has just been
// attached may be on its way.
func (s *site) allManagersVote() {
	s.t.Helper()
	begin := time.Now()
	s.all["n1"].do(`for i in $(seq 90); do
		weft volmgr list > list; weft status > status
		[ "$(grep -Ec ' (leader|follower) ' list)" = 3 ] && grep -q '^nothing is wrong' status && exit
		sleep 1
	done
	cat list status >&2; exit 1`)
	s.t.Logf("three managers vote and nothing is wrong after %v", time.Since(begin).Round(time.Second))
	s.t.Log(s.all["n1"].do("weft volmgr list; weft node list; weft drive list; weft volume list"))
}

// write writes to the volume on its host, keeps a copy, and compares.
func (s *site) write(name string) {
	s.t.Helper()
	s.all["gpu1"].do(`[ -b /dev/weft/db1 ]
		head -c 8M /dev/urandom > ` + name + `
		dd if=` + name + ` of=/dev/weft/db1 bs=1M oflag=direct conv=fsync
		` + s.compare(name))
}

// compare is a script that reads what was written, from the drives.
func (s *site) compare(name string) string {
	return "dd if=/dev/weft/db1 bs=1M count=8 iflag=direct | cmp - " + name + "\n"
}

// losesNode cuts the power of a node: the volume is written and read, and the two others can still
// make a volume.
func (s *site) losesNode(name string) {
	s.t.Helper()
	s.all[name].Kill()
	begin := time.Now()
	s.all["gpu1"].do(s.compare("before"))
	s.write("after")
	s.t.Logf("the volume is read and written %v after the loss of %s", time.Since(begin).Round(time.Second), name)
	// Root on the machine of the one that leads may do everything. A new volume goes to the targets that
	// are known to be there.
	left := slices.DeleteFunc([]string{"n1", "n2", "n3"}, func(other string) bool { return other == name })
	s.eventually("another manager leads, and knows of the loss", left, "weft node list | grep -q '^"+name+" *offline '")
	s.eventually("another manager makes a volume", left, "weft volume create db2 --size 1GiB --copies 2 --wait --timeout 1m")
	s.t.Logf("a volume is made %v after the loss of %s", time.Since(begin).Round(time.Second), name)
}

// eventually repeats a command until it succeeds on one of some machines.
func (s *site) eventually(what string, machines []string, command string) {
	s.t.Helper()
	var errs []string
	for deadline := time.Now().Add(2 * time.Minute); time.Now().Before(deadline); time.Sleep(time.Second) {
		errs = nil
		for _, name := range machines {
			_, err := s.all[name].Shell(s.t.Context(), command)
			if err == nil {
				return
			}
			errs = append(errs, err.Error())
		}
	}
	s.t.Fatalf("%s: not within 2 minutes: %s\n%s", what, strings.Join(errs, "\n"), s.journals())
}

// found is what the stranger's program prints: see ./stranger.
type found struct {
	Host    string
	Port    int
	Answers map[string][]byte
	TLS     bool
	Calls   map[string]string
	Names   []string
}

// strangerLearnsNothing looks at the machines from one that is no part of the cluster.
//
//	port 4480  managers: to plain bytes, nothing. To TLS, the certificate, with the names of the node
//	           and the cluster; to calls over it, that they need a certificate.
//	port 4420  the kernel's NVMe/TCP target, where there are legs: that it is one. It lists no
//	           subsystem, and lets nobody in who knows its name.
//	port 4421  the agent of such a target, which says what was written last: the same.
func (s *site) strangerLearnsNothing() {
	s.t.Helper()
	begin := time.Now()
	open, all := s.listening(), s.scan()
	s.t.Logf("the scan took %v", time.Since(begin).Round(time.Second))
	legs := 0
	for _, name := range []string{"n1", "n2", "n3", "gpu1"} {
		var found, want []string
		for _, f := range all {
			if f.Host == addresses[name] {
				found = append(found, fmt.Sprintf("tcp:%d", f.Port))
				s.answersNothing(name, f)
			}
		}
		if slices.Contains(found, "tcp:4420") {
			legs++
			want = []string{"tcp:4420", "tcp:4421"}
		}
		if name != "gpu1" {
			want = append(want, "tcp:4480")
		}
		if !slices.Equal(found, want) || !slices.Equal(open[name], want) {
			s.t.Errorf("%s: a stranger finds %v, and the machine listens at %v, want %v", name, found, open[name], want)
		}
	}
	if legs != 2 {
		s.t.Errorf("%d targets answer, want those of both copies", legs)
	}
	if len(all) < 7 {
		s.t.Errorf("the scan has found %d ports, want 7 at least", len(all))
	}
}

// answersNothing checks what a port has said.
func (s *site) answersNothing(name string, f found) {
	s.t.Helper()
	switch f.Port {
	case 4420, 4421:
		if f.TLS || len(f.Answers) != 1 || len(f.Answers["NVMe/TCP"]) != 128 {
			s.t.Errorf("%s answers %q at port %d, want an ICResp to an ICReq and nothing else", name, f.Answers, f.Port)
		}
		s.letsNobodyIn(f.Host, f.Port)
	case 4480:
		if len(f.Answers) > 0 {
			s.t.Errorf("%s answers %q without TLS", name, f.Answers)
		}
		if !f.TLS || len(f.Calls) != len(methods()) {
			s.t.Errorf("%s was asked %d calls over TLS, want %d", name, len(f.Calls), len(methods()))
		}
		for _, told := range f.Names {
			if !tellable.MatchString(told) {
				s.t.Errorf("the certificate of %s tells %q", name, told)
			}
		}
		for method, answer := range f.Calls {
			want := "16 " + path.Base(method) + ": needs a certificate of this cluster, 0 bytes"
			if method == "/weft.v1.Identities/Join" { // what a token is for
				want = "3 certificate_request: certificate request: asn1: syntax error: sequence truncated, 0 bytes"
			}
			if answer != want {
				s.t.Errorf("%s answers %s with %q, want %q", name, method, answer, want)
			}
		}
	}
}

// tellable is what a manager's certificate may say.
var tellable = regexp.MustCompile(`^(metrics\.weft\.internal|CN=n\d|CN=weft [0-9a-f-]{36}|spiffe://[0-9a-f-]{36}/node/n\d/manager)$`)

// letsNobodyIn asks a target for its subsystems, and connects to those that its host uses.
func (s *site) letsNobodyIn(address string, port int) {
	s.t.Helper()
	const me = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-000000000001"
	at := strconv.Itoa(port)
	out, err := s.stranger.Run(s.t.Context(), "nvme", "discover", "-t", "tcp", "-a", address, "-s", at, "-q", me)
	if err != nil || strings.Contains(out, "dev.weft") {
		s.t.Errorf("%s port %s: %v, and a stranger discovers\n%s", address, at, err, out)
	}
	used := s.all["gpu1"].do("grep -l 'traddr=" + address + ",' /sys/class/nvme/nvme*/address | while read file; do cat ${file%/*}/subsysnqn; done")
	if used == "" {
		s.t.Errorf("%s: its host uses no subsystem, so the stranger cannot try one", address)
	}
	for nqn := range strings.FieldsSeq(used) {
		out, err := s.stranger.Run(s.t.Context(), "nvme", "connect", "-t", "tcp", "-a", address, "-s", at, "-q", me, "-n", nqn)
		if err == nil {
			s.t.Errorf("%s lets a stranger use %s at port %s: %s", address, nqn, at, out)
		}
	}
	if out, err := s.stranger.Shell(s.t.Context(), "ls /sys/class/nvme"); err != nil || strings.TrimSpace(out) != "" {
		s.t.Errorf("the stranger has %q, %v", out, err)
	}
}

// listening is where the machines listen, by their own account: TCP and UDP, all ports.
func (s *site) listening() map[string][]string {
	s.t.Helper()
	open := map[string][]string{}
	for name, m := range s.all {
		for line := range strings.Lines(m.do("ss -Htuln")) {
			f := strings.Fields(line) // protocol, state, queues, address
			open[name] = append(open[name], f[0]+f[4][strings.LastIndex(f[4], ":"):])
		}
		slices.Sort(open[name])
	}
	return open
}

func (s *site) scan() (all []found) {
	s.t.Helper()
	program := filepath.Join(s.t.TempDir(), "stranger")
	build := exec.CommandContext(s.t.Context(), "go", "build", "-trimpath", "-ldflags=-s -w", "-o", program, "./stranger")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	if err := s.stranger.Push(s.t.Context(), program, "/stranger"); err != nil {
		s.t.Fatal(err)
	}
	argv := []string{"/stranger", "-last", "5000", "-calls", strings.Join(methods(), ",")}
	for _, m := range s.all {
		argv = append(argv, addresses[m.Name()])
	}
	out, err := s.stranger.Run(s.t.Context(), argv...)
	if err == nil {
		err = json.NewDecoder(bytes.NewReader([]byte(out))).Decode(&all)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	return all
}

// methods are all calls that a manager answers.
func methods() (all []string) {
	for _, file := range []protoreflect.FileDescriptor{pb.File_weft_v1_manager_proto, pb.File_weft_v1_agent_proto, pb.File_weft_v1_identity_proto, pb.File_weft_v1_quorum_proto} {
		for i := range file.Services().Len() {
			service := file.Services().Get(i)
			for j := range service.Methods().Len() {
				all = append(all, fmt.Sprintf("/%s/%s", service.FullName(), service.Methods().Get(j).Name()))
			}
		}
	}
	slices.Sort(all)
	return all
}
