// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"crypto/sha256"
	"encoding/base32"
	"regexp"
	"strings"

	"weft.dev/weft/proto/block"
)

// ownLabels begins the keys of the labels by which the driver knows its volumes.
const ownLabels = "csi.weft.dev/"

const (
	// labelName holds the name that the CO gave, which need not be the volume's.
	labelName = ownLabels + "name"
	// labelParameters holds what a volume was made from, to tell a repeated
	// request from another one of the same name.
	labelParameters = ownLabels + "parameters"
)

// A CO's name has up to 128 characters of any kind; a volume's has 63 of few. One
// that can be a volume's name is it. Another one becomes some of its letters, for
// people, and a digest that no other name has:
//
//	PVC "Données" of Ops  →  pvc-donn-es-of-ops.csi-3ot5kbi…
//
// No name of the first kind looks like one of the second kind or like a volume's
// id, so two names never become one.
var mapped = regexp.MustCompile(`\.csi-[a-z2-7]{32}$`)

var digits = base32.StdEncoding.WithPadding(base32.NoPadding)

const (
	digestLength = 32 // base32: 160 bits
	lettersKept  = 63 - len(".csi-") - digestLength
)

// volumeName is the Weft name of a CO's name.
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

// letters are a name's beginning, of characters that a volume's name may have.
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
