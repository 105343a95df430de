// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"syscall"
	"time"
)

// spdkDir names the directory of an SPDK that is built. Distributions do not have it.
const spdkDir = "WEFT_SPDK"

// Peers prints which programs of others Measure can compare with here, and how to get the rest.
func Peers(out io.Writer) {
	for _, program := range []string{"nbdkit", "qemu-nbd", "qemu-storage-daemon", "tgtd", "iscsi-perf"} {
		path, err := lookUp(program)
		if err != nil {
			path = "missing: install the distribution's package (e2e/install.sh bench)"
		}
		fmt.Fprintf(out, "%-20s %s\n", program, path)
	}
	path, err := spdkClient()
	if err != nil {
		path = fmt.Sprintf("missing: %v; build it as its README says, with configure --disable-unit-tests, and set %s", err, spdkDir)
	}
	fmt.Fprintf(out, "%-20s %s\n", "SPDK", path)
}

// spdkClient is the path of SPDK's client.
func spdkClient() (path string, err error) {
	dir := os.Getenv(spdkDir)
	if dir == "" {
		return "", fmt.Errorf("%s does not name the directory of a built SPDK", spdkDir)
	}
	path = filepath.Join(dir, "build/bin/spdk_nvme_perf")
	_, err = os.Stat(path)
	return path, err
}

// spdkAlone is the server with which both ends are SPDK's.
const spdkAlone = "SPDK, its client"

// spdk is SPDK's NVMe/TCP target over memory, and its client on that target and on ours. Each
// polls one processor, as it is meant to be used.
func spdk(own *server, cpu int) (all []*server, err error) {
	client, err := spdkClient()
	if err != nil {
		return nil, err
	}
	if cpu < 0 {
		return nil, errors.New("its target and its client need a processor each")
	}
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	config, err := spdkConfig(port)
	if err != nil {
		return nil, err
	}
	s, err := theirs("SPDK, our host", job{Kind: "host", Address: "127.0.0.1:" + port}, cpu, filepath.Join(filepath.Dir(client), "nvmf_tgt"),
		"-m", fmt.Sprintf("%#x", 1<<cpu), "--no-huge", "-s", "1024", "--no-pci", "-r", config+".sock", "-c", config)
	if err != nil {
		return nil, err
	}
	kill := s.stop
	s.stop = func() {
		kill()
		_ = os.Remove(config) // a file in the temporary directory
		_ = os.Remove(config + ".sock")
	}
	s.polls = true
	s.pause(true)
	both, ours := *s, *own
	both.name, both.perf, both.stop = spdkAlone, client, func() {}
	ours.name, ours.perf, ours.stop, ours.own = "weft, SPDK's client", client, func() {}, own.own
	return []*server{s, &both, &ours}, nil
}

// spdkConfig writes the configuration of SPDK's target: the same subsystem as ours.
func spdkConfig(port string) (path string, err error) {
	type object = map[string]any
	call := func(method string, params object) object { return object{"method": method, "params": params} }
	text, err := json.Marshal(object{"subsystems": []object{
		{"subsystem": "bdev", "config": []object{
			call("bdev_malloc_create", object{"name": "memory", "num_blocks": int64(deviceSize) / 4096, "block_size": 4096}),
		}},
		{"subsystem": "nvmf", "config": []object{
			call("nvmf_create_transport", object{"trtype": "TCP", "io_unit_size": 128 << 10, "in_capsule_data_size": 8 << 10, "max_queue_depth": 128}),
			call("nvmf_create_subsystem", object{"nqn": subsystem, "allow_any_host": true, "serial_number": "bench"}),
			call("nvmf_subsystem_add_ns", object{"nqn": subsystem, "namespace": object{"nsid": 1, "bdev_name": "memory", "uuid": namespace.String()}}),
			call("nvmf_subsystem_add_listener", object{"nqn": subsystem, "listen_address": object{"trtype": "TCP", "adrfam": "IPv4", "traddr": "127.0.0.1", "trsvcid": port}}),
		}},
	}})
	if err != nil {
		return "", err
	}
	f, err := os.CreateTemp("", "weft-bench-spdk-*.json")
	if err != nil {
		return "", err
	}
	_, err = f.Write(text)
	return f.Name(), errors.Join(err, f.Close())
}

// pause stops a server that polls, or lets it run, so that it does not take the processor of
// the server that is being measured.
func (s *server) pause(on bool) {
	if !s.polls {
		return
	}
	signal := syscall.SIGCONT
	if on {
		signal = syscall.SIGSTOP
	}
	_ = syscall.Kill(s.pid, signal) // if it is gone, the measurement fails and says so
}

var (
	perfTotal    = regexp.MustCompile(`(?m)^Total\s*:\s*([\d.]+)`)
	perfQuantile = regexp.MustCompile(`(?m)^\s*([\d.]+)%\s*:\s*([\d.]+)us`)
)

// spdkPerf generates a job's load with SPDK's client.
func spdkPerf(ctx context.Context, client string, j job, cpu int) (r result, err error) {
	pattern := map[bool]map[bool]string{false: {false: "read", true: "write"}, true: {false: "randread", true: "randwrite"}}[j.Random][j.Write]
	host, port, err := net.SplitHostPort(j.Address)
	if err != nil {
		return r, err
	}
	where := fmt.Sprintf("trtype:TCP adrfam:IPv4 traddr:%s trsvcid:%s subnqn:%s hostnqn:%s", host, port, subsystem, initiator.NQN)
	cmd := exec.CommandContext(ctx, client, "-q", strconv.Itoa(j.Depth), "-o", strconv.Itoa(j.Size), "-w", pattern,
		"-t", strconv.Itoa(int(j.Seconds)), "-c", fmt.Sprintf("%#x", 1<<cpu), "--no-huge", "-s", "512", "-L", "-r", where)
	out, err := outputOf(cmd, cpu)
	if err != nil {
		return r, err
	}
	return parsePerf(out)
}

// parsePerf takes IOPS and latencies from the output of SPDK's client.
func parsePerf(out string) (r result, err error) {
	total := perfTotal.FindStringSubmatch(out)
	if total == nil {
		return r, fmt.Errorf("spdk_nvme_perf printed %q", out)
	}
	r.IOPS, err = strconv.ParseFloat(total[1], 64)
	for _, q := range perfQuantile.FindAllStringSubmatch(out, -1) {
		us, err := strconv.ParseFloat(q[2], 64)
		if err != nil {
			return r, err
		}
		switch share, _ := strconv.ParseFloat(q[1], 64); share {
		case 50:
			r.P50 = time.Duration(us * 1000)
		case 99:
			r.P99 = time.Duration(us * 1000)
		case 99.9:
			r.P999 = time.Duration(us * 1000)
		}
	}
	return r, err
}

// wholeSeconds is the running time for a program that counts whole seconds.
func wholeSeconds(s float64) float64 { return math.Max(1, math.Round(s)) }
