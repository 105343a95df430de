// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/keepalive"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

const (
	managerPort = ":4480"
	manager     = controlAddress + managerPort // the first one, or the only one
)

// WeftOptions describe the Weft cluster.
type WeftOptions struct {
	Targets   int    // 0: 4, placed in the zones of the nodes in turn
	DriveSize int64  // bytes of each target's only drive, a sparse file; 0: 16 GiB
	Target    string // program of the targets; "": weft

	NodeManagers bool // each node has a manager too, so that all of them agree by majority
}

// Weft is the lab's Weft cluster: volmgr and targets run outside of the nodes, initiator
// agents and further managers on them.
type Weft struct {
	API pb.ManagerClient

	lab *Lab
}

func (l *Lab) startWeft() error {
	o := &l.options.Weft
	if o.Targets == 0 {
		o.Targets = 4
	}
	if o.DriveSize == 0 {
		o.DriveSize = 16 << 30
	}
	if o.Target == "" {
		o.Target = l.place.Weft
	}
	l.Weft = &Weft{lab: l}
	l.env = append(l.env, "WEFT_MANAGER="+l.managerAddresses(), operator.PlainTCP)
	if err := l.Weft.startManagers(); err != nil {
		return err
	}
	for i := 1; i <= o.Targets; i++ {
		if err := l.Weft.StartTarget(i); err != nil {
			return err
		}
	}
	for _, n := range l.Nodes {
		if err := n.StartInitiator(); err != nil {
			return err
		}
	}
	for i := 1; i <= o.Targets; i++ {
		if err := l.Weft.addDrive(i); err != nil {
			return err
		}
	}
	return l.Weft.awaitDrives()
}

// managerAddresses are the addresses of all managers, as --manager takes them.
func (l *Lab) managerAddresses() string {
	all := []string{manager}
	if l.options.Weft.NodeManagers {
		for _, n := range l.Nodes {
			all = append(all, n.managerAddress())
		}
	}
	return strings.Join(all, ",")
}

// startManagers makes the cluster and starts all its managers.
func (w *Weft) startManagers() error {
	if err := w.initManager(); err != nil {
		return err
	}
	if err := w.StartManager(); err != nil {
		return err
	}
	conn, err := managers.Connect(w.lab.managerAddresses(), func(address string) (*grpc.ClientConn, error) {
		// One that is cut off must not hold a call for ever.
		alive := keepalive.ClientParameters{Time: 10 * time.Second, Timeout: 3 * time.Second, PermitWithoutStream: true}
		return grpc.NewClient("passthrough:///"+address, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithKeepaliveParams(alive))
	})
	if err != nil {
		return err
	}
	w.lab.t.Cleanup(func() { conn.Close() })
	w.API = pages.Client(conn)
	if !w.lab.options.Weft.NodeManagers {
		return nil
	}
	ctx, cancel := context.WithTimeout(w.lab.t.Context(), time.Minute)
	defer cancel()
	for _, n := range w.lab.Nodes {
		// The first one may not answer yet. A join can be repeated.
		if err := poll(ctx, 200*time.Millisecond, n.joinManager); err != nil {
			return err
		}
		if err := n.startManager(); err != nil {
			return err
		}
	}
	return w.awaitVotes()
}

// awaitVotes waits until all managers vote and are reached by the one that leads.
func (w *Weft) awaitVotes() error {
	ctx, cancel := context.WithTimeout(w.lab.t.Context(), time.Minute)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, func() error {
		r, err := w.API.ListManagers(ctx, &pb.ListManagersRequest{})
		if err != nil {
			return err
		}
		voters := 0
		for _, m := range r.GetManagers() {
			if m.GetVoter() && m.GetProblem() == "" {
				voters++
			}
		}
		if want := 1 + len(w.lab.Nodes); voters != want {
			return fmt.Errorf("%d of %d managers vote", voters, want)
		}
		return nil
	})
}

// leader is the address of the manager that leads.
func (w *Weft) leader(ctx context.Context) (string, error) {
	r, err := w.API.ListManagers(ctx, &pb.ListManagersRequest{})
	if err != nil {
		return "", err
	}
	for _, m := range r.GetManagers() {
		if m.GetLeader() {
			return m.GetAddress(), nil
		}
	}
	return "", errors.New("no manager leads")
}

// lead makes a node's manager lead.
func (w *Weft) lead(ctx context.Context, n *Node) error {
	return poll(ctx, 100*time.Millisecond, func() error {
		at, err := w.leader(ctx)
		if err != nil || at == n.managerAddress() {
			return err
		}
		_, err = w.API.TransferLeadership(ctx, &pb.TransferLeadershipRequest{Manager: n.managerAddress()})
		return errors.Join(fmt.Errorf("the manager at %s leads", at), err)
	})
}

// reports returns nil if the manager that leads hears a node's initiator agent.
func (w *Weft) reports(ctx context.Context, n *Node) error {
	r, err := w.API.ListNodes(ctx, &pb.ListNodesRequest{})
	if err != nil {
		return err
	}
	for _, node := range r.GetNodes() {
		if node.GetName() == n.Name && node.GetInitiator().GetOnline() {
			return nil
		}
	}
	return fmt.Errorf("the agent of %s is not online", n.Name)
}

func (w *Weft) drive(i int) string { return filepath.Join(w.lab.dir, fmt.Sprintf("t%d.drive", i)) }

// StartTarget starts or restarts target ti. Each zone has as many targets as a volume has
// copies, so that a volume can be placed within one zone.
func (w *Weft) StartTarget(i int) error {
	drive, err := os.OpenFile(w.drive(i), os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer drive.Close()
	if err := drive.Truncate(w.lab.options.Weft.DriveSize); err != nil {
		return err
	}
	name := fmt.Sprintf("t%d", i)
	return w.lab.start(name, w.lab.options.Weft.Target, "target", "--node", name, "--manager", w.lab.managerAddresses(), "--datapath", "user",
		"--portal", fmt.Sprintf("tcp://%s:%d", storageAddress, 4420+i), "--drive-file", w.drive(i), "--label", "zone="+w.lab.Nodes[(i-1)%len(w.lab.Nodes)].Zone)
}

// Target is the process of target ti.
func (w *Weft) Target(i int) *Process { return w.lab.program(fmt.Sprintf("t%d", i)) }

// initManager initializes the cluster.
func (w *Weft) initManager() error {
	_, err := w.operator().Try(w.lab.t.Context(), "volmgr", "init", "--data-dir", w.lab.file("volmgr"))
	return err
}

// StartManager starts or restarts volmgr.
func (w *Weft) StartManager() error {
	return w.lab.start("volmgr", w.lab.place.Weft, "volmgr", "--data-dir", w.lab.file("volmgr"), "--listen", manager)
}

// Manager is the process of volmgr.
func (w *Weft) Manager() *Process { return w.lab.program("volmgr") }

// addDrive adds a target's drive once the manager knows the target.
func (w *Weft) addDrive(i int) error {
	ctx, cancel := context.WithTimeout(w.lab.t.Context(), 30*time.Second)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, func() error {
		_, err := w.Try("drive", "add", fmt.Sprintf("t%d", i), w.drive(i))
		return err
	})
}

func (w *Weft) awaitDrives() error {
	ctx, cancel := context.WithTimeout(w.lab.t.Context(), 30*time.Second)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, func() error { return operator.DrivesReady(ctx, w.API) })
}

func (w *Weft) operator() operator.Operator {
	return operator.Operator{Program: w.lab.place.Weft, Manager: w.lab.managerAddresses()}
}

// Try runs a weft command and returns its output.
func (w *Weft) Try(args ...string) (string, error) {
	return w.operator().Try(w.lab.t.Context(), args...)
}

// State is the output that an operator would look at when something is wrong.
func (w *Weft) State() string { return w.operator().State(w.lab.t.Context()) }

func (n *Node) managerAddress() string { return nodeAddress(n.id.N) + managerPort }

// ownManager are the arguments of the node's manager.
func (n *Node) ownManager() []string {
	return []string{"--data-dir", n.file("volmgr"), "--listen", n.managerAddress()}
}

// joinManager makes the store of a manager on the node, and adds it to the cluster.
func (n *Node) joinManager() error {
	_, err := n.Run(append([]string{n.lab.place.Weft, "volmgr", "join", "--manager", manager}, n.ownManager()...)...)
	return err
}

func (n *Node) startManager() error {
	return n.start("volmgr", append([]string{n.lab.place.Weft, "volmgr"}, n.ownManager()...)...)
}

// StartInitiator starts or restarts the node's initiator agent.
func (n *Node) StartInitiator() error {
	return n.start("initiator", n.lab.place.Weft, "initiator", "--node", n.Name, "--manager", n.lab.managerAddresses(), "--datapath", "user", "--block-device", "fuse",
		"--run-dir", n.file(runDirName), "--state-dir", "/var/lib/weft/initiator", "--label", "zone="+n.Zone)
}
