// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"strings"

	"weft.dev/weft/proto/pb"
)

var subject = regexp.MustCompile(`^(volume|snapshot|node|drive) "?([a-z0-9._@-]+)`)

// NextCommand shows more about the object that a sentence begins with.
func NextCommand(sentence string) string {
	found := subject.FindStringSubmatch(sentence)
	if found == nil || strings.Contains(sentence, "`weft ") {
		return ""
	}
	name := found[2]
	if found[1] == "drive" {
		name = ShortID(name)
	}
	return "weft explain " + found[1] + " " + name
}

// Used is the used share of a capacity.
func Used(allocated, capacity uint64) string {
	if capacity == 0 {
		return ""
	}
	return fmt.Sprintf("%d%%", int(float64(allocated)/float64(capacity)*100+0.5))
}

// Promised is Used of drives that have promised more than is taken, since volumes on them are thin.
func Promised(allocated, promised, capacity uint64) string {
	if promised <= allocated {
		return Used(allocated, capacity)
	}
	return fmt.Sprintf("%s, %s promised", Used(allocated, capacity), Used(promised, capacity))
}

// Layout prints 2×2: stripes × copies.
func Layout(l *pb.Layout) string { return fmt.Sprintf("%d×%d", l.GetStripes(), l.GetCopies()) }

// IsSnapshotName reports whether a name is that of a snapshot, "db1@mon".
func IsSnapshotName(name string) bool { return strings.Contains(name, "@") }

// AttachmentsOf returns all attachments of a volume.
func AttachmentsOf(v *pb.Volume) []*pb.Attachment {
	if all := v.GetAttachments(); len(all) > 0 || v.GetAttachment() == nil {
		return all
	}
	return []*pb.Attachment{v.GetAttachment()}
}

// ParsePairs reads KEY=VALUE arguments.
func ParsePairs(args []string) (map[string]string, error) {
	labels := map[string]string{}
	for _, arg := range args {
		k, v, ok := strings.Cut(arg, "=")
		if !ok || k == "" {
			return nil, UsageError{Err: fmt.Errorf("label %q: must be KEY=VALUE", arg), Hint: "such as rack=r1"}
		}
		if old, twice := labels[k]; twice && old != v {
			return nil, UsageError{Err: fmt.Errorf("label %q: given twice, as %q and %q", k, old, v)}
		}
		labels[k] = v
	}
	return labels, nil
}

// Shunned is why a node takes no new legs, in a word; empty if it does.
func Shunned(n *pb.Node) string {
	switch {
	case n.GetDraining():
		return "draining"
	case n.GetMaintainedUntil() != nil:
		return "maintenance"
	case n.GetCordoned():
		return "cordoned"
	}
	return ""
}

// Healing says which host copies to the legs of a detached volume, and how far it is; empty if none does.
func Healing(v *pb.Volume) string {
	h := v.GetHealing()
	if h == nil {
		return ""
	}
	var done, total uint64
	for _, r := range v.GetRebuilds() {
		if r.GetEnded() == nil {
			done, total = done+r.GetDoneBytes(), total+r.GetTotalBytes()
		}
	}
	if total == 0 {
		return "healing on " + h.GetNode()
	}
	return fmt.Sprintf("healing on %s, %d%%", h.GetNode(), 100*(done/1024)/max(total/1024, 1))
}
