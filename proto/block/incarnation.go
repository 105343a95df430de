// SPDX-License-Identifier: Apache-2.0

package block

import "strings"

// SameLosses reports whether a drive's target has noticed no loss between two reports.
func SameLosses(a, b string) bool {
	losses, _, _ := strings.Cut(a, ".")
	others, _, _ := strings.Cut(b, ".")
	return losses == others
}

// SameIncarnation reports whether a drive has lost none of its acknowledged writes between two reports, as far as
// they tell. Each is a number, which changes with each loss that the target has noticed, followed by "." and the
// kernel's number of the disk. A target that cannot tell the disk leaves that out: one whose kernel is older than
// 5.15, or for a partition one of an earlier version. Then the numbers alone count.
func SameIncarnation(a, b string) bool {
	losses, disk, told := strings.Cut(a, ".")
	others, other, alsoTold := strings.Cut(b, ".")
	return losses == others && (disk == other || !told || !alsoTold)
}
