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
	var silent *Namespace
	var looked []entry
	for _, find := range []func(block.NQN) ([]entry, error){t.known, t.find} {
		there, err := find(nqn)
		if err != nil {
			return Namespace{}, err
		}
		for _, e := range there {
			if slices.Contains(looked, e) {
				continue
			}
			looked = append(looked, e)
			all, err := t.namespaces(e)
			if err != nil {
				return Namespace{}, err
			}
			for _, n := range all {
				if n.NSID != nsid || n.UUID != uuid || n.Size == 0 || len(n.Paths) == 0 {
					continue
				}
				if n.Live {
					return n, nil
				}
				silent = &n
			}
		}
	}
	if silent != nil {
		return *silent, fmt.Errorf("find namespace %d of %s: %s: %w", nsid, nqn, silent.Name, ErrNoLivePath)
	}
	return Namespace{}, fmt.Errorf("find namespace %d of %s: %w", nsid, nqn, ErrNoNamespace)
}

const subsystems = "class/nvme-subsystem/"

// subsystem has what does not change of /sys/class/nvme-subsystem/<name>/.
type subsystem struct {
	nqn   block.NQN
	heads fixed[Head]
}

func (t *Tree) subsystem(name string) (s *subsystem, all bool, err error) {
	nqn, err := t.read(subsystems + name + "/subsysnqn")
	return &subsystem{nqn: block.NQN(nqn)}, nqn != "", err
}

// known returns the subsystems of an NQN that find has found, as far as they are still there.
func (t *Tree) known(nqn block.NQN) (all []entry, err error) {
	t.mu.Lock()
	found := t.found[nqn]
	t.mu.Unlock()
	for _, e := range found {
		if t.still(subsystems, e) {
			all = append(all, e)
		}
	}
	return all, nil
}

// find finds the subsystems of an NQN among all of the machine.
func (t *Tree) find(nqn block.NQN) ([]entry, error) {
	there, err := t.entries(subsystems)
	if err != nil {
		return nil, err
	}
	t.subsystems.keep(there)
	found := make(map[block.NQN][]entry, len(there))
	for _, e := range there {
		s, err := t.subsystems.of(e, t.subsystem)
		if vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		found[s.nqn] = append(found[s.nqn], e)
	}
	t.mu.Lock()
	t.found = found
	t.mu.Unlock()
	return found[nqn], nil
}

// namespaces lists the namespaces of a subsystem. Its directory has the heads, and links to the controllers.
func (t *Tree) namespaces(of entry) (all []Namespace, err error) {
	s, err := t.subsystems.of(of, t.subsystem)
	if vanished(err) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	there, err := t.entries(subsystems + of.name)
	if err != nil {
		return nil, err
	}
	s.heads.keep(there)
	for _, e := range there {
		if k, ok := parseName(e.name); !ok || !k.head() {
			continue
		}
		n, err := t.namespace(s, e, there)
		if vanished(err) {
			continue
		}
		if err != nil {
			return nil, err
		}
		all = append(all, n)
	}
	return all, nil
}

func (t *Tree) namespace(s *subsystem, head entry, there []entry) (n Namespace, err error) {
	if n.Head, err = s.heads.of(head, t.head); err != nil {
		return n, err
	}
	sectors, err := t.number("block/" + head.name + "/size")
	if err != nil {
		return n, err
	}
	n.Size = block.Size(sectors) * block.SectorSize
	of, _ := parseName(head.name)
	for _, e := range there {
		c, ok := parseName(e.name)
		if !ok || !c.controller() {
			continue
		}
		of.control = c.control
		if p := (Path{Name: of.String(), Controller: e.name}); t.exists("block/" + p.Name) {
			n.Paths = append(n.Paths, p)
			state, _ := t.read("class/nvme/" + e.name + "/state")
			n.Live = n.Live || state == Live
		}
	}
	return n, nil
}
