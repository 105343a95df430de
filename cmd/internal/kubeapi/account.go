// SPDX-License-Identifier: Apache-2.0

package kubeapi

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
)

// Account is the service account whose token somebody shows, and the node that its pod runs on.
type Account struct {
	Namespace, Name string
	Node            string
}

// ErrNoAccount is returned by ReviewToken for what is not the token of a pod, for an audience.
var ErrNoAccount = errors.New("not a token of a pod's service account that Kubernetes accepts")

// The claims of a token that say what it is bound to. Kubernetes has set the node since 1.30.
const (
	podClaim  = "authentication.kubernetes.io/pod-name"
	nodeClaim = "authentication.kubernetes.io/node-name"
)

// tokenReview is a TokenReview of authentication.k8s.io/v1.
type tokenReview struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
	Spec       struct {
		Token     string   `json:"token"`
		Audiences []string `json:"audiences"`
	} `json:"spec"`
	Status struct {
		Authenticated bool     `json:"authenticated"`
		Audiences     []string `json:"audiences"`
		User          struct {
			Username string              `json:"username"`
			Extra    map[string][]string `json:"extra"`
		} `json:"user"`
	} `json:"status"`
}

// ReviewToken asks the API server whose token this is. The token must be bound to a pod, and made
// for an audience: one that a pod uses for something else is not accepted.
func (c *Client) ReviewToken(ctx context.Context, token, audience string) (Account, error) {
	r := tokenReview{APIVersion: "authentication.k8s.io/v1", Kind: "TokenReview"}
	r.Spec.Token, r.Spec.Audiences = token, []string{audience}
	body, err := json.Marshal(r)
	if err != nil {
		return Account{}, err
	}
	var answer tokenReview
	if err := c.call(ctx, http.MethodPost, "/apis/authentication.k8s.io/v1/tokenreviews", body, &answer); err != nil {
		return Account{}, fmt.Errorf("ask Kubernetes about a token: %w", err)
	}
	return answer.account(audience)
}

// account is whose token was reviewed. An API server that knows no audiences returns none.
func (r tokenReview) account(audience string) (Account, error) {
	user := r.Status.User
	namespace, name, ok := strings.Cut(strings.TrimPrefix(user.Username, "system:serviceaccount:"), ":")
	if !r.Status.Authenticated || !slices.Contains(r.Status.Audiences, audience) || !ok || !strings.HasPrefix(user.Username, "system:serviceaccount:") {
		return Account{}, ErrNoAccount
	}
	pod, node := user.Extra[podClaim], user.Extra[nodeClaim]
	if len(pod) != 1 || len(node) != 1 || node[0] == "" {
		return Account{}, fmt.Errorf("%w: it is bound to no pod and node", ErrNoAccount)
	}
	return Account{Namespace: namespace, Name: name, Node: node[0]}, nil
}

// configMap is what Weft needs of a ConfigMap of API v1.
type configMap struct {
	APIVersion string            `json:"apiVersion"`
	Kind       string            `json:"kind"`
	Metadata   metadata          `json:"metadata"`
	Data       map[string]string `json:"data"`
}

// Publish sets a key of a ConfigMap, which it makes if there is none.
func (c *Client) Publish(ctx context.Context, namespace, name, key, value string) error {
	if err := c.publish(ctx, namespace, name, key, value); err != nil {
		return fmt.Errorf("write ConfigMap %s/%s: %w", namespace, name, err)
	}
	return nil
}

func (c *Client) publish(ctx context.Context, namespace, name, key, value string) error {
	all := "/api/v1/namespaces/" + url.PathEscape(namespace) + "/configmaps"
	one := all + "/" + url.PathEscape(name)
	var have configMap
	err := c.get(ctx, one, &have)
	if refusedWith(err, http.StatusNotFound) {
		body, err := json.Marshal(configMap{"v1", "ConfigMap", metadata{name, namespace}, map[string]string{key: value}})
		if err != nil {
			return err
		}
		return c.call(ctx, http.MethodPost, all, body, nil)
	}
	if err != nil || have.Data[key] == value {
		return err
	}
	body, err := json.Marshal(map[string]any{"data": map[string]string{key: value}})
	if err != nil {
		return err
	}
	return c.call(ctx, http.MethodPatch, one, body, nil)
}
