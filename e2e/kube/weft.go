// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

const manager = controlAddress + ":4480"

// WeftOptions describe the Weft cluster.
type WeftOptions struct {
	Targets   int    // 0: 4, placed in the zones of the nodes in turn
	DriveSize int64  // bytes of each target's only drive, a sparse file; 0: 16 GiB
	Target    string // program of the targets; "": weft
}

// Weft is the lab's Weft cluster: volmgr and targets run outside of the nodes, initiator
// agents on them.
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
	l.env = append(l.env, "WEFT_MANAGER="+manager, operator.PlainTCP)
	if err := l.Weft.initManager(); err != nil {
		return err
	}
	if err := l.Weft.StartManager(); err != nil {
		return err
	}
	conn, err := grpc.NewClient("passthrough:///"+manager, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return err
	}
	l.t.Cleanup(func() { conn.Close() })
	l.Weft.API = pages.Client(conn)
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
	return w.lab.start(name, w.lab.options.Weft.Target, "target", "--node", name, "--manager", manager, "--datapath", "user",
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
	return operator.Operator{Program: w.lab.place.Weft, Manager: manager}
}

// Try runs a weft command and returns its output.
func (w *Weft) Try(args ...string) (string, error) {
	return w.operator().Try(w.lab.t.Context(), args...)
}

// State is the output that an operator would look at when something is wrong.
func (w *Weft) State() string { return w.operator().State(w.lab.t.Context()) }

// StartInitiator starts or restarts the node's initiator agent.
func (n *Node) StartInitiator() error {
	return n.start("initiator", n.lab.place.Weft, "initiator", "--node", n.Name, "--manager", manager, "--datapath", "user", "--block-device", "fuse",
		"--run-dir", n.file(runDirName), "--state-dir", "/var/lib/weft/initiator", "--label", "zone="+n.Zone)
}
