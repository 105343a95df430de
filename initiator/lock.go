// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/agentlock"
)

// Only one agent of a node may use the kernel's data path: the kernel's tables are global, and
// two agents would keep changing them back and forth, each by its own memory. So the agent
// locks a file of its StateDir and one for its node in <dev>/weft, which name their holder. An
// agent in user space has a host identity of its own (lockState), but may not run on a node
// that has a kernel agent.

var errHeld = errors.New("another initiator agent runs on this machine")

// lock makes this process the agent of its node.
func (c Config) lock(ctx context.Context) (agentlock.Lock, error) {
	return agentlock.Wait(ctx, errHeld, c.tryLock)
}

func (c Config) tryLock() (l agentlock.Lock, err error) {
	node := filepath.Join(c.DevDir, "weft", "initiator-"+string(c.Node)+".lock")
	if c.Datapath == User {
		f, err := hold(node, os.O_RDONLY, unix.LOCK_SH)
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, fs.ErrPermission) {
			return nil, nil // the node has had no kernel agent since its boot
		}
		return agentlock.Lock{f}, err
	}
	for _, path := range []string{filepath.Join(c.StateDir, "agent.lock"), node} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			return l, err
		}
		f, err := hold(path, os.O_RDWR|os.O_CREATE, unix.LOCK_EX)
		if err != nil {
			return l, err
		}
		if l = append(l, f); f == nil {
			continue
		}
		if err := c.sign(f); err != nil {
			return l, err
		}
	}
	return l, nil
}

// hold takes the lock of a file, unless a living process has it. A killed agent may have left
// a call in the kernel that waits for a silent target: it keeps its locks until the call
// returns, but does nothing more. In that case hold returns no file and no error.
func hold(path string, flags, how int) (*os.File, error) {
	f, err := agentlock.Take(path, flags, 0o644, how)
	if !errors.Is(err, unix.EWOULDBLOCK) {
		return f, err
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	holder := strings.TrimSpace(string(text))
	if killed(holder) {
		return nil, nil
	}
	if holder == "" {
		holder = "it has just started"
	}
	return nil, fmt.Errorf("%w: %s holds %s", errHeld, holder, path)
}

// holderFormat is how an agent signs its lock: its process number is valid in the pid
// namespace named last.
const holderFormat = "node %s, data path %s, process %d in %s, since %s"

func (c Config) sign(f *os.File) error {
	space, err := os.Readlink("/proc/self/ns/pid")
	if err != nil {
		return err
	}
	return agentlock.Sign(f, fmt.Sprintf(holderFormat, c.Node, c.Datapath, os.Getpid(), space, time.Now().UTC().Format(time.RFC3339)))
}

// killed reports whether the process that has signed a lock is known to be dying: SIGKILL is
// pending for it, or only other threads are left.
func killed(holder string) bool {
	_, at, ok := strings.Cut(holder, ", process ")
	pid, rest, ok2 := strings.Cut(at, " in ")
	space, _, ok3 := strings.Cut(rest, ",")
	own, err := os.Readlink("/proc/self/ns/pid")
	if _, bad := strconv.Atoi(pid); !ok || !ok2 || !ok3 || bad != nil || err != nil || own != space {
		return false
	}
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	return err == nil && ends(status)
}

// ends reads /proc/PID/status.
func ends(status []byte) bool {
	const kill = 1 << (unix.SIGKILL - 1)
	for lines := bufio.NewScanner(bytes.NewReader(status)); lines.Scan(); {
		key, value, _ := strings.Cut(lines.Text(), ":")
		value = strings.TrimSpace(value)
		switch key {
		case "State":
			if strings.HasPrefix(value, "Z") || strings.HasPrefix(value, "X") {
				return true
			}
		case "SigPnd", "ShdPnd":
			if pending, err := strconv.ParseUint(value, 16, 64); err == nil && pending&kill != 0 {
				return true
			}
		}
	}
	return false
}
