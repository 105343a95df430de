// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/sha512"
	"encoding/binary"
	"fmt"
	"hash"
	"io"
)

// Hash is the number of a hash function (Base 2.1, section 8.3.4.5.2). In a Key, 0 means
// none.
type Hash uint8

// The hash functions.
const (
	SHA256 Hash = 1
	SHA384 Hash = 2
	SHA512 Hash = 3
)

func (h Hash) new() func() hash.Hash {
	switch h {
	case SHA256:
		return sha256.New
	case SHA384:
		return sha512.New384
	case SHA512:
		return sha512.New
	}
	return nil
}

// Size is the length of the digest in bytes, 0 if the hash is unknown.
func (h Hash) Size() int {
	if h < SHA256 || h > SHA512 {
		return 0
	}
	return 16 * (int(h) + 1)
}

func (h Hash) String() string {
	if h.Size() == 0 {
		return fmt.Sprintf("hash %d", uint8(h))
	}
	return fmt.Sprintf("SHA-%d", 8*h.Size())
}

// exchange is the input that both proofs of a transaction hash.
type exchange struct {
	hash        Hash
	transaction uint16
	hostNQN     string
	subsystem   string
	session     []byte // the DH secret, nil in the null group
}

// hostProof is the host's proof for challenge c1.
func (x *exchange) hostProof(k Key, c1 []byte, seq uint32) []byte {
	return x.proof(k.transformed(x.hostNQN), c1, seq, "HostHost", x.hostNQN, x.subsystem)
}

// controllerProof is the controller's proof for challenge c2.
func (x *exchange) controllerProof(k Key, c2 []byte, seq uint32) []byte {
	return x.proof(k.transformed(x.subsystem), c2, seq, "Controller", x.subsystem, x.hostNQN)
}

// proof is the response of Base 2.1, section 8.3.4.5.4. Numbers are little endian, the byte
// after them requests no secure channel, and one zero byte separates the names.
func (x *exchange) proof(key, challenge []byte, seq uint32, role, prover, verifier string) []byte {
	if x.session != nil {
		digest := x.hash.new()()
		digest.Write(x.session)
		augmented := hmac.New(x.hash.new(), digest.Sum(nil))
		augmented.Write(challenge)
		challenge = augmented.Sum(nil)
	}
	m := hmac.New(x.hash.new(), key)
	m.Write(challenge)
	var numbers [7]byte
	binary.LittleEndian.PutUint32(numbers[0:], seq)
	binary.LittleEndian.PutUint16(numbers[4:], x.transaction)
	m.Write(numbers[:])
	io.WriteString(m, role)
	io.WriteString(m, prover)
	m.Write([]byte{0})
	io.WriteString(m, verifier)
	return m.Sum(nil)
}
