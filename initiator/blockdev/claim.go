// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// claim is a process's claim on a volume's name under DevDir, whatever its run directory: two
// clusters on one machine may each have a volume of that name. The kernel releases it when the
// process dies, however it dies.
type claim struct {
	f    *os.File
	path string
}

func (s system) claimFile(name block.VolumeName) string {
	return filepath.Join(s.dev, "weft", "."+string(name)+".lock") // a volume's name cannot begin with a dot
}

// claimName claims the name, even from a dead process. If a living process has it, the error
// is an ErrExported that names the process. It is also an ErrExported if the name leads to an
// existing device that this package did not make, such as the kernel data path's.
func (s system) claimName(o Options) (*claim, error) {
	path := s.claimFile(o.Name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, fmt.Errorf("claim %s: %w", s.link(o.Name), err)
	}
	for {
		c, err := lockClaim(path)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, s.taken(o.Name)
		}
		if err != nil {
			return nil, fmt.Errorf("claim %s: %w", s.link(o.Name), err)
		}
		if !c.isThere() {
			c.unlock() // its owner removed it between our two steps
			continue
		}
		if disk, lives := s.foreign(o.Name); lives {
			c.release()
			return nil, fmt.Errorf("%s leads to %s, which this process did not create: %w", s.link(o.Name), disk, ErrExported)
		}
		// For people only: another process quotes it in an error.
		if err := errors.Join(c.f.Truncate(0), writeAt(c.f, fmt.Sprintf("process %d, which keeps its records in %s\n", os.Getpid(), o.RunDir))); err != nil {
			c.release()
			return nil, fmt.Errorf("claim %s: %w", s.link(o.Name), err)
		}
		return c, nil
	}
}

// taken says who has a name.
func (s system) taken(name block.VolumeName) error {
	owner, _ := os.ReadFile(s.claimFile(name))
	to, err := os.Readlink(s.link(name))
	if err != nil {
		to = "no device yet"
	}
	return fmt.Errorf("%s is a volume of another cluster (it leads to %s and is held by %s): %w; detach one of the two: a machine can have only one volume of a name",
		s.link(name), to, strings.TrimSpace(string(owner)), ErrExported)
}

// foreign reports whether the name leads to an existing disk of a kind that this package does
// not make. A disk of our kinds was left by a dead process.
func (s system) foreign(name block.VolumeName) (disk string, lives bool) {
	to, err := os.Readlink(s.link(name))
	if err != nil {
		return "", false
	}
	disk = filepath.Base(to)
	for _, ours := range []string{"loop", "nbd", "ublkb"} {
		if strings.HasPrefix(disk, ours) {
			return disk, false
		}
	}
	return disk, exists(filepath.Join(s.sys, "block", disk))
}

func lockClaim(path string) (*claim, error) {
	// A thread that waits for the dead device must not keep it open, see unshared.
	var f *os.File
	_, err := serving.open(func() (_ []int, err error) {
		if f, err = os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600); err != nil {
			return nil, err
		}
		return []int{int(f.Fd())}, nil
	})
	if err != nil {
		return nil, err
	}
	c := &claim{f, path}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		c.unlock()
		return nil, err
	}
	return c, nil
}

// isThere reports whether the locked file is still the one that others would lock.
func (c *claim) isThere() bool {
	mine, err1 := c.f.Stat()
	now, err2 := os.Lstat(c.path)
	return err1 == nil && err2 == nil && os.SameFile(mine, now)
}

// release releases the name and removes the claim's file.
func (c *claim) release() {
	_ = os.Remove(c.path)
	c.unlock()
}

func (c *claim) unlock() {
	serving.forget(int(c.f.Fd()))
	c.f.Close()
}

// Held returns an ErrExported that names the process if a living process has exported a name
// under devDir ("" is /dev). It is for code that names devices in other ways. The name may
// still be exported a moment later.
func Held(devDir string, name block.VolumeName) error {
	s := systemOf(Options{DevDir: cmp.Or(devDir, devices)})
	if !exists(s.claimFile(name)) {
		return nil
	}
	c, err := lockClaim(s.claimFile(name))
	if errors.Is(err, unix.EWOULDBLOCK) {
		return s.taken(name)
	}
	if err != nil {
		return fmt.Errorf("find who holds %s: %w", s.link(name), err)
	}
	if c.isThere() {
		c.release()
	} else {
		c.unlock()
	}
	return nil
}
