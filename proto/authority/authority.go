// SPDX-License-Identifier: Apache-2.0

// Package authority is how an agent knows whose orders to take: those of the highest
// (term, generation) that it has acted on, or higher ones.
//
// A term is the time of one volume manager; each has a higher number than all before
// it. Orders of a lower term come from a manager that was replaced and goes on, or
// from one on a copy of its store. Such a manager lacks records that the later one
// made, so to obey it could serve a stale copy. The same holds for its answers: what it
// records is not in the store that counts.
//
// The highest order is kept in a file, so that an agent that starts again does not fall
// back. Term 0 is a manager of a version without terms; it is taken as long as no other
// was heard of.
package authority

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"sync"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
)

// Order says where an order comes from: a cluster's manager in a term, and the
// generation of its records.
type Order struct {
	Cluster    block.ClusterID
	Term       uint64
	Generation uint64
}

// OrderOf returns the authority behind a wanted state. An agent ignores a wanted state that names
// no cluster, so its order is of none.
func OrderOf(wanted interface {
	GetClusterId() string
	GetTerm() uint64
	GetGeneration() uint64
}) Order {
	cluster, _ := block.ParseClusterID(wanted.GetClusterId()) //nolint:errcheck // see above
	return Order{Cluster: cluster, Term: wanted.GetTerm(), Generation: wanted.GetGeneration()}
}

// behind reports whether o is older than p. Those of different clusters do not compare;
// nor do those of managers that have no terms.
func (o Order) behind(p Order) bool {
	if o.Cluster != p.Cluster || p.Term == 0 {
		return false
	}
	return o.Term < p.Term || o.Term == p.Term && o.Generation < p.Generation
}

// ErrReplaced is what is wrong with an order or an answer of a manager that another one
// has replaced.
var ErrReplaced = errors.New("the volume manager was replaced")

// Note is the newest order that an agent has acted on. The zero one is that of an agent
// that has acted on none. Its methods may be called side by side.
type Note struct {
	path string // empty: only this process remembers

	mu     sync.Mutex
	newest Order
}

// Load reads the note that is kept at path from now on; the file need not be there.
// Without it, or with an empty path, the note is lost when the process ends.
func (n *Note) Load(path string) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.path = path; path == "" {
		return nil
	}
	text, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read the newest order: %w", err)
	}
	if n.newest, err = parse(string(text)); err != nil {
		return fmt.Errorf("read the newest order: %s holds %.60q: %w; remove it if the volume manager that answers is the right one", path, text, err)
	}
	return nil
}

// format has one length, so that a note can be written over another one.
const format = "cluster %s term %020d generation %020d\n"

func parse(text string) (o Order, err error) {
	var cluster string
	if _, err := fmt.Sscanf(text, "cluster %s term %d generation %d\n", &cluster, &o.Term, &o.Generation); err != nil {
		return Order{}, err
	}
	o.Cluster, err = block.ParseClusterID(cluster)
	return o, err
}

// Newest is the newest order that was acted on; zero if none was.
func (n *Note) Newest() Order {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.newest
}

// Check returns an error that is ErrReplaced if an order is older than the newest one.
func (n *Note) Check(o Order) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.checkLocked(o)
}

func (n *Note) checkLocked(o Order) error {
	if !o.behind(n.newest) {
		return nil
	}
	is, has := fmt.Sprintf("term %d", o.Term), fmt.Sprintf("term %d", n.newest.Term)
	if o.Term == n.newest.Term {
		is, has = fmt.Sprintf("%s, generation %d", is, o.Generation), fmt.Sprintf("%s, generation %d", has, n.newest.Generation)
	}
	why := fmt.Sprintf("it is at %s, and this agent has acted on orders of %s", is, has)
	if n.path != "" {
		why += "; if there is no later manager any more, remove " + n.path + " and restart the agent"
	}
	return fmt.Errorf("%w: %s", ErrReplaced, why)
}

// Take notes an order that is to be acted on, and refuses it as Check does. If it
// returns nil, the note is kept.
func (n *Note) Take(o Order) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if err := n.checkLocked(o); err != nil {
		return err
	}
	if o == n.newest || o.Term == 0 {
		return nil
	}
	if err := n.keepLocked(o); err != nil {
		return fmt.Errorf("note the newest order: %w", err)
	}
	n.newest = o
	return nil
}

// keepLocked writes the note. A new term outlives a power cut. A generation is written in
// place, since there are many, and outlives the process: a manager that is started again
// has another term.
func (n *Note) keepLocked(o Order) error {
	text := fmt.Sprintf(format, o.Cluster, o.Term, o.Generation)
	switch {
	case n.path == "":
		return nil
	case o.Cluster != n.newest.Cluster || o.Term != n.newest.Term:
		return durable.Write(n.path, text, 0o644)
	}
	f, err := os.OpenFile(n.path, os.O_WRONLY, 0)
	if errors.Is(err, fs.ErrNotExist) { // somebody has removed it
		return durable.Write(n.path, text, 0o644)
	}
	if err != nil {
		return err
	}
	_, err = f.WriteAt([]byte(text), 0)
	return errors.Join(err, f.Close())
}

// CheckAnswer is Check for the answer to a call, of which only the term counts: orders
// overtake answers.
func (n *Note) CheckAnswer(term uint64) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	o := n.newest
	if o.Term = term; term < n.newest.Term {
		return n.checkLocked(o)
	}
	return nil
}
