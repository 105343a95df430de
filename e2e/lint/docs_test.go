// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// top is the root of the tree.
const top = "../.."

func pages(t *testing.T) []string {
	t.Helper()
	var all []string
	for _, pattern := range []string{"*.md", "deploy/*.md", "docs/*.md", "docs/*/*.md"} {
		found, err := filepath.Glob(filepath.Join(top, pattern))
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, found...)
	}
	if len(all) < 10 {
		t.Fatalf("found %d pages, want all of the documentation", len(all))
	}
	return all
}

func read(t *testing.T, page string) string {
	t.Helper()
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

var (
	fence   = regexp.MustCompile("(?ms)^ *```.*?^ *```")
	link    = regexp.MustCompile(`\]\(([^()\s]+)\)`)
	heading = regexp.MustCompile(`(?m)^#+ +(.+)$`)
	spoken  = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
)

// anchors are the names that a page's headings have as GitHub shows it.
func anchors(text string) (all []string) {
	for _, match := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		all = append(all, strings.ReplaceAll(strings.ToLower(spoken.ReplaceAllString(match[1], "")), " ", "-"))
	}
	return all
}

func TestLinksInTheDocumentationLeadSomewhere(t *testing.T) {
	for _, page := range pages(t) {
		for _, match := range link.FindAllStringSubmatch(fence.ReplaceAllString(read(t, page), ""), -1) {
			if strings.Contains(match[1], "://") {
				continue
			}
			path, anchor, _ := strings.Cut(match[1], "#")
			to := page
			if path != "" {
				to = filepath.Join(filepath.Dir(page), path)
			}
			if _, err := os.Stat(to); err != nil {
				t.Errorf("%s links to %s: %v", page, match[1], err)
				continue
			}
			if anchor != "" && !slices.Contains(anchors(read(t, to)), anchor) {
				t.Errorf("%s links to %s: %s has no such heading", page, match[1], to)
			}
		}
	}
}

// Whoever adds a page also says where it is found.
func TestEveryPageIsLinked(t *testing.T) {
	linked := map[string]bool{}
	for _, page := range pages(t) {
		for _, match := range link.FindAllStringSubmatch(read(t, page), -1) {
			path, _, _ := strings.Cut(match[1], "#")
			if path != "" {
				linked[filepath.Join(filepath.Dir(page), path)] = true
			}
		}
	}
	for _, page := range pages(t) {
		if strings.Contains(page, "docs/") && !linked[page] {
			t.Errorf("no page links to %s", page)
		}
	}
}

func TestTheReadmeIsShort(t *testing.T) {
	if n := len(strings.Fields(read(t, filepath.Join(top, "README.md")))); n > 900 {
		t.Errorf("README.md has %d words, want at most 900: the rest belongs in docs", n)
	}
}
