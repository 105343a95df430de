// SPDX-License-Identifier: Apache-2.0

package target

import (
	"path/filepath"

	"weft.dev/weft/proto/authority"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// This file decides which of a cluster's managers the agent obeys: the one with the highest term.
// Which cluster's manager it may be is decided in cluster.go.

// newestFile is where the newest order is kept. It lives as long as the exports, that is until the
// next boot; after that the labels refuse older epochs. An agent that may not write there (locked
// is false) remembers the order in memory only, unless Config.Newest names a file.
func (c Config) newestFile(locked bool) string {
	if c.Newest == "" && locked {
		return filepath.Join(c.Root, "dev/weft", "target-"+string(c.Node)+".newest")
	}
	return c.Newest
}

// noted returns w after recording whose order it is; it returns nothing wanted, with the problem,
// if the order is refused or cannot be recorded.
func (w wanted) noted(n *authority.Note, message *pb.TargetWanted) wanted {
	if w.cluster.IsZero() {
		return w
	}
	if err := n.Take(authority.OrderOf(message)); err != nil {
		return wanted{
			admissions: map[block.VolumeID]block.Epoch{},
			problems:   []problem{{managerObject, followManager, err.Error()}},
		}
	}
	return w
}

// The words for a problem with the manager.
const (
	managerObject = "volume manager"
	followManager = "follow it"
)

// replaced notes that a manager's orders are ignored because another one has replaced it, logs that
// once, and moves on to the next manager.
func (a *Agent) replaced(err error) {
	if a.config.Next != nil {
		a.config.Next()
	}
	a.mu.Lock()
	said := a.behind
	a.behind = err.Error()
	a.mu.Unlock()
	if said != err.Error() {
		a.log.Error("volume manager is not obeyed: its orders are ignored, and the exports stay as they are", "err", err)
		poke(a.wake)
	}
}

// replacedProblem reports that in the agent's report.
func (a *Agent) replacedProblem() []problem {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.behind == "" {
		return nil
	}
	return []problem{{managerObject, followManager, a.behind}}
}
