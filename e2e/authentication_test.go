// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
)

// A volume that requires authentication is attached on the kernel's data path at both ends. Linux's
// own host on another machine, with the right names and without the key, is refused; the host that
// was told the key reads and writes on. A kernel built without NVME_HOST_AUTH and NVME_TARGET_AUTH,
// such as Debian's 6.1, is refused the volume; the rest needs KERNEL=6.12.
func TestScenarioAuthentication(t *testing.T) {
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2})
	c1, c2 := b.Clients[0], b.Clients[1]
	b.Create("db", "256MiB", 1, 2)
	if out, err := b.Try("volume", "set", "db", "--authentication", "require"); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if strings.TrimSpace(shell(t, c1, "grep -c ' nvme_auth_negotiate' /proc/kallsyms || true")) == "0" {
		if slices.Contains([]string{"6.12", "6.17", "7.2"}, vm.KernelVersion()) {
			t.Fatalf("Linux %s has no function nvme_auth_negotiate; it had, so the rest is not tried", vm.KernelVersion())
		}
		if out, err := b.Try("attach", "db", "--node", "c1"); err == nil || !strings.Contains(err.Error()+out, "it requires authentication") {
			t.Errorf("a kernel that cannot authenticate was given the volume: %v\n%s", err, out)
		}
		return
	}
	device := b.Attach("db", c1)
	if explained, err := b.Try("explain", "volume", "db"); err != nil || !strings.Contains(explained, "host c1 and its targets authenticate to one another: t1, t2") {
		t.Errorf("it is not said that authentication is in force: %v\n%s", err, explained)
	}
	shell(t, c1, "dd if=/dev/urandom of="+device+" bs=1M count=8 oflag=direct 2>/dev/null")

	for files, machine := range map[string]*vm.Machine{"/sys/class/nvme/nvme*/dhchap_*secret": c1, "/sys/kernel/config/nvmet/hosts/*/dhchap_*key": b.Targets[0]} {
		modes := strings.Fields(shell(t, machine, "ls -l "+files+" | cut -c1-10"))
		if len(modes) < 2 || slices.ContainsFunc(modes, func(m string) bool { return m != "-rw-------" }) {
			t.Errorf("%s have modes %v: others can read the keys", files, modes)
		}
	}

	// What c1 connected to, and as whom.
	for _, line := range strings.Split(strings.TrimSpace(shell(t, c1, `for c in /sys/class/nvme/nvme*; do
		echo "$(cat $c/subsysnqn) $(cat $c/hostnqn) $(cat $c/hostid) $(cat $c/address)"; done`)), "\n") {
		words := strings.Fields(line)
		if len(words) != 4 {
			t.Fatalf("controller %q", line)
		}
		if want := block.ProvenHost(block.NQN(words[0])); words[1] != string(want.NQN) {
			t.Errorf("connected to %s as %s, want %s", words[0], words[1], want.NQN)
		}
		address := map[string]string{}
		for part := range strings.SplitSeq(words[3], ",") {
			key, value, _ := strings.Cut(part, "=")
			address[key] = value
		}
		options := fmt.Sprintf("transport=tcp,traddr=%s,trsvcid=%s,nqn=%s,hostnqn=%s,hostid=%s,nr_io_queues=1",
			address["traddr"], address["trsvcid"], words[0], words[1], words[2])
		tool := fmt.Sprintf("nvme connect -t tcp -a %s -s %s -n %s -q %s -I %s", address["traddr"], address["trsvcid"], words[0], words[1], words[2])
		wrong := "dhchap_secret=DHHC-1:00:ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n:"
		for what, connect := range map[string]string{
			"nvme-cli without a key": tool, "Linux without a key": write(options), "Linux with another key": write(options + "," + wrong),
		} {
			if out := shell(t, c2, "{ "+connect+"; } 2>&1 && echo CONNECTED || echo the target said no"); !strings.Contains(out, "the target said no") {
				t.Errorf("%s was let in as %s on c2: %s", what, words[1], out)
			}
		}
		// With c1's keys it is let in: so it was refused for want of them, and for nothing else.
		keys := strings.Fields(shell(t, c1, "cd /sys/class/nvme; for c in nvme*; do grep -q "+words[0]+" $c/subsysnqn && cat $c/dhchap_secret $c/dhchap_ctrl_secret; done; true"))
		if len(keys) != 2 {
			t.Fatalf("c1 has %d keys for %s", len(keys), words[0])
		}
		shell(t, c2, write(options+",dhchap_secret="+keys[0]+",dhchap_ctrl_secret="+keys[1])+" && nvme disconnect -n "+words[0])
	}
	shell(t, c1, "dd if="+device+" of=/dev/null bs=1M count=8 iflag=direct 2>/dev/null; dd if=/dev/urandom of="+device+" bs=1M count=8 oflag=direct 2>/dev/null")
	b.Detach("db")
	b.Attach("db", c2) // as itself, with keys of its own
}

// write makes Linux connect with these options.
func write(options string) string { return "echo '" + options + "' > /dev/nvme-fabrics" }
