// SPDX-License-Identifier: Apache-2.0

package evidence

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
)

func volumeID(n byte) block.VolumeID {
	return block.VolumeID{UUID: block.UUIDFromRandom([16]byte{n})}
}

func leg(n byte) block.LegID { return block.LegID{UUID: block.UUIDFromRandom([16]byte{n, 1})} }

func note(epoch block.Epoch, legs ...byte) Note {
	n := Note{Epoch: epoch, Legs: map[block.LegID]uint64{}}
	for _, l := range legs {
		n.Legs[leg(l)] = uint64(l)
	}
	return n
}

func open(dir string) *Book {
	b := New(dir, slog.New(slog.DiscardHandler))
	b.Open()
	return b
}

func TestANoteIsThereAfterARestart(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "evidence")
	b := open(dir)
	for _, n := range []Note{note(1, 1, 2), note(1, 2)} {
		if err := b.Write(volumeID(1), n); err != nil {
			t.Fatal(err)
		}
	}
	again := open(dir)
	if diff := cmp.Diff(note(1, 2), again.Of(volumeID(1))); diff != "" {
		t.Errorf("after a restart (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(b.Report(), again.Report(), cmp.Comparer(func(x, y fmt.Stringer) bool { return x.String() == y.String() })); diff != "" || len(again.Report()) != 1 {
		t.Errorf("reported after a restart (-before +after):\n%s", diff)
	}
}

// After a detach, labels may still be from before a leg was lost. Only if all legs are in sync
// and equal is the note not needed.
func TestANoteThatLacksALegOutlivesACleanEnd(t *testing.T) {
	for _, c := range []struct {
		clean, whole bool
		left         int
	}{{true, true, 0}, {true, false, 1}, {false, true, 1}} {
		dir := t.TempDir()
		b, n := open(dir), note(1, 1, 2)
		n.Whole = c.whole
		if err := b.Write(volumeID(1), n); err != nil {
			t.Fatal(err)
		}
		b.Leave(volumeID(1), c.clean)
		if here, again := b.Report(), open(dir).Report(); len(here) != c.left || len(again) != c.left {
			t.Errorf("clean %v, all legs in it %v: reported %v, and after a restart %v; want %d", c.clean, c.whole, here, again, c.left)
		}
	}
}

// A crash leaves the old note or the new one; other files in the directory are not taken for a
// note.
func TestAWriteThatWasCutIsNoNote(t *testing.T) {
	dir := t.TempDir()
	if err := open(dir).Write(volumeID(1), note(1, 1, 2)); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		"." + volumeID(1).String() + ".json-1": `{"epoch":1,"legs":{`, volumeID(2).String() + ".json": "", volumeID(3).String() + ".json": `{"epoch":1,"more":2}`, "x.json": "{}",
	} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b := open(dir)
	if got := b.Report(); len(got) != 1 || !b.Of(volumeID(1)).Equal(note(1, 1, 2)) {
		t.Errorf("reported = %v, want the one note that was finished", got)
	}
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 1 {
		t.Errorf("left in the directory: %v, %v; want the note alone", left, err)
	}
}

// No note is better than one that names too many legs.
func TestANoteThatCanNotBeWrittenIsRemoved(t *testing.T) {
	dir := t.TempDir()
	b := open(dir)
	if err := b.Write(volumeID(1), note(1, 1, 2)); err != nil {
		t.Fatal(err)
	}
	file := b.file(volumeID(1))
	if err := errors.Join(os.Remove(file), os.Mkdir(file, 0o700)); err != nil { // now it cannot be replaced
		t.Fatal(err)
	}
	if err := b.Write(volumeID(1), note(1, 2)); err != nil {
		t.Errorf("Write = %v, want the old note removed instead", err)
	}
	if _, err := os.Stat(file); !errors.Is(err, fs.ErrNotExist) || b.Of(volumeID(1)).Epoch != 0 || len(b.Report()) != 0 {
		t.Errorf("after a note that could not be written: %v, reported %v; want none", err, b.Report())
	}
}

func TestAnOldNoteThatCanNotBeRemovedIsAnError(t *testing.T) {
	dir := t.TempDir()
	b := open(dir)
	if err := b.Write(volumeID(1), note(1, 1, 2)); err != nil {
		t.Fatal(err)
	}
	file := b.file(volumeID(1))
	if err := errors.Join(os.Remove(file), os.MkdirAll(filepath.Join(file, "x"), 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := b.Write(volumeID(1), note(1, 2)); err == nil || !b.Of(volumeID(1)).Equal(note(1, 1, 2)) {
		t.Errorf("Write = %v, Of = %v; want an error, and what may still stand", err, b.Of(volumeID(1)))
	}
}

func TestNotesOfVolumesThatWereLeftAreBounded(t *testing.T) {
	dir := t.TempDir()
	b := open(dir)
	for i := range byte(keptNotes + 3) {
		if err := b.Write(volumeID(i), note(1, 1)); err != nil {
			t.Fatal(err)
		}
	}
	if n := len(b.Report()); n != keptNotes+3 {
		t.Errorf("%d notes of volumes in use, want %d", n, keptNotes+3)
	}
	for i := range byte(keptNotes + 3) {
		if i != 0 { // the oldest is still in use
			b.Leave(volumeID(i), false)
		}
	}
	if n := len(b.Report()); n != keptNotes+1 || b.Of(volumeID(0)).Epoch == 0 || b.Of(volumeID(1)).Epoch != 0 {
		t.Errorf("%d notes; of volume 0 %v, of volume 1 %v; want %d, and volume 1's, the oldest that was left, gone", n, b.Of(volumeID(0)), b.Of(volumeID(1)), keptNotes+1)
	}
}

func TestWithin(t *testing.T) {
	for _, c := range []struct {
		a, b Note
		want bool
	}{
		{note(1, 1), note(1, 1, 2), true}, {note(1, 1, 2), note(1, 1), false}, {note(1, 1, 2), note(2, 1), true},
		{Note{Epoch: 1, Legs: map[block.LegID]uint64{leg(1): 7}}, note(1, 1), false}, {Note{}, note(1), true},
	} {
		if got := c.a.Within(c.b); got != c.want {
			t.Errorf("%v.Within(%v) = %v, want %v", c.a, c.b, got, c.want)
		}
	}
}
