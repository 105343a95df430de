// SPDX-License-Identifier: Apache-2.0

// Package kubeapi asks Kubernetes' API, as a pod: it reads a Node object, posts events, asks whose token
// somebody shows, publishes a value in a ConfigMap, and changes the budget of the guards of storage
// nodes. Weft's own programs need no more of Kubernetes; a client library would be larger than they are.
package kubeapi

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"time"
)

// account is where a pod finds its token and the API server's CA certificate.
const account = "/var/run/secrets/kubernetes.io/serviceaccount"

// answerTime limits one request.
const answerTime = 10 * time.Second

// answerSize limits how much of an answer is read; a Node object has some kilobytes for each image
// and volume on it.
const answerSize = 16 << 20

// Client talks to an API server. It may be used by several goroutines.
type Client struct {
	server string // https://HOST:PORT
	dir    string // directory of token and ca.crt
	http   http.Client
}

// InCluster makes a client from what every pod is given. It makes no request yet.
func InCluster() (*Client, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return nil, errors.New("this is not a Kubernetes pod: KUBERNETES_SERVICE_HOST is not set")
	}
	return newClient("https://"+net.JoinHostPort(host, port), account)
}

func newClient(server, dir string) (*Client, error) {
	pem, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil {
		return nil, fmt.Errorf("read the API server's authority: %w", err)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("read the API server's authority: no certificate in %s", filepath.Join(dir, "ca.crt"))
	}
	return &Client{server: server, dir: dir, http: http.Client{
		Timeout: answerTime,
		// Not through a proxy for outside traffic: the token is in the request.
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}},
	}}, nil
}

// Node is the part of a Node object that Weft uses.
type Node struct {
	Labels   map[string]string
	Leaving  bool     // it is being drained, shut down or removed
	Attached []string // unique names of the volumes attached to it
}

// AttachedOf returns a driver's volumes that are attached.
func (n *Node) AttachedOf(driver string) []string {
	var all []string
	for _, name := range n.Attached {
		if id, ok := strings.CutPrefix(name, "kubernetes.io/csi/"+driver+"^"); ok {
			all = append(all, id)
		}
	}
	return all
}

// leavingTaints are set before a node goes away: by a drain, and by cluster autoscalers. The
// kubelet's own shutdown makes the node not ready, with a message.
var leavingTaints = map[string]bool{
	"node.kubernetes.io/unschedulable":  true,
	"node.kubernetes.io/out-of-service": true,
	"ToBeDeletedByClusterAutoscaler":    true,
	"karpenter.sh/disrupted":            true,
}

const shuttingDown = "node is shutting down"

// nodeObject is a Node of API v1.
type nodeObject struct {
	Metadata struct {
		Labels map[string]string `json:"labels"`
	} `json:"metadata"`
	Spec struct {
		Unschedulable bool `json:"unschedulable"`
		Taints        []struct {
			Key string `json:"key"`
		} `json:"taints"`
	} `json:"spec"`
	Status struct {
		VolumesAttached []struct {
			Name string `json:"name"`
		} `json:"volumesAttached"`
		Conditions []struct {
			Type    string `json:"type"`
			Status  string `json:"status"`
			Message string `json:"message"`
		} `json:"conditions"`
	} `json:"status"`
}

// Node reads a node.
func (c *Client) Node(ctx context.Context, name string) (*Node, error) {
	var o nodeObject
	if err := c.get(ctx, "/api/v1/nodes/"+url.PathEscape(name), &o); err != nil {
		return nil, fmt.Errorf("ask Kubernetes for node %s: %w", name, err)
	}
	n := &Node{Labels: o.Metadata.Labels, Leaving: o.Spec.Unschedulable}
	for _, t := range o.Spec.Taints {
		n.Leaving = n.Leaving || leavingTaints[t.Key]
	}
	for _, c := range o.Status.Conditions {
		if c.Type == "Ready" && c.Status == "False" && strings.Contains(c.Message, shuttingDown) {
			n.Leaving = true
		}
	}
	for _, v := range o.Status.VolumesAttached {
		n.Attached = append(n.Attached, v.Name)
	}
	return n, nil
}

func (c *Client) get(ctx context.Context, path string, to any) error {
	return c.call(ctx, http.MethodGet, path, nil, to)
}

// refusal is an answer other than success.
type refusal struct {
	code int
	text string
}

func (r *refusal) Error() string { return r.text }

func refusedWith(err error, code int) bool {
	r, ok := errors.AsType[*refusal](err)
	return ok && r.code == code
}

// call sends a request and decodes the answer into to, unless to is nil.
func (c *Client) call(ctx context.Context, method, path string, body []byte, to any) error {
	// Read each time: a token lasts an hour.
	token, err := os.ReadFile(filepath.Join(c.dir, "token"))
	if err != nil {
		return fmt.Errorf("read the token: %w", err)
	}
	request, err := http.NewRequestWithContext(ctx, method, c.server+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	request.Header.Set("Accept", "application/json")
	switch {
	case method == http.MethodPatch:
		request.Header.Set("Content-Type", "application/merge-patch+json")
	case body != nil:
		request.Header.Set("Content-Type", "application/json")
	}
	answer, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	said, err := io.ReadAll(io.LimitReader(answer.Body, answerSize))
	if err != nil {
		return err
	}
	if answer.StatusCode/100 != 2 {
		var why struct{ Message string }
		_ = json.Unmarshal(said, &why) // if it is no Status object, the code has to suffice
		return &refusal{answer.StatusCode, strings.TrimSpace(answer.Status + " " + why.Message)}
	}
	if to == nil {
		return nil
	}
	return json.Unmarshal(said, to)
}
