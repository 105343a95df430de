// SPDX-License-Identifier: Apache-2.0

package testbed

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"google.golang.org/grpc/credentials"

	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/pki"
)

// This file makes members of a closed cluster, as its operator would.

// agentRoles are the roles of agents and their state directories, by the first letter of a machine.
var agentRoles = map[byte][2]string{'t': {"target", "/var/lib/weft/target"}, 'c': {"initiator", "/var/lib/weft/initiator"}}

// admit returns the flags with which a machine's daemon may talk to the others. A machine that is no
// member yet, or has lost its disk, gets a token.
func (b *Bed) admit(m *vm.Machine) []string {
	b.T.Helper()
	if !b.closed {
		return []string{"--insecure-plain-tcp"}
	}
	agent, ok := agentRoles[m.Name()[0]]
	if !ok {
		return nil // a manager has joined with its store
	}
	if _, err := m.Run(b.T.Context(), "test", "-e", pki.IdentityIn(agent[1])); err == nil {
		return nil
	}
	return []string{"--join", b.tokenFile(m, agent[0])}
}

// tokenFile puts a token for a role on a machine.
func (b *Bed) tokenFile(m *vm.Machine, role string) string {
	b.T.Helper()
	token := b.token(fmt.Sprintf("--node %s --role %s", m.Name(), role))
	const file = "/run/weft-join.token"
	if out, err := m.Shell(b.T.Context(), fmt.Sprintf("umask 077; echo '%s' > %s", token, file)); err != nil {
		b.T.Fatalf("%v\n%s", err, out)
	}
	return file
}

// token makes a token at the machine of the manager that leads, on its socket.
func (b *Bed) token(subject string) (token string) {
	b.T.Helper()
	b.Eventually(time.Minute, "the manager makes a token", func(ctx context.Context) (err error) {
		token, err = b.Leader().Shell(ctx, fmt.Sprintf("weft token create %s --manager unix:%s.socket 2>/dev/null", subject, managerStore))
		return err
	})
	return strings.TrimSpace(token)
}

// logIn lets this machine's operator in, as an admin.
func (b *Bed) logIn() credentials.TransportCredentials {
	b.T.Helper()
	config, err := os.MkdirTemp("", "weft-login-")
	if err != nil {
		b.T.Fatalf("%v", err)
	}
	b.T.Cleanup(func() { os.RemoveAll(config) })
	b.config = config
	file := filepath.Join(config, "token")
	if err := os.WriteFile(file, []byte(b.token("--person tester --role admin")+"\n"), 0o600); err != nil {
		b.T.Fatalf("%v", err)
	}
	if _, err := b.Try("login", "--token-file", file, "--name", "bed"); err != nil {
		b.T.Fatalf("%v", err)
	}
	c, err := pki.ReadCredential(filepath.Join(config, "weft", "bed.pem"))
	if err != nil {
		b.T.Fatalf("%v", err)
	}
	return credentials.NewTLS(c.Client(time.Now))
}
