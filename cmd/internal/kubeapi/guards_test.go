// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/csi/drain"
)

// merge applies a JSON merge patch (RFC 7386).
func merge(to map[string]any, patch map[string]any) {
	for k, v := range patch {
		inner, isMap := v.(map[string]any)
		old, wasMap := to[k].(map[string]any)
		switch {
		case v == nil:
			delete(to, k)
		case isMap && wasMap:
			merge(old, inner)
		default:
			to[k] = v
		}
	}
}

// cluster is an API server with the objects of guards, by path.
type cluster map[string]map[string]any

func newCluster(t *testing.T) (cluster, Guards) {
	t.Helper()
	c := cluster{}
	for path, text := range map[string]string{
		"/apis/policy/v1/namespaces/weft-system/poddisruptionbudgets/weft-guard":                        `{"metadata":{"resourceVersion":"7"},"spec":{"maxUnavailable":0,"selector":{"matchLabels":{"component":"guard","name":"weft"}}}}`,
		"/apis/apps/v1/namespaces/weft-system/statefulsets/weft-guard/scale":                            `{"spec":{"replicas":0}}`,
		"/apis/apps/v1/namespaces/weft-system/daemonsets/weft-target":                                   `{"spec":{"template":{"spec":{"nodeSelector":{"weft.dev/storage":"true"}}}},"metadata":{"generation":2},"status":{"observedGeneration":2,"desiredNumberScheduled":3}}`,
		"/api/v1/nodes?fieldSelector=spec.unschedulable%3Dtrue&labelSelector=weft.dev%2Fstorage%3Dtrue": `{"items":[{"metadata":{"name":"t1"}}]}`,
		"/api/v1/nodes?fieldSelector=metadata.name%3Dt2&labelSelector=weft.dev%2Fstorage%3Dtrue":        `{"items":[{"metadata":{"name":"t2"}}]}`,
		"/api/v1/nodes?fieldSelector=metadata.name%3Dt3&labelSelector=weft.dev%2Fstorage%3Dtrue":        `{"items":[]}`,
		"/api/v1/namespaces/weft-system/pods?fieldSelector=spec.nodeName%3Dt1&labelSelector=component%3Dguard%2Cname%3Dweft": `{"items":[
			{"metadata":{"name":"weft-guard-0","uid":"u0"},"status":{"phase":"Running"}},
			{"metadata":{"name":"weft-guard-1","uid":"u1","deletionTimestamp":"2026-11-26T00:00:00Z"},"status":{"phase":"Running"}},
			{"metadata":{"name":"weft-guard-2","uid":"u2"},"status":{"phase":"Failed"}}]}`,
		"/api/v1/namespaces/weft-system/pods?fieldSelector=spec.nodeName%3Dt2&labelSelector=component%3Dguard%2Cname%3Dweft": `{"items":[]}`,
		"/api/v1/namespaces/weft-system/pods?fieldSelector=spec.nodeName%3Dt3&labelSelector=component%3Dguard%2Cname%3Dweft": `{"items":[]}`,
	} {
		object := map[string]any{}
		if err := json.Unmarshal([]byte(text), &object); err != nil {
			t.Fatal(err)
		}
		c[path] = object
	}
	api := serveBy(t, func(w http.ResponseWriter, r *http.Request) {
		object, known := c[r.URL.RequestURI()]
		if !known {
			w.WriteHeader(http.StatusNotFound)
			return
		}
		if r.Method == http.MethodPatch && !c.patched(w, r, object) {
			return
		}
		if err := json.NewEncoder(w).Encode(object); err != nil {
			t.Error(err)
		}
	})
	return c, Guards{Client: api, Namespace: "weft-system", Set: "weft-guard", Targets: "weft-target"}
}

// patched changes an object; not one of another version than a patch names.
func (c cluster) patched(w http.ResponseWriter, r *http.Request, object map[string]any) bool {
	var patch map[string]any
	if err := json.NewDecoder(r.Body).Decode(&patch); err != nil || r.Header.Get("Content-Type") != "application/merge-patch+json" {
		w.WriteHeader(http.StatusBadRequest)
		return false
	}
	if have, ok := object["metadata"].(map[string]any); ok {
		in, _ := patch["metadata"].(map[string]any)
		named, _ := in["resourceVersion"].(string)
		if named != "" && named != have["resourceVersion"] {
			w.WriteHeader(http.StatusConflict)
			return false
		}
		n, _ := strconv.Atoi(have["resourceVersion"].(string))
		merge(object, patch)
		have["resourceVersion"] = strconv.Itoa(n + 1)
		return true
	}
	merge(object, patch)
	return true
}

func TestGuardsAreReadAndPermitted(t *testing.T) {
	c, g := newCluster(t)
	k, err := g.Guards(t.Context())
	want := drain.Guards{
		Version: "7", Stages: map[string]drain.Stage{}, Nodes: 3, Cordoned: []string{"t1"},
		On: map[string][]drain.Guard{"t1": {{Pod: "weft-guard-0", UID: "u0"}}},
	}
	if diff := cmp.Diff(want, k); err != nil || diff != "" {
		t.Fatalf("Guards: %v\n%s", err, diff)
	}
	stages := map[string]drain.Stage{"t1": drain.MayLeave, "t2": drain.Left, "t3": drain.Left}
	if err := errors.Join(g.Permit(t.Context(), "7", []string{"weft-guard-0"}, stages), g.Scale(t.Context(), 3)); err != nil {
		t.Fatal(err)
	}
	want.Version, want.Stages, want.Permitted, want.Replicas, want.On["t2"], want.On["t3"] = "8", stages, []string{"weft-guard-0"}, 3, nil, nil
	want.Former = []string{"t3"}
	k, err = g.Guards(t.Context())
	if diff := cmp.Diff(want, k); err != nil || diff != "" {
		t.Fatalf("Guards after that: %v\n%s", err, diff)
	}
	spec, err := json.Marshal(c["/apis/policy/v1/namespaces/weft-system/poddisruptionbudgets/weft-guard"]["spec"])
	if want := `{"maxUnavailable":0,"selector":{"matchExpressions":[{"key":"statefulset.kubernetes.io/pod-name","operator":"NotIn","values":["weft-guard-0"]}],"matchLabels":{"component":"guard","name":"weft"}}}`; err != nil || string(spec) != want {
		t.Errorf("the budget is %s, %v; want %s", spec, err, want)
	}
	if err := g.Permit(t.Context(), "8", nil, map[string]drain.Stage{}); err != nil {
		t.Fatal(err)
	}
	if k, err = g.Guards(t.Context()); err != nil || len(k.Permitted)+len(k.Stages) != 0 {
		t.Errorf("no guard is permitted, but %v and %v are noted, %v", k.Permitted, k.Stages, err)
	}
}

func TestTheBudgetIsChangedOnlyAsRead(t *testing.T) {
	_, g := newCluster(t)
	if err := g.Permit(t.Context(), "6", []string{"weft-guard-0"}, nil); !errors.Is(err, drain.ErrChanged) {
		t.Errorf("with an old version: %v, want %v", err, drain.ErrChanged)
	}
}

func TestWhatKubernetesRefusesIsNamed(t *testing.T) {
	api := serveBy(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	g := Guards{Client: api, Namespace: "weft-system", Set: "weft-guard", Targets: "weft-target"}
	if _, err := g.Guards(t.Context()); err == nil || !strings.Contains(err.Error(), "read PodDisruptionBudget weft-system/weft-guard: 403") {
		t.Error(err)
	}
}
