// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/event"
	"weft.dev/weft/volmgr/labelset"
)

// UpdateVolume changes the properties that may change while a volume is in use.
// Result: Volume.
type UpdateVolume struct {
	Volume       string
	SetLabels    map[string]string
	RemoveLabels []string
	Formatted    string // empty: unchanged; NotFormatted: erase the record
	Copies       int    // 0: unchanged
	// ScrubEvery and ScrubRate are those of Volume; nil: unchanged.
	ScrubEvery *time.Duration
	ScrubRate  *block.Size
	// RebuildRate is that of Volume; nil: unchanged.
	RebuildRate *block.Size
	// Authentication is that of Volume, its default by name; empty: unchanged.
	Authentication string
}

// The labels of drives keep Volume.Formatted and Volume.Authentication there.
const (
	formattedLabel      = labelset.Own + "formatted"
	authenticationLabel = labelset.Own + "authentication"
)

// mostFormatted is the longest Volume.Formatted, in bytes.
const mostFormatted = 64

// checkLabels refuses labels, or a selector of labels, that no object may have.
func checkLabels(field string, labels map[string]string) error {
	if why := labelset.Check(labels); why != "" {
		return invalid(field, "%s", why)
	}
	return nil
}

// checkVolumeLabels also refuses keys that have another meaning among a volume's labels.
func checkVolumeLabels(field string, labels map[string]string) error {
	if why := labelset.CheckVolume(labels); why != "" {
		return invalid(field, "%s", why)
	}
	return nil
}

// Formatting is the prefix of Volume.Formatted while a file system is being made:
// "formatting ext4". A caller that finds it and an empty device may continue.
const Formatting = "formatting "

// Raw is Volume.Formatted of a volume that was attached for arbitrary writes: it is never
// treated as empty. NotFormatted erases the record.
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
	if in.Copies != 0 {
		if err := t.setCopies(v, in.Copies); err != nil {
			return nil, err
		}
		v = t.peek(v.ID)
	}
	labels := in.change(v.Labels)
	// A volume with too many labels may lose some, but not get more.
	if why := labelset.Excess(labels); why != "" && len(in.SetLabels) > 0 {
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
		t.volumeEvent(v, event.Info, event.VolumeUpdated, fmt.Sprintf("labels set: %s; removed: %s",
			some8(keys), some8(in.RemoveLabels)))
	}
	if in.Formatted != "" && in.Formatted != cmp.Or(v.Formatted, NotFormatted) {
		fresh := t.volume(v.ID)
		fresh.Formatted = in.Formatted
		if in.Formatted == NotFormatted {
			fresh.Formatted = ""
		}
		t.volumeEvent(v, event.Info, event.VolumeFormatted, in.Formatted)
	}
	err = cmp.Or(t.setAuthentication(t.peek(v.ID), in.Authentication), t.schedule(t.peek(v.ID), in.ScrubEvery, in.ScrubRate))
	if err != nil {
		return nil, err
	}
	return volumeResult(v.ID), t.setRebuildRate(t.peek(v.ID), in.RebuildRate)
}

func (t *tx) setAuthentication(v *Volume, word string) error {
	if word == "" {
		return nil
	}
	recorded, err := checkAuthentication(word)
	if err != nil || recorded == v.Authentication {
		return err
	}
	if err := t.needs("s", block.PropertyAuthentication.Field+" "+word); err != nil {
		return err
	}
	t.volume(v.ID).Authentication = recorded
	t.volumeEvent(v, event.Info, event.VolumeUpdated, fmt.Sprintf("authentication: %s, from the next grant on", word))
	return nil
}

// change returns the labels after the update.
func (in UpdateVolume) change(labels map[string]string) map[string]string {
	labels = maps.Clone(labels)
	for _, key := range in.RemoveLabels {
		delete(labels, key)
		if key == labelset.Every {
			clear(labels)
		}
	}
	if labels == nil && len(in.SetLabels) > 0 {
		labels = map[string]string{}
	}
	maps.Copy(labels, in.SetLabels)
	return labels
}

// mayBecome refuses an update that would forget a file system, made or being made. A Raw
// volume may be recorded as having one, once it was found; but a file system is made on it
// only after the record was erased.
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
	case v.Formatted == Raw && !strings.HasPrefix(formatted, Formatting): // a file system was found on it
		return nil
	case v.Formatted != fs && (formatted == fs || formatted == Raw): // the file system was made, or will not be made
		return nil
	}
	return conflict(v.object(), "formatted", v.Formatted, formatted)
}

// orRaw returns the record after writes that it does not cover. A recorded file system
// stays: none is made over it either.
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

// kept are the labels that drives keep: none if they are too many.
func (v *Volume) kept() map[string]string {
	if labelset.Excess(v.Labels) != "" {
		return nil
	}
	return v.Labels
}

// onDrives are the volume's labels, Formatted and Authentication as drive labels keep them.
func (v *Volume) onDrives() map[string]string {
	labels := maps.Clone(v.kept())
	if v.Formatted != "" {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[formattedLabel] = v.Formatted
	}
	if v.Authentication != "" {
		if labels == nil {
			labels = map[string]string{}
		}
		labels[authenticationLabel] = v.Authentication
	}
	return labels
}

// fromDrives is the inverse of onDrives.
func fromDrives(onDrives map[string]string) (labels map[string]string, formatted, authentication string) {
	labels = maps.Clone(onDrives)
	formatted, authentication = labels[formattedLabel], labels[authenticationLabel]
	delete(labels, formattedLabel)
	delete(labels, authenticationLabel)
	if word, err := checkAuthentication(authentication); err == nil {
		return labels, formatted, word
	}
	return labels, formatted, block.AuthenticationRequire // of a later version: the strictest that is known
}
