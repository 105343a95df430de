// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/kubeapi"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/volmgr"
)

// Kubernetes says which pods of a Kubernetes cluster may join without a token of Weft's.
type Kubernetes struct {
	audience string
	accounts []string
	publish  string
}

// AddFlags declares the flags of o on a command.
func (o *Kubernetes) AddFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.audience, "trust-kubernetes", "", "let pods join with service account tokens for this `audience`; in a pod whose own account may create tokenreviews")
	f.StringArrayVar(&o.accounts, "kubernetes-account", nil, "`NAMESPACE/NAME=ROLE[,ROLE]`: a service account, and the roles in which the nodes of its pods may join: target, initiator, csi; may be repeated")
	f.StringVar(&o.publish, "publish-authority", "", "`NAMESPACE/NAME` of a ConfigMap in which pods find the authority of the cluster that they join")
}

// Apply sets what the flags say of a manager.
func (o *Kubernetes) Apply(c *Config) error {
	if o.audience == "" && len(o.accounts) == 0 && o.publish == "" {
		return nil
	}
	accounts, err := o.parse()
	if err != nil {
		return cli.UsageError{Err: err}
	}
	api, err := kubeapi.InCluster()
	if err != nil {
		return cli.UsageError{Err: fmt.Errorf("--trust-kubernetes: %w", err)}
	}
	c.Vouch = o.voucher(accounts, api.ReviewToken)
	if namespace, name, publishes := strings.Cut(o.publish, "/"); publishes {
		c.Publish = func(ctx context.Context, authorities string) error {
			return api.Publish(ctx, namespace, name, "authority", authorities)
		}
	}
	return nil
}

// voucher returns who may join, of those that review knows.
func (o *Kubernetes) voucher(accounts map[string][]access.Role, review func(ctx context.Context, token, audience string) (kubeapi.Account, error)) volmgr.Voucher {
	return func(ctx context.Context, token string) (node string, roles []access.Role, err error) {
		account, err := review(ctx, token, o.audience)
		if errors.Is(err, kubeapi.ErrNoAccount) {
			return "", nil, fmt.Errorf("%w: %w", volmgr.ErrNotVouched, err)
		}
		if err != nil {
			return "", nil, err
		}
		roles, known := accounts[account.Namespace+"/"+account.Name]
		if !known {
			return "", nil, fmt.Errorf("%w: account %s/%s is not known here", volmgr.ErrNotVouched, account.Namespace, account.Name)
		}
		return account.Node, roles, nil
	}
}

// parse returns the roles of each account.
func (o *Kubernetes) parse() (map[string][]access.Role, error) {
	if o.audience == "" || len(o.accounts) == 0 {
		return nil, errors.New("--trust-kubernetes and --kubernetes-account: give both")
	}
	if namespace, name, ok := strings.Cut(o.publish, "/"); o.publish != "" && (!ok || namespace == "" || name == "") {
		return nil, fmt.Errorf("--publish-authority %s: must be NAMESPACE/NAME", o.publish)
	}
	accounts := map[string][]access.Role{}
	for _, text := range o.accounts {
		account, roles, ok := strings.Cut(text, "=")
		namespace, name, named := strings.Cut(account, "/")
		if !ok || !named || namespace == "" || name == "" || accounts[account] != nil {
			return nil, fmt.Errorf("--kubernetes-account %s: must be NAMESPACE/NAME=ROLE[,ROLE], each account once", text)
		}
		for role := range strings.SplitSeq(roles, ",") {
			// A manager gets the authority's key, so it needs a token from an admin.
			if !slices.Contains([]access.Role{access.Target, access.Initiator, access.CSI}, access.Role(role)) {
				return nil, fmt.Errorf("--kubernetes-account %s: role %q: must be target, initiator or csi", text, role)
			}
			accounts[account] = append(accounts[account], access.Role(role))
		}
	}
	return accounts, nil
}
