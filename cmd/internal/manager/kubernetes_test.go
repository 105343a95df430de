// SPDX-License-Identifier: Apache-2.0

package manager

import (
	"context"
	"errors"
	"slices"
	"testing"

	"weft.dev/weft/cmd/internal/kubeapi"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/volmgr"
)

// A pod joins in the roles of its account, on the node that Kubernetes names; other accounts do not.
func TestWhichAccountsMayJoin(t *testing.T) {
	o := Kubernetes{audience: "weft", accounts: []string{"weft-system/weft-node=initiator,csi", "weft-system/weft-target=target"}}
	accounts, err := o.parse()
	if err != nil {
		t.Fatal(err)
	}
	down := errors.New("connection refused")
	vouch := o.voucher(accounts, func(_ context.Context, token, audience string) (kubeapi.Account, error) {
		switch {
		case audience != "weft":
			t.Errorf("asked about the audience %q", audience)
		case token == "bad":
			return kubeapi.Account{}, kubeapi.ErrNoAccount
		case token == "down":
			return kubeapi.Account{}, down
		}
		return kubeapi.Account{Namespace: "weft-system", Name: token, Node: "n1"}, nil
	})
	node, roles, err := vouch(t.Context(), "weft-node")
	if want := []access.Role{access.Initiator, access.CSI}; node != "n1" || !slices.Equal(roles, want) || err != nil {
		t.Errorf("the node's account: %s, %v, %v; want n1, %v", node, roles, err, want)
	}
	for token, want := range map[string]error{"bad": volmgr.ErrNotVouched, "default": volmgr.ErrNotVouched, "down": down} {
		if node, roles, err := vouch(t.Context(), token); !errors.Is(err, want) || errors.Is(err, volmgr.ErrNotVouched) != (want == volmgr.ErrNotVouched) {
			t.Errorf("%s: %s, %v, %v; want %v", token, node, roles, err, want)
		}
	}
}

func TestAccountsThatMakeNoSenseAreRefused(t *testing.T) {
	good := []string{"weft-system/weft-node=csi"}
	for _, o := range []Kubernetes{
		{accounts: good},
		{audience: "weft"},
		{audience: "weft", accounts: good, publish: "weft-authority"},
		{audience: "weft", accounts: []string{"weft-node=csi"}},
		{audience: "weft", accounts: []string{"weft-system/weft-node"}},
		{audience: "weft", accounts: []string{"weft-system/weft-node=csi", "weft-system/weft-node=target"}},
		{audience: "weft", accounts: []string{"weft-system/weft-volmgr=manager"}},
		{audience: "weft", accounts: []string{"weft-system/weft-node=admin"}},
	} {
		if accounts, err := o.parse(); err == nil {
			t.Errorf("%+v: %v, want an error", o, accounts)
		}
	}
}
