// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/e2e/operator"
)

// nodeVar passes a node's identity to its first process.
const nodeVar = "WEFT_KUBE_NODE"

// runDirName is the run directory of a node's initiator agent, below the node's directory.
// Each node has a path of its own, because devices carry the path's hash. It is readable
// from outside also when the node is dead.
const runDirName = "w"

// identity describes a node to its first process.
type identity struct {
	Name  string
	N     int // from 1
	Nodes int
	Dir   string
}

// nodeInit is a node's first process. It makes the node's view of the machine. When its
// standard input closes it exits, and everything on the node ends with it.
func nodeInit() int {
	var id identity
	if err := json.Unmarshal([]byte(os.Getenv(nodeVar)), &id); err != nil {
		fmt.Println("read", nodeVar, err)
		return 1
	}
	in := bufio.NewReader(os.Stdin)
	if _, err := in.ReadString('\n'); err != nil { // the node's network is connected
		return 1
	}
	if err := enterNode(id); err != nil {
		fmt.Println(err)
		return 1
	}
	fmt.Println(nodeReady)
	go func() {
		_, _ = io.Copy(io.Discard, in)
		os.Exit(0)
	}()
	orphans := make(chan os.Signal, 1)
	signal.Notify(orphans, syscall.SIGCHLD)
	for range orphans {
		for {
			if pid, err := syscall.Wait4(-1, nil, syscall.WNOHANG, nil); pid <= 0 || err != nil {
				break
			}
		}
	}
	return 0
}

const nodeReady = "ready"

func enterNode(id identity) error {
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("make mounts private: %w", err)
	}
	if err := unix.Mount("proc", "/proc", "proc", 0, ""); err != nil {
		return fmt.Errorf("mount /proc: %w", err)
	}
	if err := unix.Mount("tmpfs", "/run", "tmpfs", 0, "mode=755"); err != nil {
		return fmt.Errorf("mount /run: %w", err)
	}
	if err := unix.Mount(filepath.Join(id.Dir, "var"), "/var", "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mount /var: %w", err)
	}
	if err := ownDevWeft(); err != nil {
		return err
	}
	// Mounts must propagate between the kubelet, the driver and the pods.
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_SHARED, ""); err != nil {
		return fmt.Errorf("share mounts: %w", err)
	}
	if err := unix.Sethostname([]byte(id.Name)); err != nil {
		return fmt.Errorf("set the host's name: %w", err)
	}
	return nodeNetwork(id.N, id.Nodes)
}

// Node is one node of the cluster.
type Node struct {
	Name string
	Zone string // its failure domain in Weft and in Kubernetes

	lab       *Lab
	id        identity
	init      *exec.Cmd
	keepAlive io.Closer // standard input of its first process

	mu       sync.Mutex
	programs map[string]*Process
}

// startNode creates a node's namespaces, without any programs.
func startNode(l *Lab, n, nodes int) (*Node, error) {
	name := fmt.Sprintf("n%d", n)
	node := &Node{
		Name: name, Zone: fmt.Sprintf("z%d", n), lab: l, programs: make(map[string]*Process),
		id: identity{Name: name, N: n, Nodes: nodes, Dir: filepath.Join(l.dir, name)},
	}
	for _, d := range []string{"var/lib/kubelet", "var/lib/weft", "var/log/pods", "var/tmp", "cni", runDirName} {
		if err := os.MkdirAll(filepath.Join(node.id.Dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	if err := os.Symlink("/run", filepath.Join(node.id.Dir, "var/run")); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, err
	}
	return node, node.boot()
}

// boot starts the node's first process and waits until it has set the node up.
func (n *Node) boot() error {
	id, err := json.Marshal(n.id)
	if err != nil {
		return err
	}
	n.init = self("node", n.lab.place)
	n.init.Env = append(n.init.Env, nodeVar+"="+string(id))
	n.init.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWNET | unix.CLONE_NEWUTS | unix.CLONE_NEWIPC,
	}
	in, err := n.init.StdinPipe()
	if err != nil {
		return err
	}
	n.keepAlive = in
	out, err := n.init.StdoutPipe()
	if err != nil {
		return err
	}
	if err := n.init.Start(); err != nil {
		return fmt.Errorf("start node %s: %w", n.Name, err)
	}
	if err := plug(n.Name, n.init.Process.Pid); err != nil {
		return err
	}
	if _, err := io.WriteString(in, "\n"); err != nil {
		return fmt.Errorf("start node %s: %w", n.Name, err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line = strings.TrimSpace(line); line != nodeReady {
		return fmt.Errorf("start node %s: %s: %w", n.Name, line, err)
	}
	return n.makeGroups()
}

// group is the control group of all pods on the node.
func (n *Node) group() string { return n.lab.place.ID + "-" + n.Name }

func (n *Node) makeGroups() error {
	hierarchies, err := filepath.Glob("/sys/fs/cgroup/*/cgroup.procs")
	if err != nil {
		return err
	}
	for _, h := range hierarchies {
		dir := filepath.Dir(h)
		if filepath.Base(dir) == "unified" {
			continue
		}
		group := filepath.Join(dir, n.group())
		if err := os.Mkdir(group, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return err
		}
		// A cpuset group accepts no process before its processors and memory are set.
		for _, file := range []string{"cpuset.cpus", "cpuset.mems"} {
			if text, err := os.ReadFile(filepath.Join(dir, file)); err == nil {
				if err := os.WriteFile(filepath.Join(group, file), text, 0); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// command is a program in the node's namespaces.
func (n *Node) command(ctx context.Context, argv ...string) *exec.Cmd {
	enter := []string{"--target", fmt.Sprint(n.init.Process.Pid), "--mount", "--uts", "--ipc", "--net", "--pid", "--"}
	cmd := exec.CommandContext(ctx, "nsenter", append(enter, argv...)...)
	cmd.Dir = "/"
	path := append(n.lab.parts.Programs(), n.lab.parts.CNI(), "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/usr/bin", "/sbin", "/bin")
	cmd.Env = []string{"PATH=" + strings.Join(path, ":"), "HOME=/root", operator.PlainTCP}
	return cmd
}

// Run runs a program on the node and returns its output.
func (n *Node) Run(argv ...string) (string, error) {
	ctx, cancel := context.WithTimeout(n.lab.t.Context(), time.Minute)
	defer cancel()
	out, err := n.command(ctx, argv...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s on %s: %w: %s", strings.Join(argv, " "), n.Name, err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// start starts a program of the node, under a name. It may have run before.
func (n *Node) start(name string, argv ...string) error {
	p, err := startProcess(n.lab.logs, n.Name+"-"+name, n.command(context.Background(), argv...))
	if err == nil {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.programs[name] = p
	}
	return err
}

// Program is the node's program of that name: containerd, kubelet, initiator, csi.
func (n *Node) Program(name string) *Process {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.programs[name]
}

// CutControl cuts the node off from the control plane, from all managers but its own and from the
// other nodes, as a dead switch does: connections stay open but pass nothing. The node still reaches
// the targets.
func (n *Node) CutControl() error { return n.control("add") }

// MendControl undoes CutControl.
func (n *Node) MendControl() error { return n.control("del") }

func (n *Node) control(change string) error {
	all := []string{controlAddress}
	for _, other := range n.lab.Nodes {
		if other != n {
			all = append(all, nodeAddress(other.id.N))
		}
	}
	for _, address := range all {
		if _, err := n.Run("ip", "route", change, "blackhole", address+"/32"); err != nil {
			return err
		}
	}
	return nil
}

// Kill ends everything on the node at once, like a power cut.
func (n *Node) Kill() error {
	if n.init == nil || n.init.Process == nil {
		return nil
	}
	err := n.init.Process.Kill()
	n.keepAlive.Close()
	_ = n.init.Wait()
	for _, p := range n.programs {
		err = errors.Join(err, p.await(10*time.Second))
	}
	n.init, n.programs = nil, make(map[string]*Process)
	return err
}

// leftovers lists the mounts and devices of volumes that the node still has, or is "".
func (n *Node) leftovers() string {
	mounts, err := os.ReadFile(fmt.Sprintf("/proc/%d/mountinfo", n.init.Process.Pid))
	if err != nil {
		return err.Error()
	}
	var left []string
	for line := range strings.Lines(string(mounts)) {
		fields := strings.Fields(line)
		if len(fields) > 4 && (strings.Contains(fields[4], "/kubernetes.io~csi/") || strings.Contains(fields[4], "/kubernetes.io/csi/")) {
			left = append(left, "mount "+fields[4])
		}
	}
	disks, err := disksOf(n.file(runDirName))
	if err != nil {
		return err.Error()
	}
	for _, d := range disks {
		left = append(left, "device "+d)
	}
	return strings.Join(left, ", ")
}
