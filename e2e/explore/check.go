// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"fmt"

	"weft.dev/weft/initiator/volume"
)

// broken says which promise a world breaks; empty: none.
func (r *rig) broken(w *world) string {
	m := r.managers.at(w.manager)
	if m.inSync == 0 {
		return "no leg is recorded in sync"
	}
	for i := range r.Copies {
		if m.inSync&^m.suspect&^w.lossy&(1<<i) != 0 && w.content[i] < w.acked {
			return fmt.Sprintf("copy %d is recorded in sync and holds write %d; write %d was acknowledged", i, w.content[i], w.acked)
		}
	}
	if m.clean && m.holder < 0 {
		for i := range r.Copies {
			if first := r.first(m.inSync); m.inSync&(1<<i) != 0 && w.content[i] != w.content[first] {
				return fmt.Sprintf("the volume is recorded clean, and copy %d holds write %d, copy %d write %d", i, w.content[i], first, w.content[first])
			}
		}
	}
	for h := range r.Hosts {
		if s := r.brokenBy(w, m, h); s != "" {
			return fmt.Sprintf("%s: %s", hostName(h), s)
		}
	}
	return ""
}

func (r *rig) first(mask uint8) int {
	for i := range r.Copies {
		if mask&(1<<i) != 0 {
			return i
		}
	}
	return 0
}

// brokenBy looks at what a host may read and write.
func (r *rig) brokenBy(w *world, m *manager, h int) string {
	if m.granted >= 0 && int(m.granted) != h {
		for i := range r.Copies {
			for _, x := range r.exports.at(r.visible(w.target[i], h)) {
				if m.exported&(1<<i) != 0 && x.Epoch < m.epoch {
					return fmt.Sprintf("it may still write to copy %d at epoch %d, and %s has epoch %d", i, x.Epoch, hostName(int(m.granted)), m.epoch)
				}
			}
		}
	}
	x := r.hosts.at(w.host[h])
	if n := x.Note; n.Epoch != 0 && n.Epoch == m.epoch && !r.Cached { // no note knows what a cache loses
		for i := range r.Copies {
			if _, named := n.Legs[r.legs[i]]; named && w.content[i] < w.had[h] {
				return fmt.Sprintf("its note names copy %d, which holds write %d; it has acknowledged write %d", i, w.content[i], w.had[h])
			}
		}
	}
	return r.misread(w, h)
}

// misread says which old value a host may read.
func (r *rig) misread(w *world, h int) string {
	st := r.stack(w, h)
	if st == nil || !st.Device || st.Held || r.lapsed(w.host[h]) {
		return ""
	}
	shown := -1
	for i := range r.Copies {
		if st.Slots[i].State != volume.InSync || !r.answers(w, h, i) {
			continue
		}
		switch value := w.content[i]; {
		case value < max(w.acked, w.had[h]):
			return fmt.Sprintf("it reads write %d from copy %d after write %d was acknowledged or read", value, i, max(w.acked, w.had[h]))
		case w.write[h].number != 0: // reads wait
		case shown >= 0 && value != w.content[shown]:
			return fmt.Sprintf("it reads write %d from copy %d, and write %d from copy %d", w.content[shown], shown, value, i)
		default:
			shown = i
		}
	}
	return ""
}

// lapsed reports whether a host's lease is over, so that it reads no more.
func (r *rig) lapsed(n int32) bool {
	return r.step(hostLapsed, n, 0, func() int32 {
		h := *r.hosts.at(n)
		t := actor{rig: r, in: looked{host: n}, host: &h}
		m := h.memory(r)
		if volume.LeaseLeft(h.Stack.Wanted, &m, t.seen(), limits, capabilities) > 0 {
			return 0
		}
		return 1
	}) == 1
}

// serves reports whether the volume serves, or nobody has it and anybody may get it.
func (r *rig) serves(w *world) bool {
	m := r.managers.at(w.manager)
	if m.holder < 0 {
		return r.attachable(w.manager)
	}
	st := r.stack(w, int(m.holder))
	if st == nil || !st.Device || st.Held || w.write[m.holder].number != 0 {
		return false
	}
	x := r.hosts.at(w.host[m.holder])
	if x.Memory.Epoch != m.epoch {
		return false
	}
	for i := range r.Copies {
		if st.Slots[i].inUse() && !r.answers(w, int(m.holder), i) {
			return false
		}
	}
	return true
}

// attachable reports whether an attach would be accepted now.
func (r *rig) attachable(manager int32) bool {
	return !r.ask(asked{manager, operatorAttaches, 0, 0}).refused
}
