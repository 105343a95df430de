// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"net/netip"
	"testing"

	"weft.dev/weft/initiator/volume"
)

// A GPU that is not there costs a volume its preference, and nothing else.
func TestAVolumePrefersTheNetworksNearToItsGPU(t *testing.T) {
	near := netip.MustParsePrefix("192.0.2.0/24")
	a := &Agent{cfg: Config{Networks: func(gpu string) ([]netip.Prefix, error) {
		if gpu != "3" {
			return nil, errors.New("no such GPU")
		}
		return []netip.Prefix{near}, nil
	}}}
	for gpu, want := range map[string]volume.Wanted{
		"":  {},
		"3": {Near: []netip.Prefix{near}},
		"9": {NearError: "no such GPU"},
	} {
		w := volume.Wanted{GPU: gpu}
		a.prefer(&w)
		if len(w.Near) != len(want.Near) || w.NearError != want.NearError {
			t.Errorf("GPU %q: networks %v, %q; want %v, %q", gpu, w.Near, w.NearError, want.Near, want.NearError)
		}
	}
	w := volume.Wanted{GPU: "3"}
	if (&Agent{}).prefer(&w); w.NearError == "" || w.Near != nil {
		t.Errorf("an agent that finds no GPUs: networks %v, %q", w.Near, w.NearError)
	}
}
