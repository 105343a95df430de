// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"cmp"
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
)

// Thousands of degraded volumes, as after the loss of a rack, must not become thousands of series.
func TestASeriesNamesOnlyTheWorstVolumes(t *testing.T) {
	copies := map[string]int{}
	for i := range 5000 {
		copies[fmt.Sprintf("v%d", i)] = 1 + i%2
	}
	copies["gone"] = 0
	out := make(chan prometheus.Metric, len(copies))
	gauges(out).worst(copiesLeftDesc, copies, cmp.Compare)
	close(out)
	named := map[string]float64{}
	for one := range out {
		var m dto.Metric
		if err := one.Write(&m); err != nil {
			t.Fatal(err)
		}
		named[m.GetLabel()[0].GetValue()] = m.GetGauge().GetValue()
	}
	if value, ok := named["gone"]; len(named) != maxNamed || !ok || value != 0 {
		t.Errorf("%d volumes are named, and the one that is gone: %v; want %d, the worst first", len(named), ok, maxNamed)
	}
	for name, left := range named {
		if left > 1 {
			t.Errorf("%s is named, with %v copies left, although there are worse ones", name, left)
		}
	}
}
