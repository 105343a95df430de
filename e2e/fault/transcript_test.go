// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/anishathalye/porcupine"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/stats"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// transcript is what callers have asked about the volumes of a shelf, and what they were told: each
// attempt, as it went over the wire, with its beginning and its end.
//
// An attempt that was told of no outcome may take effect later: it does not end.
//
// An answer to which a manager that does not lead has added how far it goes is a read of some time in
// the past: it may be older than its attempt, but not older than that. So it begins at the latest time
// at which all that had been acknowledged was within what it goes to.
type transcript struct {
	cluster *cluster
	shelf   int    // number of it
	from    uint64 // the newest entry when it began

	mu    sync.Mutex
	clock int64 // counts beginnings and ends
	ops   []porcupine.Operation
	marks []mark // in their order
	wrong []string
}

// mark says that what had been acknowledged at a time was in the entries up to an index.
type mark struct {
	clock int64
	index uint64
}

// never is the end of an attempt that has no outcome.
const never = math.MaxInt64

func (h *transcript) name(volume int) string { return fmt.Sprintf("s%d-%c", h.shelf, 'a'+volume) }

func (h *transcript) volume(name string) int {
	for i := range shelf {
		if h.name(i) == name {
			return i
		}
	}
	return -1
}

func (h *transcript) tick() int64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	return h.clock
}

// record notes attempts of the callers.
func (h *transcript) record(ctx context.Context, method string, request, reply any, conn *grpc.ClientConn, next grpc.UnaryInvoker, o ...grpc.CallOption) error {
	c, ok := h.callOf(request)
	if !ok {
		return next(ctx, method, request, reply, conn, o...)
	}
	var header metadata.MD
	sent := &atomic.Bool{}
	ctx = context.WithValue(ctx, sentKey{}, sent)
	began := h.tick()
	err := next(ctx, method, request, reply, conn, append(o, grpc.Header(&header))...)
	if sent.Load() {
		h.note(ctx, c, h.answerTo(c, reply, err), began, header, err)
	}
	return err
}

// sentKey is the key of what notes that a call has gone out, in its context.
type sentKey struct{}

// departures notes which calls have gone out: others have no effect. It is a stats.Handler.
type departures struct{}

func (departures) TagRPC(ctx context.Context, _ *stats.RPCTagInfo) context.Context   { return ctx }
func (departures) TagConn(ctx context.Context, _ *stats.ConnTagInfo) context.Context { return ctx }
func (departures) HandleConn(context.Context, stats.ConnStats)                       {}

func (departures) HandleRPC(ctx context.Context, what stats.RPCStats) {
	sent, ok := ctx.Value(sentKey{}).(*atomic.Bool)
	if _, is := what.(*stats.OutHeader); is && ok {
		sent.Store(true)
	}
}

func (h *transcript) note(ctx context.Context, c call, a answer, began int64, header metadata.MD, err error) {
	_, notLeader := pb.NotLeader(err)
	// A manager that has just joined has nothing to answer from.
	nothingYet := c.reads() && a.reason == codes.FailedPrecondition.String() && saysStale(ctx)
	h.mu.Lock()
	defer h.mu.Unlock()
	h.clock++
	op := porcupine.Operation{Input: c, Output: a, Call: began, Return: h.clock}
	switch {
	case notLeader || nothingYet || a.how == unknown && c.reads(): // it has no effect
		return
	case a.how == unknown:
		op.Return = never
	case len(header.Get(pb.ReadIndexKey)) > 0:
		index, err := strconv.ParseUint(header.Get(pb.ReadIndexKey)[0], 10, 64)
		if err != nil {
			h.wrong = append(h.wrong, err.Error())
		}
		if index < h.from {
			return // it may be of a time before this shelf, and show what was there then
		}
		op.Call, a.stale = h.goesTo(index), true
		op.Output = a
	default:
		h.marks = append(h.marks, mark{h.clock, h.cluster.applied.Load()})
	}
	if a.foreign != "" {
		h.wrong = append(h.wrong, fmt.Sprintf("a list of volumes has %s, which should not be there, or is there twice", a.foreign))
	}
	h.ops = append(h.ops, op)
}

// saysStale reports whether a caller can do with an answer of a manager that does not lead.
func saysStale(ctx context.Context) bool {
	said, _ := metadata.FromOutgoingContext(ctx)
	return slices.Contains(said.Get(pb.ReadKey), pb.ReadStale)
}

// goesTo returns the latest time at which all that had been acknowledged was within an index.
func (h *transcript) goesTo(index uint64) (clock int64) {
	for _, m := range h.marks {
		if m.index <= index {
			clock = max(clock, m.clock)
		}
	}
	return clock
}

// callOf returns what a request asks for; false if it is not about this shelf.
func (h *transcript) callOf(request any) (c call, ok bool) {
	name := ""
	switch r := request.(type) {
	case *pb.ListVolumesRequest:
		return call{kind: callList}, true
	case *pb.GetStatusRequest:
		return call{kind: callStatus}, true
	case *pb.CreateVolumeRequest:
		name, c = r.GetName(), call{kind: callCreate, size: r.GetSizeBytes() / mib}
	case *pb.DeleteVolumeRequest:
		name, c = r.GetVolume(), call{kind: callDelete}
	case *pb.ExpandVolumeRequest:
		name, c = r.GetVolume(), call{kind: callGrow, size: r.GetSizeBytes() / mib}
	case *pb.UpdateVolumeRequest:
		label, err := strconv.Atoi(r.GetSetLabels()[labelOfShelf])
		if err != nil {
			return c, false
		}
		name, c = r.GetVolume(), call{kind: callLabel, label: label}
	case *pb.AttachRequest:
		name, c = r.GetVolume(), call{kind: callAttach, node: r.GetNode()}
	case *pb.DetachRequest:
		name, c = r.GetVolume(), call{kind: callDetach, node: r.GetNode()}
	case *pb.GetVolumeRequest:
		name, c = r.GetVolume(), call{kind: callGet}
	}
	c.volume = h.volume(name)
	return c, c.volume >= 0
}

const (
	mib          = uint64(block.MiB)
	labelOfShelf = "edition"
)

// answerTo returns what the caller of an attempt was told.
func (h *transcript) answerTo(c call, reply any, err error) (a answer) {
	if err != nil {
		return h.errorTo(c, err)
	}
	switch r := reply.(type) {
	case *pb.Volume:
		a.shown, a.volume = true, shownIn(r)
	case *pb.ListVolumesResponse:
		for _, v := range r.GetVolumes() {
			i := h.volume(v.GetName())
			if i < 0 || a.all[i].there() {
				a.foreign = v.GetName()
				continue
			}
			a.all[i] = shownIn(v)
		}
	case *pb.Status:
		a.counts = [2]int{int(r.GetVolumes()), int(r.GetAttachments())}
	}
	return a
}

func (h *transcript) errorTo(c call, err error) answer {
	code, reason := status.Code(err), ""
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok {
			reason = info.GetReason()
		}
	}
	switch code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled:
		return answer{how: unknown}
	case codes.NotFound, codes.AlreadyExists, codes.InvalidArgument, codes.FailedPrecondition, codes.ResourceExhausted:
	default:
		h.fail("%v: %v", c, err)
	}
	if reason == "" {
		reason = code.String()
	}
	return answer{how: refused, reason: reason}
}

func (h *transcript) fail(format string, args ...any) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.wrong = append(h.wrong, fmt.Sprintf(format, args...))
}

// shownIn returns what an answer shows of a volume.
func shownIn(r *pb.Volume) volume {
	v := volume{
		id: r.GetId(), size: r.GetSizeBytes() / mib, next: max(r.GetSizeBytes(), r.GetExpandingToBytes()) / mib, host: r.GetAttachment().GetNode(),
		creating: r.GetState() == pb.VolumeState_VOLUME_STATE_CREATING, leaving: r.GetState() == pb.VolumeState_VOLUME_STATE_DELETING,
		detaching: r.GetAttachment().GetState() == pb.AttachmentState_ATTACHMENT_STATE_DETACHING,
	}
	v.label, _ = strconv.Atoi(r.GetLabels()[labelOfShelf]) // none is 0
	return v
}

// checkFor is how long the search for an order of the calls may take.
const checkFor = 30 * time.Second

// check says why the history is not linearizable; empty if it is. Do not call it in a synctest
// bubble, where the search would have no limit.
func (h *transcript) check() string {
	if len(h.wrong) > 0 {
		return strings.Join(h.wrong, "\n")
	}
	result, info := porcupine.CheckOperationsVerbose(model, h.ops, checkFor)
	if result == porcupine.Ok {
		return ""
	}
	longest := 0
	for _, one := range info.PartialLinearizations() {
		for _, order := range one {
			longest = max(longest, len(order))
		}
	}
	return fmt.Sprintf("%s: no order of the calls explains more than %d of these %d answers:\n%s", result, longest, len(h.ops), h)
}

// String lists the attempts by their beginnings.
func (h *transcript) String() string {
	ops := slices.SortedFunc(slices.Values(h.ops), func(a, b porcupine.Operation) int { return int(a.Call - b.Call) })
	var text strings.Builder
	for _, op := range ops {
		c, a := op.Input.(call), op.Output.(answer)
		end := strconv.FormatInt(op.Return, 10)
		if op.Return == never {
			end = "-"
		}
		how := a.String()
		switch {
		case c.kind == callList:
			how = fmt.Sprint(a.all)
		case c.kind == callStatus:
			how = fmt.Sprintf("%d volumes, %d attachments", a.counts[0], a.counts[1])
		}
		if a.stale {
			how += " (stale)"
		}
		fmt.Fprintf(&text, "%6d %6s  %v: %s\n", op.Call, end, c, how)
	}
	return text.String()
}
