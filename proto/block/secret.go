// SPDX-License-Identifier: Apache-2.0

package block

import (
	"errors"
	"fmt"
	"io"
	"strings"
	"unique"
)

// Secret is bytes that only their owners may see. All verbs of fmt and all encoders show
// "[redacted]" in place of them; Reveal alone returns them. The zero Secret is none. Two secrets
// can be compared with ==, as the values of a plan are; nothing that a peer has sent may be
// compared like that, since the time it takes tells where the two differ.
type Secret struct {
	// A handle is a pointer, which fmt does not follow: for a pointer to a struct under a wrong verb
	// ("%s" of a *Keys) it prints the fields without asking their methods.
	bytes unique.Handle[string]
}

// NewSecret keeps a copy of b.
func NewSecret(b []byte) Secret {
	if len(b) == 0 {
		return Secret{}
	}
	return Secret{unique.Make(string(b))}
}

// IsZero reports whether there is no secret.
func (s Secret) IsZero() bool { return s == Secret{} }

// Reveal returns the secret: for those who use it, never for logs, errors or arguments of programs.
func (s Secret) Reveal() []byte {
	if s.IsZero() {
		return nil
	}
	return []byte(s.bytes.Value())
}

const redacted = "[redacted]"

// String never shows the secret.
func (s Secret) String() string {
	if s.IsZero() {
		return "none"
	}
	return redacted
}

// Format keeps all verbs of fmt from showing the secret.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, s.String()) }

// MarshalText never shows the secret; structured logs and JSON use it.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// UnmarshalText always fails: what MarshalText writes holds no secret.
func (s *Secret) UnmarshalText([]byte) error { return errors.New("a secret cannot be read from text") }

// SecretSize is the size of the secrets that Keys hold, in bytes.
const SecretSize = 32

// Keys are the two secrets of one export: with one the host proves its identity to the controller,
// with the other the controller proves its identity to the host (NVM Express Base 2.1, 8.3.4.5,
// DH-HMAC-CHAP). The zero Keys mean that nobody proves anything.
type Keys struct {
	Host, Controller Secret
}

// IsZero reports whether there are no keys.
func (k Keys) IsZero() bool { return k == Keys{} }

// ParseKeys refuses secrets of a wrong size, and one without the other. Two empty ones are no keys.
func ParseKeys(host, controller []byte) (Keys, error) {
	if len(host) == 0 && len(controller) == 0 {
		return Keys{}, nil
	}
	if len(host) != SecretSize || len(controller) != SecretSize {
		return Keys{}, fmt.Errorf("keys of %d and %d bytes: both must have %d", len(host), len(controller), SecretSize)
	}
	return Keys{NewSecret(host), NewSecret(controller)}, nil
}

// ProvenHost is the identity under which a host connects to a subsystem in which it has to prove
// its identity. It belongs to that subsystem alone, because the kernel's target keeps one key for
// each host NQN, whatever the subsystem: with an identity for each grant there is a key for each
// grant. NQN and host ID fit to one another, as Linux demands since 6.5.
func ProvenHost(subsystem NQN) Host {
	return HostFromID(derive("weft proven host", string(subsystem)))
}

// StockHostID is a host ID for a host of which only the NQN is known: the one in it, if it has the
// form that Linux gives it.
func StockHostID(n NQN) UUID {
	if _, id, ok := strings.Cut(string(n), ":uuid:"); ok {
		if u, err := ParseUUID(id); err == nil && !u.IsZero() {
			return u
		}
	}
	return derive("weft stock host", string(n))
}

// Connects reports whether n is a host NQN under which h connects to a subsystem: its own, or that
// of ProvenHost.
func (h Host) Connects(subsystem, n NQN) bool {
	if n == h.NQN {
		return true
	}
	_, _, short, _, err := ParseSubsystemNQN(subsystem)
	return err == nil && short == h.Short() && n == ProvenHost(subsystem).NQN
}
