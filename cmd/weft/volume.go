// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/archive"
	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/snapshot"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func newVolume(g *cli.Globals) *cobra.Command {
	return cli.Group("volume", "Manage volumes: the block devices that users ask for",
		newVolumeCreate(g), g.Watched(newVolumeList(g)), newVolumeDescribe(g), newVolumeExpand(g), newVolumeFlatten(g), newVolumeScrub(g), newVolumeSeal(g), newVolumeSet(g), snapshot.NewRestore(g), archive.NewImport(g, archives), newVolumeDelete(g), newVolumePromoteStale(g))
}

// sizeFlag is a block.Size on the command line.
type sizeFlag struct{ size *block.Size }

func (f sizeFlag) String() string {
	if f.size == nil || *f.size == 0 {
		return ""
	}
	return f.size.String()
}

func (f sizeFlag) Set(s string) (err error) {
	*f.size, err = block.ParseSize(s)
	return err
}

func (sizeFlag) Type() string { return "size" }

type volumeCreateOptions struct {
	name            string
	size, chunk     block.Size
	copies, stripes uint32
	pool, spread    string
	authentication  string
	integrity       bool
	thin            bool
	from            string   // a snapshot; empty: the volume begins empty
	chosen          []string // the flags that were given
	labels          []string
	wait            bool
}

func newVolumeCreate(g *cli.Globals) *cobra.Command {
	var o volumeCreateOptions
	flags := o.flags()
	cmd := &cobra.Command{
		Use:   "create VOLUME {--size SIZE | --from VOLUME@NAME}",
		Short: "Create a volume",
		Long: `Create a volume: striped over STRIPES columns, with COPIES copies of each column.
A copy of a column is a leg: space on one drive. The legs of a column are on
different nodes, or on nodes that differ in the --spread label. Creating an
existing volume with the same parameters succeeds.

A thin volume takes space only where it is written, and gives it back when that
is discarded. All volumes together may be larger than the drives; a write that
finds no space waits until there is some.

With --from, the volume is a clone: it begins with what a snapshot holds, and
shares that space with it. It is on the snapshot's drives and has its layout,
pool and spread, so flags for these are refused. Its size is the snapshot's, or
larger.

A size is a number and a unit: B, KiB, MiB, GiB, TiB, PiB; without a unit, bytes.`,
		Example: `  weft volume create db1 --size 100GiB
  weft volume create scratch --size 2TiB --copies 1 --stripes 4
  weft volume create home --size 10TiB --thin
  weft volume create test --from db1@mon
  weft volume create db2 --size 10GiB --copies 2 --stripes 2 --spread rack --wait`,
		Args: cli.Takes("VOLUME"),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.name = args[0]
			o.note(flags)
			return runVolumeCreate(ctx, api, o, out)
		}),
	}
	cmd.Flags().AddFlagSet(flags)
	_ = cmd.RegisterFlagCompletionFunc("from", g.CompleteSnapshots)
	_ = cmd.RegisterFlagCompletionFunc(block.PropertyPool.Flag, g.CompletePools)
	return cmd
}

// flags are the flags that set the options.
func (o *volumeCreateOptions) flags() *pflag.FlagSet {
	f := pflag.NewFlagSet("create", pflag.ContinueOnError)
	f.Var(sizeFlag{&o.size}, block.PropertySize.Flag, "`size` of the volume, such as 10GiB; without a unit, bytes")
	f.Uint32Var(&o.copies, block.PropertyCopies.Flag, block.DefaultCopies, "`number` of copies of each column, on different nodes: "+block.PropertyCopies.Bounds())
	f.Uint32Var(&o.stripes, block.PropertyStripes.Flag, 0, "`number` of columns to stripe over; 0 lets the manager choose")
	f.Var(sizeFlag{&o.chunk}, block.PropertyChunk.Flag, "`size` of the chunks that go to one column, a power of two (default "+block.PropertyChunk.Default+")")
	f.StringVar(&o.pool, block.PropertyPool.Flag, block.DefaultPool, "`pool` of drives to place the volume on")
	f.StringVar(&o.spread, block.PropertySpread.Flag, block.DefaultSpread, "node `label` that must differ between the copies of a column")
	f.StringVar(&o.authentication, block.PropertyAuthentication.Flag, block.PropertyAuthentication.Default, "whether hosts and targets prove their identities to one another, as a `word`: require, prefer (wherever both can), or off")
	f.BoolVar(&o.integrity, block.PropertyIntegrity.Flag, false, "keep a checksum of each block on the drives, and check it with each read")
	f.BoolVar(&o.thin, block.PropertyThin.Flag, false, "take space only where the volume is written")
	f.StringVar(&o.from, "from", "", "`snapshot` that the volume begins as, such as db1@mon; the volume is thin")
	f.StringArrayVar(&o.labels, block.PropertyLabels.Flag, nil, "`key=value`; may be repeated")
	f.BoolVar(&o.wait, "wait", false, "wait until the volume is ready to be attached")
	return f
}

// note notes which flags were given.
func (o *volumeCreateOptions) note(flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Changed {
			o.chosen = append(o.chosen, f.Name)
		}
	})
}

func runVolumeCreate(ctx context.Context, api pb.ManagerClient, o volumeCreateOptions, out *cli.Output) error {
	r, err := o.request()
	if err != nil {
		return err
	}
	// Only for the message on stderr; the create below decides.
	_, absent := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.name})
	if o.from != "" && absent != nil {
		if err := o.checkFrom(ctx, api); err != nil {
			return err
		}
	}
	v, err := api.CreateVolume(ctx, r)
	if err != nil {
		return err
	}
	switch {
	case absent == nil:
		out.Say("volume %s already exists with these parameters", o.name)
	case o.from != "":
		out.Say("volume %s is created: %s, a clone of %s", o.name, cli.Size(v.GetSizeBytes()), cmp.Or(v.GetCloneOf(), o.from))
	default:
		out.Say("volume %s is created: %s, %s (columns × copies)", o.name, cli.Size(v.GetSizeBytes()), cli.Layout(v.GetLayout()))
	}
	if o.wait {
		if v, err = waitForVolume(ctx, api, v.GetId(), out); err != nil {
			return err
		}
	}
	return out.Print(v, nil)
}

// request is what the manager is asked for.
func (o volumeCreateOptions) request() (*pb.CreateVolumeRequest, error) {
	labels, err := cli.ParsePairs(o.labels)
	if err != nil {
		return nil, err
	}
	if o.from != "" {
		return o.cloneRequest(labels)
	}
	if o.size == 0 {
		return nil, cli.UsageError{Err: fmt.Errorf("--size: missing or 0"), Hint: "such as --size 10GiB"}
	}
	if o.copies == 0 {
		return nil, cli.UsageError{Err: fmt.Errorf("--%s 0: must be %s", block.PropertyCopies.Flag, block.PropertyCopies.Bounds()), Hint: "1 means no mirror"}
	}
	return &pb.CreateVolumeRequest{
		Name: o.name, SizeBytes: uint64(o.size), Copies: o.copies, Stripes: o.stripes,
		ChunkBytes: uint64(o.chunk), Pool: o.pool, Spread: o.spread, Labels: labels, Authentication: o.authentication, Integrity: o.integrity, Thin: o.thin,
	}, nil
}

// fixed are the properties that a clone has of its snapshot.
var fixed = []block.Property{block.PropertyCopies, block.PropertyStripes, block.PropertyChunk, block.PropertyPool, block.PropertySpread, block.PropertyIntegrity}

// cloneRequest asks for a clone. It says nothing of what the clone has of its snapshot: the defaults of
// the flags are those of new volumes.
func (o volumeCreateOptions) cloneRequest(labels map[string]string) (*pb.CreateVolumeRequest, error) {
	for _, p := range fixed {
		if slices.Contains(o.chosen, p.Flag) {
			return nil, cli.UsageError{Err: fmt.Errorf("--%s: cannot be combined with --from: a clone has the layout, pool and spread of its snapshot", p.Flag), Hint: "leave out --" + p.Flag}
		}
	}
	if slices.Contains(o.chosen, block.PropertyThin.Flag) && !o.thin {
		return nil, cli.UsageError{Err: fmt.Errorf("--%s=false: cannot be combined with --from: a clone is thin", block.PropertyThin.Flag)}
	}
	if o.size == 0 && slices.Contains(o.chosen, block.PropertySize.Flag) {
		return nil, cli.UsageError{Err: fmt.Errorf("--size 0: must not be 0"), Hint: "leave it out: the volume has the size of the snapshot"}
	}
	return &pb.CreateVolumeRequest{Name: o.name, From: o.from, SizeBytes: uint64(o.size), Labels: labels, Authentication: o.authentication, Thin: true}, nil
}

// checkFrom refuses a clone of what is no snapshot. A manager whose version has no snapshots would not
// look at the field, and make an empty volume; it finds no snapshot here.
func (o volumeCreateOptions) checkFrom(ctx context.Context, api pb.ManagerClient) error {
	s, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.from})
	if err == nil && s.GetSnapshot() == nil {
		return cli.UsageError{Err: fmt.Errorf("--from %s: is a volume, not a snapshot", o.from), Hint: fmt.Sprintf("take a snapshot of it first: `weft snapshot create %s@NAME`", o.from)}
	}
	return err
}

// waitForVolume returns once all of a volume's legs are ready.
func waitForVolume(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) (v *pb.Volume, err error) {
	err = cli.Wait(ctx, out, cli.RequestStands, func(ctx context.Context) (waitingFor string, err error) {
		v, err = api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
		if err != nil {
			return "", err
		}
		switch v.GetState() {
		case pb.VolumeState_VOLUME_STATE_READY:
			return "", nil
		case pb.VolumeState_VOLUME_STATE_DELETING:
			return "", status.Errorf(codes.FailedPrecondition, "volume %q: it is being deleted", v.GetName())
		}
		return creating(v), nil
	})
	return v, err
}

// creating says what a volume waits for until it is ready.
func creating(v *pb.Volume) string {
	made, why := 0, ""
	for _, leg := range v.GetLegs() {
		if leg.GetState() != pb.LegState_LEG_STATE_CREATING {
			made++
		} else if why == "" && leg.GetReason() != "" {
			why = ": " + leg.GetReason()
		}
	}
	return fmt.Sprintf("volume %s: %d of %d legs made%s", v.GetName(), made, len(v.GetLegs()), why)
}

func newVolumeList(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "list",
		Short: "List the volumes",
		Long: `List the volumes. With -o wide, show also the SPACE that each takes on drives,
and its I/O in the last 10s, as "weft top" does.`,
		Example: "  weft volume list\n  weft volume list -o wide --watch\n  weft volume list -o json",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runVolumeList(ctx, api, out)
		}),
	}
}

func runVolumeList(ctx context.Context, api pb.ManagerClient, out *cli.Output) error {
	volumes, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{})
	if err != nil {
		return err
	}
	headings, more := "VOLUME SIZE LAYOUT POOL STATE HEALTH ATTACHED AGE", func(*pb.Volume) []string { return nil }
	if out.Wide {
		figures, err := volumeFigures(ctx, api)
		if err != nil {
			return err
		}
		headings += " SPACE " + cli.RateHeadings
		more = func(v *pb.Volume) []string {
			return append([]string{taken(v)}, cli.Rates(figures[v.GetId()])...)
		}
	}
	return out.Print(volumes, func(w io.Writer) {
		var rows [][]string
		for _, v := range volumes.GetVolumes() {
			rows = append(rows, append([]string{
				v.GetName(), cli.Size(v.GetSizeBytes()), cli.Layout(v.GetLayout()), v.GetPool(), volumeState(v),
				health(v), attached(v), out.Age(v.GetCreated()),
			}, more(v)...))
		}
		cli.Table(w, headings, rows...)
	})
}

// volumeFigures are the figures of the volumes by id; none if the manager's version has none.
func volumeFigures(ctx context.Context, api pb.ManagerClient) (map[string]*pb.Figures, error) {
	answer, err := api.GetFigures(ctx, &pb.GetFiguresRequest{Of: pb.FiguresOf_FIGURES_OF_VOLUMES})
	if err != nil && status.Code(err) != codes.Unimplemented {
		return nil, err
	}
	all := map[string]*pb.Figures{}
	for _, f := range answer.GetFigures() {
		all[f.GetId()] = f
	}
	return all, nil
}

// attached says where a volume is attached, and the progress of an attachment that is not complete.
// For a volume shared by many nodes it gives their number.
func attached(v *pb.Volume) string {
	const most = 3
	var nodes []string
	for _, a := range cli.AttachmentsOf(v) {
		node := a.GetNode()
		if a.GetState() != pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
			node += " (" + pb.Word(a.GetState()) + ")"
		}
		nodes = append(nodes, node)
	}
	if h := v.GetHealing(); h != nil {
		return cli.Healing(v)
	}
	if n := len(nodes); n > most {
		return fmt.Sprintf("%d nodes", n)
	}
	return strings.Join(nodes, ", ")
}

func newVolumeDescribe(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:               "describe VOLUME",
		Short:             "Show a volume's details: its legs by column, and its attachment",
		Example:           "  weft volume describe db1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolumeDescribe(ctx, api, args[0], out)
		}),
	}
}

func runVolumeDescribe(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error {
	v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
	if err != nil {
		return err
	}
	return out.Print(v, func(w io.Writer) {
		describeVolume(w, v, out)
		fmt.Fprintln(w)
		describeAttachments(w, cli.AttachmentsOf(v), out)
		describeHealing(w, v, out)
		fmt.Fprintln(w)
		describeLegs(w, v.GetLegs(), out)
		describeScrubs(w, v, out)
		describeRebuilds(w, v, out)
	})
}

func describeVolume(w io.Writer, v *pb.Volume, out *cli.Output) {
	l := block.Layout{Stripes: int(v.GetLayout().GetStripes()), Copies: int(v.GetLayout().GetCopies()), Chunk: block.Size(v.GetLayout().GetChunkBytes()), Integrity: v.GetLayout().GetIntegrity()}
	all := []string{
		"volume", v.GetName(),
		"id", v.GetId(),
		"size", volumeSize(v),
		"layout", l.String(),
		"pool", v.GetPool(),
		"spread", v.GetSpread(),
		"labels", cli.Pairs(v.GetLabels()),
		"formatted", v.GetFormatted(),
		"state", volumeState(v),
		"health", health(v),
		"thin", strconv.FormatBool(v.GetThin()),
		"space", space(v),
		"epoch", strconv.FormatUint(v.GetEpoch(), 10),
		"clean", strconv.FormatBool(v.GetClean()),
		"generation", strconv.FormatUint(v.GetGeneration(), 10),
		"scrub", scrubSchedule(v),
		"rebuild rate", cmp.Or(rebuildRate(v), "no limit"),
		"paths", portalsAtATime(v),
		"authentication", v.GetAuthentication(),
		"age", out.Age(v.GetCreated()),
	}
	properties(w, append(all, origin(v)...)...)
}

// volumeState is a volume's state; of one that is ready and that no host writes any more, that it is sealed.
func volumeState(v *pb.Volume) string {
	if v.GetSealed() != nil && v.GetState() == pb.VolumeState_VOLUME_STATE_READY {
		return "sealed"
	}
	return pb.Word(v.GetState())
}

// origin is of what a volume is a snapshot or a clone, and since when it is sealed; nothing if it is none of
// these.
func origin(v *pb.Volume) (all []string) {
	if at := v.GetSealed(); at != nil {
		all = append(all, "sealed", at.AsTime().UTC().Format(time.RFC3339))
	}
	if s := v.GetSnapshot(); s != nil {
		taken := "not yet"
		if at := s.GetTaken(); at != nil {
			taken = at.AsTime().UTC().Format(time.RFC3339)
		}
		all = append(all, "snapshot of", s.GetVolumeName(), "taken", taken)
		if s.GetGroupId() != "" {
			all = append(all, "group", cli.ShortID(s.GetGroupId()))
		}
		if s.GetFsFrozen() {
			all = append(all, "file systems", "frozen")
		}
	}
	switch {
	case v.GetFailed() != "" && v.GetSnapshot() != nil:
		all = append(all, "not taken", v.GetFailed())
	case v.GetFailed() != "":
		all = append(all, "not restored", v.GetFailed())
	}
	if v.GetCloneOf() != "" {
		all = append(all, "clone of", v.GetCloneOf())
	}
	all = append(all, flattening(v)...)
	if v.GetRestoringTo() != "" {
		all = append(all, "goes back to", v.GetRestoringTo())
	}
	return all
}

// health is empty while a volume is being created or deleted.
func health(v *pb.Volume) string {
	if v.GetHealth() == pb.Health_HEALTH_UNSPECIFIED {
		return ""
	}
	return pb.Word(v.GetHealth())
}

// space formats how much drive space a volume occupies.
func space(v *pb.Volume) string {
	if text := taken(v); text != "" {
		return text + " on drives"
	}
	return ""
}

// taken is the drive space that a volume occupies: whole extents, for each copy; of a thin volume, its
// data.
func taken(v *pb.Volume) string {
	if v.GetThin() {
		return cli.Size(v.GetUsedBytes())
	}
	var sum uint64
	for _, leg := range v.GetLegs() {
		sum += extentsOf(leg)
	}
	if sum == 0 {
		return ""
	}
	return cli.Size(sum)
}

// extentsOf is the size of a leg's own extents; a leg of a thin volume has none.
func extentsOf(leg *pb.Leg) (sum uint64) {
	for _, e := range leg.GetExtents() {
		sum += uint64(e.GetCount()) * uint64(block.ExtentSize)
	}
	return sum
}

// legTakes is the drive space that a leg occupies.
func legTakes(leg *pb.Leg) string { return cli.Size(max(extentsOf(leg), leg.GetUsedBytes())) }

// volumeSize is the exact size, plus the size to which the volume is growing.
func volumeSize(v *pb.Volume) string {
	text := block.Size(v.GetSizeBytes()).String()
	if to := v.GetExpandingToBytes(); to != 0 {
		text += ", expanding to " + block.Size(to).String()
	}
	return text
}

func describeAttachments(w io.Writer, all []*pb.Attachment, out *cli.Output) {
	if len(all) == 0 {
		fmt.Fprintln(w, "not attached")
	}
	for i, a := range all {
		if i > 0 {
			fmt.Fprintln(w)
		}
		describeAttachment(w, a, out)
	}
}

// describeHealing tells of the host that copies to the legs of a detached volume.
func describeHealing(w io.Writer, v *pb.Volume, out *cli.Output) {
	h := v.GetHealing()
	if h == nil {
		return
	}
	_, progress, _ := strings.Cut(cli.Healing(v), ", ")
	all := []string{"healed by", h.GetNode(), "copied", progress, "epoch", strconv.FormatUint(h.GetEpoch(), 10), "state", pb.Word(h.GetState()) + " for " + out.Age(h.GetSince())}
	if h.GetWaitingFor() != "" {
		all = append(all, "waiting for", h.GetWaitingFor())
	}
	properties(w, all...)
}

func describeAttachment(w io.Writer, a *pb.Attachment, out *cli.Output) {
	all := []string{
		"attached to", a.GetNode(),
		"mode", mode(a.GetMode()),
		"epoch", strconv.FormatUint(a.GetEpoch(), 10),
		"state", pb.Word(a.GetState()) + " for " + out.Age(a.GetSince()),
		"device", a.GetDevice(),
	}
	if with := a.GetAuthenticatesWith(); len(with) > 0 {
		all = append(all, "authenticates with", strings.Join(with, ", "))
	}
	if a.GetRail() != "" {
		all = append(all, "rail", a.GetRail())
	}
	if a.GetNearGpu() != "" {
		all = append(all, "near GPU", a.GetNearGpu())
	}
	if a.GetWaitingFor() != "" {
		all = append(all, "waiting for", a.GetWaitingFor())
	}
	if a.GetResyncTotalBytes() > 0 {
		all = append(all, "copied", copied(a))
	}
	properties(w, all...)
}

// copied is the progress of a resync.
func copied(a *pb.Attachment) string {
	return fmt.Sprintf("%s of %s (%s)", cli.Size(a.GetResyncDoneBytes()), cli.Size(a.GetResyncTotalBytes()), cli.Used(a.GetResyncDoneBytes(), a.GetResyncTotalBytes()))
}

func describeLegs(w io.Writer, legs []*pb.Leg, out *cli.Output) {
	var rows [][]string
	for _, leg := range legs {
		rows = append(rows, []string{
			strconv.Itoa(int(leg.GetColumn())), strconv.Itoa(int(leg.GetCopy())), cli.ShortID(leg.GetId()), pb.Word(leg.GetState()),
			leg.GetNode(), cli.ShortID(leg.GetDriveId()), legTakes(leg), strconv.FormatUint(leg.GetRevision(), 10), out.Age(leg.GetStaleSince()), leg.GetReason(),
		})
	}
	cli.Table(w, "COLUMN COPY LEG STATE NODE DRIVE SPACE REVISION SINCE REASON", rows...)
}

// describeScrubs lists the last scrubs of a volume, newest first.
func describeScrubs(w io.Writer, v *pb.Volume, out *cli.Output) {
	if v.GetScrub() == nil {
		return
	}
	var rows [][]string
	for _, c := range append([]*pb.VolumeScrub{v.GetScrub()}, v.GetPastScrubs()...) {
		what, state := "compare", "ended"
		if c.GetRepair() {
			what = "repair"
		}
		if c.GetScheduled() {
			what += ", scheduled"
		}
		switch {
		case c.GetStopped():
			state = "stopped"
		case c.GetPaused():
			state = "paused"
		case c.GetEnded() == nil:
			state = "wanted"
		}
		rows = append(rows, []string{
			c.GetBegan().AsTime().UTC().Format(time.RFC3339), out.Age(c.GetEnded()), what, state, cli.Size(c.GetDoneBytes()),
			strconv.FormatUint(c.GetFound(), 10), strconv.FormatUint(c.GetRepaired(), 10),
		})
	}
	fmt.Fprintln(w)
	cli.Table(w, "SCRUB ENDED KIND STATE DONE FOUND REPAIRED", rows...)
}

// describeRebuilds lists the copies that a volume's host makes or made of its data, newest first.
func describeRebuilds(w io.Writer, v *pb.Volume, out *cli.Output) {
	if len(v.GetRebuilds()) == 0 {
		return
	}
	var rows [][]string
	for _, r := range v.GetRebuilds() {
		state, took := "in sync", r.GetEnded().AsTime().Sub(r.GetBegan().AsTime()).Round(time.Second).String()
		speed := ""
		switch {
		case r.GetEnded() == nil:
			state, took = cli.Used(r.GetDoneBytes(), r.GetTotalBytes()), ""
			if r.GetBytesPerSecond() > 0 {
				speed = cli.Size(r.GetBytesPerSecond()) + "/s"
				state += ", " + r.GetLeft().AsDuration().String() + " left"
			}
		case r.GetFailed() != "":
			state = "ended early: " + r.GetFailed()
		}
		rows = append(rows, []string{
			r.GetBegan().AsTime().UTC().Format(time.RFC3339), out.Age(r.GetEnded()), fmt.Sprintf("%d.%d", r.GetColumn(), r.GetCopy()),
			r.GetReplaces(), r.GetNode(), cli.Size(r.GetDoneBytes()), took, speed, state,
		})
	}
	fmt.Fprintln(w)
	cli.Table(w, "REBUILD ENDED LEG FROM TO COPIED TOOK SPEED RESULT", rows...)
}

// properties prints names and values in two columns.
func properties(w io.Writer, namesAndValues ...string) {
	width := 0
	for i := 0; i < len(namesAndValues); i += 2 {
		width = max(width, len(namesAndValues[i]))
	}
	for i := 0; i < len(namesAndValues); i += 2 {
		value := namesAndValues[i+1]
		if value == "" {
			value = "-"
		}
		fmt.Fprintf(w, "%-*s  %s\n", width, namesAndValues[i], value)
	}
}

func newVolumeDelete(g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:               "delete VOLUME",
		Short:             "Delete a volume and its data; refused while it is attached",
		Example:           "  weft volume delete db1",
		Args:              cli.Takes("VOLUME"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			return runVolumeDelete(ctx, api, args[0], out)
		}),
	}
}

func runVolumeDelete(ctx context.Context, api pb.ManagerClient, volume string, out *cli.Output) error {
	// Deleting a volume that is gone succeeds.
	v, absent := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
	if cli.IsSnapshotName(volume) || v.GetSnapshot() != nil {
		return cli.UsageError{Err: fmt.Errorf("%s is a snapshot", volume), Hint: fmt.Sprintf("`weft snapshot delete %s` deletes it", volume)}
	}
	if _, err := api.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: volume}); err != nil {
		return err
	}
	if status.Code(absent) == codes.NotFound {
		out.Say("volume %s does not exist: nothing to delete", volume)
	} else {
		out.Say("volume %s is being deleted", volume)
	}
	return nil
}

type volumePromoteStaleOptions struct {
	volume         string
	legs           []string
	acceptDataLoss bool
}

func newVolumePromoteStale(g *cli.Globals) *cobra.Command {
	var o volumePromoteStaleOptions
	cmd := &cobra.Command{
		Use:   "promote-stale VOLUME LEG... --accept-data-loss",
		Short: "Accept a stale leg as the good one of its column, losing the writes it missed",
		Long: `Make a stale leg the only in-sync leg of its column. The writes that it missed
are lost; files may be damaged in their middle. Use it only when every good leg
of the column is gone for good; if one may come back, wait for it. Use it also
when a rebuilt or restored store cannot tell which copy of a column is good:
"weft explain volume" lists the evidence for each.

LEG is the leg's place as "weft explain" shows it (0.1 is copy 1 of column 0), or
the beginning of its id. Legs of several columns can be given at once.`,
		Example:           "  weft volume promote-stale db1 0.1 1.0 --accept-data-loss",
		Args:              cli.TakesMore("VOLUME", "LEG"),
		ValidArgsFunction: g.CompleteVolumes,
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, args []string, out *cli.Output) error {
			o.volume, o.legs = args[0], args[1:]
			return runVolumePromoteStale(ctx, api, o, out)
		}),
	}
	cmd.Flags().BoolVar(&o.acceptDataLoss, "accept-data-loss", false, "accept losing the writes that the leg missed")
	return cmd
}

func runVolumePromoteStale(ctx context.Context, api pb.ManagerClient, o volumePromoteStaleOptions, out *cli.Output) error {
	if !o.acceptDataLoss {
		return cli.UsageError{Err: fmt.Errorf("volume %q: promoting a stale leg loses the writes that it missed", o.volume), Hint: "to accept that, add --accept-data-loss"}
	}
	v, err := api.GetVolume(ctx, &pb.GetVolumeRequest{Volume: o.volume})
	if err != nil {
		return err
	}
	legs, err := legsOf(v, o.legs)
	if err != nil {
		return err
	}
	for _, leg := range legs {
		v, err = api.PromoteStaleLeg(ctx, &pb.PromoteStaleLegRequest{Volume: o.volume, LegId: leg.GetId(), AcceptDataLoss: true})
		if err != nil {
			return err
		}
		out.Say("leg %d.%d (%s) is now the only in-sync leg of its column", leg.GetColumn(), leg.GetCopy(), cli.ShortID(leg.GetId()))
	}
	return out.Print(v, nil)
}

// legsOf finds the legs of a volume by place or id, at most one in a column.
func legsOf(v *pb.Volume, names []string) (legs []*pb.Leg, err error) {
	columns := map[uint32]string{}
	for _, name := range names {
		leg, err := legOf(v, name)
		if err != nil {
			return nil, err
		}
		if other, taken := columns[leg.GetColumn()]; taken {
			return nil, cli.UsageError{Err: fmt.Errorf("legs %s and %s are in the same column: choose one of them", other, name)}
		}
		columns[leg.GetColumn()] = name
		legs = append(legs, leg)
	}
	return legs, nil
}

func legOf(v *pb.Volume, name string) (*pb.Leg, error) {
	var ids []string
	for _, leg := range v.GetLegs() {
		if fmt.Sprintf("%d.%d", leg.GetColumn(), leg.GetCopy()) == name {
			return leg, nil
		}
		ids = append(ids, leg.GetId())
	}
	if strings.Contains(name, ".") {
		return nil, status.Errorf(codes.NotFound, "leg %s of volume %s: not found", name, v.GetName())
	}
	id, err := matchID("leg", strings.ToLower(name), ids)
	if err != nil {
		return nil, err
	}
	return v.GetLegs()[slices.Index(ids, id)], nil
}
