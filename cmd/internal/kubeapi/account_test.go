// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"
)

// reviewer is an API server that answers reviews of the token "of a pod" with a status.
func reviewer(t *testing.T, status string) *Client {
	t.Helper()
	return serveBy(t, func(w http.ResponseWriter, r *http.Request) {
		var asked tokenReview
		if err := json.NewDecoder(r.Body).Decode(&asked); err != nil || r.Method != http.MethodPost || r.URL.Path != "/apis/authentication.k8s.io/v1/tokenreviews" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if asked.Spec.Token != "of a pod" || len(asked.Spec.Audiences) != 1 || asked.Spec.Audiences[0] != "weft" {
			t.Errorf("asked about %+v", asked.Spec)
		}
		w.WriteHeader(http.StatusCreated)
		w.Write([]byte(`{"kind":"TokenReview","status":` + status + `}`))
	})
}

// A token counts only if Kubernetes says that it is good, for Weft, and bound to a pod on a node.
func TestWhoseTokenItIs(t *testing.T) {
	const extra = `"extra":{"authentication.kubernetes.io/pod-name":["weft-target-x"],"authentication.kubernetes.io/node-name":["n1"]}`
	const user = `"user":{"username":"system:serviceaccount:weft-system:weft-target",` + extra + `}`
	got, err := reviewer(t, `{"authenticated":true,"audiences":["weft"],`+user+`}`).ReviewToken(t.Context(), "of a pod", "weft")
	if want := (Account{"weft-system", "weft-target", "n1"}); err != nil || got != want {
		t.Errorf("ReviewToken = %+v, %v; want %+v", got, err, want)
	}
	for what, status := range map[string]string{
		"a token that is not good":                     `{"authenticated":false,"audiences":["weft"],` + user + `}`,
		"a token for another audience":                 `{"authenticated":true,"audiences":["vault"],` + user + `}`,
		"a server that knows no audiences":             `{"authenticated":true,` + user + `}`,
		"a person":                                     `{"authenticated":true,"audiences":["weft"],"user":{"username":"ada:admin",` + extra + `}}`,
		"a token that is bound to no pod":              `{"authenticated":true,"audiences":["weft"],"user":{"username":"system:serviceaccount:weft-system:weft-target"}}`,
		"a token of a server that does not name nodes": `{"authenticated":true,"audiences":["weft"],"user":{"username":"system:serviceaccount:weft-system:weft-target","extra":{"authentication.kubernetes.io/pod-name":["x"]}}}`,
	} {
		if got, err := reviewer(t, status).ReviewToken(t.Context(), "of a pod", "weft"); !errors.Is(err, ErrNoAccount) {
			t.Errorf("%s: %+v, %v; want %v", what, got, err, ErrNoAccount)
		}
	}
	forbidden := serveBy(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusForbidden) })
	if _, err := forbidden.ReviewToken(t.Context(), "of a pod", "weft"); err == nil || errors.Is(err, ErrNoAccount) {
		t.Errorf("a manager that may not ask: %v", err)
	}
}

// A ConfigMap is made once, and written only when the value changes.
func TestAValueIsPublished(t *testing.T) {
	var have *configMap
	writes := 0
	c := serveBy(t, func(w http.ResponseWriter, r *http.Request) {
		const all = "/api/v1/namespaces/weft-system/configmaps"
		asked := r.Method + " " + strings.TrimPrefix(r.URL.Path, all)
		switch {
		case asked == "GET /weft-authority" && have == nil:
			w.WriteHeader(http.StatusNotFound)
			return
		case asked == "GET /weft-authority":
		case asked == "POST " && have == nil:
			have, writes = &configMap{}, writes+1
			if err := json.NewDecoder(r.Body).Decode(have); err != nil {
				t.Error(err)
			}
		case asked == "PATCH /weft-authority" && have != nil && r.Header.Get("Content-Type") == "application/merge-patch+json":
			writes++
			if err := json.NewDecoder(r.Body).Decode(have); err != nil { // as a merge: what it lacks stays
				t.Error(err)
			}
		default:
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		if err := json.NewEncoder(w).Encode(have); err != nil {
			t.Error(err)
		}
	})
	for _, value := range []string{"one", "one", "two"} {
		if err := c.Publish(t.Context(), "weft-system", "weft-authority", "authority", value); err != nil {
			t.Fatal(err)
		}
	}
	if have == nil || have.Metadata != (metadata{"weft-authority", "weft-system"}) || have.Data["authority"] != "two" || writes != 2 {
		t.Errorf("after %d writes: %+v; want two writes", writes, have)
	}
}
