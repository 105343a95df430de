// SPDX-License-Identifier: Apache-2.0

// Package keys makes the keys with which hosts and targets prove their identities to one another
// (DH-HMAC-CHAP). All keys follow from one secret of the cluster, its master:
//
//	key = HMAC-SHA256(master, "weft dhchap 1", direction, subsystem NQN, host NQN)
//
// The subsystem's name holds the volume, the epoch, the grant, the host and the target, so each
// target gets keys of its own, and each grant new ones: a host with the keys of a grant that is over
// can do nothing with them. Nobody can compute the master, or another key, from a key. So nothing
// has to be recorded for a grant, and a manager that restarts tells both ends the same keys.
//
// The master is in the manager's store, but in no backup: see cluster.Record.Secret.
package keys

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"fmt"

	"weft.dev/weft/proto/block"
)

// Master is the secret from which the keys of a cluster follow. The zero Master makes no keys.
type Master struct{ secret block.Secret }

// Make draws a master from random bytes.
func Make(random [32]byte) Master {
	return Master{block.NewSecret(sum(random[:], "weft dhchap master"))}
}

// Parse reads what Encode wrote.
func Parse(text []byte) (Master, error) {
	b, err := hex.DecodeString(string(text))
	if err != nil || len(b) != sha256.Size {
		return Master{}, fmt.Errorf("the master of the keys is not %d bytes in hex", sha256.Size)
	}
	return Master{block.NewSecret(b)}, nil
}

// Encode returns the master as the store keeps it.
func (m Master) Encode() []byte { return hex.AppendEncode(nil, m.secret.Reveal()) }

// IsZero reports whether there is no master.
func (m Master) IsZero() bool { return m.secret.IsZero() }

// String never shows the master.
func (m Master) String() string { return m.secret.String() }

// Of returns the keys for one host of a subsystem; none without a master.
func (m Master) Of(subsystem, host block.NQN) block.Keys {
	if m.IsZero() {
		return block.Keys{}
	}
	of := func(direction string) block.Secret {
		return block.NewSecret(sum(m.secret.Reveal(), "weft dhchap 1", direction, string(subsystem), string(host)))
	}
	return block.Keys{Host: of("host"), Controller: of("controller")}
}

// sum is the HMAC of parts. Each is preceded by its length, so that no two lists give the same.
func sum(key []byte, parts ...string) []byte {
	h := hmac.New(sha256.New, key)
	for _, p := range parts {
		h.Write(binary.BigEndian.AppendUint32(nil, uint32(len(p))))
		h.Write([]byte(p))
	}
	return h.Sum(nil)
}
