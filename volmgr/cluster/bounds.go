// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// Bounds of the labels of one object, and of a selector or segment. A volume's labels are
// written to the label of each drive that holds one of its legs.
const (
	MaxLabels     = 64
	MaxLabelKey   = 317 // a DNS name, a slash and a name, as in Kubernetes
	MaxLabelValue = 256
	MaxLabelBytes = 8 << 10 // of all keys and values together
)

// maxBootID is longer than any boot id of the kernel, or of agents in user space.
const maxBootID = 256

// everyLabel in UpdateVolume.RemoveLabels removes all labels.
const everyLabel = "*"

// checkLabels refuses labels, or a selector of labels, that no object may have.
func checkLabels(field string, labels map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		switch value := labels[key]; {
		case key == "":
			return invalid(field, "key %q cannot be set", key)
		case len(key) > MaxLabelKey:
			return invalid(field, "key %q has %d bytes; at most %d are allowed", Shorten(key, 40), len(key), MaxLabelKey)
		case len(value) > MaxLabelValue:
			return invalid(field, "the value of %q has %d bytes; at most %d are allowed", key, len(value), MaxLabelValue)
		}
	}
	if why := tooMuch(labels); why != "" {
		return invalid(field, "%s", why)
	}
	return nil
}

// checkVolumeLabels also refuses keys that have another meaning among a volume's labels.
func checkVolumeLabels(field string, labels map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if key == everyLabel || strings.HasPrefix(key, ownLabels) {
			return invalid(field, "key %q cannot be set", Shorten(key, 40))
		}
	}
	return checkLabels(field, labels)
}

// checkSegments refuses segments that no node's labels could match.
func checkSegments(field string, all []Segment) error {
	for _, g := range all {
		if err := checkLabels(field, g); err != nil {
			return err
		}
	}
	return nil
}

// tooMuch says which bound the labels exceed together; empty if none.
func tooMuch(labels map[string]string) string {
	bytes := 0
	for key, value := range labels {
		bytes += len(key) + len(value)
	}
	switch {
	case len(labels) > MaxLabels:
		return fmt.Sprintf("%d labels; at most %d are allowed", len(labels), MaxLabels)
	case bytes > MaxLabelBytes:
		return fmt.Sprintf("labels of %d bytes together; at most %d are allowed", bytes, MaxLabelBytes)
	}
	return ""
}

// TrimLabels drops those of a node's own labels that exceed the bounds, and says which: a
// report must not be refused for them.
func TrimLabels(labels map[string]string) (kept map[string]string, left string) {
	if checkLabels("", labels) == nil {
		return labels, ""
	}
	kept = map[string]string{}
	var out []string
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		kept[key] = labels[key]
		if checkLabels("", kept) != nil {
			delete(kept, key)
			out = append(out, Shorten(key, 40))
		}
	}
	return kept, fmt.Sprintf("at most %d of %d bytes together are kept; left out: %s", MaxLabels, MaxLabelBytes, some(out, 8))
}

// Shorten cuts a text after most bytes, and marks the cut with ….
func Shorten(text string, most int) string {
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most], "") + "…"
}

// oversize reports whether labels exceed today's bounds, since an earlier version had none.
// Such labels are not written to drives, and are shown in part.
func oversize(labels map[string]string) bool {
	return tooMuch(labels) != ""
}

// oversizeLabel is added to labels that are shown in part, and says so.
const oversizeLabel = ownLabels + "labels"

// shown returns labels as readers see them: if they are too many, the first ones.
func shown(labels map[string]string) map[string]string {
	if !oversize(labels) {
		return labels
	}
	part := map[string]string{oversizeLabel: fmt.Sprintf("%s; these are the first", tooMuch(labels))}
	bytes := 0
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		value := Shorten(labels[key], MaxLabelValue)
		if bytes += len(key) + len(value); bytes > MaxLabelBytes || len(part) > MaxLabels {
			break
		}
		part[key] = value
	}
	return part
}
