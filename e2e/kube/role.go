// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/e2e/kube/parts"
)

// The variables that assign roles to the processes of the tree.
const (
	roleVar  = "WEFT_KUBE_ROLE" // "": started by go test; "init": the lab's first process; "test"; "node"
	placeVar = "WEFT_KUBE_PLACE"
	wantVar  = "WEFT_KUBE" // "1": run the tests that need a cluster; "required": and do not skip them
)

// place is shared by the processes of a lab.
type place struct {
	ID   string // names objects that are not in a namespace
	Dir  string // directory of all files; a short path, since sockets' paths are short
	Weft string // the program
	// Missing is the reason why no lab can run here; the other fields are then empty.
	Missing string
}

func thisPlace() (p place) {
	_ = json.Unmarshal([]byte(os.Getenv(placeVar)), &p)
	return p
}

// Main is the TestMain of a test binary that calls Start. It runs the tests inside the
// lab's namespaces, and also acts as the lab's other processes.
func Main(m *testing.M) int {
	switch os.Getenv(roleVar) {
	case "init":
		return labInit()
	case "node":
		return nodeInit()
	case "test":
		return m.Run()
	}
	if os.Getenv(wantVar) == "" || listsOnly() {
		return m.Run()
	}
	p, err := prepare()
	if err != nil {
		os.Setenv(placeVar, encode(place{Missing: err.Error()}))
		return m.Run() // Start skips or fails
	}
	return outside(p)
}

// listsOnly reports whether go test -list only asks for names.
func listsOnly() bool {
	for _, a := range os.Args[1:] {
		if strings.HasPrefix(a, "-test.list=") && a != "-test.list=" {
			return true
		}
	}
	return false
}

func encode(p place) string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // contains only strings, which always encode
	}
	return string(text)
}

// prepare checks whether the machine can run a lab. It also builds Weft, since the lab's
// network namespace has no access to Go modules.
func prepare() (place, error) {
	if os.Geteuid() != 0 {
		return place{}, errors.New("a lab of namespaces needs root")
	}
	if _, err := os.Stat("/sys/fs/cgroup/memory/cgroup.procs"); err != nil {
		return place{}, errors.New("the kubelets need control groups of version 1, and /sys/fs/cgroup/memory does not exist")
	}
	if _, err := os.Stat("/dev/fuse"); err != nil {
		return place{}, fmt.Errorf("volumes need FUSE: %w", err)
	}
	if _, err := os.Stat("/dev/loop-control"); err != nil {
		return place{}, fmt.Errorf("volumes need loop devices: %w", err)
	}
	for _, program := range []string{"nsenter", "ip", "mkfs.ext4", "mkfs.xfs"} {
		if _, err := exec.LookPath(program); err != nil {
			return place{}, err
		}
	}
	if _, err := parts.Find(); err != nil {
		return place{}, err
	}
	dir, err := os.MkdirTemp("", "wk")
	if err != nil {
		return place{}, err
	}
	p := place{ID: filepath.Base(dir), Dir: dir, Weft: filepath.Join(dir, "weft")}
	build := exec.Command("go", "build", "-trimpath", "-o", p.Weft, "weft.dev/weft/cmd/weft")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		os.RemoveAll(dir)
		return place{}, fmt.Errorf("build weft: %w\n%s", err, out)
	}
	return p, nil
}

// outside runs the lab and removes what it leaves behind.
func outside(p place) int {
	// The kernel ends the lab when the thread that started it ends.
	runtime.LockOSThread()
	lab := self("init", p)
	lab.Stdin, lab.Stdout, lab.Stderr = os.Stdin, os.Stdout, os.Stderr
	lab.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL,
	}
	interrupts := make(chan os.Signal, 1)
	signal.Notify(interrupts, syscall.SIGINT, syscall.SIGTERM)
	code := 1
	if err := lab.Start(); err != nil {
		fmt.Fprintln(os.Stderr, "kube: start the lab:", err)
	} else {
		go func() {
			<-interrupts
			_ = lab.Process.Kill()
		}()
		_ = lab.Wait()
		code = lab.ProcessState.ExitCode()
	}
	if err := tidy(p); err != nil {
		fmt.Fprintln(os.Stderr, "kube: the lab could not be cleaned up:", err)
		code = max(code, 1)
	}
	if code == 0 {
		os.RemoveAll(p.Dir)
	} else {
		keepLogs(p)
	}
	return code
}

// keepLogs removes everything but the logs.
func keepLogs(p place) {
	entries, _ := os.ReadDir(p.Dir)
	kept := false
	for _, e := range entries {
		if e.Name() == "log" {
			kept = true
			continue
		}
		os.RemoveAll(filepath.Join(p.Dir, e.Name()))
	}
	if kept {
		fmt.Fprintln(os.Stderr, "kube: logs of all programs are in", filepath.Join(p.Dir, "log"))
	} else {
		os.Remove(p.Dir)
	}
}

// self runs this program again, in another role.
func self(role string, p place) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Env = append(os.Environ(), roleVar+"="+role, placeVar+"="+encode(p))
	return cmd
}

// labInit is the lab's first process. It runs the tests and reaps orphans.
func labInit() int {
	if err := enterLab(); err != nil {
		fmt.Fprintln(os.Stderr, "kube: enter the lab:", err)
		return 1
	}
	os.Setenv(roleVar, "test")
	// Not with os/exec: reap waits for all children, and so for this one too.
	tests, err := os.StartProcess("/proc/self/exe", os.Args, &os.ProcAttr{Files: []*os.File{os.Stdin, os.Stdout, os.Stderr}})
	if err != nil {
		fmt.Fprintln(os.Stderr, "kube: start the tests:", err)
		return 1
	}
	return reap(tests.Pid)
}

// reap reaps all children until the one with the given pid has ended.
func reap(until int) (code int) {
	for {
		var status syscall.WaitStatus
		pid, err := syscall.Wait4(-1, &status, 0, nil)
		if errors.Is(err, syscall.EINTR) {
			continue
		}
		if err != nil {
			return 1
		}
		if pid == until {
			if status.Exited() {
				return status.ExitStatus()
			}
			return 128 + int(status.Signal())
		}
	}
}

// enterLab makes the lab's own view of the machine.
func enterLab() error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	if err := ownDevWeft(); err != nil {
		return err
	}
	return labNetwork()
}

// ownDevWeft makes a /dev/weft that this mount namespace has alone: agents there do not meet
// those of other labs.
func ownDevWeft() error {
	if err := os.MkdirAll("/dev/weft", 0o755); err != nil {
		return err
	}
	if err := unix.Mount("tmpfs", "/dev/weft", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /dev/weft: %w", err)
	}
	return nil
}
