// SPDX-License-Identifier: Apache-2.0

package main

import (
	"slices"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestNoRuleGrantsEverything(t *testing.T) {
	rules := 0
	for _, o := range kept(t) {
		for _, r := range o.Rules {
			rules++
			for _, words := range [][]string{r.APIGroups, r.Resources, r.Verbs} {
				if slices.Contains(words, "*") || len(words) == 0 {
					t.Errorf("%s %s: rule %v has a wildcard or an empty list", o.Kind, o.Metadata.Name, r)
				}
			}
			for _, verb := range []string{"escalate", "bind", "impersonate", "deletecollection"} {
				if slices.Contains(r.Verbs, verb) {
					t.Errorf("%s %s may %s %v", o.Kind, o.Metadata.Name, verb, r.Resources)
				}
			}
			// Who can change what a privileged pod runs can do everything on its node.
			for _, resource := range []string{"pods", "daemonsets", "deployments", "statefulsets"} {
				if slices.Contains(r.Resources, resource) && slices.ContainsFunc(r.Verbs, func(verb string) bool { return verb != "get" && verb != "list" && verb != "watch" }) {
					t.Errorf("%s %s may %v %s", o.Kind, o.Metadata.Name, r.Verbs, resource)
				}
			}
			for _, resource := range []string{"secrets", "pods/exec", "nodes/proxy", "serviceaccounts/token"} {
				if slices.Contains(r.Resources, resource) {
					t.Errorf("%s %s has rights on %s, which no part of Weft needs", o.Kind, o.Metadata.Name, resource)
				}
			}
		}
	}
	if rules < 10 {
		t.Errorf("found %d rules, want those of all sidecars", rules)
	}
}

func TestOnlyTheseHaveRights(t *testing.T) {
	type grant struct{ role, account string }
	var got []grant
	for _, o := range kept(t) {
		for _, s := range o.Subjects {
			got = append(got, grant{o.RoleRef.Kind + " " + o.RoleRef.Name, s.Kind + " " + s.Namespace + "/" + s.Name})
		}
	}
	const account = "ServiceAccount " + namespace + "/weft-controller"
	want := []grant{
		{"ClusterRole weft-csi-provisioner", account},
		{"ClusterRole weft-csi-attacher", account},
		{"ClusterRole weft-csi-resizer", account},
		{"ClusterRole weft-csi-guards", account},
		{"Role weft-csi-controller", account},
		{"ClusterRole weft-node", "ServiceAccount " + namespace + "/weft-node"},
		{"ClusterRole weft-node", "ServiceAccount " + namespace + "/weft-target"},
		{"ClusterRole weft-volmgr", "ServiceAccount " + namespace + "/weft-volmgr"},
		{"Role weft-volmgr", "ServiceAccount " + namespace + "/weft-volmgr"},
		{"ClusterRole weft-csi-snapshotter", account},
	}
	if diff := cmp.Diff(want, got, cmp.AllowUnexported(grant{})); diff != "" {
		t.Errorf("bindings (-want +got):\n%s", diff)
	}
}

func TestOfTheNodeOnlyThesePathsAreUsed(t *testing.T) {
	got := map[string][]string{}
	for name, pod := range pods(kept(t)) {
		got[name] = nil
		for _, v := range pod.Volumes {
			if v.HostPath != nil {
				got[name] = append(got[name], v.HostPath.Path)
			}
		}
		slices.Sort(got[name])
	}
	want := map[string][]string{
		"weft-controller": nil,
		"weft-guard":      nil,
		"weft-volmgr":     nil,
		"weft-target":     {"/dev", "/lib/modules", "/sys", "/var/lib/weft/target"},
		"weft-node":       {"/dev", "/lib/modules", "/run/weft", "/sys", "/var/lib/kubelet", "/var/lib/kubelet/plugins/csi.weft.dev", "/var/lib/weft/csi", "/var/lib/weft/initiator"},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("host paths (-want +got):\n%s", diff)
	}
}

func TestOnlyWhatTouchesTheKernelIsPrivileged(t *testing.T) {
	privileged := map[string]bool{"weft-target/target": true, "weft-node/initiator": true, "weft-node/csi": true}
	seen := 0
	for name, pod := range pods(kept(t)) {
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			s, who := c.SecurityContext, name+"/"+c.Name
			if !is(s.ReadOnlyRootFilesystem) {
				t.Errorf("%s can write its root", who)
			}
			if privileged[who] {
				seen++
				continue
			}
			if is(s.Privileged) || !isNot(s.AllowPrivilegeEscalation) || len(s.Capabilities.Add) > 0 || !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) {
				t.Errorf("%s has rights that it does not need: %+v", who, s)
			}
			p := pod.SecurityContext
			if s.SeccompProfile.Type != "RuntimeDefault" && p.SeccompProfile.Type != "RuntimeDefault" || !is(s.RunAsNonRoot) && !is(p.RunAsNonRoot) {
				t.Errorf("%s runs as root or without a seccomp profile: %+v, its pod %+v", who, s, p)
			}
			if init := len(pod.InitContainers) > 0; !init && (pod.HostNetwork || pod.HostPID || pod.HostIPC) {
				t.Errorf("%s is in the node's namespaces", who)
			}
		}
	}
	if seen != len(privileged) {
		t.Errorf("found %d of the containers %v", seen, privileged)
	}
}

func is(b *bool) bool    { return b != nil && *b }
func isNot(b *bool) bool { return b != nil && !*b }

func TestTokensAreWhereTheyAreNeeded(t *testing.T) {
	var got []string
	for name, pod := range pods(kept(t)) {
		if mounted := !isNot(pod.AutomountServiceAccountToken); mounted != (name == "weft-controller") {
			t.Errorf("%s has its token in all containers: %v", name, mounted)
		}
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			for _, m := range c.VolumeMounts {
				if m.Name == "token" {
					got = append(got, name+"/"+c.Name)
				}
			}
		}
	}
	slices.Sort(got)
	if want := []string{"weft-node/csi", "weft-node/initiator", "weft-node/labels", "weft-target/labels", "weft-volmgr/volmgr"}; !slices.Equal(got, want) {
		t.Errorf("a token is in %v, want %v", got, want)
	}
}

// The token that a pod joins with is good for Weft's managers alone: Kubernetes' own API refuses its
// audience.
func TestPodsJoinWithATokenForWeftAlone(t *testing.T) {
	var got []string
	for name, pod := range pods(kept(t)) {
		for _, c := range append(pod.InitContainers, pod.Containers...) {
			for _, m := range c.VolumeMounts {
				if m.Name == "join" {
					got = append(got, name+"/"+c.Name)
				}
			}
		}
		for _, v := range pod.Volumes {
			if v.Name == "join" && v.Projected.Sources[0].ServiceAccountToken.Audience != "weft" {
				t.Errorf("%s: %+v", name, v)
			}
		}
	}
	slices.Sort(got)
	if want := []string{"weft-controller/csi", "weft-node/csi", "weft-node/initiator", "weft-target/target"}; !slices.Equal(got, want) {
		t.Errorf("a token to join with is in %v, want %v", got, want)
	}
}

func TestEveryContainerCanBeFoundDead(t *testing.T) {
	for name, pod := range pods(kept(t)) {
		for _, c := range pod.Containers {
			if c.LivenessProbe == nil && c.Name != "guard" { // which does nothing
				t.Errorf("%s/%s has no liveness probe", name, c.Name)
			}
			if c.TerminationMessagePolicy != "FallbackToLogsOnError" {
				t.Errorf("%s/%s does not report why it ended", name, c.Name)
			}
		}
		if pod.PriorityClassName == "" {
			t.Errorf("%s may be evicted by anyone", name)
		}
	}
}

func TestMountsOfTheNodePluginReachTheNode(t *testing.T) {
	var got []string
	for name, pod := range pods(kept(t)) {
		for _, c := range pod.Containers {
			for _, m := range c.VolumeMounts {
				if m.MountPropagation == "Bidirectional" {
					got = append(got, name+"/"+c.Name+" "+m.MountPath)
				}
			}
		}
	}
	if want := []string{"weft-node/csi /var/lib/kubelet"}; !slices.Equal(got, want) {
		t.Errorf("mounts that the node sees are made by %v, want %v", got, want)
	}
}
