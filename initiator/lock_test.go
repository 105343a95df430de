// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/agentlock"
	"weft.dev/weft/proto/block"
)

// TestANodeHasOneAgentOfTheKernelsDataPath: a second one must not touch a table.
func TestANodeHasOneAgentOfTheKernelsDataPath(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		second := w.agent(nil)
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		err := second.Run(ctx)
		me := fmt.Sprintf("node h1, data path kernel, process %d in ", os.Getpid())
		if !errors.Is(err, errHeld) || !strings.Contains(err.Error(), me) {
			t.Errorf("Run of a second agent = %v, want it to name the first: %s", err, me)
		}
		time.Sleep(time.Second)
		w.expect("the first goes on alone")
		w.stop()
		w.stop = w.start()
		time.Sleep(time.Second)
		w.expect("an agent after another one", "suspend top", "resume top")
	})
}

func TestWhichAgentsShareAMachine(t *testing.T) {
	kernel := func(node block.NodeName, state string) Config {
		return Config{Node: node, StateDir: state, Datapath: Kernel}
	}
	user := func(node block.NodeName, state string) Config {
		return Config{Node: node, StateDir: state, Datapath: User}
	}
	for _, c := range []struct {
		first, second Config
		ok            bool
	}{
		{kernel("n1", "a"), kernel("n1", "a"), false},
		{kernel("n1", "a"), kernel("n1", "b"), false},
		{kernel("n1", "a"), kernel("n2", "a"), false},
		{kernel("n1", "a"), kernel("n2", "b"), true},
		{kernel("n1", "a"), user("n1", "b"), false},
		{kernel("n1", "a"), user("n2", "b"), true},
		{user("n1", "a"), user("n1", "b"), true}, // of two clusters, as in a lab
	} {
		dir := t.TempDir()
		ctx, cancel := context.WithCancel(t.Context())
		cancel() // do not wait for the other agent
		take := func(c Config) (agentlock.Lock, error) {
			c.DevDir, c.StateDir = filepath.Join(dir, "dev"), filepath.Join(dir, c.StateDir)
			return c.lock(ctx)
		}
		first, err := take(c.first)
		if err != nil {
			t.Fatal(err)
		}
		second, err := take(c.second)
		if (err == nil) != c.ok || err != nil && !strings.Contains(err.Error(), "node n1, data path kernel, process") {
			t.Errorf("%s agent of %s beside one of %s: %v, want success %v", c.second.Datapath, c.second.Node, c.first.Node, err, c.ok)
		}
		second.Release()
		first.Release()
		if second, err = take(c.second); err != nil {
			t.Errorf("%s agent of %s after one of %s: %v", c.second.Datapath, c.second.Node, c.first.Node, err)
		}
		second.Release()
	}
}

// An agent that was killed inside a call that does not return keeps its locks and does nothing
// more: the next agent need not wait for a silent target.
func TestAKilledAgentIsNoHolder(t *testing.T) {
	for status, want := range map[string]bool{
		"Name:\tweft\nState:\tS (sleeping)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n": false,
		"Name:\tweft\nState:\tT (stopped)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000020000\n":  false,
		"Name:\tweft\nState:\tZ (zombie)\nSigPnd:\t0000000000000000\nShdPnd:\t0000000000000000\n":   true,
		"Name:\tweft\nState:\tD (disk sleep)\nSigPnd:\t0000000000000100\nShdPnd:\t0000000000000000": true,
		"": false,
	} {
		if got := ends([]byte(status)); got != want {
			t.Errorf("ends(%q) = %v, want %v", status, got, want)
		}
	}
	for _, holder := range []string{"", "node n1", "node n1, data path kernel, process 1 in pid:[0], since now", "node n1, data path kernel, process x in y, since"} {
		if killed(holder) {
			t.Errorf("killed(%q), and nothing is known of it", holder)
		}
	}
}
