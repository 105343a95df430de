// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"slices"
	"testing"
)

// Of three copies one is suspect, one can be served and the third is offline. The one that can
// be served stands in for the suspect one, whichever of them comes first.
func TestAPeerThatCanBeServedEndsASuspicionInAnyOrder(t *testing.T) {
	nodes := []string{"t1", "t2", "t3"}
	for _, suspect := range nodes {
		for _, serves := range nodes {
			if serves == suspect {
				continue
			}
			t.Run(fmt.Sprintf("%s suspect, %s serves", suspect, serves), func(t *testing.T) {
				s := newScript(t)
				for _, node := range nodes {
					s.run(fmt.Sprintf("target %s drives=10GiB volatile", node))
				}
				for _, command := range []string{
					"create db1 size=1GiB stripes=1 copies=3", "comply", "host c1", "attach db1 c1", "comply", "serve c1 db1",
					"restart", "reboot " + suspect, "report " + serves, "comply " + serves + " " + suspect,
				} {
					s.run(command)
				}
				v, err := s.state.Volume("db1")
				if err != nil {
					t.Fatal(err)
				}
				i := slices.IndexFunc(v.Legs, func(l Leg) bool { return string(l.Node) == suspect })
				if l := &v.Legs[i]; l.Suspect || l.State != LegStale {
					t.Errorf("%v is %s, suspect %v (%s); want it stale, since %s has everything", l, l.State, l.Suspect, l.Reason, serves)
				}
			})
		}
	}
}
