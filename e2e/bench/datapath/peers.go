// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// server is a measured server: how to reach it, and how much it has used.
type server struct {
	name string
	job  job // how the client reaches it
	pid  int
	own  *process // set if it is one of ours
	stop func()
	// broken means that it failed once and is skipped from then on.
	broken bool
	// iscsi is the URL for iscsi-perf, which then generates the load.
	iscsi string
	// perf is the path of SPDK's client, which then generates the load.
	perf  string
	polls bool // see pause
}

// used is the processor time and, for our own servers, the allocations.
func (s *server) used() (u usage, err error) {
	if s.own != nil {
		err = s.own.ask(0, struct{}{}, &u)
		return u, err
	}
	u.CPU, err = processorTime(s.pid)
	return u, err
}

// ours starts a server process of this program.
func ours(name string, j job, cpu int, role ...string) (*server, error) {
	p, err := start(cpu, role...)
	if err != nil {
		return nil, err
	}
	address, err := p.out.ReadString('\n')
	if err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	j.Address = strings.TrimSpace(address)
	return &server{name: name, job: j, own: p, stop: p.stop}, nil
}

// over is the same server, used through more layers of Weft in the client.
func (s *server) over(name, kind string, stripes, copies int) *server {
	v := *s
	v.name, v.stop = name, func() {}
	v.job.Kind, v.job.Stripes, v.job.Copies = kind, stripes, copies
	return &v
}

// theirs starts a server from the distribution.
func theirs(name string, j job, cpu int, program string, args ...string) (*server, error) {
	path, err := lookUp(program)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, args...)
	var said bytes.Buffer
	cmd.Stdout, cmd.Stderr = &said, &said
	if _, err := pinned(cmd, cpu); err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	s := &server{name: name, job: j, pid: cmd.Process.Pid, stop: func() { cmd.Process.Kill() }}
	for range 100 {
		c, err := net.Dial("tcp", j.Address)
		if err == nil {
			c.Close()
			return s, nil
		}
		time.Sleep(50 * time.Millisecond)
	}
	s.stop()
	return nil, fmt.Errorf("%s does not listen: %s", name, said.String())
}

// lookUp finds a program in PATH or in root's usual directories.
func lookUp(program string) (string, error) {
	path, err := exec.LookPath(program)
	if err == nil {
		return path, nil
	}
	for _, dir := range []string{"/usr/sbin", "/sbin"} {
		if _, err := os.Stat(filepath.Join(dir, program)); err == nil {
			return filepath.Join(dir, program), nil
		}
	}
	return "", err
}

// freePort is a port that is not in use now.
func freePort() (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer l.Close()
	_, port, err := net.SplitHostPort(l.Addr().String())
	return port, err
}

// peers starts the distribution's servers over file: in memory if direct is false,
// otherwise past the page cache where the peer supports it. It skips and names those that
// are not installed.
func peers(ctx context.Context, file string, direct bool, cpu int) (all []*server, missing []string) {
	type peer struct {
		name  string
		start func(port string) (*server, error)
	}
	over := func(port, export string) job {
		return job{Kind: "nbd", Form: blocking, Address: "127.0.0.1:" + port, Export: export}
	}
	qemuCache, driver := "writeback", "file"
	if direct {
		qemuCache = "none"
	}
	list := []peer{
		{"nbdkit", func(port string) (*server, error) {
			args := []string{"-f", "-p", port, "-i", "127.0.0.1"}
			if direct {
				return theirs("nbdkit file", over(port, ""), cpu, "nbdkit", append(args, "file", file)...)
			}
			return theirs("nbdkit memory", over(port, ""), cpu, "nbdkit", append(args, "memory", strconv.FormatUint(uint64(deviceSize), 10))...)
		}},
		{"qemu-nbd", func(port string) (*server, error) {
			return theirs("qemu-nbd", over(port, ""), cpu, "qemu-nbd", "-t", "-f", "raw", "-e", "8", "-b", "127.0.0.1", "-p", port, "--cache="+qemuCache, file)
		}},
		{"qemu-storage-daemon", func(port string) (*server, error) {
			return theirs("qemu-storage-daemon", over(port, "x"), cpu, "qemu-storage-daemon",
				"--blockdev", fmt.Sprintf("driver=%s,node-name=f,filename=%s,cache.direct=%s", driver, file, map[bool]string{true: "on", false: "off"}[direct]),
				"--nbd-server", "addr.type=inet,addr.host=127.0.0.1,addr.port="+port,
				"--export", "type=nbd,id=e,node-name=f,name=x,writable=on")
		}},
		{"tgt", func(port string) (*server, error) { return tgt(ctx, port, file, direct, cpu) }},
	}
	for _, p := range list {
		port, err := freePort()
		if err != nil {
			missing = append(missing, fmt.Sprintf("%s: %v", p.name, err))
			continue
		}
		s, err := p.start(port)
		if err != nil {
			missing = append(missing, fmt.Sprintf("%s: %v", p.name, err))
			continue
		}
		all = append(all, s)
	}
	return all, missing
}

// tgt is an iSCSI target in user space.
func tgt(ctx context.Context, port, file string, direct bool, cpu int) (*server, error) {
	control := strconv.Itoa(1000 + os.Getpid()%30000) // names its socket; other users may run a tgtd, too
	s, err := theirs("tgt", job{Address: "127.0.0.1:" + port}, cpu, "tgtd", "-f", "-C", control, "--iscsi", "portal=127.0.0.1:"+port)
	if err != nil {
		return nil, err
	}
	admin, err := lookUp("tgtadm")
	if err != nil {
		return nil, err
	}
	unit := []string{"--mode", "logicalunit", "--op", "new", "--tid", "1", "--lun", "1", "--backing-store", file}
	if direct {
		unit = append(unit, "--bsoflags", "direct")
	}
	for _, args := range [][]string{
		{"--mode", "target", "--op", "new", "--tid", "1", "--targetname", "iqn.2026-11.dev.weft:bench"},
		unit,
		{"--mode", "target", "--op", "bind", "--tid", "1", "--initiator-address", "ALL"},
	} {
		if err := run(ctx, admin, append([]string{"-C", control, "--lld", "iscsi"}, args...)...); err != nil {
			s.stop()
			return nil, err
		}
	}
	s.iscsi = fmt.Sprintf("iscsi://127.0.0.1:%s/iqn.2026-11.dev.weft:bench/1", port)
	return s, nil
}

var iscsiAverage = regexp.MustCompile(`iops average (\d+)`)

var errNotMade = errors.New("iscsi-perf cannot generate this load")

// iscsiPerf generates a job's load with libiscsi's tool, which only reads and reports no
// latencies.
func iscsiPerf(ctx context.Context, url string, j job, cpu int) (r result, err error) {
	if j.Write {
		return r, errNotMade
	}
	args := []string{"-m", strconv.Itoa(j.Depth), "-b", strconv.Itoa(j.Size / 512), "-t", strconv.Itoa(int(j.Seconds))}
	if j.Random {
		args = append(args, "-r")
	}
	cmd := exec.CommandContext(ctx, "iscsi-perf", append(args, url)...)
	out, err := outputOf(cmd, cpu)
	if err != nil {
		return r, err
	}
	found := iscsiAverage.FindAllStringSubmatch(out, -1)
	if len(found) == 0 {
		return r, fmt.Errorf("iscsi-perf printed %q", out)
	}
	r.IOPS, err = strconv.ParseFloat(found[len(found)-1][1], 64)
	return r, err
}
