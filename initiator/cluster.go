// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/agentlock"
	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// This file decides which cluster the agent obeys. A machine belongs to the first cluster that
// its agent hears of, and remembers that for good. If another cluster's manager answers at the
// known address, for example one with an empty store, it lists none of the machine's volumes:
// obeying it would remove mounted devices.

// clusterFile is where a machine remembers its cluster, in Config.StateDir.
const clusterFile = "cluster"

// allegiance is the cluster that a machine belongs to, and the one whose orders it refuses.
type allegiance struct {
	own   block.ClusterID // zero: none yet
	other string          // the cluster of the answering manager, if its orders are refused
	why   string          // why they are refused; empty if they are not
}

// judge says why the orders of a cluster's manager are refused; empty if they are not. A
// machine that has volumes but has lost its StateDir, and with it its cluster, joins the
// cluster that knows one of the volumes: volume ids are random.
func (a allegiance) judge(w *pb.InitiatorWanted, held []block.VolumeID) string {
	from, err := block.ParseClusterID(w.GetClusterId())
	switch {
	case err != nil:
		return "the volume manager does not name its cluster"
	case from == a.own:
		return ""
	case !a.own.IsZero():
		return fmt.Sprintf("the volume manager belongs to cluster %v, this machine to cluster %v", from, a.own)
	case len(held) == 0:
		return ""
	}
	for _, wanted := range w.GetAttachments() {
		if v, err := block.ParseVolumeID(wanted.GetVolumeId()); err == nil && slices.Contains(held, v) {
			return ""
		}
	}
	return fmt.Sprintf("this machine does not remember its cluster, and has volumes (%v) that the volume manager of cluster %v does not know", held, from)
}

// whatToDo tells people what to do when a manager's orders are refused.
const whatToDo = "start the right volume manager at this address, or correct --manager; to move this machine to the other cluster for good: detach its volumes, stop the agent, `weft initiator leave-cluster`"

// obeys decides whether the agent obeys a manager, and remembers the cluster of the first one.
func (a *Agent) obeys(w *pb.InitiatorWanted) bool {
	a.mu.Lock()
	side := a.cluster
	a.mu.Unlock()
	var held []block.VolumeID
	var err error
	if side.own.IsZero() {
		held, err = a.path.held()
	}
	why := side.judge(w, held)
	if err != nil {
		why = fmt.Sprintf("this machine does not remember its cluster, and its volumes cannot be listed: %v", err)
	}
	if why == "" && side.own.IsZero() {
		side.own, _ = block.ParseClusterID(w.GetClusterId())
		if err := rememberCluster(a.cfg.StateDir, side.own); err != nil {
			why = err.Error() // otherwise it could obey another cluster's manager next
		} else {
			a.log.Info("this machine belongs to a cluster now", "cluster", side.own)
		}
	}
	if why == "" {
		if err := a.newest.Take(authority.OrderOf(w)); err != nil {
			why = err.Error()
		}
	}
	if why != "" {
		a.refuse(w.GetClusterId(), why)
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cluster.why != "" {
		a.log.Info("volume manager is obeyed again", "cluster", side.own)
	}
	a.cluster = allegiance{own: side.own}
	return true
}

// refuse notes that a manager's orders are refused, and logs it once.
func (a *Agent) refuse(other, why string) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.cluster.why == why {
		return
	}
	a.cluster.other, a.cluster.why = other, why
	a.log.Error("volume manager is not obeyed: its orders are ignored, and the attachments stay as they are",
		"why", why, "cluster", a.cluster.own, "its_cluster", other, "do", whatToDo)
}

// refusedBy takes note if err says that a manager refuses this machine; false if err says
// something else.
func (a *Agent) refusedBy(err error) bool {
	other, refused := pb.OtherCluster(err)
	if refused {
		a.mu.Lock()
		why := a.cluster.judge(&pb.InitiatorWanted{ClusterId: other}, nil)
		a.mu.Unlock()
		a.refuse(other, cmp.Or(why, err.Error()))
	}
	return refused
}

// readCluster returns the cluster that dir remembers; zero if none. A file with any other
// content is an error and is left alone.
func readCluster(dir string) (block.ClusterID, error) {
	path := filepath.Join(dir, clusterFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return block.ClusterID{}, nil
	}
	if err != nil {
		return block.ClusterID{}, fmt.Errorf("read this machine's cluster: %w", err)
	}
	id, err := block.ParseClusterID(strings.TrimSpace(string(b)))
	if err != nil || id.IsZero() {
		return block.ClusterID{}, fmt.Errorf("read this machine's cluster: %s holds %.40q instead of a cluster id: write the id that `weft status` shows", path, b)
	}
	return id, nil
}

// rememberCluster returns when the cluster is remembered durably.
func rememberCluster(dir string, id block.ClusterID) error {
	if err := durable.Write(filepath.Join(dir, clusterFile), id.String()+"\n", 0o644); err != nil {
		return fmt.Errorf("remember this machine's cluster: %w", err)
	}
	return nil
}

// Leave makes the machine forget its cluster, so that its agent joins the next one that it
// hears of. It returns the cluster that it left. It refuses while an agent runs or volumes are
// attached.
func (a *Agent) Leave() (block.ClusterID, error) {
	id, err := a.leaveCluster()
	if err != nil {
		return id, fmt.Errorf("leave the cluster: %w", err)
	}
	return id, nil
}

func (a *Agent) leaveCluster() (block.ClusterID, error) {
	id, err := readCluster(a.cfg.StateDir)
	if err != nil || id.IsZero() {
		return id, err
	}
	lock, err := lockState(a.cfg.StateDir, unix.LOCK_EX)
	if err != nil {
		return id, err
	}
	defer lock.Close()
	held, err := a.inKernel()
	if err != nil {
		return id, err
	}
	if len(held) > 0 {
		return id, fmt.Errorf("this machine has volumes of cluster %v: %v: start its agent and detach them", id, held)
	}
	if err := os.Remove(filepath.Join(a.cfg.StateDir, clusterFile)); err != nil {
		return id, err
	}
	return id, durable.SyncDir(a.cfg.StateDir)
}

// inKernel lists the volumes that the kernel serves here, whoever set them up.
func (a *Agent) inKernel() ([]block.VolumeID, error) {
	if a.path != nil {
		return a.path.held()
	}
	client, err := dm.Open()
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	held, err := mapped(client.Devices)
	return held, errors.Join(err, client.Close())
}

// mapped lists the volumes that have device-mapper devices.
func mapped(devices func(prefix string) ([]dm.State, error)) (held []block.VolumeID, err error) {
	all, err := devices(mirror.UUIDPrefix)
	for _, d := range all {
		if id := d.UUID[len(mirror.UUIDPrefix):]; len(id) >= 36 {
			if v, err := block.ParseVolumeID(id[:36]); err == nil && !slices.Contains(held, v) {
				held = append(held, v)
			}
		}
	}
	return held, err
}

// lockState locks a StateDir: exclusively for an agent in user space, shared for those of the
// kernel's data path, where an earlier one may hang in a call that has not returned.
func lockState(dir string, how int) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, "lock")
	lock, err := agentlock.Take(path, os.O_RDWR|os.O_CREATE, 0o600, how)
	if errors.Is(err, unix.EWOULDBLOCK) {
		return nil, fmt.Errorf("lock %s, which another initiator agent may hold: %w", path, unix.EWOULDBLOCK)
	}
	return lock, err
}
