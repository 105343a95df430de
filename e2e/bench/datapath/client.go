// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
)

// Role as the first argument makes this program one of the measured processes, instead of
// the one that measures.
const Role = "datapath-process"

// Process is the main function of a measured process.
func Process(args []string) error {
	switch role := args[0]; role {
	case "client":
		defer profileFor(role)()
		return answer(work)
	case "device":
		defer profileFor(role)()
		return serveBlock(args[1], number(args[2]), number(args[3]))
	case "memory-device":
		defer profileFor(role)()
		return serveMemoryBlock()
	case "thin":
		return thinProcess(args[1:])
	default:
		return serve(role, args[1:])
	}
}

// number parses an argument that start printed from a number.
func number(arg string) int {
	n, err := strconv.Atoi(arg)
	if err != nil {
		panic(err)
	}
	return n
}

// serve listens, prints its address, and reports its resource use when asked.
func serve(kind string, args []string) error {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	defer profileFor(kind)()
	switch kind {
	case "frames":
		go serveFrames(l, form(args[0]))
	case "memory":
		d, err := filled()
		if err != nil {
			return err
		}
		if err := serveDevice(l, d); err != nil {
			return err
		}
	case "mapped":
		d, err := serveMapped(args)
		if err != nil {
			return err
		}
		if err := serveDevice(l, d); err != nil {
			return err
		}
	case "file":
		f, err := backend.Open(args[0], backend.Options{})
		if err != nil {
			return err
		}
		if err := serveDevice(l, f); err != nil {
			return err
		}
	default:
		return fmt.Errorf("no role %q", kind)
	}
	fmt.Fprintln(os.Stdout, l.Addr())
	return answer(func(struct{}) usage { return ownUsage() })
}

// work runs one job in the client process.
func work(j job) (r result) {
	before := ownUsage()
	r, err := j.do()
	after := ownUsage()
	if err != nil {
		r.Err = err.Error()
	}
	if ios := float64(r.IOs); ios > 0 {
		r.Mallocs = float64(after.Mallocs-before.Mallocs) / ios
		r.CPU = float64((after.CPU - before.CPU).Microseconds()) / ios
	}
	return r
}

func (j job) do() (result, error) {
	switch j.Kind {
	case "frames", "nbd":
		var w wire = frames{}
		if j.Kind == "nbd" {
			w = nbd{j.Export, j.FUA}
		}
		c, err := dial(j.Form, j.Address)
		if err != nil {
			return result{}, err
		}
		defer c.Close()
		return drive(c, w, j)
	case "host", "volume", "device":
		return j.doDevice()
	}
	return result{}, fmt.Errorf("no kind of job %q", j.Kind)
}

// doDevice runs a job on Weft's host, on a volume over several hosts, or on a block device
// of the kernel.
func (j job) doDevice() (_ result, retErr error) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	switch j.Kind {
	case "device":
		f, err := backend.Open(j.Address, backend.Options{Workers: j.Depth})
		if err != nil {
			return result{}, err
		}
		defer f.Close()
		return loadDevice(f, j)
	case "volume":
		v, closed, err := reachVolume(ctx, j.Address, j.Stripes, j.Copies)
		if err != nil {
			return result{}, err
		}
		defer func() { retErr = errors.Join(retErr, closed()) }()
		return loadDevice(v, j)
	}
	c, d, err := reach(ctx, j.Address)
	if err != nil {
		return result{}, err
	}
	defer c.Cut()
	return loadDevice(d, j)
}

// serveBlock exports a volume as a kernel block device and prints its path. It never runs
// in the process that generates the load: killed while it waits for its own device, that
// process could not exit.
func serveBlock(address string, stripes, copies int) (retErr error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	v, closed, err := reachVolume(ctx, address, stripes, copies)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, closed()) }()
	return serveExported(ctx, v)
}

// serveMemoryBlock exports memory of this process as a kernel block device.
func serveMemoryBlock() error {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	d, err := filled()
	if err != nil {
		return err
	}
	return serveExported(ctx, d)
}

func serveExported(ctx context.Context, d block.Device) (retErr error) {
	node, unexport, err := export(ctx, d)
	if err != nil {
		return err
	}
	defer func() { retErr = errors.Join(retErr, unexport()) }()
	fmt.Fprintln(os.Stdout, node)
	return answer(func(struct{}) usage { return ownUsage() })
}
