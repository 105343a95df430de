// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/block"
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
	if err := r.Register(a); err != nil {
		t.Fatal(err)
	}
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			key := f.GetName()
			for _, l := range m.GetLabel() {
				key += " " + l.GetValue()
			}
			got[key] = m.GetGauge().GetValue() + m.GetCounter().GetValue()
		}
	}
	for key, want := range map[string]float64{
		"weft_initiator_leg_losses_total":           1,
		"weft_initiator_resync_bytes_total":         3 << 20,
		"weft_initiator_last_stall_seconds detect":  2,
		"weft_initiator_last_stall_seconds record":  0.01,
		"weft_initiator_last_stall_seconds release": 0.2,
		"weft_initiator_attachments serving":        0,
		"weft_initiator_legs lost":                  0,
		"weft_initiator_manager_refused":            1,
	} {
		if v, ok := got[key]; !ok || v != want {
			t.Errorf("%s = %v, %v; want %v", key, v, ok, want)
		}
	}
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
