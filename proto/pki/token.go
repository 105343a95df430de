// SPDX-License-Identifier: Apache-2.0

package pki

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"time"

	"weft.dev/weft/proto/access"
)

// Token lets one member join a cluster:
//
//	weft1.<SHA-256 of the authority's certificate>.<id>.<secret>
//
// A member checks the authority before it shows the secret, so a manager of somebody else learns
// nothing. Records hold the id and the hash of the secret.
type Token struct {
	Authority string // its hash
	ID        string // 16 hexadecimal digits
	secret    [32]byte
}

const (
	tokenPrefix = "weft1"
	tokenMost   = 256 // bytes
	idLength    = 8   // bytes
)

// NewToken makes a token with a new secret.
func NewToken(authority string) Token {
	t := Token{Authority: authority}
	var id [idLength]byte
	rand.Read(id[:])
	t.ID = hex.EncodeToString(id[:])
	rand.Read(t.secret[:])
	return t
}

// errToken says nothing of the text, which may be a secret.
var errToken = errors.New("not a token: it reads weft1.AUTHORITY.ID.SECRET")

// ParseToken parses the text of a token. An error does not repeat it.
func ParseToken(text string) (t Token, err error) {
	fields := strings.Split(text, ".")
	if len(text) > tokenMost || len(fields) != 4 || fields[0] != tokenPrefix {
		return Token{}, errToken
	}
	if !isHex(fields[1], sha256.Size) || !isHex(fields[2], idLength) {
		return Token{}, errToken
	}
	secret, err := base64.RawURLEncoding.Strict().DecodeString(fields[3])
	if err != nil || len(secret) != len(t.secret) {
		return Token{}, errToken
	}
	t.Authority, t.ID = fields[1], fields[2]
	copy(t.secret[:], secret)
	if t.Text() != text { // the decoder skips ends of lines
		return Token{}, errToken
	}
	return t, nil
}

func isHex(text string, bytes int) bool {
	b, err := hex.DecodeString(text)
	return err == nil && len(b) == bytes && hex.EncodeToString(b) == text
}

// ReadToken reads a token from a file, or from standard input if path is "-". It may end with a newline.
func ReadToken(path string) (Token, error) {
	read := func() ([]byte, error) { return os.ReadFile(path) }
	if path == "-" {
		read = func() ([]byte, error) { return io.ReadAll(io.LimitReader(os.Stdin, 4096)) }
	}
	text, err := read()
	if err != nil {
		return Token{}, err
	}
	t, err := ParseToken(strings.TrimSpace(string(text)))
	if err != nil {
		return Token{}, fmt.Errorf("%s: %w", path, err)
	}
	return t, nil
}

// Text is the token with its secret: for the operator who asked for it, and nobody else.
func (t Token) Text() string {
	return strings.Join([]string{tokenPrefix, t.Authority, t.ID, base64.RawURLEncoding.EncodeToString(t.secret[:])}, ".")
}

// String leaves the secret out.
func (t Token) String() string { return "token " + t.ID }

// GoString leaves the secret out.
func (t Token) GoString() string { return t.String() }

// LogValue implements [slog.LogValuer].
func (t Token) LogValue() slog.Value { return slog.StringValue(t.String()) }

// Proof shows a manager that one has the secret; the manager records only [HashProof] of it.
func (t Token) Proof() []byte { return t.secret[:] }

// HashProof is what is recorded of a secret.
func HashProof(proof []byte) string {
	sum := sha256.Sum256(append([]byte("weft token\n"), proof...))
	return hex.EncodeToString(sum[:])
}

// Client is the configuration of a connection on which the token is shown: the other end must be
// a manager that the pinned authority has named.
func (t Token) Client(now func() time.Time) *tls.Config { return pinned([]string{t.Authority}, now) }

func pinned(hashes []string, now func() time.Time) *tls.Config {
	return &tls.Config{
		MinVersion:         tls.VersionTLS13,
		Time:               now,
		InsecureSkipVerify: true, //nolint:gosec // VerifyConnection does it, against the pinned authorities
		VerifyConnection: func(state tls.ConnectionState) error {
			for _, hash := range hashes {
				if authority := find(hash, state.PeerCertificates); authority != nil {
					return isManager(state, []*x509.Certificate{authority}, nil, now())
				}
			}
			return errors.New("this is a manager of another cluster than the token's, or its authority was rotated since")
		},
	}
}

// Pins are the authorities of a cluster, by their hashes, for a node that joins without a token of
// the cluster.
type Pins []string

// ParsePins parses hashes that are separated by spaces or lines.
func ParsePins(text string) (Pins, error) {
	hashes := strings.Fields(text)
	if len(hashes) == 0 || len(hashes) > authoritiesMost {
		return nil, fmt.Errorf("%d hashes of authorities, want 1 to %d", len(hashes), authoritiesMost)
	}
	for _, hash := range hashes {
		if !isHex(hash, sha256.Size) {
			return nil, errors.New("not the SHA-256 of an authority's certificate, in hexadecimal digits")
		}
	}
	return hashes, nil
}

// Client is the configuration of a connection on which something secret is shown: the other end must
// be a manager that one of the authorities has named.
func (p Pins) Client(now func() time.Time) *tls.Config { return pinned(p, now) }

// isManager checks that the other end is a manager; of a cluster, unless that is nil.
func isManager(state tls.ConnectionState, authorities []*x509.Certificate, of *access.Identity, now time.Time) error {
	who, err := verify(state.PeerCertificates[0], authorities, x509.ExtKeyUsageServerAuth, now)
	if err != nil {
		return err
	}
	if who.Role != access.Manager || of != nil && who.Cluster != of.Cluster {
		return fmt.Errorf("%v is no manager of this cluster", who)
	}
	return nil
}
