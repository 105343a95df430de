// SPDX-License-Identifier: Apache-2.0

package block

// LegRecord says what decides how large the record of a leg can become on the label
// of its drive, whatever happens to its volume: its numbers grow, and any of the
// volume's legs can be in sync. The room is reserved when the leg is carved, so that
// a fence, which is an epoch on the label, never finds the label full.
type LegRecord struct {
	Legs   int // of the volume
	Runs   int // of extents
	Labels int // of the volume
	Text   int // bytes of the volume's names, and of the keys and values of its labels
}

// LabelRoom is how much the records of all legs of a drive may take.
const LabelRoom = 3*MiB - 4*KiB

// The parts of a record at their largest, as weft.v1.LegLabel encodes them: tags,
// lengths, and numbers of 5 or 10 bytes. target/drive tests that they suffice.
const (
	recordFixed = 512 // all but what follows
	recordRun   = 14
	recordLeg   = 39 // an id among those that are in sync, or suspect
	recordLabel = 12 // without its text
)

// Size is how much of LabelRoom the record can take.
func (r LegRecord) Size() Size {
	return Size(recordFixed + r.Runs*recordRun + r.Legs*recordLeg + r.Labels*recordLabel + r.Text)
}
