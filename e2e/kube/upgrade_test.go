// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"fmt"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"sigs.k8s.io/yaml"
)

// nextVersion names the version that the upgrade installs. It is the same program.
const nextVersion = "v0.2.0-test"

// upgrade installs another version as the guide says, under a pod that writes: no write fails or is
// lost, and the pods of agents follow one at a time. The cluster has learned of snapshots meanwhile, so
// the new version comes with the sidecar for them.
func upgrade(t *testing.T, l *Lab) {
	t.Helper()
	l.Apply(claim{name: "log", class: "weft-mirrored"}.String() + pod{name: "writer", claim: "log", node: "n2", command: writes}.String())
	ready(l, "writer")
	begun := time.Now()
	program := l.file("weft-next")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-X main.release="+nextVersion, "-o", program, "weft.dev/weft/cmd/weft")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the next version: %v\n%s", err, out)
	}
	const tag = "0.2.0-test"
	l.importImages(l.buildImage(tag, program))
	l.must(l.startSnapshotController())
	for _, file := range []string{"volmgr", "target", "guard", "node", "snapshots/added", "snapshots/changed"} {
		l.Apply(strings.ReplaceAll(chartFile(t, file), "weft.dev/weft:"+imageTag, "weft.dev/weft:"+tag))
	}
	l.rolledOut("statefulset/weft-volmgr")
	l.rolledOut("deployment/weft-controller")
	runsNext(l, "manager", chartManagers)
	for i, n := range l.Nodes {
		_, err := weft(l, "node", "maintain", n.Name, "--for=10m")
		l.must(err)
		deleteOn(l, n.Name, "target")
		runsNext(l, "target", i+1)
		nothingIsWrong(l)
	}
	t.Logf("managers and targets run %s after %v: %s", nextVersion, time.Since(begun).Round(time.Second), slowest(l, "writer"))

	// In user space a node is drained before its agent is replaced. So the writer moves from n2 to n1.
	deleteOn(l, "n1", "node")
	runsNext(l, "initiator", 1)
	last := lastWrite(l, "writer")
	l.Kubectl("drain", "n2", "--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=120s")
	deleteOn(l, "n2", "node")
	runsNext(l, "initiator", len(l.Nodes))
	l.Kubectl("uncordon", "n2")
	l.Apply(pod{name: "reader", claim: "log", node: "n1"}.String())
	ready(l, "reader")
	if kept, gaps := count(t, sh(l, "reader", "cat /data/log")); kept < last || gaps != "" {
		t.Errorf("the writer was told that %d writes are there; %d are, with gaps: %q", last, kept, gaps)
	}
	l.rolledOut("statefulset/weft-volmgr")
	nothingIsWrong(l)
	_, err := weft(l, "upgrade", "finish")
	l.must(err)
	t.Logf("all of Weft runs %s after %v", nextVersion, time.Since(begun).Round(time.Second))
	remove(l, "pod/reader", "pvc/log")
}

// writes appends numbers to a file, one at a time, and prints each that is durable, with the time that it
// took in hundredths of a second.
const writes = `i=0
now() { read -r up rest < /proc/uptime; echo "${up%.*}${up#*.}"; }
while :; do
  i=$((i+1)); before=$(now)
  echo $i >> /data/log && sync -d /data/log || echo "failed: write $i"
  echo "$i $(( $(now) - before ))"
done`

// printed returns what the writer printed, and fails the test if a write failed.
func printed(l *Lab, pod string) []string {
	l.t.Helper()
	out := strings.Split(strings.TrimSpace(l.Kubectl("logs", pod)), "\n")
	if at := slices.IndexFunc(out, func(line string) bool { return !writeLine.MatchString(line) }); at >= 0 {
		l.t.Errorf("the writer says %q", out[at])
	}
	return out
}

var writeLine = regexp.MustCompile(`^(\d+) (\d+)$`)

// lastWrite is the number of the last write that was acknowledged.
func lastWrite(l *Lab, pod string) int {
	all := printed(l, pod)
	if len(all) < 2 {
		l.t.Fatalf("the writer wrote only %q", all)
	}
	n, _ := strconv.Atoi(strings.Fields(all[len(all)-1])[0])
	return n
}

// slowest describes the slowest write.
func slowest(l *Lab, pod string) string {
	most, number := 0, ""
	all := printed(l, pod)
	for _, line := range all {
		if m := writeLine.FindStringSubmatch(line); m != nil {
			if took, _ := strconv.Atoi(m[2]); took >= most {
				most, number = took, m[1]
			}
		}
	}
	return fmt.Sprintf("of %d writes the slowest, number %s, took %v", len(all), number, time.Duration(most)*10*time.Millisecond)
}

// count returns the last number of the log, and the first place where it does not follow the one before.
func count(t *testing.T, log string) (last int, gap string) {
	t.Helper()
	for line := range strings.Lines(log) {
		n, err := strconv.Atoi(strings.TrimSpace(line))
		if err != nil || n != last+1 {
			return last, fmt.Sprintf("after %d: %q", last, line)
		}
		last = n
	}
	return last, ""
}

// deleteOn deletes a node's pod of a component, and waits until it is gone.
func deleteOn(l *Lab, node, component string) {
	l.t.Helper()
	l.Kubectl("--namespace="+namespace, "delete", "pod", "--selector=app.kubernetes.io/component="+component, "--field-selector=spec.nodeName="+node, "--timeout=120s")
}

// runsNext waits until so many parts of a kind run the next version.
func runsNext(l *Lab, kind string, many int) {
	l.t.Helper()
	eventually(l, 2*time.Minute, fmt.Sprintf("%d of kind %s run the next version", many, kind), func(context.Context) error {
		out, err := weft(l, "upgrade", "status", "--output=json")
		if err != nil {
			return err
		}
		var status struct {
			Parts []struct{ Kind, Name, Version string }
		}
		if err := yaml.Unmarshal([]byte(out), &status); err != nil {
			return err
		}
		n := 0
		for _, p := range status.Parts {
			if p.Kind == kind && p.Version == nextVersion {
				n++
			}
		}
		if n < many {
			return fmt.Errorf("%d do:\n%s", n, out)
		}
		return nil
	})
}

func nothingIsWrong(l *Lab) {
	l.t.Helper()
	eventually(l, 2*time.Minute, "nothing is wrong", func(context.Context) error {
		out, err := weft(l, "status")
		if err == nil && !strings.Contains(out, "nothing is wrong") {
			err = fmt.Errorf("weft status says\n%s", out)
		}
		return err
	})
}
