// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"sigs.k8s.io/yaml"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/csi"
)

// workload is the part of a Kubernetes object that these tests read.
type workload struct {
	Kind     string
	Metadata struct{ Name string }
	Spec     struct {
		Template struct {
			Spec struct{ InitContainers, Containers []podContainer }
		}
	}
	Provisioner, DriverName string
	Parameters              map[string]string
}

type podContainer struct {
	Name          string
	Image         string
	Command, Args []string
	Env           []struct{ Name string }
	Ports         []struct {
		Name          string
		ContainerPort int
	}
	LivenessProbe, ReadinessProbe, StartupProbe *action
	Lifecycle                                   struct{ PreStop *action }
}

type action struct {
	HTTPGet *struct{ Path, Port string }
	Exec    *struct{ Command []string }
}

// deployed returns the objects of deploy/kubernetes, and those that the chart makes with everything
// switched on.
func deployed(t *testing.T) []workload {
	t.Helper()
	files, err := filepath.Glob("../../deploy/kubernetes/*.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var all []workload
	for _, file := range append(files, "../../deploy/manifests/testdata/everything.yaml") {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for part := range strings.SplitSeq(string(text), "\n---\n") {
			var w workload
			if err := yaml.Unmarshal([]byte(part), &w); err != nil {
				t.Fatalf("%s: %v", file, err)
			}
			all = append(all, w)
		}
	}
	return all
}

// containers calls do for each container of Weft's image.
func containers(t *testing.T, do func(t *testing.T, name string, c podContainer)) {
	t.Helper()
	seen := 0
	for _, w := range deployed(t) {
		for _, c := range slices.Concat(w.Spec.Template.Spec.InitContainers, w.Spec.Template.Spec.Containers) {
			if strings.Contains(c.Image, "/weft") {
				seen++
				do(t, w.Kind+" "+w.Metadata.Name+"/"+c.Name, c)
			}
		}
	}
	if want := 2 * 8; seen != want { // volmgr, target, guard, initiator, csi twice, labels twice
		t.Errorf("found %d containers of Weft, want %d", seen, want)
	}
}

// accept checks that the program knows a command with these flags.
func accept(args []string) error {
	root := newRoot(&cli.Globals{Stdout: new(bytes.Buffer), Stderr: new(bytes.Buffer)})
	cmd, rest, err := root.Find(args)
	if err != nil {
		return err
	}
	if err := cmd.ParseFlags(rest); err != nil {
		return err
	}
	if more := cmd.Flags().Args(); cmd == root || len(more) > 0 {
		return fmt.Errorf("no command of weft: %v", args)
	}
	return nil
}

func TestManifestsRunCommandsThatThereAre(t *testing.T) {
	var commands []string
	containers(t, func(t *testing.T, name string, c podContainer) {
		if err := accept(c.Args); err != nil {
			t.Errorf("%s: weft %s: %v", name, strings.Join(c.Args, " "), err)
		}
		commands = append(commands, c.Args[0])
		for _, p := range []*action{c.LivenessProbe, c.ReadinessProbe, c.StartupProbe, c.Lifecycle.PreStop} {
			if p == nil || p.Exec == nil {
				continue
			}
			line := strings.Join(p.Exec.Command, " ")
			if err := accept(p.Exec.Command[1:]); err != nil || p.Exec.Command[0] != "weft" {
				t.Errorf("%s: runs %s: %v", name, line, err)
			}
			if strings.Contains(line, "$(") {
				t.Errorf("%s: runs %s, where Kubernetes puts in no variables", name, line)
			}
			commands = append(commands, p.Exec.Command[1])

		}
	})
	slices.Sort(commands)
	if got, want := slices.Compact(commands), []string{"csi", "initiator", "kubernetes", "pool", "status", "target", "volmgr"}; !slices.Equal(got, want) {
		t.Errorf("the manifests run %v, want %v", got, want)
	}
}

func TestAManifestWithAnUnknownFlagIsNoticed(t *testing.T) {
	for _, args := range [][]string{{"csi", "--mood=node"}, {"csi", "--max-volumes=many"}, {"cis"}, {"volmgr", "start"}, {"target", "here"}} {
		if accept(args) == nil {
			t.Errorf("weft %v was accepted", args)
		}
	}
}

func TestEachVariableInFlagsIsSet(t *testing.T) {
	containers(t, func(t *testing.T, name string, c podContainer) {
		for _, arg := range c.Args {
			for _, after := range strings.Split(arg, "$(")[1:] {
				variable, _, _ := strings.Cut(after, ")")
				if !slices.ContainsFunc(c.Env, func(e struct{ Name string }) bool { return e.Name == variable }) {
					t.Errorf("%s: %s uses a variable that is not set", name, arg)
				}
			}
		}
	})
}

func TestProbesAskWhereTheProgramAnswers(t *testing.T) {
	containers(t, func(t *testing.T, name string, c podContainer) {
		if c.LivenessProbe == nil {
			return // an init container, which ends by itself, or a guard, which does nothing
		}
		listen := ""
		for _, arg := range c.Args {
			if port, ok := strings.CutPrefix(arg, "--metrics-listen=:"); ok {
				listen = port
			}
		}
		for _, p := range c.Ports {
			if p.Name == c.LivenessProbe.HTTPGet.Port {
				if port := strconv.Itoa(p.ContainerPort); port != listen || c.LivenessProbe.HTTPGet.Path != "/healthz" {
					t.Errorf("%s: the probe asks port %s for %s, and the program answers on %q for /healthz", name, port, c.LivenessProbe.HTTPGet.Path, listen)
				}
				return
			}
		}
		t.Errorf("%s: the liveness probe asks no port of it", name)
	})
}

func TestClassesAreOfTheDriver(t *testing.T) {
	classes := 0
	for _, w := range deployed(t) {
		switch w.Kind {
		case "StorageClass":
			classes++
			if w.Provisioner != csi.DriverName {
				t.Errorf("StorageClass %s is of %q", w.Metadata.Name, w.Provisioner)
			}
		case "VolumeAttributesClass":
			classes++
			if w.DriverName != csi.DriverName {
				t.Errorf("VolumeAttributesClass %s is of %q", w.Metadata.Name, w.DriverName)
			}
		case "CSIDriver":
			if w.Metadata.Name != csi.DriverName {
				t.Errorf("CSIDriver is of %q", w.Metadata.Name)
			}
		}
	}
	if classes < 6 {
		t.Errorf("found %d classes, want those of the examples", classes)
	}
}
