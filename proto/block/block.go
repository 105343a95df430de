// SPDX-License-Identifier: Apache-2.0

// Package block defines what every part of Weft shares: identifiers, sizes, portals,
// layouts, and the names used on the wire.
//
// Everything here is a plain value. The package imports no os, net, context, clock or
// logger, so that pure code (volmgr/cluster, raid) can use it.
package block

import (
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"strings"
)

// ExtentSize is the unit in which drives are carved into legs: 256 MiB.
const ExtentSize Size = 256 * MiB

// LeastDrive is the size of the smallest drive that is taken.
const LeastDrive = 2 * ExtentSize

// CheckedData is the data in an extent that also holds checksums, see package target/integrity.
const CheckedData Size = 255 * MiB

// SectorSize is the unit of device-mapper tables and of block-layer statistics.
const SectorSize Size = 512

// UUID is 16 bytes, printed as 8-4-4-4-12 lower-case hex digits.
type UUID [16]byte

// ParseUUID reads the form that [UUID.String] writes.
func ParseUUID(s string) (UUID, error) {
	var u UUID
	if len(s) != 36 || s[8] != '-' || s[13] != '-' || s[18] != '-' || s[23] != '-' {
		return u, fmt.Errorf("parse uuid %q: not 8-4-4-4-12 hex digits", s)
	}
	b, err := hex.DecodeString(strings.ReplaceAll(s, "-", ""))
	if err != nil || len(b) != 16 {
		return u, fmt.Errorf("parse uuid %q: not 8-4-4-4-12 hex digits", s)
	}
	copy(u[:], b)
	return u, nil
}

// UUIDFromRandom makes a version 4 UUID (RFC 9562, 5.4) of 16 random bytes.
func UUIDFromRandom(random [16]byte) UUID {
	return versioned(random, 4)
}

// derive makes a version 8 UUID (RFC 9562, 5.8) of the SHA-256 of its parts.
func derive(parts ...string) UUID {
	sum := sha256.Sum256([]byte(strings.Join(parts, "\x00")))
	return versioned([16]byte(sum[:16]), 8)
}

func versioned(b [16]byte, version byte) UUID {
	b[6] = b[6]&0x0f | version<<4
	b[8] = b[8]&0x3f | 0x80
	return b
}

func (u UUID) String() string {
	h := hex.EncodeToString(u[:])
	return h[:8] + "-" + h[8:12] + "-" + h[12:16] + "-" + h[16:20] + "-" + h[20:]
}

// IsZero reports whether u is the nil UUID, which identifies nothing.
func (u UUID) IsZero() bool { return u == UUID{} }

// MarshalText and UnmarshalText make a UUID a string in JSON.
func (u UUID) MarshalText() ([]byte, error) { return []byte(u.String()), nil }

// UnmarshalText is the inverse of MarshalText.
func (u *UUID) UnmarshalText(b []byte) (err error) {
	*u, err = ParseUUID(string(b))
	return err
}

// The identifiers of the cluster's objects. They are distinct types so that one
// cannot be passed for another; all print and parse as UUIDs.
type (
	ClusterID struct{ UUID }
	VolumeID  struct{ UUID }
	LegID     struct{ UUID }
	DriveID   struct{ UUID }
)

// ParseClusterID is the inverse of ClusterID.String.
func ParseClusterID(s string) (ClusterID, error) { u, err := ParseUUID(s); return ClusterID{u}, err }

// ParseVolumeID is the inverse of VolumeID.String.
func ParseVolumeID(s string) (VolumeID, error) { u, err := ParseUUID(s); return VolumeID{u}, err }

// ParseLegID is the inverse of LegID.String.
func ParseLegID(s string) (LegID, error) { u, err := ParseUUID(s); return LegID{u}, err }

// ParseDriveID is the inverse of DriveID.String.
func ParseDriveID(s string) (DriveID, error) { u, err := ParseUUID(s); return DriveID{u}, err }

// NodeName is a machine's name: 1 to 63 characters as in RFC 1123 host names, dots allowed.
type NodeName string

// VolumeName is what users call a volume: 1 to 63 characters, a to z, 0 to 9, '-', '.'
// and '_', beginning with a letter or digit, so that it can stand in a path. A snapshot is called
// like its volume and, after an '@', by such a name of its own: "db1@mon".
type VolumeName string

// Snapshot returns the name of a volume's snapshot.
func (n VolumeName) Snapshot(name string) VolumeName { return n + "@" + VolumeName(name) }

// Beside returns what the device of a volume, or of a snapshot, is called on a machine where another
// volume's device has the name: "db1+0b5f0a3e", with the first digits of its id. No volume has such a
// name: a '+' cannot be in one.
func (n VolumeName) Beside(v VolumeID) VolumeName {
	return n + "+" + VolumeName(v.String()[:8])
}

// ParseNodeName checks s.
func ParseNodeName(s string) (NodeName, error) {
	if err := checkName(s); err != nil {
		return "", fmt.Errorf("node name %q: %w", s, err)
	}
	return NodeName(s), nil
}

// ParseVolumeName checks s, which is not the name of a snapshot.
func ParseVolumeName(s string) (VolumeName, error) {
	if err := checkName(s); err != nil {
		return "", fmt.Errorf("volume name %q: %w", s, err)
	}
	return VolumeName(s), nil
}

// ParseSnapshotName checks s, the name of a volume's snapshot without that of the volume.
func ParseSnapshotName(s string) (string, error) {
	if err := checkName(s); err != nil {
		return "", fmt.Errorf("snapshot name %q: %w", s, err)
	}
	return s, nil
}

// ParseDeviceName checks s, the name of a volume or of a snapshot, which hosts have as a device.
func ParseDeviceName(s string) (VolumeName, error) {
	volume, snapshot, ok := strings.Cut(s, "@")
	name, err := ParseVolumeName(volume)
	if err != nil || !ok {
		return name, err
	}
	snapshot, err = ParseSnapshotName(snapshot)
	return name.Snapshot(snapshot), err
}

func checkName(s string) error {
	if s == "" || len(s) > 63 {
		return fmt.Errorf("must have 1 to 63 characters, has %d", len(s))
	}
	for i, r := range s {
		letter := r >= 'a' && r <= 'z' || r >= '0' && r <= '9'
		if !letter && (i == 0 || !strings.ContainsRune("-._", r)) {
			return fmt.Errorf("must not contain %q: use a-z, 0-9 and, after the first character, '-', '.' and '_'", r)
		}
	}
	return nil
}

// Epoch numbers the grants of write access to one volume. It only grows; 0 means that the
// volume has never been attached.
type Epoch uint64
