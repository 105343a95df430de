// SPDX-License-Identifier: Apache-2.0

package packages

import (
	"encoding/gob"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/vm"
)

// An operator's machine is a directory of this one, whose ssh and scp are this test binary. They
// reach the virtual machines over their control ports, so that the commands of the guide run as
// they are written there.
//
//	bash ──► ssh root@n1 COMMAND ──socket──► the test ──control port──► bash -c COMMAND on n1

// socketVar names, for ssh and scp, the socket of the test.
const socketVar = "WEFT_PACKAGES_SSH"

func TestMain(m *testing.M) {
	if socket := os.Getenv(socketVar); socket != "" {
		os.Exit(remote(socket))
	}
	os.Exit(m.Run())
}

// errand is what ssh or scp is asked for.
type errand struct {
	Program string
	Args    []string
	Dir     string
	Stdin   []byte
}

// outcome is what became of an errand.
type outcome struct {
	Stdout, Stderr []byte
	Code           int
}

// remote is ssh or scp: it passes its errand to the test, and returns the exit code.
func remote(socket string) int {
	o, err := func() (o outcome, err error) {
		e := errand{Program: filepath.Base(os.Args[0]), Args: os.Args[1:]}
		if e.Dir, err = os.Getwd(); err != nil {
			return o, err
		}
		if e.Stdin, err = io.ReadAll(os.Stdin); err != nil {
			return o, err
		}
		conn, err := net.Dial("unix", socket)
		if err != nil {
			return o, err
		}
		defer conn.Close()
		if err := gob.NewEncoder(conn).Encode(e); err != nil {
			return o, err
		}
		return o, gob.NewDecoder(conn).Decode(&o)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 255
	}
	_, _ = os.Stdout.Write(o.Stdout)
	_, _ = os.Stderr.Write(o.Stderr)
	return o.Code
}

// desk is the operator's machine.
type desk struct {
	t        *testing.T
	dir      string // where the operator types
	bin      string // has ssh and scp
	socket   string
	machines map[string]machine
}

func newDesk(t *testing.T, machines map[string]machine) *desk {
	t.Helper()
	root := t.TempDir()
	d := &desk{t: t, dir: filepath.Join(root, "operator"), bin: filepath.Join(root, "bin"), socket: filepath.Join(root, "ssh"), machines: machines}
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{d.dir, d.bin} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, program := range []string{"ssh", "scp"} {
		if err := os.Symlink(self, filepath.Join(d.bin, program)); err != nil {
			t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", d.socket)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	go d.serve(listener)
	return d
}

func (d *desk) serve(listener net.Listener) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return // the test is over
		}
		go func() {
			defer conn.Close()
			var e errand
			if gob.NewDecoder(conn).Decode(&e) == nil {
				_ = gob.NewEncoder(conn).Encode(d.run(e)) // a caller that is gone needs none
			}
		}()
	}
}

func (d *desk) run(e errand) (o outcome) {
	begin := time.Now()
	defer func() {
		d.t.Logf("%5.1f s  %s %.100s", time.Since(begin).Seconds(), e.Program, strings.Join(e.Args, " "))
	}()
	err := fmt.Errorf("%s %s: unlike any that the guide has", e.Program, strings.Join(e.Args, " "))
	switch {
	case e.Program == "ssh" && len(e.Args) > 1:
		o, err = d.ssh(e.Args[0], strings.Join(e.Args[1:], " "), e.Stdin)
	case e.Program == "scp" && len(e.Args) == 2:
		host, path, _ := strings.Cut(e.Args[1], ":")
		var m machine
		if m, err = d.machine(host); err == nil {
			err = m.Push(d.t.Context(), filepath.Join(e.Dir, e.Args[0]), path)
		}
	}
	if err != nil {
		o = outcome{Stderr: []byte(err.Error() + "\n"), Code: 255}
	}
	if o.Code != 0 { // a shell does not stop at each of them
		d.t.Errorf("%s %s: exit code %d: %s", e.Program, strings.Join(e.Args, " "), o.Code, o.Stderr)
	}
	return o
}

func (d *desk) machine(host string) (machine, error) {
	m, known := d.machines[strings.TrimPrefix(host, "root@")]
	if !known {
		return m, fmt.Errorf("%s: no such machine", host)
	}
	return m, nil
}

// ssh runs a command with root's shell, as sshd does.
func (d *desk) ssh(host, command string, stdin []byte) (outcome, error) {
	m, err := d.machine(host)
	if err != nil {
		return outcome{}, err
	}
	var stdout, stderr strings.Builder
	err = m.Do(d.t.Context(), vm.Command{Argv: []string{"bash", "-c", command}, Dir: "/root", Stdin: stdin, Stdout: &stdout, Stderr: &stderr})
	o := outcome{Stdout: []byte(stdout.String()), Stderr: []byte(stderr.String())}
	if exit, ok := err.(*vm.ExitError); ok { //nolint:errorlint // Do's own error
		o.Code, err = exit.Code, nil
	}
	return o, err
}

// types runs commands as the operator types them, and stops at the first that fails, also within a
// loop or a pipe. It returns what they printed.
func (d *desk) types(commands string) (string, error) {
	cmd := exec.CommandContext(d.t.Context(), "bash", "-e", "-o", "pipefail", "-c", commands)
	cmd.Dir = d.dir
	cmd.Env = append(os.Environ(), "PATH="+d.bin+":"+os.Getenv("PATH"), socketVar+"="+d.socket)
	out, err := cmd.CombinedOutput()
	return string(out), err
}
