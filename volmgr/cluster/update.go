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

// mostFormatted is how long Volume.Formatted may be.
const mostFormatted = 64

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
	if err := checkVolumeLabels("set_labels", in.SetLabels); err != nil {
		return nil, err
	}
	if in.Formatted != "" {
		if err := v.mayBecome(in.Formatted); err != nil {
			return nil, err
		}
	}
	labels := in.change(v.Labels)
	// Of more than there may be, some may go; nothing may be added.
	if why := tooMuch(labels); why != "" && len(in.SetLabels) > 0 {
		return nil, invalid("set_labels", "%s would have %s", v.object(), why)
	}
	if !maps.Equal(labels, v.Labels) {
		next := v.clone()
		next.Labels = labels
		if d := t.s.lacksRoom(v, next); d != nil {
			return nil, t.s.labelFull(v, d, "set_labels")
		}
		t.volume(v.ID).Labels = labels
		keys := slices.Sorted(maps.Keys(in.SetLabels))
		t.volumeEvent(v, Info, EventVolumeUpdated, fmt.Sprintf("labels set: %s; removed: %s",
			some8(keys), some8(in.RemoveLabels)))
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

// change is what labels become.
func (in UpdateVolume) change(labels map[string]string) map[string]string {
	labels = maps.Clone(labels)
	for _, key := range in.RemoveLabels {
		delete(labels, key)
		if key == everyLabel {
			clear(labels)
		}
	}
	if labels == nil && len(in.SetLabels) > 0 {
		labels = map[string]string{}
	}
	maps.Copy(labels, in.SetLabels)
	return labels
}

// mayBecome refuses to forget a file system, or that one is being made. A volume of
// which anything is true may turn out to have a file system; one is made on it only
// after somebody has taken the record back.
func (v *Volume) mayBecome(formatted string) error {
	fs := strings.TrimPrefix(v.Formatted, Formatting)
	switch {
	case len(formatted) > mostFormatted || strings.TrimSpace(formatted) != formatted:
		return invalid("formatted", "%q is not the name of a file system", formatted)
	case formatted == NotFormatted && v.users() != "":
		return refused(ReasonAttached, v.object(), "attached to %s, which may write it", v.users()).
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

func some8(words []string) string {
	if len(words) == 0 {
		return "none"
	}
	return some(words, 8)
}

// kept are the labels that drives keep: those that are too many are not.
func (v *Volume) kept() map[string]string {
	if oversize(v.Labels) {
		return nil
	}
	return v.Labels
}

// onDrives are the labels as the labels of drives keep them.
func (v *Volume) onDrives() map[string]string {
	labels := maps.Clone(v.kept())
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
