// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// UpdateVolume changes what may change of a volume that is in use. Result: Volume.
type UpdateVolume struct {
	Volume       string
	SetLabels    map[string]string
	RemoveLabels []string
	Formatted    string // empty: as it is; NotFormatted: the record is taken back
}

// formattedLabel is where the labels of drives keep Volume.Formatted.
const formattedLabel = ownLabels + "formatted"

// ownLabels begins the keys that nobody else may set.
const ownLabels = "weft.dev/"

// Formatting begins what Volume.Formatted says as long as a file system is being
// made: "formatting ext4". Who finds this and an empty device may go on with it.
const Formatting = "formatting "

// Raw is Volume.Formatted of a volume that was given to somebody who may write
// anything anywhere: it is never taken for an empty one. NotFormatted takes back what
// is recorded.
const (
	Raw          = "raw"
	NotFormatted = "none"
)

func (in UpdateVolume) apply(t *tx) (view, error) {
	v, err := t.s.find(in.Volume)
	if err != nil {
		return nil, err
	}
	if err := checkLabels("set_labels", in.SetLabels); err != nil {
		return nil, err
	}
	if in.Formatted != "" {
		if err := v.mayBecome(in.Formatted); err != nil {
			return nil, err
		}
	}
	labels := maps.Clone(v.Labels)
	for _, key := range in.RemoveLabels {
		delete(labels, key)
	}
	if len(in.SetLabels) > 0 {
		if labels == nil {
			labels = map[string]string{}
		}
		maps.Copy(labels, in.SetLabels)
	}
	if !maps.Equal(labels, v.Labels) {
		t.volume(v.ID).Labels = labels
		keys := slices.Sorted(maps.Keys(in.SetLabels))
		t.volumeEvent(v, Info, EventVolumeUpdated, fmt.Sprintf("labels set: %s; removed: %s",
			list(keys), list(in.RemoveLabels)))
	}
	if in.Formatted != "" && in.Formatted != cmp.Or(v.Formatted, NotFormatted) {
		fresh := t.volume(v.ID)
		fresh.Formatted = in.Formatted
		if in.Formatted == NotFormatted {
			fresh.Formatted = ""
		}
		t.volumeEvent(v, Info, EventVolumeFormatted, in.Formatted)
	}
	return volumeResult(v.ID), nil
}

// mayBecome refuses to forget a file system, or that one is being made. A volume of
// which anything is true may turn out to have a file system; one is made on it only
// after somebody has taken the record back.
func (v *Volume) mayBecome(formatted string) error {
	fs := strings.TrimPrefix(v.Formatted, Formatting)
	switch {
	case len(formatted) > 64 || strings.TrimSpace(formatted) != formatted:
		return invalid("formatted", "%q is no name of a file system", formatted)
	case formatted == NotFormatted && v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s, who may write it", v.users()).
			hint("`weft detach %s` first", v.Name)
	case formatted == NotFormatted:
		return nil
	case v.Formatted == "" || v.Formatted == formatted:
		return nil
	case v.Formatted == Raw && !strings.HasPrefix(formatted, Formatting): // it has been found
		return nil
	case v.Formatted != fs && (formatted == fs || formatted == Raw): // it has been made, or will not be
		return nil
	}
	return conflict(v.object(), "formatted", v.Formatted, formatted)
}

// orRaw is what is recorded after somebody may have written what nobody recorded. A
// file system stays so: none is made on it again either.
func orRaw(formatted string) string {
	if formatted == "" || strings.HasPrefix(formatted, Formatting) {
		return Raw
	}
	return formatted
}

// checkLabels refuses keys that are empty or Weft's own.
func checkLabels(field string, labels map[string]string) error {
	for _, key := range slices.Sorted(maps.Keys(labels)) {
		if key == "" || strings.HasPrefix(key, ownLabels) {
			return invalid(field, "key %q can not be set", key)
		}
	}
	return nil
}

func list(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return strings.Join(words, ", ")
}

// onDrives are the labels as the labels of drives keep them.
func (v *Volume) onDrives() map[string]string {
	labels := maps.Clone(v.Labels)
	if v.Formatted != "" {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[formattedLabel] = v.Formatted
	}
	return labels
}

// fromDrives takes apart what onDrives has put together.
func fromDrives(onDrives map[string]string) (labels map[string]string, formatted string) {
	labels = maps.Clone(onDrives)
	formatted = labels[formattedLabel]
	delete(labels, formattedLabel)
	return labels, formatted
}
