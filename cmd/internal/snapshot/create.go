// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

type createOptions struct {
	snapshots []string // or volumes, if there is a name for all
	name      string
	labels    []string
	freeze    bool
	wait      bool
}

func newCreate(g *cli.Globals) *cobra.Command {
	var o createOptions
	cmd := &cobra.Command{
		Use:   "create " + argument + "...",
		Short: "Take snapshots of volumes, all at one moment",
		Long: `Take snapshots of volumes, attached or not. All that are given are taken at one
moment: if a write is in one of them, then so is every write that was
acknowledged before it, to any of the volumes. So give volumes that belong
together, such as the data and the log of a database, to one command. Writes
wait while the snapshots are taken.

A snapshot holds what a power cut at that moment would leave on the device. What
a program or a file system has not written yet is not in it. With --freeze, the
hosts of the volumes first write out and then freeze the file systems that they
have mounted from them, so that the snapshots hold complete file systems. Their
programs wait for about as long as writes do. If a host has mounted no file
system of a volume, or one that cannot be frozen, no snapshot is taken. A volume
that no host has needs nothing frozen. What a program has not written yet is not
in such a snapshot either.

With --name, the arguments are volumes, and their snapshots have the same name.

The command waits until the snapshots are taken. If one of them cannot be taken,
none is kept. Taking snapshots that exist has no effect.`,
		Example: `  weft snapshot create db1@mon
  weft snapshot create db1@mon log1@mon
  weft snapshot create db1@mon --freeze
  weft snapshot create --name nightly db1 db2 log1 --label keep=7d`,
		Args:              cli.TakesMore(argument),
		ValidArgsFunction: g.CompleteNewSnapshots,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.snapshots = args
			return runCreate(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.StringVar(&o.name, "name", "", "`name` of all the snapshots; the arguments are then volumes")
	f.StringArrayVar(&o.labels, "label", nil, "`key=value` of each snapshot; may be repeated")
	f.BoolVar(&o.freeze, "freeze", false, "freeze the file systems on the volumes while the snapshots are taken")
	f.BoolVar(&o.wait, "wait", true, "wait until the snapshots are taken")
	return cmd
}

func runCreate(ctx context.Context, api pb.ManagerClient, o createOptions, out *cli.Output) error {
	r, err := o.request()
	if err != nil {
		return err
	}
	made, err := api.CreateSnapshots(ctx, r)
	if err == nil && o.freeze {
		err = Understood(made)
	}
	if status.Code(err) == codes.Unimplemented {
		return cli.AdvisedError{Err: fmt.Errorf("this volume manager takes no snapshots: its version has none"), Hints: []string{"upgrade it: `weft upgrade plan` says how"}}
	}
	if err != nil {
		return err
	}
	for _, s := range made.GetSnapshots() {
		// The manager answers before they are taken.
		if s.GetState() == pb.VolumeState_VOLUME_STATE_READY {
			out.Say("snapshot %s already exists: taken %s ago", s.GetName(), out.Age(s.GetSnapshot().GetTaken()))
		}
	}
	if o.wait {
		if err := waitUntilTaken(ctx, api, made.GetSnapshots(), out); err != nil {
			return err
		}
	}
	return out.Print(made, nil)
}

// Understood refuses the answer of a manager that took snapshots as one from before --freeze does.
func Understood(made *pb.CreateSnapshotsResponse) error {
	for _, s := range made.GetSnapshots() {
		if x := s.GetSnapshot(); !x.GetFreezes() && !x.GetFsFrozen() {
			return cli.AdvisedError{
				Err:   fmt.Errorf("snapshot %s is taken, but not with frozen file systems: this volume manager's version cannot do that", s.GetName()),
				Hints: []string{fmt.Sprintf("`weft snapshot delete %s`, and upgrade the manager: `weft upgrade plan` says how", s.GetName())},
			}
		}
	}
	return nil
}

// request is what the manager is asked for.
func (o createOptions) request() (*pb.CreateSnapshotsRequest, error) {
	labels, err := cli.ParsePairs(o.labels)
	if err != nil {
		return nil, err
	}
	r := &pb.CreateSnapshotsRequest{Freeze: o.freeze}
	for _, given := range o.snapshots {
		volume, name, err := o.split(given)
		if err != nil {
			return nil, err
		}
		r.Snapshots = append(r.Snapshots, &pb.NewSnapshot{Volume: volume, Name: name, Labels: labels})
	}
	return r, nil
}

// split returns the volume and the name of a snapshot that an argument asks for.
func (o createOptions) split(given string) (volume, name string, err error) {
	volume, name, named := strings.Cut(given, "@")
	switch {
	case named && o.name != "":
		return "", "", cli.UsageError{Err: fmt.Errorf("%q has a name, and so has --name %s", given, o.name), Hint: "give volumes with --name, or leave --name out"}
	case !named && o.name == "":
		return "", "", cli.UsageError{Err: fmt.Errorf("%q has no name for the snapshot", given), Hint: fmt.Sprintf("such as %s@mon, or --name mon for all", given)}
	case !named:
		name = o.name
	}
	if _, err := block.ParseDeviceName(volume + "@" + name); err != nil {
		return "", "", cli.UsageError{Err: err}
	}
	return volume, name, nil
}

// stands is the hint of a wait that ended early.
const stands = "the request stands; `weft snapshot list` shows whether they are taken"

// waitUntilTaken returns once all snapshots are taken, and puts them as they are then in the list.
func waitUntilTaken(ctx context.Context, api pb.ManagerClient, all []*pb.Volume, out *cli.Output) error {
	return cli.Wait(ctx, out, stands, func(ctx context.Context) (string, error) {
		waitingFor := ""
		for i, s := range all {
			if s.GetState() == pb.VolumeState_VOLUME_STATE_READY {
				continue
			}
			now, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: s.GetId()})
			switch {
			case status.Code(err) == codes.NotFound:
				return "", notTaken(s.GetName(), cmp.Or(s.GetFailed(), whyGone(ctx, api, s)))
			case err != nil:
				return "", err
			case now.GetState() == pb.VolumeState_VOLUME_STATE_DELETING:
				return "", notTaken(now.GetName(), now.GetFailed())
			}
			all[i] = now
			if now.GetState() == pb.VolumeState_VOLUME_STATE_READY {
				out.Say("snapshot %s is taken: %s", now.GetName(), cli.Size(now.GetSizeBytes()))
			} else if waitingFor == "" {
				waitingFor = taking(now)
			}
		}
		return waitingFor, nil
	})
}

// whyGone is why a snapshot that is gone was not taken, by the manager's history; empty if that is not
// known. The history has it if the manager had deleted the snapshot before it was looked at.
func whyGone(ctx context.Context, api pb.ManagerClient, s *pb.Volume) string {
	reply, err := api.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + s.GetName(), Limit: 20})
	if err != nil {
		return ""
	}
	for _, e := range slices.Backward(reply.GetEvents()) {
		if e.GetKind() == "snapshot.failed" && e.GetAttributes()["volume_id"] == s.GetId() {
			return strings.TrimPrefix(e.GetText(), "the snapshot was not taken: ")
		}
	}
	return ""
}

// taking says what a snapshot waits for until it is taken.
func taking(s *pb.Volume) string {
	text := fmt.Sprintf("snapshot %s to be taken", s.GetName())
	for _, l := range s.GetLegs() {
		if l.GetState() == pb.LegState_LEG_STATE_CREATING && l.GetReason() != "" {
			return text + ": " + l.GetReason()
		}
	}
	return text
}

// notTaken is the error of a snapshot that is being deleted, or is gone, before it was taken.
func notTaken(name, why string) error {
	if why == "" {
		return cli.AdvisedError{Err: fmt.Errorf("snapshot %s: it was deleted before it was taken", name), Hints: []string{"`weft event list` says what happened"}}
	}
	return cli.AdvisedError{Err: fmt.Errorf("snapshot %s was not taken: %s", name, why), Hints: []string{"none of the snapshots that were asked for is kept; repeat the command to try again"}}
}
