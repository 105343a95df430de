// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bufio"
	"os"
	"os/exec"
	"testing"
)

// The test program is also the processes that the tests need: what it does is in
// an environment variable.
const roleVariable = "WEFT_BLOCKDEV_TEST_ROLE"

func TestMain(m *testing.M) {
	switch os.Getenv(roleVariable) {
	case "hold":
		holdOpen(os.Args[1])
	}
	os.Exit(m.Run())
}

// holdOpen has a device open until it is killed.
func holdOpen(path string) {
	f, err := os.Open(path)
	if err != nil {
		os.Exit(1)
	}
	os.Stdout.WriteString("open\n")
	_, _ = bufio.NewReader(os.Stdin).ReadString('\n')
	f.Close()
	os.Exit(0)
}

// startHolding starts a process that has a device open.
func startHolding(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	return startRole(t, "hold", "open", path)
}

// startRole starts this program in another role and waits until it says so.
func startRole(t *testing.T, role, says string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	if _, err := cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { cmd.Process.Kill(); cmd.Wait() })
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != says+"\n" {
		t.Fatalf("process %q said %q, %v; want %q", role, line, err, says)
	}
	return cmd
}
