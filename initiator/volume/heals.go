// SPDX-License-Identifier: Apache-2.0

package volume

// HealsSeen tells of ranges that a copy could not give users' reads because they did not match their
// checksums.
type HealsSeen struct {
	Run    string // another one for each time that the volume was built
	Count  int    // of this run
	Failed int    // of them: not repaired
	Last   []ScrubFinding
}
