// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"testing"

	"weft.dev/weft/proto/block"
)

const nvmetRoot = "/sys/kernel/config/nvmet"

// linuxTarget is the kernel's nvmet.
type linuxTarget struct{}

func (linuxTarget) ours() bool { return false }

var nextPort atomic.Int64

// nvmetSubsystem is a subsystem with its own ports.
type nvmetSubsystem struct {
	identity
	ids []string // of ports
	up  bool
}

func (linuxTarget) serve(t *testing.T, s spec) served {
	t.Helper()
	n := &nvmetSubsystem{identity: newIdentity(t, s)}
	for range n.tcp {
		n.ids = append(n.ids, strconv.Itoa(int(nextPort.Add(1))))
	}
	t.Cleanup(n.stop)
	n.start(s.queues)
	return n
}

func (n *nvmetSubsystem) path(parts ...string) string {
	return filepath.Join(append([]string{nvmetRoot, "subsystems", string(n.name)}, parts...)...)
}

func (n *nvmetSubsystem) port(i int, parts ...string) string {
	return filepath.Join(append([]string{nvmetRoot, "ports", n.ids[i]}, parts...)...)
}

func (n *nvmetSubsystem) put(path, value string) {
	n.t.Helper()
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		n.t.Fatalf("writing %q: %v", value, err)
	}
}

func (n *nvmetSubsystem) mkdir(path string) {
	n.t.Helper()
	if err := os.Mkdir(path, 0o755); err != nil && !errors.Is(err, fs.ErrExist) {
		n.t.Fatal(err)
	}
}

func (n *nvmetSubsystem) gone(path string) {
	n.t.Helper()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		n.t.Error(err)
	}
}

func (n *nvmetSubsystem) start(queues int) {
	n.t.Helper()
	n.mkdir(n.path())
	n.put(n.path("attr_model"), "Linux")
	if queues != 0 {
		n.put(n.path("attr_qid_max"), strconv.Itoa(queues))
	}
	for nsid := range n.sizes {
		n.enable(nsid)
	}
	if n.spec.allow == nil {
		n.put(n.path("attr_allow_any_host"), "1")
	} else {
		n.allow(*n.spec.allow)
	}
	for i := range n.ids {
		n.mkdir(n.port(i))
		n.put(n.port(i, "addr_trtype"), "tcp")
		n.put(n.port(i, "addr_adrfam"), "ipv4")
		n.put(n.port(i, "addr_traddr"), "127.0.0.1")
		n.put(n.port(i, "addr_trsvcid"), strconv.Itoa(n.tcp[i]))
		n.link(i)
	}
	for _, nqn := range n.more {
		dir := filepath.Join(nvmetRoot, "subsystems", string(nqn))
		n.mkdir(dir)
		n.put(dir+"/attr_allow_any_host", "1")
		for i := range n.ids {
			must(n.t, os.Symlink(dir, n.port(i, "subsystems", string(nqn))))
		}
	}
	n.up = true
}

func (n *nvmetSubsystem) stop() {
	n.t.Helper()
	if !n.up {
		return
	}
	n.up = false
	for i := range n.ids {
		n.unlink(i)
		for _, nqn := range n.more {
			n.gone(n.port(i, "subsystems", string(nqn)))
		}
	}
	for _, nqn := range n.more {
		n.gone(filepath.Join(nvmetRoot, "subsystems", string(nqn)))
	}
	for nsid := range n.sizes {
		n.disable(nsid)
	}
	if n.spec.allow != nil {
		n.gone(n.path("allowed_hosts", string(n.spec.allow.host.NQN)))
	}
	n.gone(n.path())
	if n.spec.allow != nil {
		n.gone(filepath.Join(nvmetRoot, "hosts", string(n.spec.allow.host.NQN)))
	}
	for i := range n.ids {
		n.gone(n.port(i))
	}
}

func (n *nvmetSubsystem) enable(nsid uint32) {
	n.t.Helper()
	ns := n.path("namespaces", strconv.Itoa(int(nsid)))
	n.mkdir(ns)
	n.put(ns+"/device_path", image(n.t, n.dir, nsid, n.sizes[nsid]))
	n.put(ns+"/device_uuid", n.uuids[nsid].String())
	n.put(ns+"/buffered_io", "1")
	n.put(ns+"/enable", "1")
}

func (n *nvmetSubsystem) disable(nsid uint32) {
	n.t.Helper()
	ns := n.path("namespaces", strconv.Itoa(int(nsid)))
	n.put(ns+"/enable", "0")
	n.gone(ns)
}

func (n *nvmetSubsystem) add(nsid uint32, size int64) {
	n.t.Helper()
	n.sizes[nsid], n.uuids[nsid] = size, block.UUIDFromRandom(newID(nsid))
	n.enable(nsid)
}

func (n *nvmetSubsystem) remove(nsid uint32) {
	n.t.Helper()
	n.disable(nsid)
	delete(n.sizes, nsid)
	removeImage(n.t, n.dir, nsid)
}

func (n *nvmetSubsystem) resize(nsid uint32, size int64) {
	n.t.Helper()
	n.sizes[nsid] = size
	image(n.t, n.dir, nsid, size)
	n.put(n.path("namespaces", strconv.Itoa(int(nsid)), "revalidate_size"), "1")
}

func (n *nvmetSubsystem) ana(port int, state anaState) {
	n.t.Helper()
	n.put(n.port(port, "ana_groups/1/ana_state"), string(state))
}

func (n *nvmetSubsystem) link(port int) {
	n.t.Helper()
	must(n.t, os.Symlink(n.path(), n.port(port, "subsystems", string(n.name))))
}

func (n *nvmetSubsystem) unlink(port int) {
	n.t.Helper()
	n.gone(n.port(port, "subsystems", string(n.name)))
}

func (n *nvmetSubsystem) allow(a access) {
	n.t.Helper()
	if old := n.spec.allow; old != nil && old.host != a.host {
		n.gone(n.path("allowed_hosts", string(old.host.NQN)))
		n.gone(filepath.Join(nvmetRoot, "hosts", string(old.host.NQN)))
	}
	n.spec.allow = &a
	dir := filepath.Join(nvmetRoot, "hosts", string(a.host.NQN))
	n.mkdir(dir)
	if !a.hostKey.IsZero() {
		n.put(dir+"/dhchap_key", a.hostKey.Representation())
		if a.hash != 0 {
			n.put(dir+"/dhchap_hash", fmt.Sprintf("hmac(sha%d)", 8*a.hash.Size()))
		}
		n.put(dir+"/dhchap_dhgroup", a.group.String())
	}
	if !a.controllerKey.IsZero() {
		n.put(dir+"/dhchap_ctrl_key", a.controllerKey.Representation())
	}
	if err := os.Symlink(dir, n.path("allowed_hosts", string(a.host.NQN))); err != nil && !errors.Is(err, fs.ErrExist) {
		n.t.Fatal(err)
	}
}
