// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"weft.dev/weft/proto/block"
)

// Format makes m an empty drive: it erases the present content, writes a label and reads it back.
// forceErase must name that content exactly as [Signatures] does, joined by ", "; a blank device
// needs none. Format may be repeated, and finishes a Format that was interrupted; on a device that
// already is this drive it does nothing.
//
// It first writes an unfinished label beside the present content, and only then erases the rest:
// after a power cut the device holds either all that forceErase names, or a label which says that
// erasing it had been agreed.
func Format(m Medium, cluster block.ClusterID, id block.DriveID, forceErase string) error {
	if err := format(m, cluster, id, forceErase); err != nil {
		return fmt.Errorf("format drive %v: %w", id, err)
	}
	return nil
}

func format(m Medium, cluster block.ClusterID, id block.DriveID, forceErase string) error {
	l := &Label{Cluster: cluster, Drive: id, Size: m.Size(), unfinished: true}
	if err := l.check(); err != nil {
		return err
	}
	c, err := examine(m, m.Size())
	if err != nil {
		return err
	}
	if c.err == nil && c.label.sameIdentity(l) && len(c.foreign) == 0 {
		return m.Flush() // it already is this drive; see load for the flush
	}
	agreed := errors.Is(c.err, ErrUnfinished) && c.label.Cluster == cluster
	if !agreed {
		if err := checkForce(c.signatures(), forceErase); err != nil {
			return err
		}
	}
	if err := eraseAround(m, &c.copies, l); err != nil {
		return err
	}
	l.unfinished = false
	for range 2 { // each fills one slot at each end
		l.Generation++
		if c.copies, err = readAfterFormat(m); err != nil {
			return err
		}
		if err := writeLabel(m, &c.copies, l); err != nil {
			return err
		}
	}
	return verify(m, l)
}

// checkForce says why the content of a device may not be erased.
func checkForce(signatures []string, forceErase string) error {
	if have := strings.Join(signatures, ", "); have != "" && have != forceErase {
		return errors.New(carries(have))
	}
	return nil
}

func carries(what string) string {
	return fmt.Sprintf("it carries %s, which is erased only if forced by exactly that name", what)
}

// eraseAround writes l, unfinished, into the head's spare slot and then zeroes the rest of both
// ends.
func eraseAround(m Medium, c *copies, l *Label) error {
	for _, s := range c {
		if s.label != nil {
			l.Generation = max(l.Generation, s.label.Generation)
		}
	}
	l.Generation++
	b, err := encode(l)
	if err != nil {
		return err
	}
	at := spare(c[:2]).offset
	if _, err := m.WriteAt(b, int64(at)); err != nil {
		return fmt.Errorf("write unfinished label: %w", err)
	}
	if err := m.Flush(); err != nil {
		return fmt.Errorf("flush unfinished label: %w", err)
	}
	after := at + block.Size(len(b))
	tail := tailArea(m.Size())
	for _, s := range []Segment{{0, at}, {after, areaSize - after}, {tail, m.Size() - tail}} {
		if err := m.Zero(context.Background(), s.Offset, s.Length, nil); err != nil {
			return fmt.Errorf("erase the ends: %w", err)
		}
	}
	return nil
}

func readAfterFormat(m Medium) (copies, error) {
	c := readCopies(m, m.Size())
	_, err := c.newest()
	return c, err
}

func verify(m Medium, want *Label) error {
	c, err := examine(m, m.Size())
	switch {
	case err != nil:
		return fmt.Errorf("read back: %w", err)
	case c.err != nil:
		return fmt.Errorf("read back: %w", c.err)
	case !c.label.equal(want) || c.label.Generation != want.Generation || len(c.foreign) > 0:
		return errors.New("read back: not what was written")
	}
	return nil
}

// FormatPath is Format on the device at path, opened exclusively: it fails with
// EBUSY if anything in the kernel holds the device.
func FormatPath(path string, cluster block.ClusterID, id block.DriveID, forceErase string) error {
	m, err := OpenDevice(path, Exclusive)
	if err != nil {
		return err
	}
	if err := Format(m, cluster, id, forceErase); err != nil {
		return fmt.Errorf("%s: %w", path, errors.Join(err, m.Close()))
	}
	return m.Close()
}
