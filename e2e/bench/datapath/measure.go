// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Options say how much to measure.
type Options struct {
	Rounds   int            // runs of each workload on each server
	Seconds  float64        // duration of each run
	Dir      string         // directory for the files of the file-backed part; empty: a temporary directory
	Section  string         // only sections whose titles contain this
	Only     string         // only workloads whose names contain this
	Servers  *regexp.Regexp // only the first server and those whose names match; nil: all
	Profiles string         // directory for processor profiles of our processes; empty: none
	Results  string         // file for the results; empty: none
	Count    int            // snapshots that are made, cloned and deleted
	Out      io.Writer
}

type workload struct {
	name   string
	write  bool
	random bool
	size   int
	depth  int
}

var inMemory = []workload{
	{"4k random read, depth 1", false, true, 4096, 1},
	{"4k random read, depth 32", false, true, 4096, 32},
	{"4k random read, depth 128", false, true, 4096, 128},
	{"4k random write, depth 1", true, true, 4096, 1},
	{"4k random write, depth 32", true, true, 4096, 32},
	{"4k random write, depth 128", true, true, 4096, 128},
	{"128k sequential read, depth 8", false, false, 128 << 10, 8},
	{"128k sequential write, depth 8", true, false, 128 << 10, 8},
}

var onFiles = []workload{
	{"4k random read, depth 32", false, true, 4096, 32},
	{"4k random write, depth 32", true, true, 4096, 32},
	{"128k sequential read, depth 8", false, false, 128 << 10, 8},
	{"128k sequential write, depth 8", true, false, 128 << 10, 8},
}

// sample is the result of one run, and the server's resource use during it.
type sample struct {
	result
	server  float64 // microseconds of processor time per IO
	mallocs float64 // of the server per IO; negative: unknown
}

// bench is the set of servers that are measured together.
type bench struct {
	Options
	client    *process
	plain     *process // the client of block devices; see clientOf
	clientCPU int
	servers   []*server
	section   string
	results   *Results
}

// processors returns the processor for servers and the one for the client; -1: any, and out says so.
func processors(out io.Writer) (server, client int) {
	if runtime.NumCPU() < 2 {
		fmt.Fprintln(out, "only one processor: servers and client share it")
		return -1, -1
	}
	return 0, 1
}

// Measure runs all sections (in memory, block devices, on files) and prints their tables.
func Measure(ctx context.Context, o Options) error {
	if o.Profiles != "" {
		os.Setenv(profilesIn, o.Profiles) // the processes inherit it
	}
	client, serverCPU, clientCPU, end, err := begin(o.Out)
	if err != nil {
		return err
	}
	defer end()
	plain, err := start(-1, "client")
	if err != nil {
		return err
	}
	defer plain.stop()
	results := newResults(o)
	for _, section := range []struct {
		title     string
		open      func(ctx context.Context, o Options, cpu int) ([]*server, []string, func(), error)
		workloads []workload
	}{{"in memory", memoryServers, inMemory}, {"block devices over memory", deviceServers, inMemory}, {"on files, past the page cache where the server can do that", fileServers, onFiles}} {
		if !strings.Contains(section.title, o.Section) {
			continue
		}
		servers, missing, clean, err := section.open(ctx, o, serverCPU)
		if err != nil {
			return err
		}
		if len(servers) == 0 {
			fmt.Fprintf(o.Out, "\nleft out: %s\n", strings.Join(missing, "; "))
			clean()
			continue
		}
		b := &bench{o, client, plain, clientCPU, servers, section.title, results}
		fmt.Fprintf(o.Out, "\n## %s\n\n", section.title)
		for _, m := range missing {
			fmt.Fprintf(o.Out, "left out: %s\n", m)
		}
		err = b.run(ctx, section.workloads)
		for _, s := range slices.Backward(servers) { // a block device ends before the servers below it
			s.stop()
		}
		clean()
		if err != nil {
			return err
		}
	}
	return results.write(o.Results)
}

// begin starts a client once no other such benchmark runs on the machine, and says which processors servers and
// the client have. end lets the next benchmark run.
func begin(out io.Writer) (client *process, serverCPU, clientCPU int, end func(), err error) {
	alone, err := alone(out)
	if err != nil {
		return nil, 0, 0, nil, err
	}
	serverCPU, clientCPU = processors(out)
	if client, err = start(clientCPU, "client"); err != nil {
		alone.Close()
		return nil, 0, 0, nil, err
	}
	return client, serverCPU, clientCPU, func() { client.stop(); alone.Close() }, nil
}

// alone waits until no other such benchmark runs on the machine, since both would claim
// first priority. Closing the file lets the next one run.
func alone(out io.Writer) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(os.TempDir(), "weft-bench.lock"), os.O_RDWR|os.O_CREATE, 0o666)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if err == unix.EWOULDBLOCK {
		fmt.Fprintln(out, "waiting until another benchmark has ended")
		err = unix.Flock(int(f.Fd()), unix.LOCK_EX)
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("lock %s: %w", f.Name(), err)
	}
	return f, nil
}

// run measures all workloads and prints a table of each, then the ratios.
func (b *bench) run(ctx context.Context, workloads []workload) error {
	if b.Servers != nil {
		for _, s := range b.servers[1:] {
			s.broken = !b.Servers.MatchString(s.name)
		}
	}
	var summary, relative [][]string
	peer := slices.IndexFunc(b.servers, func(s *server) bool { return s.name == spdkAlone && !s.broken })
	for _, w := range workloads {
		if !strings.Contains(w.name, b.Only) {
			continue
		}
		samples, err := b.rounds(ctx, w)
		if err != nil {
			return err
		}
		summary = append(summary, b.print(w, samples))
		if peer > 0 {
			relative = append(relative, b.row(w, samples, peer))
		}
	}
	b.printRatios(b.servers[0].name, summary)
	if peer > 0 {
		b.printRatios(b.servers[peer].name, relative)
	}
	return nil
}

// rounds runs a workload on each server in each round, and returns the samples of each.
func (b *bench) rounds(ctx context.Context, w workload) ([][]sample, error) {
	samples := make([][]sample, len(b.servers))
	for range b.Rounds {
		for i, s := range b.servers {
			if s.broken {
				continue
			}
			got, err := b.one(ctx, s, w)
			switch {
			case errors.Is(err, errNotMade):
			case err != nil && ctx.Err() == nil && s.own == nil: // the peer failed, not Weft
				fmt.Fprintf(b.Out, "skipped from here on: %s: %v\n", s.name, err)
				s.broken = true
			case err != nil:
				return nil, fmt.Errorf("%s on %s: %w", w.name, s.name, err)
			default:
				samples[i] = append(samples[i], got)
			}
		}
	}
	return samples, nil
}

// clientOf is the client process for a job. Kernel threads serve a block device, and would
// wait forever behind a client with first priority.
func (b *bench) clientOf(j job) *process {
	if j.Kind == "device" {
		return b.plain
	}
	return b.client
}

// one runs a workload on a server once.
func (b *bench) one(ctx context.Context, s *server, w workload) (sample, error) {
	j := s.job
	j.Write, j.Random, j.Size, j.Depth, j.Span, j.Seconds = w.write, w.random, w.size, w.depth, int64(deviceSize), b.Seconds
	s.pause(false)
	defer s.pause(true)
	before, err := s.used()
	if err != nil {
		return sample{}, err
	}
	var got sample
	switch {
	case s.iscsi != "":
		j.Seconds = wholeSeconds(j.Seconds)
		got.result, err = iscsiPerf(ctx, s.iscsi, j, b.clientCPU)
	case s.perf != "":
		j.Seconds = wholeSeconds(j.Seconds)
		got.result, err = spdkPerf(ctx, s.perf, j, b.clientCPU)
	default:
		err = b.clientOf(j).ask(j.duration(), j, &got.result)
		if err == nil && got.Err != "" {
			err = errors.New(got.Err)
		}
	}
	if err != nil {
		return sample{}, err
	}
	after, err := s.used()
	if err != nil {
		return sample{}, err
	}
	ios := got.IOPS * j.Seconds
	got.server, got.mallocs = float64((after.CPU-before.CPU).Microseconds())/ios, -1
	if s.own != nil {
		got.mallocs = float64(after.Mallocs-before.Mallocs) / ios
	}
	return got, nil
}
