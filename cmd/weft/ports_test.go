// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/status"

	"weft.dev/weft/e2e/operator"
	"weft.dev/weft/proto/pb"
)

// listening lists the addresses at which a process answers TCP and UDP, of both versions of IP.
func listening(t *testing.T, pid int) (addresses []string) {
	t.Helper()
	own := map[string]bool{} // its sockets, by inode
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	files, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if to, err := os.Readlink(filepath.Join(dir, f.Name())); err == nil {
			own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
		}
	}
	for _, table := range []string{"tcp", "tcp6", "udp", "udp6"} {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/net/%s", pid, table))
		if err != nil {
			continue // a kernel without IPv6
		}
		lines := bufio.NewScanner(bytes.NewReader(text))
		lines.Scan() // the heading
		for lines.Scan() {
			const local, state, inode, listen = 1, 3, 9, "0A"
			f := strings.Fields(lines.Text())
			if !own[f[inode]] || strings.HasPrefix(table, "tcp") && f[state] != listen {
				continue
			}
			var port int
			if _, err := fmt.Sscanf(f[local][strings.LastIndex(f[local], ":")+1:], "%X", &port); err != nil {
				t.Fatal(err)
			}
			addresses = append(addresses, fmt.Sprintf("%s:%d", table, port))
		}
	}
	return addresses
}

// answered returns the answer of a port to some bytes, until it hangs up or is silent for a second.
func answered(t *testing.T, address, text string) []byte {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(time.Second)); err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(conn, text) // it may hang up at once
	got, err := io.ReadAll(io.LimitReader(conn, 1<<16))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, syscall.ECONNRESET) {
		t.Fatal(err)
	}
	return got
}

// soon repeats check until it returns nil.
func soon(t *testing.T, what string, check func() error) {
	t.Helper()
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		if err = check(); err == nil {
			return
		}
	}
	t.Fatalf("%s: %v", what, err)
}

// installation is a cluster on this machine as an operator makes it, with no option about security.
type installation struct {
	t        *testing.T
	dir      string
	manager  string
	portal   string
	programs map[string]*exec.Cmd
}

func (i *installation) weft(args ...string) *exec.Cmd {
	cmd := exec.Command("weft", args...)
	cmd.Dir, cmd.Env = i.dir, operator.Environment()
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return cmd
}

// here runs a command on the manager's socket until it succeeds and says what is wanted.
func (i *installation) here(want string, args ...string) (out string) {
	i.t.Helper()
	soon(i.t, "weft "+strings.Join(args, " "), func() error {
		text, err := i.weft(append(args, "--manager", "unix:"+filepath.Join(i.dir, "m1.socket"))...).Output()
		if out = string(text); err == nil && !strings.Contains(out, want) {
			err = fmt.Errorf("it says %q", out)
		}
		return err
	})
	return out
}

func (i *installation) start(name string, args ...string) {
	i.t.Helper()
	var log bytes.Buffer
	cmd := i.weft(args...)
	cmd.Stderr = &log
	if err := cmd.Start(); err != nil {
		i.t.Fatal(err)
	}
	i.programs[name] = cmd
	i.t.Cleanup(func() {
		kill(cmd)
		if i.t.Failed() {
			i.t.Logf("%s:\n%s", name, &log)
		}
	})
}

// agent starts an agent, which joins with a token.
func (i *installation) agent(role string, args ...string) {
	i.t.Helper()
	node := fmt.Sprintf("%s-%d", role, os.Getpid()) // a machine has one agent of a name
	file := filepath.Join(i.dir, role+".token")
	if err := os.WriteFile(file, []byte(i.here("weft1.", "token", "create", "--node", node, "--role", role)), 0o600); err != nil {
		i.t.Fatal(err)
	}
	i.start(role, append([]string{role, "--node", node, "--manager", i.manager, "--join", file, "--datapath", "user", "--state-dir", role}, args...)...)
}

func install(t *testing.T) *installation {
	i := &installation{t: t, dir: t.TempDir(), programs: map[string]*exec.Cmd{}}
	for _, address := range []*string{&i.manager, &i.portal} {
		var err error
		if *address, err = operator.FreeAddress(); err != nil {
			t.Fatal(err)
		}
	}
	if out, err := i.weft("volmgr", "init", "--data-dir", "m1", "--node", "m1").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	drive := filepath.Join(i.dir, "drive")
	if err := errors.Join(os.WriteFile(drive, nil, 0o600), os.Truncate(drive, 2<<30)); err != nil {
		t.Fatal(err)
	}
	i.start("manager", "volmgr", "--data-dir", "m1", "--listen", i.manager)
	i.agent("target", "--portal", "tcp://"+i.portal, "--drive-file", drive)
	i.agent("initiator", "--run-dir", "run")
	i.here("online", "node", "list")
	soon(t, "both agents are online", func() error {
		if text := i.here("", "node", "list"); strings.Count(text, "online") < 2 {
			return errors.New(text)
		}
		return nil
	})
	return i
}

// A scan of a default installation finds the manager's port and no other: a target that serves no
// volume has none, and metrics are off. That port tells a stranger nothing, with and without TLS.
func TestAScanOfADefaultInstallation(t *testing.T) {
	if testing.Short() {
		t.Skip("short")
	}
	i := install(t)
	_, port, err := net.SplitHostPort(i.manager)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{"manager": {"tcp:" + port}, "target": nil, "initiator": nil} {
		if got := listening(t, i.programs[name].Process.Pid); !slices.Equal(got, want) {
			t.Errorf("the %s listens at %v, want %v", name, got, want)
		}
	}
	for what, text := range map[string]string{"nothing": "", "HTTP": "GET /metrics HTTP/1.0\r\n\r\n", "HTTP/2": "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00", "noise": strings.Repeat("\xff", 256)} {
		const alert = 7 // bytes of an alert of TLS, which says only that this was not TLS
		if got := answered(t, i.manager, text); len(got) > alert {
			t.Errorf("the manager answers %s with %q", what, got)
		}
	}
	conn, err := grpc.NewClient(i.manager, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{InsecureSkipVerify: true}))) //nolint:gosec // a stranger does not mind
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	if _, err := pb.NewManagerClient(conn).GetStatus(ctx, &pb.GetStatusRequest{}); status.Code(err) != codes.Unauthenticated {
		t.Errorf("the manager answers a stranger's GetStatus over TLS with %v", err)
	}
}
