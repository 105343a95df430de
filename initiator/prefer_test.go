// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"errors"
	"net/netip"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/pb"
)

// A GPU that is not there costs a volume its preference, and nothing else.
func TestAVolumePrefersTheNetworksNearToItsGPU(t *testing.T) {
	near := netip.MustParsePrefix("192.0.2.0/24")
	a := &Agent{near: newNearby(func(gpu string) ([]netip.Prefix, error) {
		if gpu != "3" {
			return nil, errors.New("no such GPU")
		}
		return []netip.Prefix{near}, nil
	})}
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
	if (&Agent{near: newNearby(nil)}).prefer(&w); w.NearError == "" || w.Near != nil {
		t.Errorf("an agent that finds no GPUs: networks %v, %q", w.Near, w.NearError)
	}
}

// What is near is looked for again and again. A look that takes long is not waited for, one that fails changes nothing,
// and the agent is told when an answer is another one.
func TestWhatIsNearToAGPUIsLookedForAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		one, two := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24")}, []netip.Prefix{netip.MustParsePrefix("198.51.100.0/24")}
		var took time.Duration
		answer, failure, looks := one, error(nil), 0
		a := &Agent{near: newNearby(func(string) ([]netip.Prefix, error) {
			looks++
			time.Sleep(took)
			return answer, failure
		})}
		named := &pb.InitiatorWanted{Attachments: []*pb.WantedAttachment{{NearGpu: "0"}, {NearGpu: "0"}, {}}}
		have := func(when string, want []netip.Prefix, ill, told bool) {
			t.Helper()
			got, err := a.near.networks("0")
			if !slices.Equal(got, want) || (err != nil) != ill {
				t.Errorf("%s: %v, %v; want %v", when, got, err, want)
			}
			select {
			case <-a.near.changed:
				if !told {
					t.Errorf("%s: the agent is told of another answer", when)
				}
			default:
				if told {
					t.Errorf("%s: the agent is not told of another answer", when)
				}
			}
		}
		later := func() {
			time.Sleep(nearFor + time.Second)
			a.lookNear(named)
			time.Sleep(time.Second)
		}
		took = 3 * nearPatience
		have("while the first look lasts", nil, true, false)
		time.Sleep(took)
		have("after it", one, false, true)
		took = 0
		have("soon after that", one, false, false)
		if looks != 1 {
			t.Errorf("%d looks, want one", looks)
		}
		later()
		have("a minute later", one, false, false)
		answer, failure = nil, errors.New("cannot read it")
		later()
		have("after a look that failed", one, false, false)
		answer, failure = two, nil
		later()
		have("after another answer", two, false, true)
		if looks != 4 {
			t.Errorf("%d looks, want one each minute", looks)
		}
	})
}
