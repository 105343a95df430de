// SPDX-License-Identifier: Apache-2.0

// Package labelset bounds the labels, key=value pairs, of a node, drive or volume and of
// selectors. A volume's labels are also written to the drives that hold its legs, so their
// size matters.
package labelset

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Bounds of the labels of one object, and of a selector or segment.
const (
	Most      = 64
	MostKey   = 317 // a DNS name, a slash and a name, as in Kubernetes
	MostValue = 256
	MostBytes = 8 << 10 // of all keys and values together
)

const (
	// Own is the prefix of keys that users cannot set.
	Own = "weft.dev/"
	// Every stands for all keys in a list of keys to remove.
	Every = "*"
	// oversizeKey is added to labels that are shown in part, and says so.
	oversizeKey = Own + "labels"
)

// Check says why labels, or a selector of labels, are refused; empty if they are not.
func Check(labels map[string]string) (why string) {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		switch value := labels[key]; {
		case key == "":
			return `key "" cannot be set`
		case len(key) > MostKey:
			return fmt.Sprintf("key %q has %d bytes; at most %d are allowed", Shorten(key, 40), len(key), MostKey)
		case len(value) > MostValue:
			return fmt.Sprintf("the value of %q has %d bytes; at most %d are allowed", key, len(value), MostValue)
		}
	}
	return Excess(labels)
}

// CheckVolume is Check for a volume, where some keys have another meaning.
func CheckVolume(labels map[string]string) (why string) {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if key == Every || strings.HasPrefix(key, Own) {
			return fmt.Sprintf("key %q cannot be set", Shorten(key, 40))
		}
	}
	return Check(labels)
}

// Excess says which bound the labels exceed together; empty if none. An earlier version had
// no bounds: labels that exceed them are not written to drives, and are shown in part.
func Excess(labels map[string]string) string {
	bytes := 0
	for key, value := range labels {
		bytes += len(key) + len(value)
	}
	switch {
	case len(labels) > Most:
		return fmt.Sprintf("%d labels; at most %d are allowed", len(labels), Most)
	case bytes > MostBytes:
		return fmt.Sprintf("labels of %d bytes together; at most %d are allowed", bytes, MostBytes)
	}
	return ""
}

// Trim drops those of a node's own labels that exceed the bounds, and says which: a report
// must not be refused for them.
func Trim(labels map[string]string) (kept map[string]string, left string) {
	if Check(labels) == "" {
		return labels, ""
	}
	kept = map[string]string{}
	var out []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		kept[key] = labels[key]
		if Check(kept) != "" {
			delete(kept, key)
			out = append(out, Shorten(key, 40))
		}
	}
	names := strings.Join(out[:min(len(out), 8)], ", ")
	if len(out) > 8 {
		names += fmt.Sprintf(" and %d more", len(out)-8)
	}
	return kept, fmt.Sprintf("at most %d of %d bytes together are kept; left out: %s", Most, MostBytes, names)
}

// Shown returns labels as readers see them: if they are too many, the first ones.
func Shown(labels map[string]string) map[string]string {
	excess := Excess(labels)
	if excess == "" {
		return labels
	}
	part := map[string]string{oversizeKey: excess + "; these are the first"}
	bytes := 0
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value := Shorten(labels[key], MostValue)
		if bytes += len(key) + len(value); bytes > MostBytes || len(part) > Most {
			break
		}
		part[key] = value
	}
	return part
}

// Shorten cuts a text after most bytes, and marks the cut with ….
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}
