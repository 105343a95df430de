// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// claim is a process's claim on a device's name under DevDir, whatever its run directory: two
// clusters on one machine may each have a volume of that name. The kernel releases it when the
// process dies, however it dies.
type claim struct {
	f    *os.File
	path string
	name block.VolumeName
}

func (s system) claimFile(name block.VolumeName) string {
	return filepath.Join(s.dev, "weft", "."+string(name)+".lock") // a volume's name cannot begin with a dot
}

// claimer is who wants a device's name.
type claimer struct {
	text string // for people, and for those who come later

	// owns reports whether a disk that has the name is its own. It must not open the disk, which may wait
	// for this process.
	owns func(name block.VolumeName, disk string) bool
}

func (s system) claimer(o Options) claimer {
	return claimer{
		text: fmt.Sprintf("process %d%s", os.Getpid(), keepsRecordsIn(o)),
		owns: func(name block.VolumeName, _ string) bool {
			return strings.HasSuffix(s.lastClaim(s.claimFile(name)), keepsRecordsIn(o))
		},
	}
}

func keepsRecordsIn(o Options) string { return ", which keeps its records in " + o.RunDir }

// lastClaim says who made the last claim that was not released; empty: nobody did.
func (s system) lastClaim(file string) string {
	text, _ := os.ReadFile(file)
	return strings.TrimSpace(string(text))
}

// claimName claims the first of some names that no other device has. If others have all of them, the
// error is an ErrExported that says who.
func (s system) claimName(names []block.VolumeName, by claimer) (*claim, error) {
	var taken error
	for _, name := range names {
		c, err := s.claimOne(name, by)
		switch {
		case err == nil:
			return c, nil
		case !errors.Is(err, ErrExported):
			return nil, fmt.Errorf("claim %s: %w", s.link(name), err)
		case taken == nil:
			taken = err
		default:
			taken = fmt.Errorf("%w; %w", taken, err)
		}
	}
	return nil, taken
}

// claimOne claims a name, even from a dead process. If a living process has it, or if it leads to another's
// disk, the error is an ErrExported.
func (s system) claimOne(name block.VolumeName, by claimer) (*claim, error) {
	path := s.claimFile(name)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	for {
		// Before the lock, too: the disk's process may start again just now, and should find its name free.
		if err := s.kept(name, by); err != nil {
			return nil, err
		}
		c, err := lockClaim(path)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, s.taken(name)
		}
		if err != nil {
			return nil, err
		}
		if !c.isThere() {
			c.unlock() // its owner removed it between our two steps
			continue
		}
		if err := s.kept(name, by); err != nil {
			c.unlock() // what it says of the disk's process stays
			return nil, err
		}
		if err := errors.Join(c.f.Truncate(0), writeAt(c.f, by.text+"\n")); err != nil {
			c.release()
			return nil, err
		}
		c.name = name
		return c, nil
	}
}

// kept returns an ErrExported if a name leads to another's disk. Such a disk keeps its name when its process
// has died: it may be in use, and wait for the next process.
func (s system) kept(name block.VolumeName, by claimer) error {
	if disk, lives := s.leads(name); lives && !by.owns(name, disk) {
		return s.taken(name)
	}
	return nil
}

// taken says who has a name, as far as that is known.
func (s system) taken(name block.VolumeName) error {
	text := "no device yet"
	if to, err := os.Readlink(s.link(name)); err == nil {
		text = to
	}
	if last := s.lastClaim(s.claimFile(name)); last != "" {
		text += "; it was claimed by " + last
	}
	return fmt.Errorf("%s is another volume's (it leads to %s): %w", s.link(name), text, ErrExported)
}

// leads returns the disk that a name leads to, and whether that exists. The kernel keeps loop and nbd
// devices that nobody uses.
func (s system) leads(name block.VolumeName) (disk string, lives bool) {
	to, err := os.Readlink(s.link(name))
	if err != nil {
		return "", false
	}
	disk = filepath.Base(to)
	sign := ""
	switch {
	case strings.HasPrefix(disk, "loop"):
		sign = "loop/backing_file"
	case strings.HasPrefix(disk, "nbd"):
		sign = "pid"
	}
	return disk, exists(filepath.Join(s.sys, "block", disk, sign))
}

// confusable returns an ErrExported if a living process has a volume of this name and a run directory at
// the same path, though not the same one, whose lock for the name is this process's: it may be in another
// container, or just about to end. The marks of its devices are those of this process, which would take them
// for its own.
func (s system) confusable(o Options) error {
	files, err := filepath.Glob(s.claimFile(o.Name + "+*"))
	if err != nil {
		return err
	}
	for _, file := range append(files, s.claimFile(o.Name)) {
		last := s.lastClaim(file)
		if !strings.HasSuffix(last, keepsRecordsIn(o)) {
			continue
		}
		c, err := lockClaim(file)
		if errors.Is(err, unix.EWOULDBLOCK) {
			return fmt.Errorf("%s has a volume of this name: %w", last, ErrExported)
		}
		if err != nil {
			return err
		}
		c.unlock()
	}
	return nil
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
	c := &claim{f: f, path: path}
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
