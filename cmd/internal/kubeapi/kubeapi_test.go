// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"encoding/pem"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// serve is an API server that has one answer for node n1, and a client of it.
func serve(t *testing.T, code int, answer string) *Client {
	t.Helper()
	return serveBy(t, func(w http.ResponseWriter, r *http.Request) {
		switch {
		case r.Method != http.MethodGet || r.URL.Path != "/api/v1/nodes/n1":
			w.WriteHeader(http.StatusNotFound)
		default:
			w.WriteHeader(code)
			w.Write([]byte(answer))
		}
	})
}

// serveBy is an API server that answers those who have the token.
func serveBy(t *testing.T, answer http.HandlerFunc) *Client {
	t.Helper()
	server := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "Bearer secret" {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		answer(w, r)
	}))
	t.Cleanup(server.Close)
	dir := t.TempDir()
	authority := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})
	for name, content := range map[string]string{"ca.crt": string(authority), "token": "secret\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	c, err := newClient(server.URL, dir)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestNodeIsReadFromTheAPI(t *testing.T) {
	c := serve(t, http.StatusOK, `{"kind":"Node","metadata":{"name":"n1","labels":{"topology.kubernetes.io/zone":"z1"}},
		"status":{"volumesAttached":[{"name":"kubernetes.io/csi/csi.weft.dev^v1"},{"name":"kubernetes.io/csi/other^v2"}],
		"conditions":[{"type":"Ready","status":"True","message":"kubelet is posting ready status"}]}}`)
	n, err := c.Node(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"topology.kubernetes.io/zone": "z1"}, n.Labels); diff != "" {
		t.Errorf("labels (-want +got):\n%s", diff)
	}
	if n.Leaving {
		t.Error("a node that stays is said to be leaving")
	}
	if diff := cmp.Diff([]string{"v1"}, n.AttachedOf("csi.weft.dev")); diff != "" {
		t.Errorf("attached (-want +got):\n%s", diff)
	}
}

func TestANodeThatIsLeavingIsKnown(t *testing.T) {
	for what, object := range map[string]string{
		"cordoned":           `{"spec":{"unschedulable":true}}`,
		"scaled down":        `{"spec":{"taints":[{"key":"a"},{"key":"ToBeDeletedByClusterAutoscaler"}]}}`,
		"shutting down":      `{"status":{"conditions":[{"type":"Ready","status":"False","message":"node is shutting down"}]}}`,
		"out of service":     `{"spec":{"taints":[{"key":"node.kubernetes.io/out-of-service"}]}}`,
		"taken by karpenter": `{"spec":{"taints":[{"key":"karpenter.sh/disrupted"}]}}`,
	} {
		n, err := serve(t, http.StatusOK, object).Node(t.Context(), "n1")
		if err != nil || !n.Leaving {
			t.Errorf("%s: %+v, %v, want that it is leaving", what, n, err)
		}
	}
	for what, object := range map[string]string{
		"tainted by its owner": `{"spec":{"taints":[{"key":"nvidia.com/gpu"}]}}`,
		"sick":                 `{"status":{"conditions":[{"type":"Ready","status":"False","message":"container runtime is down"}]}}`,
	} {
		n, err := serve(t, http.StatusOK, object).Node(t.Context(), "n1")
		if err != nil || n.Leaving {
			t.Errorf("%s: %+v, %v, want that it stays", what, n, err)
		}
	}
}

func TestARefusalSaysWhyAndNoSecret(t *testing.T) {
	c := serve(t, http.StatusForbidden, `{"kind":"Status","message":"nodes \"n1\" is forbidden"}`)
	_, err := c.Node(t.Context(), "n1")
	if err == nil || !strings.Contains(err.Error(), "403") || !strings.Contains(err.Error(), `nodes "n1" is forbidden`) {
		t.Errorf("Node = %v, want the code and the server's words", err)
	}
	if strings.Contains(err.Error(), "secret") {
		t.Errorf("Node = %v, with the token in it", err)
	}
	if _, err := c.Node(t.Context(), "n2/../../secrets"); err == nil || !strings.Contains(err.Error(), "404") {
		t.Errorf("Node = %v for a name that is none, want 404", err)
	}
}

func TestAServerOfAnotherAuthorityIsNotAsked(t *testing.T) {
	c := serve(t, http.StatusOK, `{}`)
	other := httptest.NewTLSServer(http.NotFoundHandler())
	t.Cleanup(other.Close)
	// httptest's servers share a certificate, which is not for this name.
	c.server = strings.Replace(other.URL, "127.0.0.1", "localhost", 1)
	if _, err := c.Node(t.Context(), "n1"); err == nil || !strings.Contains(err.Error(), "certificate") {
		t.Errorf("Node = %v, want that the certificate is refused", err)
	}
}

func TestOutsideOfAPodThereIsNoClient(t *testing.T) {
	t.Setenv("KUBERNETES_SERVICE_HOST", "")
	if _, err := InCluster(); err == nil || !strings.Contains(err.Error(), "not a Kubernetes pod") {
		t.Errorf("InCluster = %v, want that this is no pod", err)
	}
}
