// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"crypto/hmac"
	"crypto/rand"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"io"
	"log/slog"
	"strings"
)

// Key is a secret that one side proves to know, with the hash that binds it to that side's
// name. The zero Key means no key. It prints and logs as its kind, without the secret.
type Key struct {
	hash   Hash // 0: the secret is used unchanged
	secret string
}

const keyPrefix = "DHHC-1:"

// ParseKey reads a key's text form, DHHC-1:<hash>:<base64 of secret and CRC-32>: (Base 2.1,
// section 8.3.4.5.7). The secret is 32, 48 or 64 bytes. Errors never contain the secret.
func ParseKey(s string) (Key, error) {
	rest, ok := strings.CutPrefix(s, keyPrefix)
	if !ok {
		return Key{}, fmt.Errorf("parsing a DH-HMAC-CHAP key: it does not begin with %q", keyPrefix)
	}
	id, encoded, ok := strings.Cut(rest, ":")
	if !ok {
		return Key{}, errors.New("parsing a DH-HMAC-CHAP key: no colon after the hash")
	}
	if len(id) != 2 || id[0] != '0' || id[1] < '0' || id[1] > '3' {
		return Key{}, errors.New("parsing a DH-HMAC-CHAP key: its hash is none of 00, 01, 02, 03")
	}
	encoded, ok = strings.CutSuffix(encoded, ":")
	if !ok {
		return Key{}, errors.New("parsing a DH-HMAC-CHAP key: no colon at the end")
	}
	raw, err := base64.StdEncoding.Strict().DecodeString(encoded)
	if err != nil || strings.ContainsAny(encoded, "\r\n") { // the decoder would skip them
		return Key{}, errors.New("parsing a DH-HMAC-CHAP key: its secret is not base64")
	}
	n := len(raw) - crc32.Size
	if n != 32 && n != 48 && n != 64 {
		return Key{}, fmt.Errorf("parsing a DH-HMAC-CHAP key: its secret has %d bytes, not 32, 48 or 64", max(n, 0))
	}
	if crc32.ChecksumIEEE(raw[:n]) != binary.LittleEndian.Uint32(raw[n:]) {
		return Key{}, errors.New("parsing a DH-HMAC-CHAP key: its checksum does not match")
	}
	return Key{hash: Hash(id[1] - '0'), secret: string(raw[:n])}, nil
}

// NewKey makes a key of a secret of 32, 48 or 64 bytes.
func NewKey(hash Hash, secret []byte) (Key, error) {
	if n := len(secret); n != 32 && n != 48 && n != 64 || hash != 0 && hash.Size() == 0 {
		return Key{}, fmt.Errorf("making a DH-HMAC-CHAP key: %v with a secret of %d bytes", hash, n)
	}
	return Key{hash: hash, secret: string(secret)}, nil
}

// NewKeys makes the keys of a host and of its controller, bound by SHA-256.
func NewKeys(host, controller []byte) (hostKey, controllerKey Key, err error) {
	if hostKey, err = NewKey(SHA256, host); err != nil {
		return hostKey, controllerKey, err
	}
	controllerKey, err = NewKey(SHA256, controller)
	return hostKey, controllerKey, err
}

// Generate makes a key of random bytes: as many as the hash's digest, or 32 for hash 0 (a
// key used unchanged). A nil random means the system's.
func Generate(hash Hash, random io.Reader) (Key, error) {
	n := 32
	if hash != 0 {
		if n = hash.Size(); n == 0 {
			return Key{}, fmt.Errorf("generating a DH-HMAC-CHAP key: unknown %v", hash)
		}
	}
	if random == nil {
		random = rand.Reader
	}
	secret := make([]byte, n)
	if _, err := io.ReadFull(random, secret); err != nil {
		return Key{}, fmt.Errorf("generating a DH-HMAC-CHAP key: %w", err)
	}
	return Key{hash: hash, secret: string(secret)}, nil
}

// IsZero reports whether there is no key.
func (k Key) IsZero() bool { return k.secret == "" }

// Representation is the text form that ParseKey and the kernel read. It contains the
// secret: use it for files that only the owner can read, never for logs or arguments.
func (k Key) Representation() string {
	if k.IsZero() {
		return ""
	}
	raw := binary.LittleEndian.AppendUint32([]byte(k.secret), crc32.ChecksumIEEE([]byte(k.secret)))
	return fmt.Sprintf("%s%02d:%s:", keyPrefix, uint8(k.hash), base64.StdEncoding.EncodeToString(raw))
}

// Equal reports whether two keys are the same, in constant time.
func (k Key) Equal(other Key) bool {
	return k.hash == other.hash && hmac.Equal([]byte(k.secret), []byte(other.secret))
}

// String is the kind of key, for people and logs.
func (k Key) String() string {
	if k.IsZero() {
		return "no key"
	}
	return fmt.Sprintf("%s%02d:(hidden)", keyPrefix, uint8(k.hash))
}

// Format keeps all verbs of fmt from showing the secret.
func (k Key) Format(f fmt.State, _ rune) { _, _ = io.WriteString(f, k.String()) }

// LogValue keeps structured logs from showing the secret.
func (k Key) LogValue() slog.Value { return slog.StringValue(k.String()) }

// MarshalText always fails, so that encoders cannot show the secret. Use Representation.
func (k Key) MarshalText() ([]byte, error) {
	return nil, errors.New("encoding a DH-HMAC-CHAP key: refused, it is a secret")
}

// transformed binds the secret to the prover's name.
func (k Key) transformed(nqn string) []byte {
	if k.hash == 0 {
		return []byte(k.secret)
	}
	h := hmac.New(k.hash.new(), []byte(k.secret))
	io.WriteString(h, nqn)
	io.WriteString(h, "NVMe-over-Fabrics")
	return h.Sum(nil)
}
