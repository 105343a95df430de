// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/vm"
)

const (
	operations = "../../docs/operations.md"
	threeNodes = "Install three nodes, closed" // the heading there
)

// machine is the one machine of the test, with its clock.
type machine struct {
	*vm.Machine
	t *testing.T
}

func (m machine) do(script string) string {
	m.t.Helper()
	out, err := m.Shell(m.t.Context(), script)
	if err != nil {
		m.t.Fatalf("%s\n%v\n%s", script, err, m.journal())
	}
	return strings.TrimSpace(out)
}

// journal is the end of what the services said.
func (m machine) journal() string {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(m.t.Context()), time.Minute)
	defer cancel()
	out, err := m.Run(ctx, "sh", "-c", "systemctl --failed --no-legend; systemctl list-jobs --no-legend; journalctl -b --no-pager -n 60 -o short-monotonic")
	return fmt.Sprintf("%s (%v)", out, err)
}

// step tells how long a part took.
func (m machine) step(name string, part func()) {
	m.t.Helper()
	begin := time.Now()
	part()
	m.t.Logf("%s: %.1f s", name, time.Since(begin).Seconds())
}

// settled waits until the boot has ended, and fails the test if a service has failed.
func (m machine) settled() {
	m.t.Helper()
	m.do(`for i in $(seq 120); do
		state=$(systemctl is-system-running || true)
		case $state in running) exit 0;; degraded) break;; esac
		sleep 1
	done
	echo "the system is $state" >&2; exit 1`)
}

func TestScenarioPackagesFromInstallationToRemoval(t *testing.T) {
	deb := packageOf(t)
	quick := commandsBelow(t, threeNodes)
	mount := commandsBelow(t, "Mount volumes at boot")
	// Both ends of nvme-tcp in one kernel 6.1 can hit a kernel bug.
	c := vm.NewCluster(t, vm.WithKernel("6.12"))
	m := machine{c.Start("n1", vm.Userland(), vm.Memory(896), vm.CPUs(2), vm.NVMe("2GiB", "A1"), vm.NVMe("1GiB", "B1"), vm.NVMe("1GiB", "B2")), t}
	m.step("the first boot", func() {
		m.network(m.Addr())
		m.settled()
	})
	m.step("push the package", func() {
		if err := m.Push(t.Context(), deb, "/root/weft_test.deb"); err != nil {
			t.Fatal(err)
		}
	})
	m.step("install", m.install)
	m.step("bring up", func() { m.bringUp(quick) })
	m.step("policy", m.policy)
	m.step("mount", func() { m.mount(mount) })
	m.step("reboot", func() {
		if err := m.Restart(t.Context()); err != nil {
			t.Fatalf("%v\n", err)
		}
		m.settled()
	})
	m.mountedAtBoot()
	m.step("remove", m.remove)
}

// network gives the machine its address, by systemd-networkd.
func (m machine) network(address string) {
	file := "[Match]\nName=eth0\n[Network]\nAddress=" + address + "/24\n"
	if err := m.WriteFile(m.t.Context(), "/etc/systemd/network/10-eth0.network", []byte(file), 0o644); err != nil {
		m.t.Fatal(err)
	}
	m.do("systemctl restart systemd-networkd; /usr/lib/systemd/systemd-networkd-wait-online --timeout 60")
}

func (m machine) install() {
	m.do(`dpkg -i /root/weft_test.deb
		id weft
		weft version
		for s in weft-volmgr weft-target weft-initiator; do
			[ "$(systemctl is-enabled $s)" = disabled ]
			[ "$(systemctl is-active $s)" = inactive ]
		done
		[ ! -e /var/lib/weft ]
		systemd-analyze verify weft-volmgr.service weft-target.service weft-initiator.service weft-initiator-hold.service 2>/tmp/verify
		[ ! -s /tmp/verify ] || { cat /tmp/verify >&2; exit 1; }`)
}

// bringUp runs the documented commands, with this machine in all roles. They go to it directly
// instead of by ssh, and what apt-get would do is done.
func (m machine) bringUp(commands string) {
	places := strings.NewReplacer(
		`nodes="n1 n2 n3"`, "nodes=n1", `others="n2 n3"`, "others=", "client=gpu1", "client=n1",
		"managers=n1:4480,n2:4480,n3:4480", "managers="+m.Addr()+":4480", "network=192.0.2.0/24", "network="+m.Addr()[:strings.LastIndex(m.Addr(), ".")]+".0/24",
		"--size 100GiB --copies 2", "--size 256MiB --copies 1", // copies on one machine are none
	)
	m.do("cd /root\nscp() { cp weft_test.deb weft.deb; }\nssh() { shift; sh -ec \"$*\"; }\n" + places.Replace(strings.ReplaceAll(commands, "apt-get install -y", "dpkg -i")))
	m.do("[ -b /dev/weft/db1 ]; weft status; weft token list")
}

// ends is a function that sums the ends of a device, where labels and file systems begin.
const ends = `ends() { (head -c 64M; dd bs=1M skip=$(($(blockdev --getsize64 $1) / 1048576 - 64)) if=$1 2>/dev/null) < $1 | sha256sum; }
`

// policy lets the blank one of two more drives join, and leaves the other one alone.
func (m machine) policy() {
	m.do(ends + `mkfs.ext4 -q /dev/nvme1n1
		ends /dev/nvme1n1 > /root/other.sum
		for i in $(seq 30); do weft drive devices n1 | grep nvme1n1 | grep -q ext4 && break; sleep 1; done
		weft drive policy create qemu --model 'QEMU*' --label class=small
		for i in $(seq 30); do weft drive list | grep -q 'nvme2n1.*ready.*class=small' && break; sleep 1; done
		weft drive list >&2
		weft drive list | grep -q 'nvme2n1.*ready.*class=small'
		sleep 3
		if weft drive list | grep -q nvme1n1; then exit 1; fi
		ends /dev/nvme1n1 | cmp - /root/other.sum`)
}

// mount makes the documented entry, and a second volume whose entry names the file system's label.
func (m machine) mount(commands string) {
	m.do("weft volume create db2 --size 256MiB --copies 1 --wait; weft attach db2 --node n1")
	m.do("udevadm settle\n" + commands)
	m.do(strings.NewReplacer("/dev/weft/db1 /srv", "LABEL=data2 /srv", "db1", "db2", "data1", "data2").Replace(commands))
	m.do(`cat /etc/fstab >&2
		for v in db1 db2; do
			[ "$(findmnt -no FSTYPE /srv/$v)" = ext4 ]
			head -c 8000000 /dev/urandom > /srv/$v/data
			sha256sum /srv/$v/data > /root/$v.sum
		done
		sync`)
}

// mountedAtBoot checks that both file systems were there, with their data, before the target that
// services of local file systems wait for.
func (m machine) mountedAtBoot() {
	m.do(`for v in db1 db2; do
			findmnt -no SOURCE /srv/$v
			sha256sum -c /root/$v.sum
		done
		journalctl -b -p warning --no-pager >&2
		if journalctl -b --no-pager | grep -i 'ordering cycle' >&2; then exit 1; fi`)
	reached := func(unit string) time.Duration {
		text := m.do("systemctl show -P ActiveEnterTimestampMonotonic " + unit)
		us, err := strconv.ParseInt(text, 10, 64)
		if err != nil || us == 0 {
			m.t.Fatalf("%s became active at %q, %v", unit, text, err)
		}
		return time.Duration(us) * time.Microsecond
	}
	local := reached("local-fs.target")
	for _, unit := range []string{"srv-db1.mount", "srv-db2.mount"} {
		at := reached(unit)
		m.t.Logf("%s was mounted %.1f s after the kernel's start, local-fs.target reached at %.1f s", unit, at.Seconds(), local.Seconds())
		if at > local {
			m.t.Errorf("%s was mounted %v after local-fs.target", unit, at-local)
		}
	}
}

// remove removes the package, which keeps the state and does not touch the drive.
func (m machine) remove() {
	m.do(ends + `if dpkg -r weft; then echo 'removed while attached' >&2; exit 1; fi
		dpkg -s weft | grep '^Status: .* installed$'
		umount /srv/db1 /srv/db2
		weft detach db1; weft detach db2
		systemctl stop weft-initiator weft-target weft-volmgr
		ends /dev/nvme0n1 > /root/drive.sum
		find /var/lib/weft -type f | sort > /root/state
		dpkg -r weft
		[ ! -e /usr/bin/weft ]
		[ -e /etc/weft/target.env ]
		find /var/lib/weft -type f | sort | cmp - /root/state
		dpkg -P weft
		[ ! -e /etc/weft/target.env ]
		find /var/lib/weft -type f | sort | cmp - /root/state
		ends /dev/nvme0n1 | cmp - /root/drive.sum`)
}

// packageOf is the .deb that "make packages" has built.
func packageOf(t *testing.T) string {
	t.Helper()
	found, err := filepath.Glob("../../bin/packages/weft_*_amd64.deb")
	if err != nil || len(found) != 1 {
		t.Skipf("there are %d packages in bin/packages, %v; run make packages-test", len(found), err)
	}
	return found[0]
}

// commandsBelow is the first block of commands below a heading of the guide.
func commandsBelow(t *testing.T, heading string) string {
	t.Helper()
	text, err := os.ReadFile(operations)
	if err != nil {
		t.Fatal(err)
	}
	block, err := firstBlock(string(text), heading)
	if err != nil {
		t.Fatalf("%s: %v", operations, err)
	}
	return block
}

func firstBlock(text, heading string) (string, error) {
	_, below, found := strings.Cut(text, "# "+heading+"\n")
	_, block, begun := strings.Cut(below, "```sh\n")
	block, _, ended := strings.Cut(block, "```\n")
	if !found || !begun || !ended {
		return "", errors.New("no commands below " + heading)
	}
	return block, nil
}
