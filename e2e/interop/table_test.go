// SPDX-License-Identifier: Apache-2.0

package interop

import (
	_ "embed"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"testing"
)

//go:embed doc.go
var doc string

// givenUp are numbers below 070 that blktests no longer uses; they became variants of other
// tests.
var givenUp = []string{"001", "007", "009", "011", "013", "015", "020", "024"}

func TestTheTableTellsOfEachTestOfBlktests(t *testing.T) {
	here := map[string]string{}
	for _, row := range regexp.MustCompile(`(?m)^//\t(\d{3})  .{34}  (.+)$`).FindAllStringSubmatch(doc, -1) {
		if _, twice := here[row[1]]; twice {
			t.Errorf("%s is there twice", row[1])
		}
		here[row[1]] = row[2]
	}
	for n := 1; n < 70; n++ {
		number := fmt.Sprintf("%03d", n)
		if _, ok := here[number]; ok == slices.Contains(givenUp, number) {
			t.Errorf("%s is in the table: %v", number, ok)
		}
	}
	made := map[string][]string{} // cases by number
	for _, c := range append(cases(), linuxCases()...) {
		numbers, title, _ := strings.Cut(c.name, " ")
		for _, number := range regexp.MustCompile(`\d{3}`).FindAllString(numbers, -1) {
			made[number] = append(made[number], title)
			if _, ok := here[number]; !ok {
				t.Errorf("%q is not in the table", c.name)
			}
		}
	}
	for number, what := range here {
		what, _, _ = strings.Cut(what, " (")
		is := slices.ContainsFunc(made[number], func(title string) bool { return strings.Contains(title, what) })
		if isNone := strings.HasPrefix(what, "left out: ") || what == "every case does"; isNone == is || isNone && made[number] != nil {
			t.Errorf("%s is %q in the table, and made again in %q", number, what, made[number])
		}
	}
}
