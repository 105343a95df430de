// SPDX-License-Identifier: Apache-2.0

package top

import (
	"bytes"
	"context"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

// stub is a manager with figures.
type stub struct {
	pb.ManagerClient
	asked *pb.GetFiguresRequest
	all   []*pb.Figures
}

func (s *stub) GetFigures(_ context.Context, r *pb.GetFiguresRequest, _ ...grpc.CallOption) (*pb.GetFiguresResponse, error) {
	s.asked = r
	return &pb.GetFiguresResponse{Figures: s.all}, nil
}

func figuresOf(name, node string, reads, writes uint64, p99 time.Duration) *pb.Figures {
	return &pb.Figures{
		Name: name, Id: "aaaa1111-0000-4000-8000-000000000000", Node: node, Nanoseconds: 10e9,
		Read: &pb.Rates{Ios: reads, Bytes: reads * 4096, P50Nanoseconds: uint64(p99) / 4}, Write: &pb.Rates{Ios: writes, Bytes: writes * 4096},
		All: &pb.Rates{Ios: reads + writes, P50Nanoseconds: uint64(p99) / 4, P99Nanoseconds: uint64(p99)},
	}
}

func shown(t *testing.T, o options, args ...string) (string, *pb.GetFiguresRequest) {
	t.Helper()
	quiet := figuresOf("logs", "h2", 3, 0, 12345*time.Microsecond)
	quiet.HeldNanoseconds = 25e8
	s := &stub{all: []*pb.Figures{{Name: "cold"}, quiet, figuresOf("db1", "h1", 200_000, 50_000, 480*time.Microsecond)}}
	var to bytes.Buffer
	o.window = 10 * time.Second
	if err := run(t.Context(), s, o, args, &cli.Output{Stdout: &to, Stderr: &to, Now: time.Now}); err != nil {
		t.Fatal(err)
	}
	return to.String(), s.asked
}

func TestVolumesAreShownTheBusiestFirst(t *testing.T) {
	got, asked := shown(t, options{sort: "iops"})
	want := `VOLUME  HOST  READ/s  WRITE/s  READ-BW     WRITE-BW    P50     P99    HELD
db1     h1    20000   5000     78.1MiB/s   19.5MiB/s   120µs   480µs  0%
logs    h2    0.3     0        1.2KiB/s    0B/s        3.09ms  12ms   25%
cold    -     -       -        -           -           -       -      -
`
	if strings.Join(strings.Fields(got), " ") != strings.Join(strings.Fields(want), " ") {
		t.Errorf("got\n%swant\n%s", got, want)
	}
	if asked.GetOf() != pb.FiguresOf_FIGURES_OF_VOLUMES || asked.GetWindow().AsDuration() != 10*time.Second {
		t.Errorf("asked for %v", asked)
	}
}

func TestTheViewIsSortedByAColumn(t *testing.T) {
	for by, want := range map[string]string{"p99": "logs db1 cold", "held": "logs cold db1", "name": "cold db1 logs", "write": "db1 cold logs", "bandwidth": "db1 logs cold"} {
		got, _ := shown(t, options{sort: by})
		var names []string
		for line := range strings.Lines(got) {
			names = append(names, strings.Fields(line)[0])
		}
		if order := strings.Join(names[1:], " "); order != want {
			t.Errorf("--sort %s: %s, want %s", by, order, want)
		}
	}
	var usage cli.UsageError
	if err := run(t.Context(), &stub{}, options{sort: "size"}, nil, &cli.Output{}); err == nil || !strings.Contains(err.Error(), "iops, read") {
		t.Errorf("an unknown column: %v, want %T with the columns", err, usage)
	}
}

func TestHostsDrivesAndLegsHaveTheirViews(t *testing.T) {
	for _, c := range []struct {
		o        options
		args     []string
		of       pb.FiguresOf
		headings string
	}{
		{options{hosts: true}, nil, pb.FiguresOf_FIGURES_OF_HOSTS, "HOST "},
		{options{drives: true}, nil, pb.FiguresOf_FIGURES_OF_DRIVES, "DRIVE "},
		{options{}, []string{"db1"}, pb.FiguresOf_FIGURES_OF_LEGS, "LEG "},
	} {
		c.o.sort = "iops"
		got, asked := shown(t, c.o, c.args...)
		if !strings.HasPrefix(got, c.headings) || asked.GetOf() != c.of || asked.GetVolume() != strings.Join(c.args, "") {
			t.Errorf("%+v %v: asked for %v, got\n%s", c.o, c.args, asked, got)
		}
	}
}
