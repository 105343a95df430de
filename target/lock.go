// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/agentlock"
)

// A node has one target agent. A second one would plan with labels that it read before the first
// one changed them: it could export again a leg that the first one has fenced, and reported as
// fenced. So an agent holds a lock file in <dev>/weft for as long as it runs, which names the
// holder. The kernel releases it when the process and its last system call have ended.
//
// The kernel's exports belong to the machine. An agent in the kernel's data path therefore also
// holds a second file exclusively; agents of other nodes that serve in user space on the same
// machine, as in a lab, share it. Agents that use files alone hold neither, only a lock on each of
// their files.

var errHeld = errors.New("another target agent runs on this machine")

// lock makes this process the agent of its node. An agent in user space that may not write there
// does without: it locks each of its drives.
func (c Config) lock(ctx context.Context) (agentlock.Lock, error) {
	if c.FilesOnly {
		return nil, nil
	}
	l, err := agentlock.Wait(ctx, errHeld, c.tryLock)
	if c.Datapath == User && (errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS)) {
		return nil, nil
	}
	return l, err
}

func (c Config) tryLock() (l agentlock.Lock, err error) {
	dir := filepath.Join(c.Root, "dev/weft")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	how := unix.LOCK_EX
	if c.Datapath == User {
		how = unix.LOCK_SH
	}
	for _, x := range []struct {
		path string
		how  int
	}{{c.nodeLock(string(c.Node)), unix.LOCK_EX}, {filepath.Join(dir, "target.lock"), how}} {
		f, err := agentlock.Take(x.path, os.O_RDWR|os.O_CREATE, 0o644, x.how)
		if errors.Is(err, unix.EWOULDBLOCK) {
			err = fmt.Errorf("%w: %s", errHeld, c.holders())
		}
		if err != nil {
			return l, err
		}
		l = append(l, f)
	}
	return l, c.sign(l[0])
}

func (c Config) nodeLock(node string) string {
	return filepath.Join(c.Root, "dev/weft", "target-"+node+".lock")
}

// sign writes into a lock's file who holds it.
func (c Config) sign(f *os.File) error {
	path := c.Datapath
	if path == "" {
		path = Kernel
	}
	host, _ := os.Hostname() //nolint:errcheck // it only helps to find the process, of a container
	return agentlock.Sign(f, fmt.Sprintf("node %s, data path %s, process %d on %s, since %s", c.Node, path, os.Getpid(), host, time.Now().UTC().Format(time.RFC3339)))
}

// holders names the processes that hold the locks.
func (c Config) holders() string {
	files, err := filepath.Glob(c.nodeLock("*"))
	var all []string
	for _, path := range files {
		f, err := agentlock.Take(path, os.O_RDONLY, 0, unix.LOCK_SH)
		if err == nil {
			f.Close()
			continue
		}
		if text, err := os.ReadFile(path); err == nil && len(text) > 0 {
			all = append(all, strings.TrimSpace(string(text)))
		}
	}
	if err != nil || len(all) == 0 {
		return "it has just started"
	}
	return strings.Join(all, "; ")
}
