// SPDX-License-Identifier: Apache-2.0

package cli

import "fmt"

// Nouns is a number of things.
func Nouns(n int, noun string) string {
	if n == 1 {
		return "1 " + noun
	}
	return fmt.Sprintf("%d %ss", n, noun)
}
