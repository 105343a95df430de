// SPDX-License-Identifier: Apache-2.0

package fault

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/peer"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/e2e/promtool"
	rights "weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/pb"
)

// What operators load: see cmd/internal/monitoring.
const (
	alertRules = "../../deploy/helm/weft/monitoring/rules.yaml"
	dashboard  = "../../deploy/helm/weft/monitoring/dashboard.json"
)

// watched is a cluster whose daemons Prometheus scrapes.
type watched struct {
	*mirror
	promtool.Recording

	text map[string]string // of the newest scrape, by daemon
}

// scrape reads the metrics of all daemons that run.
func (w *watched) scrape() {
	w.t.Helper()
	daemons := map[string]prometheus.Gatherer{}
	w.text = map[string]string{}
	serve := func(name string, c prometheus.Collector) {
		r := prometheus.NewPedanticRegistry()
		if err := r.Register(c); err != nil {
			w.t.Fatal(err)
		}
		daemons[name] = r
		reply := httptest.NewRecorder()
		promhttp.HandlerFor(r, promhttp.HandlerOpts{}).ServeHTTP(reply, httptest.NewRequest("GET", "/metrics", nil))
		w.text[name] = reply.Body.String()
	}
	for _, h := range w.cluster.managers {
		if h.running != nil && h.process != nil {
			serve(h.name, h.running.manager)
		}
	}
	for _, h := range w.targets {
		if c := h.served.Load(); h.process != nil && c != nil {
			serve(h.name, *c)
		}
	}
	for _, h := range w.clients {
		if c := h.served.Load(); h.process != nil && c != nil {
			serve(h.name, *c)
		}
	}
	if err := w.Scrape(daemons); err != nil {
		w.t.Fatal(err)
	}
}

// during scrapes for some time, and calls what has to happen between two scrapes.
func (w *watched) during(d time.Duration, do ...func()) {
	w.t.Helper()
	const interval = 15 * time.Second
	for range d / interval {
		w.scrape()
		for _, one := range do {
			one()
		}
		time.Sleep(interval)
	}
	w.scrape()
}

// create asks for another volume, which takes an extent for each copy.
func (w *watched) create(name string, copies uint32) {
	w.t.Helper()
	_, err := w.operator.CreateVolume(context.Background(), &pb.CreateVolumeRequest{Name: name, SizeBytes: uint64(256 * block.MiB), Copies: copies, Stripes: 1})
	if err != nil {
		w.t.Fatal(err)
	}
}

// scenario is a state that alerts are meant for, or none.
type scenario struct {
	what   string
	copies int
	set    func(*cluster)
	hold   time.Duration // how long the state lasts; 0: 2 h
	do     func(*watched)
	fire   []string // the alerts that fire
}

func three(c *cluster) {
	withoutCaches(c)
	c.members = 3
}

var scenarios = []scenario{
	{"all is well", 2, three, 25 * time.Hour, func(w *watched) {
		number := uint64(1)
		busy := func() { number++; w.put("c1", number, 0, 1) }
		w.during(3*time.Minute, busy)
		w.second.leave()
		w.during(30 * time.Second)
		w.second.start()
		w.during(5*time.Minute, busy)
		w.lead(w.cluster.managers[1])
		w.during(3*time.Minute, busy)
	}, nil},
	{"a copy is away", 2, withoutCaches, 0, func(w *watched) {
		w.second.kill()
		w.during(time.Minute)
	}, []string{"WeftVolumeLastCopy", "WeftTargetAway"}},
	{"a copy of three is away", 3, withoutCaches, 0, func(w *watched) {
		w.second.kill()
		w.during(time.Minute)
	}, []string{"WeftVolumeDegraded", "WeftTargetAway"}},
	{"no copy is there", 2, withoutCaches, 0, func(w *watched) {
		w.first.kill()
		w.second.kill()
		w.write(2, 0)
		w.during(time.Minute)
	}, []string{"WeftVolumeUnavailable", "WeftTargetAway", "WeftHostIOStalled"}},
	{"a host dies while it rebuilds", 2, withoutCaches, 0, func(w *watched) {
		w.second.kill()
		w.during(30 * time.Second)
		w.second.platter.set(func() { w.second.platter.each = 200 * time.Millisecond })
		w.put("c1", 2, everyUnit...)
		w.second.start()
		w.eventually("a rebuild", func(context.Context) error {
			if w.volume().GetHealth() != pb.Health_HEALTH_REBUILDING {
				return os.ErrNotExist
			}
			return nil
		})
		w.clients[0].kill()
		w.during(time.Minute)
	}, []string{"WeftRebuildStuck", "WeftHostAway", "WeftVolumeLastCopy"}},
	{"copies rot", 2, withoutCaches, 0, func(w *watched) {
		w.put("c1", 1, everyUnit...)
		w.flip(w.first, 3)
		w.scrub(&pb.ScrubVolumeRequest{})
		w.scrubbed(1, 0)
		w.during(time.Minute)
	}, []string{"WeftCopiesDiffer"}},
	{"the only copy has a medium error", 1, withoutCaches, 0, func(w *watched) {
		w.put("c1", 1, everyUnit...)
		w.first.platter.set(func() { w.first.platter.badData = errMedium })
		if err := block.ReadAt(w.users.device("c1").volume, make([]byte, unit), 0); err == nil {
			w.t.Error("a read of a bad medium succeeds")
		}
		w.during(time.Minute)
	}, []string{"WeftVolumeIOErrors"}},
	{"a drive fails", 2, withoutCaches, 0, func(w *watched) {
		w.second.platter.set(func() { w.second.platter.err = errMedium })
		w.put("c1", 2, everyUnit...)
		w.during(time.Minute)
	}, []string{"WeftDriveFailed", "WeftVolumeLastCopy"}},
	{"the drive of the only copy gives errors", 1, withoutCaches, 0, func(w *watched) {
		w.first.platter.set(func() { w.first.platter.err = errMedium })
		w.write(2, 0)
		w.during(time.Minute)
	}, []string{"WeftHostIOStalled", "WeftVolumeIOHeld"}},
	{"a target says that it cannot export", 2, withoutCaches, 0, func(w *watched) {
		w.second.platter.set(func() {
			w.second.platter.problem = &pb.Problem{Object: "export x", Doing: "export", Cause: "address already in use", Since: timestamppb.Now()}
		})
		w.second.kill()
		w.second.start()
		w.during(2 * time.Minute)
	}, []string{"WeftAgentProblem"}},
	{"a drive says that it will fail", 2, withoutCaches, 0, func(w *watched) {
		w.second.platter.set(func() { w.second.platter.smart = &pb.SmartLog{CriticalWarning: 4} })
		w.second.kill()
		w.second.start()
		w.during(2 * time.Minute)
	}, []string{"WeftDriveSuspect"}},
	{"drives are full", 3, withoutCaches, 0, func(w *watched) {
		w.during(30 * time.Second)
		w.create("full", 3)
		w.during(time.Minute)
	}, []string{"WeftDriveNearlyFull", "WeftPoolNearlyFull", "WeftNoRoomToRebuild"}},
	{"the drives of a thin volume are full", 2, func(c *cluster) {
		withoutCaches(c)
		thin(c)
	}, 0, func(w *watched) {
		written := make(chan int64, 8)
		go w.chunks(1, 0, 2000, written)
		if last, stopped := stops(written, 20*time.Second); !stopped {
			w.t.Fatalf("no drive is full after chunk %d", last)
		}
		w.during(time.Minute)
		w.discard(0, 1900) // the writer ends
		if last, stopped := stops(written, 20*time.Second); stopped {
			w.t.Errorf("writes stop after chunk %d, and most was discarded", last)
		}
	}, []string{"WeftVolumeFull", "WeftVolumeIOHeld", "WeftDriveNearlyFull", "WeftPoolNearlyFull"}},
	{"a rail flaps", 2, func(c *cluster) {
		withoutCaches(c)
		c.rails = []string{"a", "b"}
	}, 0, func(w *watched) {
		home, _ := w.rail(w.first)
		for range 60 {
			w.network.part("c1", home, true)
			w.acknowledged(w.write(1, 0))
			time.Sleep(time.Second)
			w.network.part("c1", home, false)
			time.Sleep(time.Second)
		}
		at := func() string { now, _ := w.rail(w.first); return now }
		for range 900 { // how long the rail is suspect depends on how many of these cuts were noticed
			if at() == home {
				break
			}
			time.Sleep(time.Second)
		}
		w.network.part("c1", home, true)
		for range 60 {
			if w.acknowledged(w.write(1, 0)); at() != home {
				break
			}
			time.Sleep(time.Second)
		}
		w.network.part("c1", home, false)
		w.during(15 * time.Second)
	}, []string{"WeftHostPathSuspect"}},
	{"a host dies", 2, withoutCaches, 0, func(w *watched) {
		w.clients[0].kill()
		w.during(time.Minute)
	}, []string{"WeftHostAway"}},
	{"another cluster's manager answers", 2, withoutCaches, 0, func(w *watched) {
		w.replaceManager()
		w.during(time.Minute)
	}, []string{"WeftManagerNotObeyed"}},
	{"no manager is there", 2, withoutCaches, 0, func(w *watched) {
		w.killManager()
		w.during(time.Minute)
	}, []string{"WeftNoLeader"}},
	{"one of three managers is lost", 2, three, 0, func(w *watched) {
		w.lead(w.cluster.managers[0])
		w.cluster.managers[2].kill()
		w.during(time.Minute)
	}, []string{"WeftManagerSilent", "WeftManagerMajorityAtRisk"}},
	{"the manager's disk is slow", 2, withoutCaches, 0, func(w *watched) {
		m := w.cluster.managers[0].running
		m.set(func() { m.takes = 2 * time.Second })
		pools := 0
		w.during(20*time.Minute, func() { pools++; w.createPool(fmt.Sprintf("p%d", pools)) })
		m.set(func() { m.takes = 0 })
	}, []string{"WeftCommitsSlow"}},
	{"an upgrade is left unfinished", 2, func(c *cluster) {
		withoutCaches(c)
		c.levels = []block.Level{block.KnownLevel}
	}, 25 * time.Hour, func(w *watched) { w.during(time.Minute) }, []string{"WeftUpgradeUnfinished"}},
	{"the records are never backed up", 2, withoutCaches, 9 * 24 * time.Hour, func(w *watched) { w.during(time.Minute) }, []string{"WeftBackupOld"}},
	{"somebody calls what he may not", 2, withoutCaches, 0, func(w *watched) {
		w.during(time.Minute)
		guard := rights.Guard{Refused: w.cluster.managers[0].running.manager.Refused}
		_, err := guard.Unary(peer.NewContext(context.Background(), &peer.Peer{AuthInfo: rights.AuthInfo{Identity: rights.Identity{Kind: rights.Person, Name: "vic", Role: rights.Viewer}}}), nil,
			&grpc.UnaryServerInfo{FullMethod: pb.Manager_DeletePool_FullMethodName}, nil)
		if err == nil {
			w.t.Error("a viewer may delete pools")
		}
		w.during(time.Minute)
	}, []string{"WeftCallsRefused"}},
	{"a stranger connects to a target", 2, withoutCaches, 0, func(w *watched) {
		w.during(time.Minute)
		subsystem := w.intruder().subsystem(w.clients[0], w.first)
		if err := w.intruder().connect(w.first, subsystem, block.ProvenHost(subsystem), dhchap.Key{}, dhchap.Key{}); err == nil {
			w.t.Error("a stranger without a key gets in")
		}
		w.during(time.Minute)
	}, []string{"WeftTargetRefusesHosts"}},
}

// elsewhere are the alerts that need what this suite does not simulate, and the tests that see them
// fire.
var elsewhere = map[string]string{
	"WeftDriveMediaErrors": "target: TestADrivesOwnLogAlerts",
	"WeftDriveWorn":        "target: TestADrivesOwnLogAlerts",
	"WeftCertificateEnds":  "cmd/internal/daemon: TestACertificateThatIsNotRenewedAlerts",
}

// Each alert fires in the state that it is meant for, with the labels that its texts name; no other
// one does, and none while all is well.
func TestAlertsFireWhenTheyShould(t *testing.T) {
	promtool.Find(t)
	for _, s := range scenarios {
		t.Run(strings.ReplaceAll(s.what, " ", "-"), func(t *testing.T) {
			w := &watched{Recording: promtool.Recording{Hold: s.hold}}
			copied(t, s.copies, 1, s.set, func(m *mirror) {
				w.mirror = m
				w.during(time.Minute)
				s.do(w)
			})
			w.Check(t, alertRules, s.fire...)
			if s.fire == nil {
				w.Shows(t, alertRules, panels(t)...)
				w.lint(t)
			}
		})
	}
}

// lint fails unless promtool finds no fault with what each daemon served last.
func (w *watched) lint(t *testing.T) {
	for name, text := range w.text {
		if err := promtool.Lint(promtool.Find(t), text); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestEachAlertIsSeenToFire(t *testing.T) {
	text, err := os.ReadFile(alertRules)
	if err != nil {
		t.Fatal(err)
	}
	fired := map[string]bool{}
	for _, s := range scenarios {
		for _, alert := range s.fire {
			fired[alert] = true
		}
	}
	all := regexp.MustCompile(`alert: (\w+)`).FindAllStringSubmatch(string(text), -1)
	if len(all) < 20 {
		t.Errorf("found %d alerts in %s", len(all), alertRules)
	}
	for _, match := range all {
		if !fired[match[1]] && elsewhere[match[1]] == "" {
			t.Errorf("no test sees %s fire", match[1])
		}
	}
}

// unseen are metrics that the daemons of this suite do not serve: a file has no health log, and a
// server's calls are counted by its process. What promtool reads has no native histograms.
var unseen = regexp.MustCompile(`weft_target_drive_|weft_grpc_|histogram_quantile`)

// panels are the expressions of the dashboard, but for those that are of what is unseen, or empty
// while all is well.
func panels(t *testing.T) (all []string) {
	t.Helper()
	text, err := os.ReadFile(dashboard)
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Panels []struct {
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	for _, p := range board.Panels {
		for _, target := range p.Targets {
			if p.Type != "table" && !unseen.MatchString(target.Expr) {
				all = append(all, strings.ReplaceAll(target.Expr, "$__rate_interval", "1m"))
			}
		}
	}
	if len(all) < 15 {
		t.Errorf("found %d expressions in %s", len(all), dashboard)
	}
	return slices.Compact(all)
}
