// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/snapshot"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// Tools are what these commands share with others.
type Tools struct {
	// Attach attaches a volume or a snapshot to this machine and returns its device. What detaches it
	// again does nothing if it was attached before.
	Attach func(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) (device string, detach func(context.Context) error, err error)
	// Ready waits until a volume can be attached.
	Ready func(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) (*pb.Volume, error)
}

// detachWithin bounds how long the end of a command waits for a detach, also after it was interrupted.
const detachWithin = time.Minute

// finish undoes something at the end of a command, and adds its error to that of the command.
func finish(ctx context.Context, err *error, undo func(context.Context) error) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), detachWithin)
	defer cancel()
	*err = errors.Join(*err, undo(ctx))
}

// NewExport is the command that writes a snapshot as a stream.
func NewExport(g *cli.Globals, tools Tools) *cobra.Command {
	from := ""
	cmd := &cobra.Command{
		Use:   "export VOLUME@NAME > FILE",
		Short: "Write what a snapshot holds to stdout, for \"weft volume import\"",
		Long: `Write what a snapshot holds to stdout, as a stream that "weft volume import"
reads, in this cluster or another one. Only what holds data is read and written.

With --from, write only what differs from an earlier snapshot of the same volume.
Import that into a volume that holds the earlier snapshot.

The snapshot is attached to this machine while it is read, so this machine needs
an initiator agent.

The stream has checksums and an end: an import of a stream that was cut off or
damaged fails.`,
		Example: `  weft snapshot export db1@mon > db1-mon.weft
  weft snapshot export db1@tue --from db1@mon > db1-tue.weft
  weft snapshot export db1@mon | ssh other weft volume import db1`,
		Args:              cli.Takes("VOLUME@NAME"),
		ValidArgsFunction: g.CompleteSnapshot,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			if f, ok := g.Stdout.(*os.File); ok {
				if _, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS); err == nil {
					return cli.UsageError{Err: errors.New("stdout is a terminal, and the stream is not text"), Hint: fmt.Sprintf("redirect it: weft snapshot export %s > FILE", args[0])}
				}
			}
			// A reader that ends must not end this program before it has detached the snapshot.
			signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
			return tools.export(ctx, api, args[0], from, g.Stdout, out)
		}),
	}
	cmd.Flags().StringVar(&from, "from", "", "earlier `snapshot` of the same volume: write only what differs from it")
	_ = cmd.RegisterFlagCompletionFunc("from", g.CompleteSnapshots)
	return cmd
}

// ready returns a snapshot that is complete.
func ready(ctx context.Context, api pb.ManagerClient, name string) (*pb.Volume, error) {
	if !cli.IsSnapshotName(name) {
		return nil, cli.UsageError{Err: fmt.Errorf("%q is not the name of a snapshot, such as db1@mon", name)}
	}
	s, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: name})
	if err == nil && s.GetState() != pb.VolumeState_VOLUME_STATE_READY {
		err = fmt.Errorf("snapshot %s is not complete, or is being deleted", name)
	}
	return s, err
}

func (t Tools) export(ctx context.Context, api pb.ManagerClient, name, from string, to io.Writer, out *cli.Output) (retErr error) {
	s, err := ready(ctx, api, name)
	if err != nil {
		return err
	}
	h := Header{Volume: s.GetSnapshot().GetVolumeName(), Snapshot: s.GetName(), SnapshotID: s.GetId(), Size: block.Size(s.GetSizeBytes()), Taken: s.GetSnapshot().GetTaken().AsTime()}
	if from != "" {
		base, err := ready(ctx, api, from)
		if err != nil {
			return err
		}
		if !base.GetSnapshot().GetTaken().AsTime().Before(h.Taken) {
			return cli.UsageError{Err: fmt.Errorf("--from %s: it was not taken before %s", from, name)}
		}
		h.Since, h.SinceID = base.GetName(), base.GetId()
	}
	path, detach, err := t.Attach(ctx, api, s.GetId(), out)
	if err != nil {
		return err
	}
	defer finish(ctx, &retErr, detach)
	d, err := open(ctx, path, false)
	if err != nil {
		return err
	}
	defer d.Close() //nolint:errcheck // nothing was written to it
	buffered := bufio.NewWriterSize(to, PieceMost)
	w, err := NewWriter(buffered, h)
	if err != nil {
		return err
	}
	c := &copying{w: w, d: d, zeroes: from != "", buf: make([]byte, PieceMost)}
	if err := c.ranges(ctx, api, h, out); err != nil {
		return fmt.Errorf("export %s: %w", name, err)
	}
	if err := errors.Join(w.Close(), buffered.Flush()); err != nil {
		return fmt.Errorf("export %s: %w", name, err)
	}
	out.Say("%s is written: %s of data, of %s", name, cli.Size(uint64(c.bytes)), cli.Size(uint64(h.Size)))
	return nil
}

// copying copies ranges of a device to a stream.
type copying struct {
	w      *Writer
	d      device
	zeroes bool // zeroes are written, too: the stream is one of differences
	bytes  int64
	buf    []byte
}

// ranges copies what holds data, or differs. It asks by ids: a snapshot may be deleted, and another one
// be taken under its name, while this goes on. If no target can say what holds data, all is read.
func (c *copying) ranges(ctx context.Context, api pb.ManagerClient, h Header, out *cli.Output) error {
	begun := false
	err := snapshot.Ranges(ctx, api, h.SnapshotID, h.SinceID, func(r *pb.GetSnapshotRangesResponse) error {
		begun = true
		for _, one := range r.GetRanges() {
			if err := c.copy(ctx, int64(one.GetOffset()), int64(one.GetBytes())); err != nil {
				return err
			}
		}
		return nil
	})
	code := status.Code(err)
	if err == nil || begun || h.Since != "" || code != codes.FailedPrecondition && code != codes.Unimplemented {
		return err
	}
	out.Warn("it is read whole: %s", status.Convert(err).Message())
	return c.copy(ctx, 0, int64(h.Size))
}

// copy copies one range, in pieces.
func (c *copying) copy(ctx context.Context, off, n int64) error {
	for end := off + n; off < end; {
		if err := ctx.Err(); err != nil {
			return err
		}
		p := c.buf[:min(end-off, PieceMost-off%PieceMost)]
		if _, err := c.d.ReadAt(p, off); err != nil {
			return fmt.Errorf("read at %d: %w", off, err)
		}
		var err error
		switch {
		case !block.AllZero(p):
			c.bytes += int64(len(p))
			err = c.w.Data(off, p)
		case c.zeroes:
			err = c.w.Zeroes(off, int64(len(p)))
		}
		if err != nil {
			return err
		}
		off += int64(len(p))
	}
	return nil
}
