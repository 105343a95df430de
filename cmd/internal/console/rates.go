// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// rates are figures of one kind of object: of hosts by name, of all others by id. What is not in them
// is not known.
type rates map[string]*pb.Figures

// figures asks for the I/O of the last seconds; of the legs of a volume, or of one volume alone, if
// that is named. A manager that is older than figures has none.
func (r *reader) figures(ctx context.Context, of pb.FiguresOf, volume string) (rates, error) {
	return ask(ctx, r, "figures "+pb.Word(of)+" "+volume, func(ctx context.Context) (rates, error) {
		answer, err := r.Manager.GetFigures(ctx, &pb.GetFiguresRequest{Of: of, Volume: volume})
		if err != nil && status.Code(err) != codes.Unimplemented {
			return nil, err
		}
		all := rates{}
		for _, f := range answer.GetFigures() {
			all[cmp.Or(f.GetId(), f.GetName())] = f
		}
		return all, nil
	})
}

// load is what an object does, in words: empty ones are not known.
type load struct{ IOs, Bytes, P99 string }

func loadOf(f *pb.Figures) (l load) {
	l.IOs, l.Bytes, l.P99 = cli.Load(f)
	return l
}

// lines are a load on an edge of a map.
func (l load) lines() (all []string) {
	if l.IOs == "" {
		return nil
	}
	first := l.IOs + "/s"
	if l.P99 != "" {
		first += " " + l.P99
	}
	return []string{first, l.Bytes}
}

// columnFigures are what a host asks of a column: each read goes to one copy, each write to all that
// are in sync. How long an I/O of the column takes is not known.
func columnFigures(legs []*pb.Leg, of rates) *pb.Figures {
	sum := &pb.Figures{Read: &pb.Rates{}, Write: &pb.Rates{}, All: &pb.Rates{}}
	for _, l := range legs {
		f := of[l.GetId()]
		if f.GetNanoseconds() == 0 || l.GetState() != pb.LegState_LEG_STATE_IN_SYNC {
			continue
		}
		sum.Nanoseconds = max(sum.Nanoseconds, f.GetNanoseconds())
		sum.Read.Ios += f.GetRead().GetIos()
		sum.Read.Bytes += f.GetRead().GetBytes()
		sum.Write.Ios = max(sum.Write.Ios, f.GetWrite().GetIos())
		sum.Write.Bytes = max(sum.Write.Bytes, f.GetWrite().GetBytes())
	}
	sum.All.Ios = sum.Read.Ios + sum.Write.Ios
	return sum
}

// busiest are the orders of a list beside that by name: the largest first.
var busiest = map[string]func(*pb.Figures) uint64{
	"I/Os":      func(f *pb.Figures) uint64 { return f.GetAll().GetIos() },
	"bandwidth": func(f *pb.Figures) uint64 { return f.GetRead().GetBytes() + f.GetWrite().GetBytes() },
	"latency":   func(f *pb.Figures) uint64 { return f.GetAll().GetP99Nanoseconds() },
}

// orders are the orders of a list, as a form offers them.
var orders = []string{"name", "I/Os", "bandwidth", "latency"}

// topSorts are the columns by which "weft top" sorts for an order.
var topSorts = map[string]string{"I/Os": "iops", "bandwidth": "bandwidth", "latency": "p99"}

// sortBusiest puts the rows that do most first, if an order asks for that. Others stay in order.
func sortBusiest(rows []volumeRow, order string, of rates) {
	if most := busiest[order]; most != nil {
		slices.SortStableFunc(rows, func(a, b volumeRow) int { return cmp.Compare(most(of[b.GetId()]), most(of[a.GetId()])) })
	}
}

// ioFacts are the I/O of a volume in all that is known of it.
func ioFacts(f *pb.Figures) (all []fact) {
	names := []string{"Reads/s", "Writes/s", "Read", "Written", "Half take at most", "1 in 100 takes more than", "Held"}
	for i, value := range append(cli.Rates(f), cli.Held(f)) {
		if value != "" {
			all = append(all, fact{names[i], value})
		}
	}
	return all
}
