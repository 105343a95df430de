// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"bufio"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Label is the label of a volume that says what was imported into it.
const Label = block.ImportLabel

// imported is the value of Label: a snapshot's id, and the epoch of the attachment through which it was
// written. While it is being written, or if that was cut off, incomplete is set, and since is what the
// volume held before; empty: nothing.
type imported struct {
	incomplete      bool
	snapshot, since string
	epoch           uint64
}

func (i imported) String() string {
	if !i.incomplete {
		return fmt.Sprintf("complete %s %d", i.snapshot, i.epoch)
	}
	return fmt.Sprintf("incomplete %s since %s %d", i.snapshot, orNothing(i.since), i.epoch)
}

func orNothing(id string) string {
	if id == "" {
		return "nothing"
	}
	return id
}

// holds reports whether a volume holds what a stream begins from: the earlier snapshot, or that with a
// part of this stream. Nobody may have had it since.
func holds(v *pb.Volume, h Header) bool {
	label := v.GetLabels()[Label]
	for _, i := range []imported{{snapshot: h.SinceID, epoch: v.GetEpoch()}, {incomplete: true, snapshot: h.SnapshotID, since: h.SinceID, epoch: v.GetEpoch()}} {
		if label == i.String() {
			return true
		}
	}
	return false
}

type importOptions struct {
	name         string
	copies       uint32
	pool, spread string
}

// NewImport is the command that makes a volume of a stream.
func NewImport(g *cli.Globals, tools Tools) *cobra.Command {
	var o importOptions
	cmd := &cobra.Command{
		Use:   "import VOLUME < FILE",
		Short: "Make a volume of what \"weft snapshot export\" has written",
		Long: `Make a thin volume that holds what a snapshot held, from the stream on stdin that
"weft snapshot export" has written. If the stream is cut off or damaged, or the
command fails or is interrupted, the volume is deleted again. Until the import is
complete, the volume's label "import" begins with "incomplete".

A stream that was written with --from is imported into the volume into which the
earlier snapshot was imported. That volume must not have been attached since. If
that fails, the volume stays incomplete: repeat the command with the same stream.

The volume is attached to this machine while it is written, so this machine needs
an initiator agent.`,
		Example: `  weft volume import db1-copy < db1-mon.weft
  weft volume import db1-copy < db1-tue.weft`,
		Args: cli.Takes("VOLUME"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.name = args[0]
			if o.copies < 1 || o.copies > block.MaxCopies {
				return cli.UsageError{Err: fmt.Errorf("--%s %d: must be %s", block.PropertyCopies.Flag, o.copies, block.PropertyCopies.Bounds())}
			}
			return tools.importStream(ctx, api, o, bufio.NewReaderSize(interruptible(ctx, os.Stdin), PieceMost), out)
		}),
	}
	cmd.Flags().Uint32Var(&o.copies, block.PropertyCopies.Flag, block.DefaultCopies, "`number` of copies of a new volume, on different nodes: "+block.PropertyCopies.Bounds())
	cmd.Flags().StringVar(&o.pool, block.PropertyPool.Flag, block.DefaultPool, "`pool` of drives to place a new volume on")
	cmd.Flags().StringVar(&o.spread, block.PropertySpread.Flag, block.DefaultSpread, "node `label` that must differ between the copies of a new volume")
	_ = cmd.RegisterFlagCompletionFunc(block.PropertyPool.Flag, g.CompletePools)
	return cmd
}

// interruptible reads from a reader that may be silent for long, until ctx ends; then the error is why. One read may be
// left behind.
func interruptible(ctx context.Context, from io.Reader) io.Reader {
	r, w := io.Pipe()
	context.AfterFunc(ctx, func() { w.CloseWithError(context.Cause(ctx)) })
	go func() {
		_, err := io.CopyBuffer(w, struct{ io.Reader }{from}, make([]byte, PieceMost))
		w.CloseWithError(err)
	}()
	return r
}

func (t Tools) importStream(ctx context.Context, api pb.ManagerClient, o importOptions, from io.Reader, out *cli.Output) (retErr error) {
	r, err := NewReader(from)
	if err != nil {
		return fmt.Errorf("import %s: %w", o.name, err)
	}
	h := r.Header()
	v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.name})
	absent := status.Code(err) == codes.NotFound
	switch {
	case err != nil && !absent:
		return err
	case h.SinceID != "":
		err = onto(v, absent, o.name, h)
	case absent:
		v, err = t.create(ctx, api, o, h, out)
	default:
		return cli.AdvisedError{Err: status.Errorf(codes.AlreadyExists, "volume %s exists already", o.name), Hints: []string{"give another name, or delete the volume: `weft volume delete " + o.name + "`"}}
	}
	if err != nil {
		return err
	}
	if h.SinceID == "" {
		defer func() {
			if retErr != nil {
				finish(ctx, &retErr, func(ctx context.Context) error {
					_, err := api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.GetId()})
					return err
				})
			}
		}()
	}
	n, epoch, err := t.fill(ctx, api, v, r, out)
	switch {
	case err == nil:
	case h.SinceID != "" && epoch > 0: // the volume is marked as incomplete
		return cli.AdvisedError{Err: fmt.Errorf("import %s: %w", o.name, err), Hints: []string{fmt.Sprintf("volume %s may hold a part of %s: repeat the import with the whole stream", o.name, h.Snapshot)}}
	default:
		return fmt.Errorf("import %s: %w", o.name, err)
	}
	if v, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: v.GetId()}); err == nil {
		// Whoever has attached it since began another epoch, and may have written.
		v, err = mark(ctx, api, v, imported{snapshot: h.SnapshotID, epoch: epoch})
	}
	if err != nil {
		return err
	}
	out.Say("volume %s holds %s: %s of data, of %s", o.name, h.Snapshot, cli.Size(uint64(n)), cli.Size(uint64(h.Size)))
	return out.Print(v, nil)
}

// onto says why a stream of differences cannot be imported into a volume.
func onto(v *pb.Volume, absent bool, name string, h Header) error {
	switch {
	case absent:
		return cli.AdvisedError{Err: fmt.Errorf("volume %s does not exist, and the stream has only what differs from %s", name, h.Since), Hints: []string{"import a stream of " + h.Since + " first"}}
	case !holds(v, h):
		return cli.AdvisedError{Err: fmt.Errorf("volume %s does not hold %s: that is not what was imported into it last, or it was attached since", name, h.Since),
			Hints: []string{"import a full stream into a new volume, and the differences into that"}}
	case v.GetSizeBytes() < uint64(h.Size):
		return cli.AdvisedError{Err: fmt.Errorf("volume %s has %s, and the stream %s", name, cli.Size(v.GetSizeBytes()), cli.Size(uint64(h.Size))), Hints: []string{fmt.Sprintf("weft volume expand %s --size %d --wait", name, h.Size)}}
	case v.GetSealed() != nil:
		return fmt.Errorf("volume %s is sealed, and never changes", name)
	case len(cli.AttachmentsOf(v)) > 0:
		return fmt.Errorf("volume %s is attached", name)
	}
	return nil
}

// create makes the volume, marked as incomplete, and as that of this import: a second one of the same
// stream is refused.
func (t Tools) create(ctx context.Context, api pb.ManagerClient, o importOptions, h Header, out *cli.Output) (*pb.Volume, error) {
	v, err := api.CreateVolume(ctx, &pb.CreateVolumeRequest{
		Name: o.name, SizeBytes: uint64(h.Size), Copies: o.copies, Pool: o.pool, Spread: o.spread, Thin: true,
		Labels: map[string]string{Label: imported{incomplete: true, snapshot: h.SnapshotID}.String() + " by " + strings.ToLower(rand.Text()[:8])},
	})
	if err != nil {
		return nil, err
	}
	ready, err := t.Ready(ctx, api, v.GetId(), out)
	if err != nil {
		finish(ctx, &err, func(ctx context.Context) error {
			_, err := api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v.GetId()})
			return err
		})
	}
	return ready, err
}

// fill writes a stream to a volume, durably, and returns how much data that was, and in which epoch it was
// written; with an epoch and an error, the volume is marked as incomplete. The volume is detached again, whatever happens.
func (t Tools) fill(ctx context.Context, api pb.ManagerClient, v *pb.Volume, r *Reader, out *cli.Output) (n int64, epoch uint64, retErr error) {
	path, detach, err := t.Attach(ctx, api, v.GetId(), out)
	if err != nil {
		return 0, 0, err
	}
	defer finish(ctx, &retErr, detach)
	h := r.Header()
	now, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: v.GetId()})
	if err == nil && (now.GetLabels()[Label] != v.GetLabels()[Label] || h.SinceID != "" && now.GetEpoch() != v.GetEpoch()+1) {
		err = fmt.Errorf("volume %s: somebody else had it meanwhile", v.GetName())
	}
	if err == nil {
		_, err = mark(ctx, api, now, imported{incomplete: true, snapshot: h.SnapshotID, since: h.SinceID, epoch: now.GetEpoch()})
	}
	if err != nil {
		return 0, 0, err
	}
	d, err := open(ctx, path, true)
	if err != nil {
		return 0, now.GetEpoch(), err
	}
	defer func() { retErr = errors.Join(retErr, d.Close()) }()
	n, err = write(ctx, d, r)
	return n, now.GetEpoch(), err
}

// write writes a stream to a device, durably, and returns how much data that was.
func write(ctx context.Context, d device, r *Reader) (n int64, err error) {
	for {
		one, err := r.Next()
		if errors.Is(err, io.EOF) {
			return n, errors.Join(d.Sync(), r.Ended())
		}
		if err == nil {
			err = ctx.Err()
		}
		if err != nil {
			return n, err
		}
		if one.Data == nil {
			err = d.Zero(one.Offset, one.Len)
		} else {
			_, err = d.WriteAt(one.Data, one.Offset)
			n += one.Len
		}
		if err != nil {
			return n, fmt.Errorf("write at %d: %w", one.Offset, err)
		}
	}
}

// mark records what was imported. The volume is not formatted by anybody from now on.
func mark(ctx context.Context, api pb.ManagerClient, v *pb.Volume, i imported) (*pb.Volume, error) {
	r := &pb.UpdateVolumeRequest{Volume: v.GetId(), SetLabels: map[string]string{Label: i.String()}}
	if v.GetFormatted() == "" {
		r.Formatted = "raw"
	}
	return api.UpdateVolume(ctx, r)
}
