// SPDX-License-Identifier: Apache-2.0

// Package evidence keeps on a host's disk which legs of its mirrored volumes hold every write
// that the host was told is done.
//
// The manager records the same, but its store can be lost. The labels on the drives lag behind
// it, so a copy that missed writes would then look like a good one. Only the host knows
// better, and it writes down what it knows before it relies on it:
//
//	a leg is lost:    manager records it stale → note without it → writes continue
//	a leg is rebuilt: manager records it in sync → note with it
//
// A note may therefore name too few legs, but never too many. If a note cannot be written, the
// old one is removed, since no note is better than a wrong one; if that fails too, the writes
// wait.
package evidence

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pb"
)

// Note names the legs of a volume that hold every acknowledged write.
type Note = volume.Note

// keptNotes limits the notes of volumes that were not detached cleanly. They are reported each
// second, and the oldest are the least likely to be needed.
const keptNotes = 64

// Again is the pause after a note that could not be written.
const Again = 5 * time.Second

// Book is a directory of notes. It is safe for concurrent use, but only one goroutine at a
// time may write the note of a volume.
type Book struct {
	dir string
	log *slog.Logger

	mu    sync.Mutex
	notes map[block.VolumeID]Note
	held  map[block.VolumeID]bool // the volume is in use here
	age   map[block.VolumeID]int  // grows with each note
	last  int
}

const suffix = ".json"

// New returns a Book in dir; it touches nothing.
func New(dir string, log *slog.Logger) *Book {
	return &Book{dir: dir, log: log, notes: map[block.VolumeID]Note{}, held: map[block.VolumeID]bool{}, age: map[block.VolumeID]int{}}
}

// Open makes the directory if need be, and reads its notes. A file with any other content is
// removed. A disk that takes no more writes is not an error yet: the agent must run on it, and
// Write will report it.
func (b *Book) Open() {
	b.mu.Lock()
	defer b.mu.Unlock()
	dir, log := b.dir, b.log
	err := os.MkdirAll(dir, 0o700)
	if err == nil {
		err = durable.SyncDir(filepath.Dir(dir))
	}
	files, unread := os.ReadDir(dir)
	if err = errors.Join(err, unread); err != nil {
		log.Error("evidence directory cannot be used", "dir", dir, "err", err)
	}
	modified := func(f fs.DirEntry) int64 {
		info, err := f.Info()
		if err != nil {
			return 0
		}
		return info.ModTime().UnixNano()
	}
	slices.SortStableFunc(files, func(x, y fs.DirEntry) int { return cmp.Compare(modified(x), modified(y)) })
	for _, f := range files {
		v, note, err := read(filepath.Join(dir, f.Name()))
		if err != nil {
			log.Warn("evidence cannot be read and is removed", "file", f.Name(), "err", err, "removed", os.Remove(filepath.Join(dir, f.Name())))
			continue
		}
		b.last++
		b.notes[v], b.age[v] = note, b.last
	}
}

func read(file string) (v block.VolumeID, n Note, err error) {
	name, ok := strings.CutSuffix(filepath.Base(file), suffix)
	if !ok {
		return v, n, errors.New("no note: a write was interrupted")
	}
	if v, err = block.ParseVolumeID(name); err != nil {
		return v, n, err
	}
	text, err := os.ReadFile(file)
	if err != nil {
		return v, n, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	return v, n, d.Decode(&n)
}

// Of returns the note of a volume; its epoch is 0 if there is none.
func (b *Book) Of(v block.VolumeID) Note {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.notes[v]
}

// Write makes n the note of a volume, and returns when it is durable. After an error, a crash
// may still bring back the previous note. It is not an error if n could not be written but the
// previous note was removed: then there is none.
func (b *Book) Write(v block.VolumeID, n Note) error {
	err := b.put(v, n)
	if err != nil {
		b.log.Error("evidence not written: if the manager's store is lost, there is none for this volume", "volume", v.String(), "err", err)
		if gone := b.remove(v); gone != nil {
			return fmt.Errorf("write evidence: %w; remove the old one: %w", err, gone)
		}
		n = Note{}
	}
	b.mu.Lock()
	b.last++
	b.notes[v], b.held[v], b.age[v] = n, true, b.last
	b.mu.Unlock()
	return nil
}

func (b *Book) file(v block.VolumeID) string { return filepath.Join(b.dir, v.String()+suffix) }

func (b *Book) put(v block.VolumeID, n Note) error {
	text, err := json.Marshal(n)
	if err != nil {
		return err
	}
	return durable.Write(b.file(v), string(text), 0o600)
}

func (b *Book) remove(v block.VolumeID) error {
	if err := os.Remove(b.file(v)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	if err := durable.SyncDir(b.dir); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}

// Leave says that a volume is no longer in use here. After a clean detach with all legs in
// sync the note is no longer needed, and is removed. Otherwise it stays until keptNotes newer
// ones have come: until the labels tell which legs are stale, only the manager's store does.
func (b *Book) Leave(v block.VolumeID, clean bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.held, v)
	if clean && b.notes[v].Whole {
		b.dropLocked(v)
	}
	var left []block.VolumeID
	for id := range b.notes {
		if !b.held[id] {
			left = append(left, id)
		}
	}
	slices.SortFunc(left, func(x, y block.VolumeID) int { return cmp.Compare(b.age[x], b.age[y]) })
	for len(left) > keptNotes {
		b.dropLocked(left[0])
		left = left[1:]
	}
}

func (b *Book) dropLocked(v block.VolumeID) {
	if _, ok := b.notes[v]; !ok {
		return
	}
	if err := b.remove(v); err != nil {
		b.log.Warn("evidence not removed", "volume", v.String(), "err", err)
	}
	delete(b.notes, v)
	delete(b.held, v)
	delete(b.age, v)
}

// Report returns all notes, for the manager.
func (b *Book) Report() (all []*pb.Evidence) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for v, n := range b.notes {
		if n.Epoch == 0 {
			continue
		}
		e := &pb.Evidence{VolumeId: v.String(), Epoch: uint64(n.Epoch)}
		for leg, revision := range n.Legs {
			e.Legs = append(e.Legs, &pb.EvidenceLeg{LegId: leg.String(), Revision: revision})
		}
		slices.SortFunc(e.Legs, func(x, y *pb.EvidenceLeg) int { return strings.Compare(x.LegId, y.LegId) })
		all = append(all, e)
	}
	slices.SortFunc(all, func(x, y *pb.Evidence) int { return strings.Compare(x.VolumeId, y.VolumeId) })
	return all
}
