// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

type volumeExpandOptions struct {
	volume string
	size   block.Size
	wait   bool
}

func newVolumeExpand(g *cli.Globals) *cobra.Command {
	var o volumeExpandOptions
	cmd := &cobra.Command{
		Use:   "expand VOLUME --size SIZE",
		Short: "Expand a volume, in use or not",
		Long: `Expand a volume to SIZE. Its legs grow on their own drives, all of them or none.
Then the attached hosts' devices grow, without stopping I/O. Afterwards grow the
file system with its own tool: resize2fs, xfs_growfs. A volume cannot be made
smaller.

With --wait, the command returns when the volume and every host's device have the
new size.`,
		Example:           "  weft volume expand db1 --size 200GiB --wait && resize2fs /dev/weft/db1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runVolumeExpand(ctx, api, o, out)
		}),
	}
	cmd.Flags().Var(sizeFlag{&o.size}, "size", "new `size` of the volume, such as 20GiB; without a unit, bytes")
	cmd.Flags().BoolVar(&o.wait, "wait", false, "wait until the volume and the devices of attached hosts have the new size")
	return cmd
}

func runVolumeExpand(ctx context.Context, api pb.ManagerClient, o volumeExpandOptions, out *cli.Output) error {
	if o.size == 0 {
		return cli.UsageError{Err: fmt.Errorf("--size: missing or 0"), Hint: "such as --size 20GiB"}
	}
	v, err := api.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: o.volume, SizeBytes: uint64(o.size)})
	if err != nil {
		return err
	}
	if to := v.GetExpandingToBytes(); to != 0 {
		out.Say("volume %s is being expanded from %s to %s", v.GetName(), cli.Size(v.GetSizeBytes()), cli.Size(to))
	} else {
		out.Say("volume %s has %s", v.GetName(), cli.Size(v.GetSizeBytes()))
	}
	if o.wait {
		if v, err = waitForSize(ctx, api, v.GetId(), o.size, out); err != nil {
			return err
		}
	}
	return out.Print(v, nil)
}

// waitForSize returns once a volume and the devices of its hosts have a size.
func waitForSize(ctx context.Context, api pb.ManagerClient, volume string, least block.Size, out *cli.Output) (v *pb.Volume, err error) {
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
		if v, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume}); err != nil {
			return "", err
		}
		if v.GetSizeBytes() >= uint64(least) {
			return smallDevice(v), nil
		}
		why, err := api.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: volume})
		if err != nil {
			return "", err
		}
		return fmt.Sprintf("volume %s to grow: %s", v.GetName(), strings.Join(why.GetWaits(), "; ")), nil
	})
	return v, err
}

// smallDevice names a host whose device has not grown yet. Hosts of an older version do not report
// their device's size.
func smallDevice(v *pb.Volume) string {
	for _, a := range v.GetAttachments() {
		if n := a.GetSizeBytes(); n != 0 && n < v.GetSizeBytes() {
			return fmt.Sprintf("host %s, whose device has %s of %s", a.GetNode(), cli.Size(n), cli.Size(v.GetSizeBytes()))
		}
	}
	return ""
}

type volumeSetOptions struct {
	volume, formatted string
	copies            uint32
	labels            []string
	every, rate       string // empty: unchanged
	rebuildRate       string // likewise
	authentication    string // likewise
	paths             uint32 // 0: unchanged
	lateWrites        bool
}

const volumeSetHelp = `Set labels of a volume with KEY=VALUE, and remove them with KEY-, or all of them
with '*-'. Other labels stay. A volume has at most 64 labels, with keys of up to
317 bytes and values of up to 256, 8 KiB together.

With --copies, the volume has 1, 2 or 3 copies of its data from now on, in use or
not. New legs are placed on drives that hold no copy, and the host that has the
volume copies them; "weft explain volume" shows the progress. Fewer copies need
as many good ones; the others are given up and freed. A volume that was attached
with a single copy gets more only after it is detached.

The use of a volume is recorded before it is written: the file system that was
made on it for a pod, or "raw" if it was attached by hand or as a raw device. No
file system is made for a pod on a volume that is recorded as raw. With
--formatted none you state that nothing on the volume is needed, so that a file
system can be made. The volume must not be attached.

With --scrub-every the copies are compared that often while the volume is
attached, as "weft volume scrub" does without --repair. The first time is chosen
so that volumes are not compared all at once, and one host compares one volume at
a time. A schedule uses the manager's clock.

With --rebuild-rate, a host on the user-space path copies no more than that to
legs in a second, all legs of the volume together. At any rate, it copies more
slowly while that makes other I/O take more than twice as long, down to 8 MiB a
second. A host on the kernel's path ignores the rate.

With --authentication require, the volume's hosts and targets prove their
identities to one another with keys that the manager makes for each grant, and
the volume is not attached where one of them cannot. With prefer they do so
wherever both can, and with off never. A change takes effect when the volume is
attached the next time; "weft explain volume" says what is in force.

With --paths 2, a host on the kernel path reaches each leg through two portals of
its target at a time, in turns, so that one volume uses the bandwidth of two
networks. Hosts on the user-space path, and hosts without an agent, go on using
one. A change takes effect when the volume is attached the next time. This gives
up a promise: if a path fails, Linux sends a write again on the other one at
once, and the first may still be on its way. If it arrives after a newer write to
the same blocks, it replaces that in this copy, although that was acknowledged,
and nothing notices it but a scrub. With one path, the default, this cannot
happen: when the path fails, the target ends and drains the old connection first.
So --paths 2 needs --accept-late-writes, unless nobody writes the volume: it is
sealed. On targets in the kernel, a volume that is not thin cannot get its first
snapshot while a host has several paths to it.`

func newVolumeSet(g *cli.Globals) *cobra.Command {
	var o volumeSetOptions
	cmd := &cobra.Command{
		Use:   "set VOLUME [--copies N] [--label KEY=VALUE] [--formatted none] [--scrub-every TIME] [--rebuild-rate SIZE] [--authentication WORD] [--paths N]",
		Short: "Change a volume's copies, labels, scrubs, authentication, paths, or use",
		Long:  volumeSetHelp,
		Example: `  weft volume set db1 --label tier=gold --label owner-
  weft volume set db1 --copies 3
  weft volume set db1 --scrub-every 7d --scrub-rate 50MiB
  weft volume set db1 --scrub-every off
  weft volume set db1 --rebuild-rate 500MiB
  weft volume set db1 --authentication require
  weft volume set db1 --paths 2 --accept-late-writes
  weft volume set db1 --formatted none`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runVolumeSet(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.Uint32Var(&o.copies, "copies", 0, "`number` of copies of the data, on different drives, 1 to 3; 0 leaves them as they are")
	f.StringArrayVar(&o.labels, "label", nil, "`key=value` to set, or key- to remove; may be repeated")
	f.StringVar(&o.formatted, "formatted", "", "`word`: none states that nothing on the volume is needed, so that Kubernetes may format it")
	f.StringVar(&o.every, "scrub-every", "", "compare the copies that often: a `time` such as 7d or 12h, from 1h; \"off\" for never")
	f.StringVar(&o.rate, "scrub-rate", "", "most that such a scrub reads of each leg in a second, as a `size` from 64KiB; \"off\" for no limit")
	f.StringVar(&o.rebuildRate, "rebuild-rate", "", "most that is copied to legs in a second, as a `size` from 1MiB; \"off\" for no limit")
	f.StringVar(&o.authentication, block.PropertyAuthentication.Flag, "", "whether hosts and targets prove their identities to one another from the next attach on, as a `word`: require, prefer (wherever both can), or off")
	f.Uint32Var(&o.paths, "paths", 0, "`number` of portals through which a host's kernel reaches each leg at a time, 1 or 2; 0 leaves it as it is")
	f.BoolVar(&o.lateWrites, "accept-late-writes", false, "with --paths: a write on a path that fails may replace a newer one that was acknowledged")
	return cmd
}

// schedule adds the schedule of scrubs and the rates to a request.
func (o volumeSetOptions) schedule(r *pb.UpdateVolumeRequest) error {
	if o.every != "" {
		every, err := block.ParseInterval(o.every)
		if err != nil {
			return cli.UsageError{Err: fmt.Errorf("--scrub-every %q: not a time", o.every), Hint: "such as 7d or 12h, or off"}
		}
		r.ScrubEverySeconds = proto.Uint64(uint64(every / time.Second))
	}
	if o.rate != "" {
		rate, err := block.ParseRate(o.rate)
		if err != nil {
			return cli.UsageError{Err: fmt.Errorf("--scrub-rate: %w", err)}
		}
		r.ScrubBytesPerSecond = proto.Uint64(uint64(rate))
	}
	if o.rebuildRate != "" {
		rate, err := block.ParseRate(o.rebuildRate)
		if err != nil {
			return cli.UsageError{Err: fmt.Errorf("--rebuild-rate: %w", err)}
		}
		r.RebuildBytesPerSecond = proto.Uint64(uint64(rate))
	}
	return nil
}

func (o volumeSetOptions) changeNothing() bool {
	return len(o.labels) == 0 && o.formatted == "" && o.copies == 0 && o.every == "" && o.rate == "" && o.rebuildRate == "" && o.authentication == "" && o.paths == 0
}

func runVolumeSet(ctx context.Context, api pb.ManagerClient, o volumeSetOptions, out *cli.Output) error {
	switch {
	case o.changeNothing():
		return cli.UsageError{Err: fmt.Errorf("nothing to change: --copies, --label, --scrub-every, --rebuild-rate, --authentication, --paths or --formatted is missing"), Hint: "such as --label tier=gold, or --label tier- to remove it"}
	case o.lateWrites && o.paths < 2:
		return cli.UsageError{Err: fmt.Errorf("--accept-late-writes: what for?"), Hint: "it goes with --paths 2"}
	case o.formatted != "" && o.formatted != "none":
		return cli.UsageError{Err: fmt.Errorf("--formatted %q is not known", o.formatted), Hint: "use none: nothing on the volume is needed"}
	}
	r := &pb.UpdateVolumeRequest{Volume: o.volume, Formatted: o.formatted, Copies: o.copies, Authentication: o.authentication, Paths: o.paths, AcceptLateWrites: o.lateWrites}
	if err := o.setLabels(r); err != nil {
		return err
	}
	if err := o.schedule(r); err != nil {
		return err
	}
	v, err := api.UpdateVolume(ctx, r)
	if err != nil {
		return err
	}
	if o.paths > 1 && v.GetPaths() != o.paths {
		return fmt.Errorf("volume %s: its volume manager knows nothing of several paths: it is of an earlier version", v.GetName())
	}
	o.say(v, out)
	return out.Print(v, nil)
}

// say tells what has changed.
func (o volumeSetOptions) say(v *pb.Volume, out *cli.Output) {
	if o.copies > 0 {
		out.Say("volume %s has %d copies now%s", v.GetName(), o.copies, toCopy(v))
	}
	if len(o.labels) > 0 {
		out.Say("volume %s has labels %s", v.GetName(), cli.OrNone(cli.Pairs(v.GetLabels())))
	}
	if o.formatted != "" {
		out.Say("Kubernetes may now make a file system on volume %s", v.GetName())
	}
	if o.every != "" || o.rate != "" {
		out.Say("the copies of volume %s are compared %s", v.GetName(), scrubSchedule(v))
	}
	if o.rebuildRate != "" {
		out.Say("legs of volume %s are copied at %s", v.GetName(), cmp.Or(rebuildRate(v), "any rate"))
	}
	if o.authentication != "" {
		out.Say("authentication of volume %s: %s, from the next attach on", v.GetName(), v.GetAuthentication())
	}
	if o.paths != 0 {
		out.Say("hosts reach each leg of volume %s through %s, from the next attach on", v.GetName(), portalsAtATime(v))
	}
}

// portalsAtATime is how many paths a volume has.
func portalsAtATime(v *pb.Volume) string {
	if n := v.GetPaths(); n > 1 {
		return fmt.Sprintf("up to %d portals at a time", n)
	}
	return "one portal at a time"
}

// rebuildRate is the most that is copied to a volume's legs; empty: no limit.
func rebuildRate(v *pb.Volume) string {
	if v.GetRebuildBytesPerSecond() == 0 {
		return ""
	}
	return cli.Size(v.GetRebuildBytesPerSecond()) + " a second"
}

// setLabels adds the changes of labels to a request.
func (o volumeSetOptions) setLabels(r *pb.UpdateVolumeRequest) (err error) {
	var set []string
	for _, change := range o.labels {
		key, remove := strings.CutSuffix(change, "-")
		if remove && !strings.Contains(change, "=") {
			r.RemoveLabels = append(r.RemoveLabels, key)
			continue
		}
		set = append(set, change)
	}
	if r.SetLabels, err = cli.ParsePairs(set); err != nil {
		return err
	}
	for _, key := range r.RemoveLabels {
		if _, both := r.SetLabels[key]; both || key == "" {
			return cli.UsageError{Err: fmt.Errorf("label %q: both set and removed", key)}
		}
	}
	return nil
}

// scrubSchedule is how often a volume's copies are compared.
func scrubSchedule(v *pb.Volume) string {
	every := time.Duration(v.GetScrubEverySeconds()) * time.Second
	if every == 0 {
		return "on request"
	}
	text := "every " + every.String()
	if day := 24 * time.Hour; every%day == 0 {
		text = fmt.Sprintf("every %dd", every/day)
	}
	if rate := v.GetScrubBytesPerSecond(); rate != 0 {
		text += fmt.Sprintf(", %s a second", cli.Size(rate))
	}
	return text
}

// toCopy says how many copies of the data are still to be made.
func toCopy(v *pb.Volume) string {
	n := int(v.GetLayout().GetStripes() * v.GetLayout().GetCopies())
	for _, l := range v.GetLegs() {
		if l.GetState() == pb.LegState_LEG_STATE_IN_SYNC {
			n--
		}
	}
	switch {
	case n <= 0:
		return ""
	case v.GetSealed() != nil || v.GetAttachment() == nil:
		return fmt.Sprintf("; legs that a host copies while it is detached: %d", n)
	}
	return fmt.Sprintf("; legs that its host copies now: %d", n)
}

func newVolumeFlatten(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "flatten VOLUME",
		Short: "Make a clone independent of the snapshot that it began as",
		Long: `Make a clone independent of the snapshot that it began as. What it shares with
other volumes is copied by its targets, while hosts use it, at 100 MiB/s at most
for all that is copied in this way on a drive; what is zeroes takes no space.
The snapshots of the clone are independent with it. Then the snapshot that it
began as can be deleted, and its space comes free.

The command returns at once. It goes on through restarts, and once a target that
is away is back. It leaves what hosts need to go on writing: on a drive that is
95% full it waits, and part of the reserve of each drive is never taken for it.
What cannot be read is tried again, and the rest is copied. 'weft volume
describe' shows how far it is, and 'weft explain volume' what it waits for.`,
		Example:           "  weft volume flatten c1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolumeFlatten(ctx, api, args[0], out)
		}),
	}
}

func runVolumeFlatten(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error {
	v, err := api.FlattenVolume(ctx, &pb.FlattenVolumeRequest{Volume: volume})
	if err != nil {
		return err
	}
	if v.GetFlattening().GetEnded() != nil {
		out.Say("volume %s shares nothing with other volumes", v.GetName())
	} else {
		out.Say("volume %s is being flattened: `weft volume describe %s` shows how far it is", v.GetName(), v.GetName())
	}
	return out.Print(v, nil)
}

// flattening says how far a clone is from being independent; nothing if that was not asked for.
func flattening(v *pb.Volume) []string {
	x := v.GetFlattening()
	if x == nil {
		return nil
	}
	if at := x.GetEnded(); at != nil {
		return []string{"flattened", at.AsTime().UTC().Format(time.RFC3339)}
	}
	text := "under way"
	if x.GetLeftBytes() > 0 {
		text = cli.Size(x.GetLeftBytes()) + " left"
	}
	if waits := x.GetWaitsFor(); len(waits) > 0 {
		text += "; " + strings.Join(waits, "; ")
	}
	return []string{"flattening", text}
}

func newVolumeSeal(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "seal VOLUME",
		Short: "Seal a volume, so that no host ever writes it again",
		Long: `Seal a volume that holds all that it is to hold: a data set, a model. No host
ever writes it again, and any number of hosts can attach it, all of them
read-only. A seal cannot be taken back; to change what a sealed volume holds,
make a new version of it:

  weft snapshot create v1@next && weft volume create v2 --from v1@next

Before, detach the volume in order, so that its copies are equal. Hosts that have
it read-only may keep it. Its copies are still compared, healed and moved, and
its labels, its schedule of scrubs and the number of its copies can be changed.
It can be deleted.`,
		Example:           "  weft volume seal v1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolumeSeal(ctx, api, args[0], out)
		}),
	}
}

func runVolumeSeal(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error {
	v, err := api.SealVolume(ctx, &pb.SealVolumeRequest{Volume: volume})
	if err != nil {
		return err
	}
	out.Say("volume %s is sealed since %s: no host writes it any more", v.GetName(), v.GetSealed().AsTime().UTC().Format(time.RFC3339))
	return out.Print(v, nil)
}

type volumeScrubOptions struct {
	volume              string
	rate                block.Size
	stop, pause, resume bool
	repair, wait        bool
	from                []string
}

func newVolumeScrub(g *cli.Globals) *cobra.Command {
	var o volumeScrubOptions
	cmd := &cobra.Command{
		Use:   "scrub VOLUME",
		Short: "Compare the copies of an attached volume while it is in use, and repair them",
		Long: `Compare the copies of an attached volume while it is in use, in the background:
users' I/O goes first. Each of the first 64 ranges that differ or cannot be read
is an event; the log of the volume's host has all of them. "weft explain volume"
shows the progress and the result, "weft volume describe" the last scrubs.

Without --repair nothing is changed. With it, a range is written again from a
copy that is known to be right:

  1. the copies that can be read agree, and the others have a medium error there;
  2. of three copies, two agree;
  3. --from names the copy of that column, as COLUMN.COPY.

The first of these that applies decides. If none does, the range stays as it is.
What is found is an event before it is repaired, and what became of it is
another.

A scrub goes on where it was after a pause, a restart, or the next attach. Repeat
the command with --rate to change the rate of the scrub that is under way.`,
		Example: `  weft volume scrub db1 --rate 100MiB
  weft volume scrub db1 --pause
  weft volume scrub db1 --repair --from 0.1 --wait`,
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume = args[0]
			return runVolumeScrub(ctx, api, o, out)
		}),
	}
	f := cmd.Flags()
	f.Var(sizeFlag{&o.rate}, "rate", "most that is read of each leg in a second, as a `size` from 64KiB; without it there is no limit")
	f.BoolVar(&o.stop, "stop", false, "stop the scrub that is under way")
	f.BoolVar(&o.pause, "pause", false, "stop it for now; it keeps its place")
	f.BoolVar(&o.resume, "resume", false, "let it go on after a pause")
	f.BoolVar(&o.repair, "repair", false, "write again what differs or cannot be read, where it is known which copy is right")
	f.StringArrayVar(&o.from, "from", nil, "with --repair, the `leg` of a column that is right where copies differ and no two of three agree, such as 0.1; may be repeated for other columns")
	f.BoolVar(&o.wait, "wait", false, "wait until the scrub has ended, and print what it found")
	return cmd
}

func runVolumeScrub(ctx context.Context, api pb.ManagerClient, o volumeScrubOptions, out *cli.Output) error {
	r := &pb.ScrubVolumeRequest{Volume: o.volume, Stop: o.stop, Pause: o.pause, Resume: o.resume, BytesPerSecond: uint64(o.rate), Repair: o.repair}
	for _, leg := range o.from {
		place, err := parsePlace(leg)
		if err != nil {
			return err
		}
		r.From = append(r.From, place)
	}
	if o.wait && (o.stop || o.pause) {
		return cli.UsageError{Err: errors.New("--wait: there is nothing to wait for")}
	}
	v, err := api.ScrubVolume(ctx, r)
	if err != nil {
		return err
	}
	switch c := v.GetScrub(); {
	case c == nil || c.GetEnded() != nil:
		out.Say("volume %s is not being compared", v.GetName())
	case c.GetPaused():
		out.Say("the scrub of volume %s is paused", v.GetName())
	case c.GetRepair():
		out.Say("the copies of volume %s are being compared and repaired", v.GetName())
	default:
		out.Say("the copies of volume %s are being compared", v.GetName())
	}
	if !o.wait {
		return out.Print(v, nil)
	}
	began := v.GetScrub().GetBegan().AsTime()
	if v, err = waitForScrub(ctx, api, v.GetId(), out); err != nil {
		return err
	}
	events, err := api.ListEvents(ctx, &pb.ListEventsRequest{Object: "volume " + v.GetName(), Limit: mostScrubEvents})
	if err != nil {
		return err
	}
	found := slices.DeleteFunc(events.GetEvents(), func(e *pb.Event) bool {
		return !strings.HasPrefix(e.GetKind(), "volume.scrub") || e.GetTime().AsTime().Before(began)
	})
	return out.Print(v, func(w io.Writer) { eventTable(w, found) })
}

// mostScrubEvents is more than the events of one scrub.
const mostScrubEvents = 500

// parsePlace parses a leg's place, COLUMN.COPY.
func parsePlace(text string) (*pb.Place, error) {
	column, copy, _ := strings.Cut(text, ".")
	c, err := strconv.ParseUint(column, 10, 16)
	n, err2 := strconv.ParseUint(copy, 10, 16)
	if err != nil || err2 != nil {
		return nil, cli.UsageError{Err: fmt.Errorf("--from %q: not COLUMN.COPY", text), Hint: "such as 0.1; `weft volume describe` lists the legs"}
	}
	return &pb.Place{Column: uint32(c), Copy: uint32(n)}, nil
}

// waitForScrub returns once no scrub of a volume is under way.
func waitForScrub(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) (v *pb.Volume, err error) {
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (string, error) {
		if v, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume}); err != nil {
			return "", err
		}
		c := v.GetScrub()
		switch {
		case c.GetEnded() != nil || c == nil:
			return "", nil
		case c.GetPaused():
			return fmt.Sprintf("the scrub of volume %s, which is paused", v.GetName()), nil
		}
		return fmt.Sprintf("the scrub of volume %s, which is at %d %%", v.GetName(), 100*c.GetDoneBytes()/max(1, c.GetTotalBytes())), nil
	})
	return v, err
}
