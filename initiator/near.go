// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/pb"
)

// nearby knows which networks are near to GPUs. To find that out takes tens of milliseconds, or long if a device does
// not answer, so it is done beside the agent's loop, again and again, since routes come and go. It may be used from
// several goroutines.
type nearby struct {
	find    func(gpu string) ([]netip.Prefix, error)
	changed chan struct{} // holds a token after an answer has changed

	mu      sync.Mutex
	answers map[string]*nearAnswer // by GPU
}

// nearAnswer is the last answer for a GPU. An error does not replace networks that were found before.
type nearAnswer struct {
	near  []netip.Prefix
	err   error
	asked time.Time
	asks  bool          // it is being found out
	first chan struct{} // closed with the first answer
}

const (
	// nearFor is how long an answer counts before it is looked for again.
	nearFor = time.Minute
	// nearPatience is how long a volume's first attach waits for an answer. A later one moves its paths.
	nearPatience = time.Second
)

// newNearby: with a nil find, no GPU has any.
func newNearby(find func(gpu string) ([]netip.Prefix, error)) *nearby {
	if find == nil {
		find = func(gpu string) ([]netip.Prefix, error) {
			return nil, fmt.Errorf("GPU %s: this agent does not look for GPUs", gpu)
		}
	}
	return &nearby{find: find, changed: make(chan struct{}, 1), answers: map[string]*nearAnswer{}}
}

// networks returns those near to a GPU, as far as they are known.
func (n *nearby) networks(gpu string) ([]netip.Prefix, error) {
	select {
	case <-n.ask(gpu):
	case <-time.After(nearPatience):
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	a := n.answers[gpu]
	return a.near, a.err
}

// ask begins to find out what is near to a GPU, if the last answer is old.
func (n *nearby) ask(gpu string) (first <-chan struct{}) {
	n.mu.Lock()
	defer n.mu.Unlock()
	a := n.answers[gpu]
	if a == nil {
		a = &nearAnswer{first: make(chan struct{}), err: fmt.Errorf("GPU %s: it is not known yet which networks are near to it", gpu)}
		n.answers[gpu] = a
	}
	if a.asks || !a.asked.IsZero() && time.Since(a.asked) < nearFor {
		return a.first
	}
	begins := a.asked.IsZero()
	a.asks, a.asked = true, time.Now()
	go func() {
		near, err := n.find(gpu)
		n.mu.Lock()
		defer n.mu.Unlock()
		a.asks, a.asked = false, time.Now()
		if err == nil || len(a.near) == 0 {
			if !slices.Equal(near, a.near) || fmt.Sprint(err) != fmt.Sprint(a.err) {
				select {
				case n.changed <- struct{}{}:
				default:
				}
			}
			a.near, a.err = near, err
		}
		if begins {
			close(a.first)
		}
	}()
	return a.first
}

// prefer says which networks are near to the GPU that is named for a volume.
func (a *Agent) prefer(w *volume.Wanted) {
	if w.GPU == "" {
		return
	}
	near, err := a.near.networks(w.GPU)
	if w.Near = near; err != nil {
		w.NearError = err.Error()
	}
}

// lookNear looks again at what is near to the GPUs that are named.
func (a *Agent) lookNear(all *pb.InitiatorWanted) {
	for _, p := range all.GetAttachments() {
		if gpu := p.GetNearGpu(); gpu != "" {
			a.near.ask(gpu)
		}
	}
}
