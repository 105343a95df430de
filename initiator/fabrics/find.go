// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"slices"

	"weft.dev/weft/proto/block"
)

// The errors of FindNamespace when there is no usable device.
var (
	ErrNoNamespace = errors.New("no such namespace")
	ErrNoLivePath  = errors.New("no live path")
)

// Namespace is a head and its paths.
type Namespace struct {
	Head
	Paths []Path
	Live  bool // a controller of one of the paths is live
}

// FindNamespace finds the block device of a namespace. While somebody has them open, a
// subsystem may be listed twice, and a head may keep its name after its namespace is gone; so
// the NQN, the nsid, the UUID and the size must all match. ErrNoNamespace: nothing matches.
// ErrNoLivePath: the namespace is returned, but its I/O waits.
func (t *Tree) FindNamespace(nqn block.NQN, nsid uint32, uuid block.UUID) (Namespace, error) {
	subsystems, err := t.Subsystems()
	if err != nil {
		return Namespace{}, err
	}
	var silent *Namespace
	for _, s := range subsystems {
		if s.NQN != nqn {
			continue
		}
		for _, name := range s.Heads {
			n, err := t.namespace(s, name)
			if vanished(err) {
				continue
			}
			if err != nil {
				return Namespace{}, err
			}
			if n.NSID != nsid || n.UUID != uuid || n.Size == 0 || len(n.Paths) == 0 {
				continue
			}
			if n.Live {
				return n, nil
			}
			silent = &n
		}
	}
	if silent != nil {
		return *silent, fmt.Errorf("find namespace %d of %s: %s: %w", nsid, nqn, silent.Name, ErrNoLivePath)
	}
	return Namespace{}, fmt.Errorf("find namespace %d of %s: %w", nsid, nqn, ErrNoNamespace)
}

func (t *Tree) namespace(s Subsystem, name string) (Namespace, error) {
	h, err := t.head(name)
	if err != nil {
		return Namespace{}, err
	}
	paths, err := t.Paths(h)
	if err != nil {
		return Namespace{}, err
	}
	n := Namespace{Head: h}
	for _, p := range paths {
		if !slices.Contains(s.Controllers, p.Controller) {
			continue
		}
		n.Paths = append(n.Paths, p)
		state, _ := t.read("class/nvme/" + p.Controller + "/state")
		n.Live = n.Live || state == Live
	}
	return n, nil
}

// HeadOf finds the head whose block device is dev ("259:3"), with the NQN of its subsystem: it
// identifies the devices of a table that was loaded earlier.
func (t *Tree) HeadOf(dev string) (block.NQN, Namespace, error) {
	subsystems, err := t.Subsystems()
	if err != nil {
		return "", Namespace{}, err
	}
	for _, s := range subsystems {
		for _, name := range s.Heads {
			n, err := t.namespace(s, name)
			if err == nil && n.Dev == dev {
				return s.NQN, n, nil
			}
		}
	}
	return "", Namespace{}, fmt.Errorf("find head %s: %w", dev, ErrNoNamespace)
}
