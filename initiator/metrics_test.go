// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
)

func TestMetricsTellOfLossesStallsAndStrangers(t *testing.T) {
	w := newWorld(t, 1, 2)
	a, err := New(Config{Node: "h1", BootID: "b", Manager: manager{world: w}})
	if err != nil {
		t.Fatal(err)
	}
	a.lostLeg()
	a.stalled(stall{detect: 2 * time.Second, record: 10 * time.Millisecond, release: 200 * time.Millisecond})
	a.resynced(3 * block.MiB)
	a.refuse(elsewhere.String(), "it is of another cluster")
	r := prometheus.NewPedanticRegistry()
	a.keepers[block.VolumeID{}] = countedVolume{}
	if err := r.Register(a); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	if wrong, err := promlint.NewWithMetricFamilies(families).Lint(); err != nil || len(wrong) > 0 {
		t.Errorf("the metrics are not as they should be: %v, %v", wrong, err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			got[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	for key, want := range map[string]float64{
		"weft_initiator_leg_losses_total":                 1,
		"weft_initiator_resync_bytes_total":               3 << 20,
		"weft_initiator_last_stall_seconds detect":        2,
		"weft_initiator_last_stall_seconds record":        0.01,
		"weft_initiator_last_stall_seconds release":       0.2,
		"weft_initiator_attachments serving":              0,
		"weft_initiator_legs lost":                        0,
		"weft_initiator_manager_refused":                  1,
		"weft_volume_ios_total read db1":                  2,
		"weft_volume_ios_total flush db1":                 1,
		"weft_volume_bytes_total read db1":                8192,
		"weft_volume_errors_total flush db1":              1,
		"weft_volume_io_seconds read db1":                 2,
		"weft_volume_held_seconds_total db1":              1.5,
		"weft_leg_io_seconds " + leg.String() + " t1 db1": 3,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s = %v, %v; want %v", key, v, ok, want)
		}
	}
}

var leg = block.LegID{UUID: block.UUIDFromRandom([16]byte{7})}

// countedVolume is a volume with some I/O.
type countedVolume struct{ volumeKeeper }

func (countedVolume) State() keeper.State { return keeper.State{} }

func (countedVolume) Figures() *keeper.Figures {
	var t figures.Tally
	t.Add(figures.Read, 4096, time.Millisecond, false)
	t.Add(figures.Read, 4096, 0, false)
	t.Add(figures.Flush, 0, time.Hour, true)
	f := &keeper.Figures{Name: "db1", Held: 1500 * time.Millisecond, Latencies: true, Legs: []keeper.LegFigures{{Leg: leg, Node: "t1"}}}
	t.Take(&f.Users)
	f.Legs[0].Sent = f.Users.Clone()
	return f
}

func TestConfigNamesWhatIsMissing(t *testing.T) {
	good := Config{Node: "h1", BootID: "b", Manager: manager{}}
	if _, err := New(good); err != nil {
		t.Errorf("New = %v, want nil", err)
	}
	for what, spoil := range map[string]func(*Config){
		"node":    func(c *Config) { c.Node = "" },
		"boot id": func(c *Config) { c.BootID = "" },
		"manager": func(c *Config) { c.Manager = nil },
		"lease":   func(c *Config) { c.Lease = time.Second },
	} {
		bad := good
		spoil(&bad)
		if _, err := New(bad); err == nil {
			t.Errorf("New without a good %s = nil, want an error", what)
		}
	}
}
