// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"
)

// Config holds what one end knows before a transaction.
type Config struct {
	HostNQN      string
	SubsystemNQN string

	// HostKey is the key that the host proves to know. Required.
	HostKey Key
	// ControllerKey is the key that the controller proves to know. A host that has one
	// insists on the proof. A controller without one fails a host that asks for it.
	ControllerKey Key

	// Hashes and Groups are the allowed ones, the preferred first. The controller's order
	// decides. Empty: all of them, short ones first, and the null group last.
	Hashes []Hash
	Groups []Group

	// Transaction is the host's number for this exchange; successive exchanges on a
	// connection need different ones. A controller uses the host's.
	Transaction uint16

	// Sequence numbers the challenges; nil: one Sequence for the process.
	Sequence *Sequence
	// Random is the source of challenges and DH keys; nil: the system's.
	Random io.Reader
}

// complete fills in the defaults.
func (c *Config) complete() error {
	if c.HostNQN == "" || c.SubsystemNQN == "" {
		return errors.New("DH-HMAC-CHAP: both NQNs are needed")
	}
	if c.HostKey.IsZero() {
		return errors.New("DH-HMAC-CHAP: a host key is needed")
	}
	if len(c.Hashes) == 0 {
		c.Hashes = []Hash{SHA256, SHA384, SHA512}
	}
	if len(c.Groups) == 0 {
		c.Groups = []Group{FFDHE2048, FFDHE3072, FFDHE4096, FFDHE6144, FFDHE8192, Null}
	}
	for _, h := range c.Hashes {
		if h.Size() == 0 {
			return fmt.Errorf("DH-HMAC-CHAP: unknown %v", h)
		}
	}
	for _, g := range c.Groups {
		if !g.known() {
			return fmt.Errorf("DH-HMAC-CHAP: unknown %v", g)
		}
	}
	if len(c.Hashes) > maxIDs || len(c.Groups) > maxIDs {
		return errors.New("DH-HMAC-CHAP: too many hashes or groups")
	}
	c.Hashes, c.Groups = slices.Clone(c.Hashes), slices.Clone(c.Groups)
	if c.Sequence == nil {
		c.Sequence = &processSequence
	}
	if c.Random == nil {
		c.Random = rand.Reader
	}
	return nil
}

func (c *Config) random(n int) ([]byte, *Error) {
	b := make([]byte, n)
	if _, err := io.ReadFull(c.Random, b); err != nil {
		return nil, fail(Failed, "reading random bytes: %v", err)
	}
	return b, nil
}

// Sequence numbers challenges: the first number is random, each later one is one more, and
// none is 0 (Base 2.1, section 8.3.4.5.2). The zero Sequence is ready for use, also by
// several goroutines.
type Sequence struct {
	mu   sync.Mutex
	last uint32
}

var processSequence Sequence

func (s *Sequence) next(random io.Reader) (uint32, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.last == 0 {
		var b [4]byte
		if _, err := io.ReadFull(random, b[:]); err != nil {
			return 0, fmt.Errorf("reading random bytes: %w", err)
		}
		s.last = binary.LittleEndian.Uint32(b[:])
	} else {
		s.last++
	}
	if s.last == 0 {
		s.last = 1
	}
	return s.last, nil
}
