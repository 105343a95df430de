// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"bytes"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

var elsewhere = block.ClusterID{UUID: block.UUIDFromRandom([16]byte{8})}

// replace puts another manager, with an empty store, at the known address. It returns a
// function that undoes this.
func (w *world) replace(strict bool) (back func()) {
	w.mu.Lock()
	ours := proto.CloneOf(w.wanted)
	w.strict = strict
	w.mu.Unlock()
	w.change(func(all *pb.InitiatorWanted) { all.ClusterId, all.Attachments = elsewhere.String(), nil })
	return func() {
		w.change(func(all *pb.InitiatorWanted) { all.ClusterId, all.Attachments = ours.ClusterId, ours.Attachments })
	}
}

func (w *world) clusterFile() string { return filepath.Join(w.dir, "state/cluster") }

func (w *world) lastReport() *pb.InitiatorReport {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reports[len(w.reports)-1]
}

// An empty manager at the known address: what is attached stays attached, even over a restart
// of the agent, and the right manager is obeyed again.
func TestAnotherClustersWordChangesNothing(t *testing.T) {
	for name, strict := range map[string]bool{"it refuses the agent": true, "it takes the agent's reports": false} {
		t.Run(name, func(t *testing.T) {
			in(t, 1, 2, func(w *world) {
				back := w.replace(strict)
				time.Sleep(10 * time.Second)
				w.expect("under another cluster's manager")
				w.stop()
				w.stop = w.start()
				time.Sleep(10 * time.Second)
				w.expect("under another cluster's manager, by an agent that has its lease to find out", "suspend top", "resume top")
				back()
				w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
				w.until(clean)
			})
		})
	}
}

// The operator is told once per episode, with the names of both clusters; a manager that
// accepts the reports of such an agent shows why nothing happens.
func TestAnotherClustersWordIsLoggedOnceAnEpisode(t *testing.T) {
	for name, strict := range map[string]bool{"it refuses the agent": true, "it takes the agent's reports": false} {
		t.Run(name, func(t *testing.T) {
			var out bytes.Buffer
			from(t, 1, 2, func(w *world) {
				w.log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError}))
			}, func(w *world) {
				for episode := 1; episode <= 2; episode++ {
					back := w.replace(strict)
					time.Sleep(20 * time.Second)
					synctest.Wait() // nobody writes to it now
					if lines := strings.Count(out.String(), "not obeyed"); lines != episode {
						t.Errorf("after %d episodes the log says so %d times:\n%s", episode, lines, &out)
					}
					if !strict {
						if p := w.lastReport().Problems; len(p) != 1 || p[0].Object != "cluster "+elsewhere.String() {
							t.Errorf("the problems reported are %v", p)
						}
					}
					back()
					time.Sleep(5 * time.Second)
					if p := w.lastReport().Problems; len(p) != 0 {
						t.Errorf("under the right manager the problems reported are %v", p)
					}
				}
				for _, part := range []string{"level=ERROR", home.String(), elsewhere.String(), "leave-cluster"} {
					if !strings.Contains(out.String(), part) {
						t.Errorf("the log lacks %q:\n%s", part, &out)
					}
				}
			})
		})
	}
}

func TestAMachineRemembersItsFirstCluster(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		if b, err := os.ReadFile(w.clusterFile()); err != nil || string(b) != home.String()+"\n" {
			t.Errorf("%s holds %q, %v; want %v", w.clusterFile(), b, err, home)
		}
		time.Sleep(2 * time.Second)
		if got := w.lastReport().ClusterId; got != home.String() {
			t.Errorf("the report is of cluster %q, want %v", got, home)
		}
	})
}

// The cluster was lost with the rest of the state directory while the kernel serves a volume:
// the machine joins the cluster that knows the volume.
func TestAMachineWithVolumesJoinsOnlyWhoKnowsThem(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		w.stop()
		back := w.replace(false)
		if err := os.Remove(w.clusterFile()); err != nil {
			t.Fatal(err)
		}
		w.stop = w.start()
		time.Sleep(10 * time.Second)
		w.expect("under a manager that does not know the volume", "suspend top", "resume top")
		if _, err := os.Stat(w.clusterFile()); !os.IsNotExist(err) {
			t.Errorf("the machine has joined a cluster that does not know its volume: %v", err)
		}
		back()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(clean)
		if b, err := os.ReadFile(w.clusterFile()); err != nil || string(b) != home.String()+"\n" {
			t.Errorf("%s holds %q, %v; want %v", w.clusterFile(), b, err, home)
		}
	})
}

func TestADamagedClusterFileIsNoLicence(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, clusterFile), []byte("\x00\x00"), 0o600); err != nil {
		t.Fatal(err)
	}
	if id, err := readCluster(dir); err == nil || !strings.Contains(err.Error(), "write the id") {
		t.Errorf("readCluster = %v, %v; want an error that says what to do", id, err)
	}
}

// A machine is moved to another cluster by hand, once it has nothing of the first.
func TestAMachineLeavesItsClusterWhenItHasNothingOfIt(t *testing.T) {
	in(t, 1, 2, func(w *world) {
		leave := func() (block.ClusterID, error) { return w.agent(nil).Leave() }
		running, err := lockState(filepath.Join(w.dir, "state"), unix.LOCK_SH) // as an agent of the kernel's data path does
		if err != nil {
			t.Fatal(err)
		}
		if _, err := leave(); err == nil || !strings.Contains(err.Error(), "another initiator agent") {
			t.Errorf("Leave beside an agent = %v, want a refusal", err)
		}
		running.Close()
		w.stop()
		if id, err := leave(); err == nil || !strings.Contains(err.Error(), w.volume.String()) || id != home {
			t.Errorf("Leave with a volume = %v, %v; want a refusal that names it", id, err)
		}
		w.stop = w.start()
		w.change(func(all *pb.InitiatorWanted) { all.Attachments[0].Detach = true })
		w.until(clean)
		w.stop()
		if id, err := leave(); err != nil || id != home {
			t.Errorf("Leave = %v, %v; want %v", id, err, home)
		}
		if id, err := leave(); err != nil || !id.IsZero() {
			t.Errorf("Leave again = %v, %v; want none", id, err)
		}
		w.replace(true)
		w.stop = w.start()
		time.Sleep(5 * time.Second)
		if got := w.lastReport().ClusterId; got != elsewhere.String() {
			t.Errorf("after that the machine is of cluster %q, want %v", got, elsewhere)
		}
	})
}
