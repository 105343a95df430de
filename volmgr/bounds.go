// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"context"
	"fmt"
	"slices"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/labelset"
)

// Bounds of a request. Those of labels are package cluster's.
const (
	textMost  = 4 << 10
	eraseMost = 64 << 10 // force_erase lists everything that was found on a device
	listMost  = 5000
)

// bounded returns a service whose unary calls refuse requests that exceed the bounds.
func bounded(service grpc.ServiceDesc) *grpc.ServiceDesc {
	methods := make([]grpc.MethodDesc, len(service.Methods))
	for i, m := range service.Methods {
		call := m.Handler
		m.Handler = func(srv any, ctx context.Context, decode func(any) error, interceptor grpc.UnaryServerInterceptor) (any, error) {
			return call(srv, ctx, func(request any) error {
				if err := decode(request); err != nil {
					return err
				}
				return toStatus(checkRequest(request.(proto.Message)))
			}, interceptor)
		}
		methods[i] = m
	}
	service.Methods = methods
	return &service
}

// checkRequest refuses texts and lists that are too long, in any field.
func checkRequest(request proto.Message) (err error) {
	tooLong := func(f protoreflect.FieldDescriptor, have int, what string, most int) bool {
		if have > most {
			err = &cluster.Error{Kind: cluster.InvalidArgument, Field: string(f.Name()),
				Text: fmt.Sprintf("%s: %d %s; at most %d are allowed", f.Name(), have, what, most)}
		}
		return have <= most
	}
	text := func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		most := textMost
		if f.Name() == "force_erase" {
			most = eraseMost
		}
		return tooLong(f, len(v.String()), "bytes", most)
	}
	var check func(m protoreflect.Message) bool
	check = func(m protoreflect.Message) bool {
		m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
			switch {
			case f.IsMap():
				return true
			case f.IsList():
				list := v.List()
				ok := tooLong(f, list.Len(), "entries", listMost)
				for i := 0; ok && i < list.Len(); i++ {
					switch f.Kind() {
					case protoreflect.StringKind:
						ok = text(f, list.Get(i))
					case protoreflect.MessageKind:
						ok = check(list.Get(i).Message())
					}
				}
				return ok
			case f.Kind() == protoreflect.StringKind:
				return text(f, v)
			}
			return true
		})
		return err == nil
	}
	check(request.ProtoReflect())
	return err
}

// Bounds of what is kept of a report. The rest is dropped, and a problem of the agent says
// so. The report is not refused: one bad agent must not stop anything, not even the other
// agents on its node.
const (
	reportTextMost = 1 << 10
	problemsMost   = 256
	portalsMost    = 64
	devicesMost    = 10_000
	marksMost      = 64 // holders or signatures of a device
)

// trimmer cuts a report to the bounds, and notes what was dropped.
type trimmer struct{ left []string }

func (t *trimmer) labels(labels map[string]string) map[string]string {
	kept, left := labelset.Trim(labels)
	if left != "" {
		t.left = append(t.left, "labels: "+left)
	}
	return kept
}

func first[T any](t *trimmer, what string, all []T, most int) []T {
	if len(all) <= most {
		return all
	}
	t.left = append(t.left, fmt.Sprintf("%s: %d; at most %d are allowed", what, len(all), most))
	return all[:most]
}

// problems returns the first problems, and one more for each note of what was dropped.
func (t *trimmer) problems(all []*pb.Problem) []*pb.Problem {
	all = first(t, "problems", all, problemsMost)
	for _, p := range all {
		shorten(&p.Object, &p.Doing, &p.Cause)
	}
	for _, left := range t.left {
		all = append(all, &pb.Problem{Object: "report", Doing: "accept the whole report", Cause: left, Since: timestamppb.Now()})
	}
	return all
}

func shorten(texts ...*string) {
	for _, text := range texts {
		*text = labelset.Shorten(*text, reportTextMost)
	}
}

func trimTarget(r *pb.TargetReport) {
	t := &trimmer{}
	shorten(&r.Version, &r.Kernel)
	r.Labels = t.labels(r.Labels)
	r.Portals = first(t, "portals", r.Portals, portalsMost)
	r.ProcessPortals = first(t, "process_portals", r.ProcessPortals, portalsMost)
	for _, p := range slices.Concat(r.Portals, r.ProcessPortals) {
		shorten(&p.Address, &p.Rail)
	}
	if r.Refusals != nil {
		shorten(&r.Refusals.Nqn, &r.Refusals.HostNqn, &r.Refusals.Address, &r.Refusals.Reason)
	}
	r.Devices = first(t, "devices", r.Devices, devicesMost)
	for _, d := range r.Devices {
		shorten(&d.Path, &d.Model, &d.Serial, &d.Wwid, &d.Refused)
		if d.Health != nil {
			shorten(&d.Health.Unread)
		}
		d.Holders, d.Signatures = first(t, "holders of "+d.Path, d.Holders, marksMost), first(t, "signatures on "+d.Path, d.Signatures, marksMost)
		for _, marks := range [][]string{d.Holders, d.Signatures} {
			for i := range marks {
				shorten(&marks[i])
			}
		}
	}
	for _, d := range r.Drives {
		shorten(&d.Device, &d.Error)
	}
	for _, l := range r.Legs {
		shorten(&l.Error, &l.KernelRefuses, &l.Damage)
	}
	t.left = t.left[:min(len(t.left), problemsMost)]
	r.Problems = t.problems(r.Problems)
}

func trimInitiator(r *pb.InitiatorReport) {
	t := &trimmer{}
	shorten(&r.Version, &r.Kernel)
	r.Labels = t.labels(r.Labels)
	for _, a := range r.Attachments {
		shorten(&a.Device, &a.DeviceNumber, &a.WaitingFor)
		for _, l := range a.Legs {
			shorten(&l.Device, &l.Error)
		}
	}
	r.Problems = t.problems(r.Problems)
}
