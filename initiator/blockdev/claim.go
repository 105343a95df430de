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

// claim is a process's hold on a volume's name under DevDir, whatever its run
// directory: two clusters on one machine may each have a volume of that name. The
// kernel lets go of it when the process dies, however it does.
type claim struct {
	f    *os.File
	path string
}

func (s system) claimFile(name block.VolumeName) string {
	return filepath.Join(s.dev, "weft", "."+string(name)+".lock") // not a volume's name
}

// claimName takes the name, also of a process that died. Of one that lives it is
// an ErrExported that says whose it is; so it is if the name leads to a device
// that is there and none of this package's, such as the kernel data path's.
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
			c.unlock() // its owner has removed it between our two steps
			continue
		}
		if disk, lives := s.foreign(o.Name); lives {
			c.release()
			return nil, fmt.Errorf("%s leads to %s, which this process did not create: %w", s.link(o.Name), disk, ErrExported)
		}
		// Only for people, who read it in an error of another process.
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

// foreign tells whether the name leads to a disk that is there and is of no kind
// that is made here. One that is, was left by a process that is dead.
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
	// It must not be kept by a thread that waits for the dead device, see apart.
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

// isThere tells whether the locked file is the one that others would lock.
func (c *claim) isThere() bool {
	mine, err1 := c.f.Stat()
	now, err2 := os.Lstat(c.path)
	return err1 == nil && err2 == nil && os.SameFile(mine, now)
}

// release lets the next one have the name; nothing is left of the claim.
func (c *claim) release() {
	_ = os.Remove(c.path)
	c.unlock()
}

func (c *claim) unlock() {
	serving.forget(int(c.f.Fd()))
	c.f.Close()
}

// Held is an ErrExported that says whose a name under devDir is ("" is /dev), if a
// process that lives has it exported. It is for who gives names to devices by
// other means; nothing keeps the name from being exported a moment later.
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
		return fmt.Errorf("look who has %s: %w", s.link(name), err)
	}
	if c.isThere() {
		c.release()
	} else {
		c.unlock()
	}
	return nil
}
