// SPDX-License-Identifier: Apache-2.0

package columns

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/initiator/blockdev"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
	"weft.dev/weft/raid/engine"
)

// Role is the first argument of a process that makes the devices, in the machine:
//
//	bench columns raw|kernel|user STRIPES
const Role = "columns"

const (
	legSize = 64 * block.MiB
	copies  = 2
	most    = 8 // columns
)

// Process makes the device of a kind with a number of columns, and prints its path. "user"
// serves it until SIGTERM; the others leave it to the kernel.
func Process(args []string) error {
	if len(args) != 2 {
		return errors.New("want a kind and a number of columns")
	}
	stripes, err := strconv.Atoi(args[1])
	if err != nil || stripes < 1 || stripes > most {
		return fmt.Errorf("columns %q: want 1 to %d", args[1], most)
	}
	l := block.Layout{Stripes: stripes, Copies: copies, Chunk: block.DefaultChunk}
	switch args[0] {
	case "raw":
		l.Copies = 1
		return mapped(l)
	case "kernel":
		return mapped(l)
	case "user":
		return served(l)
	}
	return fmt.Errorf("kind %q: want raw, kernel or user", args[0])
}

// mapped makes the tables that the initiator makes on the kernel's data path.
func mapped(l block.Layout) error {
	client, err := dm.Open()
	if err != nil {
		return err
	}
	defer client.Close()
	id := block.VolumeID{UUID: block.UUID{0: byte(l.Copies), 1: byte(l.Stripes), 6: 0x40, 8: 0x80}}
	size := legSize * block.Size(l.Stripes)
	var wanted []dm.Device
	for k := range l.Stripes {
		column, err := columnOf(id, k, l, size)
		if err != nil {
			return err
		}
		wanted = append(wanted, column.Devices()...)
	}
	for _, step := range dm.Diff(nil, append(wanted, mirror.Top(id, l, size))) {
		if err := client.Do(step); err != nil {
			return err
		}
	}
	top, err := client.Info(mirror.TopName(id))
	if err == nil {
		fmt.Println(dm.NodePath(top.Number))
	}
	return err
}

// columnOf is a column whose legs are in sync.
func columnOf(id block.VolumeID, k int, l block.Layout, size block.Size) (mirror.Column, error) {
	c := mirror.NewColumn(id, k, l, size, "")
	if l.Copies > 1 {
		log, err := logDevice(fmt.Sprintf("%d-%d", l.Stripes, k))
		if err != nil {
			return c, err
		}
		c.Log = log
	}
	for copy := range l.Copies {
		number, err := dm.MajorMinor(fmt.Sprintf("/dev/ram%d", k*copies+copy))
		if err != nil {
			return c, err
		}
		c.Legs = append(c.Legs, mirror.Leg{Device: dm.RefTo(number), State: mirror.InSync})
	}
	return c, nil
}

// logDevice is a column's log as the initiator makes it: a loop device over a file in memory.
func logDevice(name string) (dm.Ref, error) {
	path := filepath.Join("/run", "columns-"+name)
	if err := os.WriteFile(path, nil, 0o600); err != nil {
		return "", err
	}
	if err := os.Truncate(path, int64(mirror.LogDeviceSize)); err != nil {
		return "", err
	}
	loop, err := new(dm.Loops).Attach(path)
	return dm.RefTo(loop.Number), err
}

// served serves a volume of the user-space engine as a block device.
func served(l block.Layout) error {
	ctx, stop := signal.NotifyContext(context.Background(), unix.SIGTERM, syscall.SIGINT)
	defer stop()
	size := legSize * block.Size(l.Stripes)
	v, err := engine.New(engine.Config{Layout: l, Size: size})
	if err != nil {
		return err
	}
	for k := range l.Stripes {
		for copy := range l.Copies {
			if err := v.Add(k, copy, ramdisk.New(legSize, 0), engine.InSync, false); err != nil {
				return err
			}
		}
	}
	e, err := blockdev.Export(ctx, v, blockdev.Options{Name: block.VolumeName(fmt.Sprintf("columns%d", l.Stripes))})
	if err != nil {
		return err
	}
	fmt.Println(e.Node(), e.Way())
	<-ctx.Done()
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	return errors.Join(e.Close(ctx, true), v.Close(ctx))
}
