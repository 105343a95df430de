// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"weft.dev/weft/e2e/operator"
)

// closedCluster is a closed cluster of managers, each a process that serves the console.
type closedCluster struct {
	t        *testing.T
	dir      string
	managers []string
	consoles []string // URLs
	running  []*exec.Cmd
}

// certificate writes a certificate for the loopback address, and its key.
func (c *closedCluster) certificate() (cert, key string, roots *x509.CertPool) {
	c.t.Helper()
	private, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		c.t.Fatal(err)
	}
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, IsCA: true, BasicConstraintsValid: true}
	der, err := x509.CreateCertificate(rand.Reader, template, template, private.Public(), private)
	if err != nil {
		c.t.Fatal(err)
	}
	secret, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		c.t.Fatal(err)
	}
	cert, key, roots = filepath.Join(c.dir, "console.crt"), filepath.Join(c.dir, "console.key"), x509.NewCertPool()
	for path, block := range map[string]*pem.Block{cert: {Type: "CERTIFICATE", Bytes: der}, key: {Type: "PRIVATE KEY", Bytes: secret}} {
		if err := os.WriteFile(path, pem.EncodeToMemory(block), 0o600); err != nil {
			c.t.Fatal(err)
		}
	}
	text, _ := os.ReadFile(cert)
	roots.AppendCertsFromPEM(text)
	return cert, key, roots
}

func (c *closedCluster) store(i int) string { return filepath.Join(c.dir, fmt.Sprint("m", i+1)) }

func (c *closedCluster) environment() []string {
	return append(operator.Environment(), "XDG_CONFIG_HOME="+filepath.Join(c.dir, "config"))
}

// weft runs a command, and returns what it prints.
func (c *closedCluster) weft(args ...string) string {
	c.t.Helper()
	cmd := exec.Command("weft", args...)
	cmd.Env = c.environment()
	var told strings.Builder
	cmd.Stderr = &told
	out, err := cmd.Output()
	if err != nil {
		c.t.Fatalf("weft %s: %v: %s", strings.Join(args, " "), err, told.String())
	}
	return string(out)
}

// start runs a manager until the end of the test.
func (c *closedCluster) start(i int, more ...string) {
	c.t.Helper()
	cmd := exec.Command("weft", append([]string{"volmgr", "--data-dir", c.store(i), "--listen", c.managers[i], "--console", strings.TrimPrefix(strings.TrimPrefix(c.consoles[i], "https://"), "http://")}, more...)...)
	var log strings.Builder
	cmd.Env, cmd.Stderr = c.environment(), &log
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if err := cmd.Start(); err != nil {
		c.t.Fatal(err)
	}
	c.running = append(c.running, cmd)
	c.t.Cleanup(func() {
		kill(cmd)
		if strings.Contains(log.String(), "weft1.") {
			c.t.Errorf("the log of manager %d has a token", i+1)
		}
		if c.t.Failed() {
			c.t.Logf("manager %d:\n%s", i+1, log.String())
		}
	})
}

// eventually tries until it succeeds.
func (c *closedCluster) eventually(what string, try func() error) {
	c.t.Helper()
	deadline := time.Now().Add(4 * onceBound)
	for err := try(); err != nil; err = try() {
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: %v", what, err)
		}
		time.Sleep(100 * time.Millisecond)
	}
}

// token returns the name of a file with a new token.
func (c *closedCluster) token(name string, args ...string) string {
	c.t.Helper()
	path := filepath.Join(c.dir, name+".token")
	text := c.weft(append([]string{"token", "create", "--manager", "unix:" + c.store(0) + ".socket"}, args...)...)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		c.t.Fatal(err)
	}
	return path
}

func startClosed(t *testing.T) (c *closedCluster, roots *x509.CertPool) {
	t.Helper()
	c = &closedCluster{t: t, dir: t.TempDir()}
	for i := range 3 {
		for _, list := range []*[]string{&c.managers, &c.consoles} {
			address, err := operator.FreeAddress()
			if err != nil {
				t.Fatal(err)
			}
			*list = append(*list, address)
		}
		c.consoles[i] = "http://" + c.consoles[i]
	}
	cert, key, roots := c.certificate()
	c.weft("volmgr", "init", "--data-dir", c.store(0), "--node", "m1")
	c.start(0)
	for i := 1; i < 3; i++ {
		node, more := fmt.Sprint("m", i+1), []string(nil)
		var path string
		c.eventually("a manager leads", func() error {
			cmd := exec.Command("weft", "status", "--manager", "unix:"+c.store(0)+".socket")
			cmd.Env = c.environment()
			return cmd.Run()
		})
		path = c.token(node, "--node", node, "--role", "manager")
		c.weft("volmgr", "join", "--manager", c.managers[0], "--join", path, "--data-dir", c.store(i), "--listen", c.managers[i], "--node", node)
		if i == 1 {
			more = []string{"--console-cert", cert, "--console-key", key}
			c.consoles[i] = strings.Replace(c.consoles[i], "http:", "https:", 1)
		}
		c.start(i, more...)
	}
	for name, role := range map[string]string{"vic": "viewer", "ada": "admin"} {
		c.weft("login", "--manager", strings.Join(c.managers, ","), "--token-file", c.token(name, "--person", name, "--role", role), "--name", name)
	}
	return c, roots
}

// tab is a browser at a console.
type tab struct {
	*http.Client
	t  *testing.T
	at string
}

func (c *closedCluster) browser(at string, roots *x509.CertPool) *tab {
	c.t.Helper()
	jar, err := cookiejar.New(nil)
	if err != nil {
		c.t.Fatal(err)
	}
	return &tab{t: c.t, at: at, Client: &http.Client{Jar: jar, Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true}, Timeout: onceBound}}
}

// logIn logs in with a link, and returns the page that follows.
func (b *tab) logIn(link string) (int, string) {
	b.t.Helper()
	_, code, _ := strings.Cut(strings.TrimSpace(link), "#")
	return b.post("/login", url.Values{"code": {code}})
}

func (b *tab) post(path string, form url.Values) (int, string) {
	b.t.Helper()
	return b.read(b.PostForm(b.at+path, form))
}

func (b *tab) get(path string) (int, string) {
	b.t.Helper()
	return b.read(b.Get(b.at + path))
}

func (b *tab) read(answer *http.Response, err error) (int, string) {
	b.t.Helper()
	if err != nil {
		b.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return answer.StatusCode, string(text)
}

// Each manager serves the console, to whoever has a link, as the person whose link it is. What they
// may not do, the managers refuse.
func TestAnyManagerServesTheConsole(t *testing.T) {
	c, roots := startClosed(t)
	for i, at := range c.consoles {
		link := c.weft("console", "--at", at, "--context", "vic")
		if !strings.HasPrefix(link, at+"/login#weft1.") {
			t.Fatalf("the link to %s is %s", at, link)
		}
		stranger, vic := c.browser(at, roots), c.browser(at, roots)
		if code, text := stranger.get("/volumes"); code != http.StatusUnauthorized || strings.Contains(text, "viewer") {
			t.Errorf("a stranger gets %d from manager %d:\n%s", code, i+1, text)
		}
		if code, text := vic.logIn(link); code != http.StatusOK || !strings.Contains(text, "<b>vic (viewer)</b>") {
			t.Errorf("vic gets %d from manager %d:\n%s", code, i+1, text)
		}
		if code, text := stranger.logIn(link); code == http.StatusOK || !strings.Contains(text, "the token is not good") {
			t.Errorf("the link is good twice: %d from manager %d:\n%s", code, i+1, text)
		}
		if code, text := stranger.logIn("#guess"); code != http.StatusForbidden {
			t.Errorf("a guess gets %d:\n%s", code, text)
		}
		if _, text := vic.post("/do/token-person", url.Values{"name": {"eve"}, "role": {"admin"}, "back": {"/access"}}); !strings.Contains(text, "person vic (viewer) may not; it needs the role admin") {
			t.Errorf("manager %d does not refuse vic:\n%s", i+1, text)
		}
	}
	node := c.weft("token", "create", "--context", "ada", "--node", "t1", "--role", "target")
	if code, text := c.browser(c.consoles[2], roots).logIn("#" + node); code == http.StatusOK || !strings.Contains(text, "the console is for people") {
		t.Errorf("a node's token lets a browser in: %d\n%s", code, text)
	}
}

// An admin works on through the console of a manager that follows, when the one that leads is lost.
func TestTheConsoleGoesOnWithoutTheManagerThatLeads(t *testing.T) {
	c, roots := startClosed(t)
	ada := c.browser(c.consoles[1], roots)
	if code, text := ada.logIn(c.weft("console", "--at", c.consoles[1], "--context", "ada")); code != http.StatusOK {
		t.Fatalf("ada gets %d:\n%s", code, text)
	}
	c.eventually("three vote", func() error {
		if n := strings.Count(c.weft("volmgr", "list", "--context", "ada"), "follower"); n != 2 {
			return fmt.Errorf("%d managers follow", n)
		}
		return nil
	})
	if _, text := ada.post("/do/token-person", url.Values{"name": {"bob"}, "role": {"viewer"}, "back": {"/access"}}); !strings.Contains(text, "weft token create --person bob") || !strings.Contains(text, `class="secret"`) {
		t.Errorf("ada gets no token:\n%s", text)
	}
	if text := c.weft("event", "list", "--audit", "--context", "ada"); !strings.Contains(text, "person ada (admin)") {
		t.Errorf("the audit does not name ada:\n%s", text)
	}
	kill(c.running[0])
	c.eventually("the console goes on", func() error {
		code, text := ada.get("/access")
		if code != http.StatusOK || !strings.Contains(text, "ada (admin)") {
			return fmt.Errorf("%d: %s", code, text)
		}
		return nil
	})
	if _, text := ada.post("/do/token-person", url.Values{"name": {"eve"}, "role": {"viewer"}, "back": {"/access"}}); !strings.Contains(text, `class="secret"`) {
		t.Errorf("ada gets no token from the next leader:\n%s", text)
	}
	if _, text := ada.post("/logout", nil); !strings.Contains(text, "weft console --at") {
		t.Errorf("after the logout:\n%s", text)
	}
	if code, _ := ada.get("/access"); code != http.StatusUnauthorized {
		t.Errorf("after the logout, the page is %d", code)
	}
}
