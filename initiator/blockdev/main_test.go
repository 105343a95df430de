// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// The test program also plays the processes that the tests need; an environment variable names
// the role.
const roleVariable = "WEFT_BLOCKDEV_TEST_ROLE"

// withinVariable is Options.ResumeWithin of the role "serve".
const withinVariable = "WEFT_BLOCKDEV_TEST_WITHIN"

func TestMain(m *testing.M) {
	if len(os.Args) == 3 && os.Args[1] == holdDevices { // a holder inherits the role of its process
		if err := Hold(context.Background(), HoldOptions{RunDir: os.Args[2], Linger: time.Second}); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	switch os.Getenv(roleVariable) {
	case "hold":
		holdOpen(os.Args[1])
	case "serve", inContainer:
		serve(os.Args[1:])
	case "wait for itself":
		waitForItself(os.Args[1:])
	}
	// go test logs the files that a test looks at, to decide when its cached result is valid. A
	// unshared thread does not have that log's descriptor, and these tests depend on the kernel,
	// not on files.
	flag.Parse()
	if err := flag.Set("test.testlogfile", ""); err != nil {
		panic(err)
	}
	os.Exit(m.Run())
}

// holdOpen keeps a device open until the process is killed.
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

// serve exports the file args[4] until the process is killed; what follows are Options.Names.
func serve(args []string) {
	o := Options{Kind: Kind(args[0]), Name: block.VolumeName(args[1]), RunDir: args[2], Resume: args[3]}
	if o.Resume != "" {
		o.Holder = holderCommand(o.RunDir)
		o.ResumeWithin, _ = time.ParseDuration(os.Getenv(withinVariable))
	}
	for _, n := range args[5:] {
		o.Names = append(o.Names, block.VolumeName(n))
	}
	disk, err := openFileDisk(args[4], crashGeometry)
	if err == nil {
		_, err = Export(context.Background(), disk, o)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Stdout.WriteString("serving\n")
	select {}
}

// waitForItself makes a thread wait for a write that its own process does not complete.
func waitForItself(args []string) {
	disk := newMemDisk(plain)
	e, err := Export(context.Background(), disk, Options{Kind: Kind(args[0]), Name: block.VolumeName(args[1]), RunDir: args[2]})
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	disk.hold(isWrite)
	go unshared(func() error {
		fd, err := unix.Open(e.Node(), unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err == nil {
			_, err = unix.Pwrite(fd, make([]byte, 4096), 0)
		}
		return errors.Join(err, unix.Fsync(fd))
	})
	<-disk.arrived
	os.Stdout.WriteString("waiting\n")
	select {}
}

// holderCommand is this program as a holder.
func holderCommand(runDir string) []string {
	self, err := os.Executable()
	if err != nil {
		panic(err)
	}
	return []string{self, holdDevices, runDir}
}

const holdDevices = "hold devices"

// startHolding starts a process that keeps a device open.
func startHolding(t *testing.T, path string) *exec.Cmd {
	t.Helper()
	return startRole(t, "hold", "open", path)
}

// roleCommand returns this program in another role.
func roleCommand(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
	cmd.Stderr = os.Stderr
	if role == inContainer {
		cmd.SysProcAttr = &syscall.SysProcAttr{Unshareflags: unix.CLONE_NEWNS}
	}
	return cmd
}

// inContainer is the role "serve" in a mount namespace that ends with the process.
const inContainer = "serve in a container"

// startRole starts this program in another role and waits for its ready message.
func startRole(t *testing.T, role, says string, args ...string) *exec.Cmd {
	t.Helper()
	cmd := roleCommand(role, args...)
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
	hung := time.AfterFunc(time.Minute, func() { cmd.Process.Kill() })
	defer hung.Stop()
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil || line != says+"\n" {
		t.Fatalf("process %q said %q, %v; want %q", role, line, err, says)
	}
	return cmd
}
