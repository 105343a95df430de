// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"

	"weft.dev/weft/proto/block"
)

// TestANodeHasOneAgent starts a second agent beside a running one. It must not look at a label or
// touch an export: it would export again what the first one fences.
func TestANodeHasOneAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.plug("/dev/a", 2*block.GiB, "a")
		w.run()
		defer func() { w.stop() }()
		synctest.Wait()
		for _, datapath := range []Datapath{Kernel, User} {
			second, err := New(Config{Node: "t1", Manager: &w.manager, Root: w.root, Datapath: datapath})
			if err != nil {
				t.Fatal(err)
			}
			second.kernel = kernel{} // it would panic
			err = second.Run(t.Context())
			me := fmt.Sprintf("node t1, data path kernel, process %d on", os.Getpid())
			if !errors.Is(err, errHeld) || !strings.Contains(err.Error(), me) {
				t.Errorf("a second agent, with data path %s: Run = %v, want it to name the first: %s", datapath, err, me)
			}
		}
		w.stop()
		w.run() // an agent after another one
		synctest.Wait()
		if held, err := (Config{Node: "t1", Root: w.root}).lock(t.Context()); err == nil {
			held.Release()
			t.Error("an agent that follows another one holds no lock")
		}
	})
}

func TestWhoSharesAMachine(t *testing.T) {
	for _, c := range []struct {
		first, second Config
		ok            bool
	}{
		{Config{Node: "t1", Datapath: User}, Config{Node: "t1", Datapath: User}, false},
		{Config{Node: "t1", Datapath: User}, Config{Node: "t2", Datapath: User}, true},
		{Config{Node: "t1", Datapath: User}, Config{Node: "t2"}, false},
		{Config{Node: "t1"}, Config{Node: "t2", Datapath: User}, false},
		{Config{Node: "t1"}, Config{Node: "t2", Datapath: Kernel}, false},
		{Config{Node: "t1"}, Config{Node: "t1", Datapath: User, FilesOnly: true}, true},
		{Config{Node: "t1", Datapath: User, FilesOnly: true}, Config{Node: "t1"}, true},
	} {
		c.first.Root = t.TempDir()
		c.second.Root = c.first.Root
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // it does not wait
		first, err := c.first.lock(ctx)
		if err != nil {
			t.Fatal(err)
		}
		second, err := c.second.lock(ctx)
		if (err == nil) != c.ok || err != nil && !strings.Contains(err.Error(), "node "+string(c.first.Node)) {
			t.Errorf("an agent of %+v beside one of %+v: %v, want success %v", c.second, c.first, err, c.ok)
		}
		second.Release()
		first.Release()
		second, err = c.second.lock(ctx)
		if err != nil {
			t.Errorf("an agent of %+v after one of %+v: %v", c.second, c.first, err)
		}
		second.Release()
	}
}

// An agent in user space needs only the right to open the drives.
func TestALockThatCanNotBeWritten(t *testing.T) {
	root := t.TempDir()
	if err := os.WriteFile(filepath.Join(root, "dev"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if held, err := (Config{Node: "t1", Root: root, Datapath: Kernel}).lock(t.Context()); err == nil {
		held.Release()
		t.Error("a target of the kernel goes without a lock")
	}
	if os.Getuid() == 0 {
		t.Skip("root may write everywhere")
	}
	root = t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o500); err != nil {
		t.Fatal(err)
	}
	held, err := (Config{Node: "t1", Root: root, Datapath: User}).lock(t.Context())
	if err != nil {
		t.Errorf("a target in user space that may not write to /dev: %v", err)
	}
	held.Release()
}
