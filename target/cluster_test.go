// SPDX-License-Identifier: Apache-2.0

package target

import (
	"bytes"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target/drive"
)

var elsewhere = block.ClusterID{UUID: uid('c', 2)}

// A manager with an empty store on the known address wants no exports. The existing exports belong
// to another cluster and stay, whatever else the node has.
func TestAnotherClustersWordTakesNoExportAway(t *testing.T) {
	at(t, func(t *testing.T, w *world) {
		w.run()
		home := want().drive(1).volume(1, 1, 1)
		w.manager.set(home.TargetWanted)
		w.until("export ready", exportsReady(1))
		// A drive of that other cluster is present too, so the drives disagree.
		m, err := w.medium("/dev/d2")
		if err != nil {
			t.Fatal(err)
		}
		if err := drive.Format(m, elsewhere, driveID(2), ""); err != nil {
			t.Fatal(err)
		}
		before := w.exported()
		w.manager.set(&pb.TargetWanted{ClusterId: elsewhere.String()})
		r := w.until("it says why nothing is done", problemWith("cluster "+elsewhere.String()))
		time.Sleep(30 * time.Second)
		if diff := cmp.Diff(before, w.exported()); diff != "" {
			t.Errorf("exports changed (-before +after):\n%s", diff)
		}
		if r.GetClusterId() != cluster.String() {
			t.Errorf("the report is of cluster %q, want that of the exports, %v", r.GetClusterId(), cluster)
		}
		home.Exports = nil
		w.manager.set(home.TargetWanted)
		w.until("its own manager is obeyed", exportsReady(0))
		// Nothing is exported any more: the node may be of any cluster.
		w.manager.set((wish{&pb.TargetWanted{ClusterId: elsewhere.String()}}).leg(3, 2, 1, 1).TargetWanted)
		w.until("so is the other one's", func(r *pb.TargetReport) bool { return legReport(r, 3).GetReady() })
	})
}

// The drive of an export has died, and the agent has restarted: the node's other drives tell the
// cluster.
func TestAnotherClustersWordTakesNoExportOfADeadDriveAway(t *testing.T) {
	in(t, Kernel, func(t *testing.T, w *world) {
		w.run()
		w.manager.set(want().drive(1).drive(2).volume(1, 1, 1).TargetWanted)
		w.until("export ready", exportsReady(1))
		w.stop()
		w.pull("/dev/d1")
		before := w.exported()
		w.manager.forget()
		w.manager.set(&pb.TargetWanted{ClusterId: elsewhere.String()})
		w.run()
		w.until("it says why nothing is done", problemWith("cluster "+elsewhere.String()))
		time.Sleep(30 * time.Second)
		if diff := cmp.Diff(before, w.exported()); diff != "" {
			t.Errorf("exports changed (-before +after):\n%s", diff)
		}
	})
}

// This is logged once.
func TestAManagerThatRefusesATargetIsLoggedOnce(t *testing.T) {
	in(t, User, func(t *testing.T, w *world) {
		var out bytes.Buffer
		w.log = slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelError}))
		w.manager.refuse = otherCluster(elsewhere.String())
		w.run()
		time.Sleep(time.Minute)
		w.stop()
		if n := strings.Count(out.String(), "not obeyed"); n != 1 || !strings.Contains(out.String(), elsewhere.String()) {
			t.Errorf("in a minute the log says so %d times:\n%s", n, &out)
		}
	})
}

func otherCluster(own string) error {
	s, _ := status.New(codes.FailedPrecondition, "node t1: its drives belong to another cluster").WithDetails(
		&errdetails.ErrorInfo{Reason: pb.ReasonOtherCluster, Metadata: map[string]string{pb.ClusterKey: own}})
	return s.Err()
}
