// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/csi/drain"
)

// podName is the label that Kubernetes gives to each pod of a StatefulSet.
const podName = "statefulset.kubernetes.io/pod-name"

// stagesNote is the annotation at the guards' budget that keeps the stages of drains, as JSON.
const stagesNote = "weft.dev/drains"

// Guards implements [drain.Kubernetes]. The StatefulSet of the guards and their budget have the same
// name.
type Guards struct {
	*Client
	Namespace string
	Set       string // the StatefulSet of the guards, and the budget
	Targets   string // their DaemonSet
}

// NewGuards makes a client for the guards in the namespace of the pod that it runs in.
func NewGuards(set, targets string) (Guards, error) {
	api, err := InCluster()
	if err != nil {
		return Guards{}, err
	}
	namespace, err := os.ReadFile(filepath.Join(account, "namespace"))
	if err != nil {
		return Guards{}, fmt.Errorf("read the pod's namespace: %w", err)
	}
	return Guards{Client: api, Namespace: strings.TrimSpace(string(namespace)), Set: set, Targets: targets}, nil
}

// budgetObject is what Weft needs of a PodDisruptionBudget of policy/v1.
type budgetObject struct {
	Metadata struct {
		ResourceVersion string            `json:"resourceVersion"`
		Annotations     map[string]string `json:"annotations"`
	} `json:"metadata"`
	Spec struct {
		Selector selector `json:"selector"`
	} `json:"spec"`
}

type selector struct {
	MatchLabels      map[string]string `json:"matchLabels,omitempty"`
	MatchExpressions []expression      `json:"matchExpressions"`
}

// expression is a LabelSelectorRequirement.
type expression struct {
	Key      string   `json:"key"`
	Operator string   `json:"operator"`
	Values   []string `json:"values"`
}

// scaleObject is what Weft needs of a Scale of autoscaling/v1.
type scaleObject struct {
	Spec struct {
		Replicas int `json:"replicas"`
	} `json:"spec"`
}

// daemonSetObject is what Weft needs of a DaemonSet of apps/v1.
type daemonSetObject struct {
	Metadata struct {
		Generation int `json:"generation"`
	} `json:"metadata"`
	Spec struct {
		Template struct {
			Spec struct {
				NodeSelector map[string]string `json:"nodeSelector"`
			} `json:"spec"`
		} `json:"template"`
	} `json:"spec"`
	Status struct {
		Observed int `json:"observedGeneration"`
		Desired  int `json:"desiredNumberScheduled"`
	} `json:"status"`
}

// list is one of objects.
type list struct {
	Items []struct {
		Metadata struct {
			Name    string `json:"name"`
			UID     string `json:"uid"`
			Deleted string `json:"deletionTimestamp"`
		} `json:"metadata"`
		Status struct {
			Phase string `json:"phase"`
		} `json:"status"`
	} `json:"items"`
}

func (g Guards) apps(kind, name string) string {
	return "/apis/apps/v1/namespaces/" + url.PathEscape(g.Namespace) + "/" + kind + "/" + url.PathEscape(name)
}

func (g Guards) budget() string {
	return "/apis/policy/v1/namespaces/" + url.PathEscape(g.Namespace) + "/poddisruptionbudgets/" + url.PathEscape(g.Set)
}

func (g Guards) pods(rest string) string {
	return "/api/v1/namespaces/" + url.PathEscape(g.Namespace) + "/pods" + rest
}

// Guards implements drain.Kubernetes.
func (g Guards) Guards(ctx context.Context) (drain.Guards, error) {
	var budget budgetObject
	if err := g.get(ctx, g.budget(), &budget); err != nil {
		return drain.Guards{}, fmt.Errorf("read PodDisruptionBudget %s/%s: %w", g.Namespace, g.Set, err)
	}
	var scale scaleObject
	if err := g.get(ctx, g.apps("statefulsets", g.Set)+"/scale", &scale); err != nil {
		return drain.Guards{}, fmt.Errorf("read the scale of StatefulSet %s/%s: %w", g.Namespace, g.Set, err)
	}
	var targets daemonSetObject
	if err := g.get(ctx, g.apps("daemonsets", g.Targets), &targets); err != nil {
		return drain.Guards{}, fmt.Errorf("read DaemonSet %s/%s: %w", g.Namespace, g.Targets, err)
	}
	k := drain.Guards{
		Version: budget.Metadata.ResourceVersion, Stages: map[string]drain.Stage{},
		Nodes: targets.Status.Desired, Replicas: scale.Spec.Replicas, On: map[string][]drain.Guard{},
	}
	if targets.Status.Observed != targets.Metadata.Generation {
		k.Nodes = k.Replicas // the number is of another generation, or none yet
	}
	if text := budget.Metadata.Annotations[stagesNote]; text != "" {
		if err := json.Unmarshal([]byte(text), &k.Stages); err != nil {
			return drain.Guards{}, fmt.Errorf("read annotation %s of PodDisruptionBudget %s/%s: %w", stagesNote, g.Namespace, g.Set, err)
		}
	}
	for _, e := range budget.Spec.Selector.MatchExpressions {
		if e.Key == podName && e.Operator == "NotIn" {
			k.Permitted = append(k.Permitted, e.Values...)
		}
	}
	var cordoned list
	query := url.Values{"fieldSelector": {"spec.unschedulable=true"}, "labelSelector": {labels(targets.Spec.Template.Spec.NodeSelector)}}
	if err := g.get(ctx, "/api/v1/nodes?"+query.Encode(), &cordoned); err != nil {
		return drain.Guards{}, fmt.Errorf("list cordoned nodes: %w", err)
	}
	for _, o := range cordoned.Items {
		k.Cordoned = append(k.Cordoned, o.Metadata.Name)
	}
	var err error
	if k.Former, err = g.former(ctx, k, labels(targets.Spec.Template.Spec.NodeSelector)); err != nil {
		return drain.Guards{}, err
	}
	for _, node := range slices.Concat(k.Cordoned, slices.Collect(maps.Keys(k.Stages))) {
		all, err := g.on(ctx, node, labels(budget.Spec.Selector.MatchLabels))
		if err != nil {
			return drain.Guards{}, err
		}
		k.On[node] = all
	}
	return k, nil
}

// former is the nodes with a stage that a selector of nodes does not select, or that are not there.
func (g Guards) former(ctx context.Context, k drain.Guards, selector string) (all []string, err error) {
	for _, node := range slices.Sorted(maps.Keys(k.Stages)) {
		if slices.Contains(k.Cordoned, node) {
			continue
		}
		var same list
		query := url.Values{"fieldSelector": {"metadata.name=" + node}, "labelSelector": {selector}}
		if err := g.get(ctx, "/api/v1/nodes?"+query.Encode(), &same); err != nil {
			return nil, fmt.Errorf("look up node %s: %w", node, err)
		}
		if len(same.Items) == 0 {
			all = append(all, node)
		}
	}
	return all, nil
}

// labels is a label selector.
func labels(all map[string]string) string {
	var terms []string
	for k, v := range all {
		terms = append(terms, k+"="+v)
	}
	slices.Sort(terms)
	return strings.Join(terms, ",")
}

// on lists the guards on a node, without those that are ending.
func (g Guards) on(ctx context.Context, node, selector string) ([]drain.Guard, error) {
	var pods list
	query := url.Values{"fieldSelector": {"spec.nodeName=" + node}, "labelSelector": {selector}}
	if err := g.get(ctx, g.pods("?"+query.Encode()), &pods); err != nil {
		return nil, fmt.Errorf("list guards on node %s: %w", node, err)
	}
	var all []drain.Guard
	for _, o := range pods.Items {
		if o.Metadata.Deleted == "" && o.Status.Phase != "Failed" && o.Status.Phase != "Succeeded" {
			all = append(all, drain.Guard{Pod: o.Metadata.Name, UID: o.Metadata.UID})
		}
	}
	return all, nil
}

// Permit implements drain.Kubernetes.
func (g Guards) Permit(ctx context.Context, version string, pods []string, stages map[string]drain.Stage) error {
	text, err := json.Marshal(stages)
	if err != nil {
		return err
	}
	but := []expression{} // a merge replaces a list as a whole
	if len(pods) > 0 {
		but = append(but, expression{podName, "NotIn", pods})
	}
	err = g.patch(ctx, g.budget(), map[string]any{
		"metadata": map[string]any{"resourceVersion": version, "annotations": map[string]string{stagesNote: string(text)}},
		"spec":     map[string]any{"selector": selector{MatchExpressions: but}},
	})
	if refusedWith(err, http.StatusConflict) {
		return drain.ErrChanged
	}
	if err != nil {
		return fmt.Errorf("write PodDisruptionBudget %s/%s: %w", g.Namespace, g.Set, err)
	}
	return nil
}

// Scale implements drain.Kubernetes.
func (g Guards) Scale(ctx context.Context, replicas int) error {
	if err := g.patch(ctx, g.apps("statefulsets", g.Set)+"/scale", map[string]any{"spec": map[string]any{"replicas": replicas}}); err != nil {
		return fmt.Errorf("scale StatefulSet %s/%s: %w", g.Namespace, g.Set, err)
	}
	return nil
}

func (g Guards) patch(ctx context.Context, path string, change map[string]any) error {
	body, err := json.Marshal(change)
	if err != nil {
		return err
	}
	return g.call(ctx, http.MethodPatch, path, body, nil)
}

// Tell implements drain.Kubernetes.
func (g Guards) Tell(ctx context.Context, guard drain.Guard, name, reason, message string) error {
	err := g.post(ctx, reference{"v1", "Pod", g.Namespace, guard.Pod, guard.UID}, name, "Warning", reason, message, time.Now())
	if err != nil {
		return fmt.Errorf("post event %s of pod %s/%s: %w", reason, g.Namespace, guard.Pod, err)
	}
	return nil
}
