// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr"
	"weft.dev/weft/volmgr/quorum"
)

// This file holds the faults of managers.

// managerPrefix begins what repairs of managers are called.
const managerPrefix = "manager "

func (h *managerHost) started() string { return managerPrefix + h.name + " is started" }

func (c *cluster) managerNames() (names []string) {
	for _, h := range c.managers {
		names = append(names, h.name)
	}
	return names
}

// agreed returns when all managers vote.
func (c *cluster) agreed() {
	c.t.Helper()
	if !c.quorum {
		return
	}
	c.eventually("all managers vote", func(context.Context) error {
		if !c.allVote() {
			return errors.New(c.explainManagers())
		}
		return nil
	})
}

// explainManagers says what each manager knows of the quorum.
func (c *cluster) explainManagers() (text string) {
	for _, h := range c.managers {
		text += fmt.Sprintf("\n  %s, member %v: ", h.name, h.member)
		if h.running == nil || h.running.isOff() {
			text += "down"
			continue
		}
		now := h.running.manager.Member().Status()
		text += fmt.Sprintf("%v of term %d, follows %v, applied %v", now.Role, now.Term, now.Leader, now.Applied)
	}
	return text
}

// manager chooses a manager: often the one that leads.
func (r *chaos) manager() *managerHost {
	c := r.cluster
	if len(c.managers) == 1 {
		return c.managers[0]
	}
	if h := c.leader(); h != nil && r.random.IntN(2) == 0 {
		return h
	}
	return c.managers[r.random.IntN(len(c.managers))]
}

// managerKinds lists the faults of several managers.
func (r *chaos) managerKinds() []kind {
	if len(r.cluster.managers) == 1 {
		return nil
	}
	return []kind{
		{"part managers", 3, r.partManagers},
		{"lose messages", 2, r.loseMessages},
		{"hand over", 2, r.handOver},
		{"replace manager", 2, r.replaceManager},
		{"lose managers", 1, r.loseManagers},
	}
}

// killManager ends a manager's process, or cuts its power, at any time, in its next commit or in
// one of its next writes.
func (r *chaos) killManager() string {
	h := r.manager()
	if h.running == nil {
		return ""
	}
	what := h.name + " is killed"
	switch r.random.IntN(4) {
	case 0:
		h.kill()
	case 1:
		h.cut()
		what = h.name + " loses its power"
	default:
		what = r.armTrap(h)
	}
	r.later(8*time.Second, h.started(), func() { r.startManager(h) })
	return what
}

// armTrap makes a manager lose power in its next commit, or in one of its next writes.
func (r *chaos) armTrap(h *managerHost) string {
	m := h.running
	if n := 1 + r.random.IntN(12); m.medium != nil && r.random.IntN(2) == 0 {
		m.medium.set(func() { m.medium.cutIn = n })
		return fmt.Sprintf("%s is to lose its power in its write %d from now", h.name, n)
	}
	t := trapBefore
	if r.random.IntN(3) == 0 {
		t = trapAfter
	}
	m.set(func() { m.trap = t })
	return h.name + map[trap]string{
		trapBefore: " is to lose its power before its next commit",
		trapAfter:  " is to lose its power after its next commit",
	}[t]
}

// startManager restarts a manager, also one that has not run into its trap. One that has lost its
// disk becomes a new member: see replaceManager.
func (r *chaos) startManager(h *managerHost) {
	h.cut()
	h.buried()
	if volmgr.FindStore(h.store) == nil {
		h.start()
	}
}

// slowStore makes commits slow, or the disk of a manager.
func (r *chaos) slowStore() string {
	h := r.manager()
	m := h.running
	if m == nil || m.isOff() {
		return ""
	}
	d := time.Duration(r.random.Int64N(int64(time.Second)))
	if m.medium != nil && r.random.IntN(2) == 0 {
		m.medium.set(func() { m.medium.takes = d })
		r.later(10*time.Second, h.name+"'s disk is fast", func() { m.medium.set(func() { m.medium.takes = 0 }) })
		return fmt.Sprintf("%s's disk takes up to %v", h.name, d.Round(time.Millisecond))
	}
	m.set(func() { m.takes = d })
	r.later(10*time.Second, "commits are fast", func() { m.set(func() { m.takes = 0 }) })
	return fmt.Sprintf("commits of %s take up to %v", h.name, d.Round(time.Millisecond))
}

// partManagers cuts a manager off from the others, in one direction or both, while agents still
// reach it.
func (r *chaos) partManagers() string {
	c, h, way := r.cluster, r.manager(), r.random.IntN(3)
	set := func(cut bool) {
		for _, other := range c.managers {
			if other != h {
				c.network.cut(h.name, other.name, cut && way != 1)
				c.network.cut(other.name, h.name, cut && way != 2)
			}
		}
	}
	set(true)
	r.later(15*time.Second, h.name+" and the other managers reach each other", func() { set(false) })
	return h.name + []string{" and the other managers do not reach each other", " hears no other manager", " is not heard by other managers"}[way]
}

// loseMessages makes managers lose a part of what they say to each other.
func (r *chaos) loseMessages() string {
	part := 0.05 + r.random.Float64()/2
	var all []*medium
	for _, h := range r.cluster.managers {
		if h.running != nil {
			all = append(all, h.running.medium)
		}
	}
	set := func(part float64) {
		for _, m := range all {
			m.set(func() { m.loses = part })
		}
	}
	set(part)
	r.later(10*time.Second, "managers lose no messages", func() { set(0) })
	return fmt.Sprintf("managers lose %.0f%% of their messages", 100*part)
}

// handOver makes the leader hand leadership over, or stops it in order.
func (r *chaos) handOver() string {
	c := r.cluster
	h := c.leader()
	if h == nil {
		return ""
	}
	if r.random.IntN(2) == 0 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		_, err := c.operator.TransferLeadership(ctx, &pb.TransferLeadershipRequest{})
		return fmt.Sprintf("%s is to hand over: %v", h.name, err)
	}
	h.leave()
	r.later(8*time.Second, h.started(), func() { r.startManager(h) })
	return h.name + " is stopped in order"
}

// replaceManager removes a member for good, and adds its machine as a new one. Its disk may be
// lost before: then all others must know all members, since a quorum does not survive the loss of
// two disks.
func (r *chaos) replaceManager() string {
	c := r.cluster
	h := r.manager()
	if h.replaced || !c.allVote() {
		return ""
	}
	h.replaced = true
	id, what := h.member, h.name+" is replaced"
	if r.random.IntN(2) == 0 {
		h.kill()
		h.buried()
		if err := os.RemoveAll(h.store); err != nil {
			c.t.Fatalf("%v", err)
		}
		what = h.name + " loses its disk"
	}
	r.later(5*time.Second, h.made(), func() { r.readmit(h, id, time.Now().Add(patience)) })
	return what
}

func (h *managerHost) made() string { return managerPrefix + h.name + " is made a new member" }

// readmit removes a member, and adds its machine as a new one. The removal may have to wait for the
// repair of another manager. So it is tried again by a later repair, and not here, where that other
// repair may be waiting for this one to return.
func (r *chaos) readmit(h *managerHost, id quorum.ID, until time.Time) {
	c := r.cluster
	if err := c.tryRemove(id); err != nil {
		if time.Now().After(until) {
			c.t.Fatalf("%s is removed: not within %v: %v%s", h.name, patience, err, c.explainManagers())
		}
		time.Sleep(200 * time.Millisecond)
		r.undo = append(r.undo, repair{time.Now(), h.made(), func() { r.readmit(h, id, until) }})
		return
	}
	h.kill()
	h.buried()
	c.join(h)
	h.replaced = false
	c.did("%s is a new member", h.name)
}

// loseManagers cuts the power of all managers.
func (r *chaos) loseManagers() string {
	for _, h := range r.cluster.managers {
		if h.running == nil {
			continue // whoever has ended it starts it again
		}
		h.cut()
		r.later(8*time.Second, h.started(), func() { r.startManager(h) })
	}
	return "all managers lose their power"
}

// loseMajority loses the disks of all managers but one, which an operator makes the only one
// (weft volmgr recover). Half of the time it was cut off from the others before, and lacks what they have
// confirmed since.
func (r *chaos) loseMajority() string {
	c := r.cluster
	r.heal()
	time.Sleep(2 * time.Second) // a new member gets the records meanwhile, and may be the one that stays
	c.archive.rest()            // what only the others know is not lost
	c.archive.lose()
	c.clerk.hold()
	survivor, what := r.manager(), ""
	if r.random.IntN(2) == 0 {
		what = ", which was cut off before"
		for _, other := range c.managers {
			if other != survivor {
				c.network.part(survivor.name, other.name, true)
			}
		}
		time.Sleep(time.Duration(r.random.Int64N(int64(8 * time.Second))))
	}
	c.killManager()
	config := c.managers[0].config()
	recovered := config.Dir + ".recovered"
	config.Dir = recovered
	if _, err := volmgr.Recover(config, survivor.store); err != nil {
		c.t.Fatalf("%v", err)
	}
	c.loseStore()
	if err := os.Rename(recovered, c.managers[0].store); err != nil {
		c.t.Fatalf("%v", err)
	}
	c.network.heal()
	return survivor.name + what + ", is the only one left; " + r.startAnew()
}
