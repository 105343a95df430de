// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
)

// devRun is a weft dev that runs, and commands to it.
type devRun struct {
	t    *testing.T
	dir  string
	said bytes.Buffer
}

func startDev(t *testing.T, args ...string) *devRun {
	t.Helper()
	d := &devRun{t: t, dir: filepath.Join(t.TempDir(), "dev")}
	cmd := exec.Command("weft", append([]string{"dev", "--dir", d.dir}, args...)...)
	cmd.Env = operator.Environment()
	cmd.Stdout, cmd.Stderr = &d.said, &d.said
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Signal(syscall.SIGTERM) // it may have ended
		if err := cmd.Wait(); err != nil || t.Failed() {
			t.Logf("weft dev = %v\n%s", err, &d.said)
		}
	})
	return d
}

// weft runs a command until it succeeds, and returns what it prints.
func (d *devRun) weft(args ...string) (out string) {
	d.t.Helper()
	addresses := "unix:" + filepath.Join(d.dir, "manager")
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		cmd := exec.Command("weft", args...)
		cmd.Env = append(operator.Environment(), "WEFT_MANAGER="+addresses+","+addresses+"2,"+addresses+"3")
		text, err := cmd.Output()
		if err == nil {
			return strings.TrimSpace(string(text))
		}
		if exit, ok := errors.AsType[*exec.ExitError](err); ok {
			err = fmt.Errorf("%w: %s", err, exit.Stderr)
		}
		if time.Now().After(deadline) {
			d.t.Fatalf("weft %v: %v", args, err)
		}
	}
}

// connect opens the namespace that an attached volume is shown as.
func connect(t *testing.T, url string) block.Device {
	t.Helper()
	at, volume, _ := strings.Cut(strings.TrimPrefix(url, "nvme-tcp://"), "/")
	volume, own, _ := strings.Cut(volume, "?host=")
	id, err := block.ParseUUID(own)
	if err != nil {
		t.Fatalf("%s: %v", url, err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	c, err := host.Connect(ctx, host.Config{Portals: []string{at}, Subsystem: block.NQN(volume), Host: block.HostFromID(id)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Cut)
	n, err := c.Namespace(1, block.UUID{})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// The manager that leads is killed while a program writes to a volume of weft dev: the writes and
// the commands go on, and another manager leads.
func TestDevGoesOnWithoutTheManagerThatLeads(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	d := startDev(t, "--managers", "3", "--targets", "2", "--drive-size", "1GiB", "--block-device", "none")
	d.weft("volume", "create", "db1", "--size", "64MiB", "--copies", "2", "--wait")
	writer := &timedWriter{}
	go writer.run(connect(t, d.weft("attach", "db1")))
	defer writer.end()
	more := func(n int) {
		t.Helper()
		was := writer.acknowledged()
		for deadline := time.Now().Add(onceBound); writer.acknowledged() < was+n; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("%d writes in %v, want %d", writer.acknowledged()-was, onceBound, n)
			}
		}
	}
	more(50)
	if _, err := writer.longest(); err != nil {
		t.Fatal(err)
	}
	lost := d.weft("dev", "stop-manager", "--dir", d.dir)
	begin := time.Now()
	d.weft("pool", "create", "gold")
	took := time.Since(begin)
	more(200)
	longest, err := writer.longest()
	if err != nil || longest > onceBound || took > onceBound {
		t.Errorf("a change took %v, the longest write %v, %v", took, longest, err)
	}
	t.Logf("manager %s is killed: a change is answered after %v; the longest write took %v", lost, took, longest)
	list := d.weft("volmgr", "list")
	if strings.Count(list, " leader ") != 1 {
		t.Errorf("the managers are\n%s", list)
	}
}
