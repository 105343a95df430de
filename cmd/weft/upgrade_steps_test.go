// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/upgrade"
	"weft.dev/weft/proto/pb"
)

// Three managers and two targets are upgraded, one step after another as "weft upgrade next" says,
// while a host writes. No write fails, and the manager that leads is the last of them.
func TestAnUpgradeTakesOneStepAfterAnother(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	c := startThree(t)
	first, err := c.leader()
	if err != nil {
		t.Fatal(err)
	}
	var took []string
	for {
		s := c.plan().Next()
		if s == nil {
			break
		}
		if len(took) == 5 {
			t.Fatalf("after %v comes %s %s", took, s.Kind, s.Name)
		}
		if s.Kind == "target" {
			c.singleCopyIsInTheWay(s.Name)
		}
		c.take(s)
		took = append(took, strings.TrimSpace(s.Kind+" "+s.Address))
		t.Logf("%s %s: the longest write took %v", s.Kind, s.Name, c.noErrors(s.Kind))
	}
	if len(took) != 5 || took[2] != "manager "+first || took[3] != "target" || took[4] != "target" {
		t.Errorf("the steps were %v; %s led at first", took, first)
	}
	c.healthy()
	if out := c.next("upgrade", "next"); !strings.Contains(out, "6 of 6 run test; nothing is left to do") {
		t.Errorf("another step is %q", out)
	}
	if out := c.next("upgrade", "status"); strings.Count(out, " test ") != 6 {
		t.Errorf("weft upgrade status says\n%s", out)
	}
}

// next runs a command of the next version.
func (c *three) next(args ...string) string {
	c.t.Helper()
	cmd := exec.Command("weft-next", args...)
	cmd.Env = c.environment()
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("weft-next %s: %v: %s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

func (c *three) plan() (p upgrade.Plan) {
	c.t.Helper()
	if err := json.Unmarshal([]byte(c.next("upgrade", "plan", "-o", "json")), &p); err != nil {
		c.t.Fatal(err)
	}
	return p
}

// take does a step as a person does: what the command says is done, and then the command ends.
func (c *three) take(s *upgrade.Step) {
	c.t.Helper()
	var progress bytes.Buffer
	cmd := exec.Command("weft-next", "upgrade", "next", "--timeout", "90s")
	cmd.Env, cmd.Stderr = c.environment(), &progress
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		c.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	text, _ := bufio.NewReader(stdout).ReadString('\n') // it ends without a line if it is refused
	if !strings.HasPrefix(text, "you install test on ") || !strings.Contains(text, s.Name) {
		c.t.Errorf("step %s %s: %q", s.Kind, s.Name, text)
	}
	c.program = "weft-next"
	if s.Kind == "manager" {
		i := slices.Index(c.addresses, s.Address)
		stop(c.t, c.managers[s.Address])
		c.manager(i)
	} else {
		stop(c.t, c.targets[s.Name])
		c.runTarget(s.Name)
	}
	if err := cmd.Wait(); err != nil {
		c.t.Fatalf("weft upgrade next, %s %s: %v: %s", s.Kind, s.Name, err, progress.String())
	}
	c.t.Logf("weft upgrade next\n%s%s", text, progress.String())
}

// singleCopyIsInTheWay has a volume of one copy on a target that is in use, and shows that the target
// is left alone as long as it is.
func (c *three) singleCopyIsInTheWay(node string) {
	c.t.Helper()
	if _, err := c.api.CreateVolume(c.t.Context(), &pb.CreateVolumeRequest{Name: "one", SizeBytes: 256 << 20, Copies: 1, Stripes: 1, Topology: []*pb.Segment{{Labels: map[string]string{"node": node}}}}); err != nil {
		c.t.Fatal(err)
	}
	c.must("volume", "create", "one", "--size", "256MiB", "--stripes", "1", "--copies", "1", "--wait")
	c.must("attach", "one", "--node", "c1")
	cmd := exec.Command("weft-next", "upgrade", "next")
	cmd.Env = c.environment()
	out, err := cmd.CombinedOutput()
	if want := "volume one has a single copy on " + node + ", and c1 uses it"; err == nil || !strings.Contains(string(out), want) {
		c.t.Errorf("weft upgrade next: %v: %s; want %q", err, out, want)
	}
	if nodes := c.must("node", "list", "-o", "json"); strings.Contains(nodes, `"maintained_until": "`) {
		c.t.Errorf("a step that is refused has begun:\n%s", nodes)
	}
	c.must("detach", "one")
	c.must("volume", "delete", "one")
}

// stop ends a process in order.
func stop(t *testing.T, cmd *exec.Cmd) {
	t.Helper()
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	select {
	case <-ended:
	case <-time.After(20 * time.Second):
		t.Fatalf("%v does not end", cmd.Args)
	}
}
