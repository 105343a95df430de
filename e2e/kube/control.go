// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"
)

const (
	apiServer = "https://" + controlAddress + ":6443"
	etcd      = "http://127.0.0.1:2379"
	admin     = "admin"
)

// startControlPlane starts etcd, the API server, the controllers and the
// scheduler, and returns when the API server is ready.
func (l *Lab) startControlPlane() error {
	users := map[string]string{admin: "system:masters"}
	for n := 1; n <= l.options.Nodes; n++ {
		users[fmt.Sprintf("system:node:n%d", n)] = "system:nodes"
	}
	var err error
	if l.secrets, err = newSecrets(filepath.Join(l.dir, "pki"), users); err != nil {
		return err
	}
	if err := l.writeKubeconfig(l.Kubeconfig, l.secrets.tokens[admin]); err != nil {
		return err
	}
	data := filepath.Join(l.dir, "etcd")
	err = l.start("etcd", "etcd", "--data-dir", data, "--unsafe-no-fsync",
		"--listen-client-urls", etcd, "--advertise-client-urls", etcd, "--listen-peer-urls", "http://127.0.0.1:2380")
	if err != nil {
		return err
	}
	// The API server waits for etcd itself.
	s := l.secrets
	err = l.start("kube-apiserver", "kube-apiserver", "--etcd-servers="+etcd,
		"--bind-address="+controlAddress, "--advertise-address="+controlAddress, "--secure-port=6443", "--endpoint-reconciler-type=none",
		"--tls-cert-file="+s.file("apiserver.crt"), "--tls-private-key-file="+s.file("apiserver.key"),
		"--service-account-key-file="+s.file("sa.key"), "--service-account-signing-key-file="+s.file("sa.key"),
		"--service-account-issuer=https://kubernetes.default.svc", "--token-auth-file="+s.file("tokens.csv"),
		"--authorization-mode=Node,RBAC", "--enable-admission-plugins=NodeRestriction",
		"--service-cluster-ip-range=10.0.0.0/24", "--allow-privileged=true", "--kubelet-preferred-address-types=InternalIP",
		"--feature-gates="+l.options.Gates, "--v=1")
	if err != nil {
		return err
	}
	if err := l.awaitReady(time.Minute); err != nil {
		return err
	}
	config := "--kubeconfig=" + l.Kubeconfig
	err = l.start("kube-controller-manager", "kube-controller-manager", config, "--leader-elect=false", "--bind-address=127.0.0.1",
		"--service-account-private-key-file="+s.file("sa.key"), "--use-service-account-credentials=true", "--root-ca-file="+s.file("ca.crt"),
		"--node-monitor-period=2s", "--node-monitor-grace-period=16s", "--feature-gates="+l.options.Gates, "--v=2")
	if err != nil {
		return err
	}
	return l.start("kube-scheduler", "kube-scheduler", config, "--leader-elect=false", "--bind-address=127.0.0.1", "--feature-gates="+l.options.Gates)
}

// awaitReady waits until the API server reports that it is ready.
func (l *Lab) awaitReady(patience time.Duration) error {
	authority, err := os.ReadFile(l.secrets.file("ca.crt"))
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(authority)
	client := http.Client{Timeout: time.Second, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool}}}
	defer client.CloseIdleConnections()
	ctx, cancel := context.WithTimeout(l.t.Context(), patience)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, func() error {
		request, err := http.NewRequestWithContext(ctx, http.MethodGet, apiServer+"/readyz", nil)
		if err != nil {
			return err
		}
		request.Header.Set("Authorization", "Bearer "+l.secrets.tokens[admin])
		response, err := client.Do(request)
		if err != nil {
			return fmt.Errorf("%w\n%s", err, l.program("kube-apiserver").tail())
		}
		defer response.Body.Close()
		text, err := io.ReadAll(response.Body)
		if err == nil && string(text) != "ok" {
			err = fmt.Errorf("API server: %s: %s", response.Status, text)
		}
		return err
	})
}

// writeKubeconfig writes a client's configuration for the API server.
func (l *Lab) writeKubeconfig(file, token string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: lab, cluster: {server: %q, certificate-authority: %q}}]
users: [{name: user, user: {token: %q}}]
contexts: [{name: lab, context: {cluster: lab, user: user}}]
current-context: lab
`, apiServer, l.secrets.file("ca.crt"), token)
	return os.WriteFile(file, []byte(text), 0o600)
}

// writeAccountConfig is writeKubeconfig with a token of a ServiceAccount.
func (l *Lab) writeAccountConfig(file, namespace, account string) error {
	token, err := l.TryKubectl("create", "token", account, "--namespace="+namespace, "--duration=24h")
	if err != nil {
		return err
	}
	return l.writeKubeconfig(file, strings.TrimSpace(token))
}

// start starts a program of the lab outside of the nodes.
func (l *Lab) start(name, program string, args ...string) error {
	if !filepath.IsAbs(program) {
		program = l.parts.Program(program)
	}
	cmd := exec.Command(program, args...)
	cmd.Dir = l.dir
	cmd.Env = append(os.Environ(), l.env...)
	p, err := startProcess(l.logs, name, cmd)
	if err == nil {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.programs[name] = p
	}
	return err
}

// program is the last program started under a name.
func (l *Lab) program(name string) *Process {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.programs[name]
}

// poll calls check until it returns nil or ctx ends. It returns check's last error.
func poll(ctx context.Context, every time.Duration, check func() error) error {
	for tick := time.NewTicker(every); ; {
		err := check()
		if err == nil {
			tick.Stop()
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			tick.Stop()
			return err
		}
	}
}
