// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"crypto/sha256"
	"encoding/base32"
	"regexp"
	"strings"

	"weft.dev/weft/proto/block"
)

// ownLabels is the prefix of the labels by which the driver recognizes its volumes.
const ownLabels = "csi.weft.dev/"

const (
	// labelName holds the name given by the CO, which may differ from the volume's.
	labelName = ownLabels + "name"
	// labelParameters holds the parameters of a new volume, to distinguish a repeated request from
	// a different one with the same name.
	labelParameters = ownLabels + "parameters"
	// labelSource holds what a new volume began as: "snapshot:ID" or "volume:ID".
	labelSource = ownLabels + "source"
	// labelClone marks a snapshot taken for a clone, and holds the CO's name of the clone.
	labelClone = ownLabels + "clone"
	// labelGroup marks a snapshot taken together with others, and holds the CO's name of the group.
	labelGroup = ownLabels + "group"
)

// A CO's name has up to 128 characters of any kind; a volume's has at most 63 from a small set. A
// name that fits becomes the volume's name. Any other becomes some of its letters, for people, and
// a digest that is unique to it:
//
//	PVC "Données" of Ops  →  pvc-donn-es-of-ops.csi-3ot5kbi…
//
// A name that looks like a digested one or like a volume's id does not count as fitting, so two
// names never become one.
var mapped = regexp.MustCompile(`\.csi-[a-z2-7]{32}$`)

var digits = base32.StdEncoding.WithPadding(base32.NoPadding)

const (
	digestLength = 32 // base32: 160 bits
	lettersKept  = 63 - len(".csi-") - digestLength
)

// volumeName is the Weft name for a CO's name.
func volumeName(name string) block.VolumeName {
	weft, err := block.ParseVolumeName(name)
	_, looksLikeID := block.ParseVolumeID(name)
	if err == nil && looksLikeID != nil && !mapped.MatchString(name) {
		return weft
	}
	sum := sha256.Sum256([]byte(name))
	digest := strings.ToLower(digits.EncodeToString(sum[:]))[:digestLength]
	return block.VolumeName(letters(name) + ".csi-" + digest)
}

// letters returns the beginning of a name in characters that a volume's name may have.
func letters(name string) string {
	var b strings.Builder
	gap := false
	for _, r := range strings.ToLower(name) {
		if (r < 'a' || r > 'z') && (r < '0' || r > '9') {
			gap = b.Len() > 0
			continue
		}
		if gap && b.Len()+1 < lettersKept {
			b.WriteByte('-')
		}
		gap = false
		if b.Len() == lettersKept {
			break
		}
		b.WriteRune(r)
	}
	if b.Len() == 0 {
		return "volume"
	}
	return b.String()
}
