// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/target"
)

// targetSet runs targets in this process; each can be stopped and started separately.
type targetSet struct {
	dir     *directory
	manager pb.AgentsClient
	log     *slog.Logger
	space   *spaceGuard
	support func(context.Context) []support.File

	mu      sync.Mutex
	ctx     context.Context //nolint:containedctx // of Run, for targets that are started later; nil before and after
	running map[block.NodeName]*runningTarget
}

type runningTarget struct {
	stop context.CancelFunc
	done chan struct{}
}

func newTargetSet(d *directory, manager pb.AgentsClient, log *slog.Logger, space *spaceGuard) *targetSet {
	return &targetSet{dir: d, manager: manager, log: log, space: space, running: map[block.NodeName]*runningTarget{}}
}

// Run runs all targets until ctx ends, and returns when none has a drive open.
func (t *targetSet) Run(ctx context.Context) error {
	t.mu.Lock()
	t.ctx = context.WithoutCancel(ctx)
	t.mu.Unlock()
	var errs []error
	for _, d := range t.dir.state.Targets {
		errs = append(errs, t.start(d.Name))
	}
	if err := errors.Join(errs...); err != nil {
		t.stopAll()
		return err
	}
	<-ctx.Done()
	t.stopAll()
	return context.Cause(ctx)
}

func (t *targetSet) stopAll() {
	t.mu.Lock()
	t.ctx = nil
	var names []block.NodeName
	for name := range t.running {
		names = append(names, name)
	}
	t.mu.Unlock()
	for _, name := range names {
		_ = t.stop(name) // it may have been stopped meanwhile
	}
}

func (t *targetSet) find(name block.NodeName) (savedTarget, error) {
	var names []string
	for _, d := range t.dir.state.Targets {
		if d.Name == name {
			return d, nil
		}
		names = append(names, string(d.Name))
	}
	return savedTarget{}, status.Errorf(codes.NotFound, "target %s: not found; there are %s", name, strings.Join(names, ", "))
}

func (t *targetSet) start(name block.NodeName) error {
	d, err := t.find(name)
	if err != nil {
		return err
	}
	log := t.log.With("target", name)
	agent, err := target.New(target.Config{
		Node: name, Portals: []block.Portal{t.dir.portal(name)}, Listen: t.dir.listenAt, Manager: t.manager, Version: t.dir.version, Log: log, Support: t.support, Dial: t.dir.dialTarget,
		Datapath: target.User, Files: []string{t.dir.in(d.Drive)}, FilesOnly: true, Newest: t.dir.in(d.Drive + ".newest"),
		Medium: func(_ string, drive block.Device) block.Device { return &guardedDrive{drive, t.space} },
	})
	if err != nil {
		return err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running[name] != nil {
		return status.Errorf(codes.FailedPrecondition, "target %s is already running", name)
	}
	if t.ctx == nil {
		return errors.New("dev is ending")
	}
	ctx, stop := context.WithCancel(t.ctx)
	a := &runningTarget{stop, make(chan struct{})}
	t.running[name] = a
	go func() {
		defer close(a.done)
		if err := agent.Run(ctx); ctx.Err() == nil {
			log.Error("target ended by itself", "err", err)
		}
		stop()
	}()
	return nil
}

// stop removes a target's exports, as a crash of its process would: acknowledged writes are on its
// drive, and requests to it wait.
func (t *targetSet) stop(name block.NodeName) error {
	if _, err := t.find(name); err != nil {
		return err
	}
	t.mu.Lock()
	a := t.running[name]
	t.mu.Unlock()
	if a == nil {
		return status.Errorf(codes.FailedPrecondition, "target %s is already stopped", name)
	}
	a.stop()
	<-a.done
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.running[name] == a {
		delete(t.running, name)
	}
	return nil
}

// addDrives adds the drives of new targets to the cluster, and returns when they can be used.
func (d *directory) addDrives(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	err := cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (waitingFor string, err error) {
		for i := range d.state.Targets {
			t := &d.state.Targets[i]
			if t.Added {
				continue
			}
			drive, err := api.AddDrive(ctx, &pb.AddDriveRequest{Node: string(t.Name), Device: d.in(t.Drive)})
			switch {
			// The manager does not know the target or its drive yet.
			case status.Code(err) == codes.NotFound, err != nil && cli.NewReport(err).Reason == "NODE_OFFLINE":
				waitingFor = "target " + string(t.Name)
			case err != nil:
				return "", fmt.Errorf("add the drive of %s: %w", t.Name, err)
			case drive.GetState() != pb.DriveState_DRIVE_STATE_READY:
				waitingFor = "the drive of " + string(t.Name)
			default:
				t.Added = true
			}
		}
		return waitingFor, nil
	})
	return errors.Join(err, d.save())
}
