// SPDX-License-Identifier: Apache-2.0

package block

// LegRecord holds what limits the size of a leg's record on its drive's label, whatever
// later happens to the volume: numbers grow, and any of its legs may come into sync. The
// space is reserved when the leg is carved. Fencing writes an epoch to the label, and so
// never finds the label full.
type LegRecord struct {
	Legs   int // of the volume
	Runs   int // of extents
	Labels int // of the volume
	Text   int // bytes of the volume's names, and of the keys and values of its labels
}

// LabelRoom is the space on a drive's label for the records of all its legs.
const LabelRoom = 3*MiB - 4*KiB

// The largest sizes of a record's parts, as weft.v1.LegLabel encodes them: tags, lengths,
// and numbers of 5 or 10 bytes. A test in target/drive checks that they suffice.
const (
	recordFixed = 512 // everything except the following
	recordRun   = 14
	recordLeg   = 39 // the id of one leg
	recordLabel = 12 // without its text
)

// MappedText is how many bytes more the record of a mapped leg takes: those of its tree's id, and those
// of the tree's own record without its runs of extents, and of the snapshot that the volume goes back to.
const MappedText = 192

// SnapshotText is how many bytes more the record of a snapshot's leg takes, without the name of the
// volume of which it was taken.
const SnapshotText = 128

// Size is the most that the record can take of LabelRoom.
func (r LegRecord) Size() Size {
	return Size(recordFixed + r.Runs*recordRun + r.Legs*recordLeg + r.Labels*recordLabel + r.Text)
}

// ImportLabel is the label of a volume that says what was imported into it. It holds as long as nobody
// changes what the volume holds: the manager drops it when the volume goes back to a snapshot.
const ImportLabel = "import"
