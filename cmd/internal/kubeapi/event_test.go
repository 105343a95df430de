// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"encoding/json"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/csi"
)

func TestAnEventIsPostedOnce(t *testing.T) {
	posted := map[string]map[string]any{}
	c := serveBy(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodPost || r.URL.Path != "/api/v1/namespaces/team/events" || r.Header.Get("Content-Type") != "application/json" {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		var event map[string]any
		if err := json.NewDecoder(r.Body).Decode(&event); err != nil {
			t.Error(err)
		}
		name := event["metadata"].(map[string]any)["name"].(string)
		if posted[name] != nil {
			w.WriteHeader(http.StatusConflict)
			return
		}
		posted[name] = event
		w.WriteHeader(http.StatusCreated)
	})
	e := csi.ClaimEvent{
		Namespace: "team", Claim: "data", UID: "u1", Name: "data.weft-7", Time: time.Date(2026, 11, 21, 12, 0, 0, 5, time.UTC),
		Warning: true, Reason: "CopyLost", Message: strings.Repeat("x", 2000),
	}
	for range 2 {
		if err := c.PostClaimEvent(t.Context(), e); err != nil {
			t.Fatal(err)
		}
	}
	want := map[string]any{
		"apiVersion": "v1", "kind": "Event", "metadata": map[string]any{"name": "data.weft-7", "namespace": "team"},
		"involvedObject": map[string]any{"apiVersion": "v1", "kind": "PersistentVolumeClaim", "namespace": "team", "name": "data", "uid": "u1"},
		"type":           "Warning", "reason": "CopyLost", "message": strings.Repeat("x", 1024),
		"source": map[string]any{"component": "csi.weft.dev"}, "count": 1.0,
		"firstTimestamp": "2026-11-21T12:00:00Z", "lastTimestamp": "2026-11-21T12:00:00Z",
	}
	if diff := cmp.Diff(want, posted["data.weft-7"]); diff != "" {
		t.Errorf("posted (-want +got):\n%s", diff)
	}
}

func TestAnEventThatIsRefusedSaysWhy(t *testing.T) {
	c := serveBy(t, func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusForbidden)
		w.Write([]byte(`{"kind":"Status","message":"events is forbidden"}`))
	})
	err := c.PostClaimEvent(t.Context(), csi.ClaimEvent{Namespace: "team", Claim: "data", Reason: "CopyLost"})
	if err == nil || !strings.Contains(err.Error(), "team/data") || !strings.Contains(err.Error(), "events is forbidden") {
		t.Errorf("PostClaimEvent = %v, want the claim and the server's words", err)
	}
}
