// SPDX-License-Identifier: Apache-2.0

package cluster

import "weft.dev/weft/proto/block"

// scrub db1 [stop] asks for a scrub.
func (s *script) scrub(a args) string {
	return s.step(ScrubVolume{Volume: a.word(0), Stop: a.has("stop"), Rate: s.size(a.options["rate"]), Seed: s.seed()})
}

// scrubbed c1 db1 found=2 at=512MiB [done] lets a host report on the wanted scrub; "other": on
// another one.
func (s *script) scrubbed(a args) string {
	v := s.state.volumes.Get(s.state.idOf(block.VolumeName(a.word(1))))
	r := &ScrubReport{ID: v.Scrub.ID, Done: a.has("done"), Compared: s.size(a.options["at"]), Total: v.Layout.LegSize(v.Size), Found: a.number("found", 0)}
	if a.has("other") {
		r.ID = "another"
	}
	for i := range r.Found {
		f := ScrubFinding{Off: block.Size(i) * block.MiB, Length: 4 * block.KiB, Equal: [][]int{{0}, {1}}}
		if i > 0 {
			f.Equal, f.Unreadable = [][]int{{0}}, []int{1}
		}
		r.Findings = append(r.Findings, f)
	}
	s.hosts[a.word(0)].scrub = r
	return s.reportHost(a.word(0))
}
