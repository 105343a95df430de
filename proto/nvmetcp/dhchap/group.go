// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"errors"
	"fmt"
	"io"
	"math/big"
	"sync"
)

// Group is the number of a Diffie-Hellman group (Base 2.1, section 8.3.4.5.2).
type Group uint8

// The groups: none, and those of RFC 7919.
const (
	Null      Group = 0
	FFDHE2048 Group = 1
	FFDHE3072 Group = 2
	FFDHE4096 Group = 3
	FFDHE6144 Group = 4
	FFDHE8192 Group = 5
)

// rfc7919 holds for each group the size of the prime, the X of its formula, and the size of
// a private exponent (RFC 7919, appendix A), rounded up to a multiple of four bytes.
var rfc7919 = [...]struct {
	bits     uint
	x        int64
	exponent int // bytes
}{
	FFDHE2048: {2048, 560316, 32},
	FFDHE3072: {3072, 2625351, 36},
	FFDHE4096: {4096, 5736041, 44},
	FFDHE6144: {6144, 15705020, 48},
	FFDHE8192: {8192, 10965728, 52},
}

// Size is the length in bytes of the group's public values and of the shared secret; 0 for
// the null group.
func (g Group) Size() int {
	if int(g) >= len(rfc7919) {
		return 0
	}
	return int(rfc7919[g].bits / 8)
}

func (g Group) known() bool { return g <= FFDHE8192 }

func (g Group) String() string {
	switch {
	case g == Null:
		return "null"
	case g.known():
		return fmt.Sprintf("ffdhe%d", rfc7919[g].bits)
	}
	return fmt.Sprintf("DH group %d", uint8(g))
}

// primes are computed on first use. RFC 7919 defines them by
//
//	p = 2^b − 2^(b−64) + (⌊2^(b−130)·e⌋ + X)·2^64 − 1
//
// The formula is shorter than the digits, and shows that they hide nothing.
var primes = [...]func() *big.Int{
	FFDHE2048: sync.OnceValue(func() *big.Int { return prime(FFDHE2048) }),
	FFDHE3072: sync.OnceValue(func() *big.Int { return prime(FFDHE3072) }),
	FFDHE4096: sync.OnceValue(func() *big.Int { return prime(FFDHE4096) }),
	FFDHE6144: sync.OnceValue(func() *big.Int { return prime(FFDHE6144) }),
	FFDHE8192: sync.OnceValue(func() *big.Int { return prime(FFDHE8192) }),
}

func prime(g Group) *big.Int {
	b := rfc7919[g].bits
	one := big.NewInt(1)
	power := func(n uint) *big.Int { return new(big.Int).Lsh(one, n) }

	// e is the sum of 1/n!; the 128 extra bits absorb the rounding errors.
	const guard = 128
	e, term := new(big.Int), power(b-130+guard)
	for n := int64(1); term.Sign() > 0; n++ {
		e.Add(e, term)
		term.Quo(term, big.NewInt(n))
	}
	e.Rsh(e, guard)

	p := power(b)
	p.Sub(p, power(b-64))
	p.Add(p, e.Add(e, big.NewInt(rfc7919[g].x)).Lsh(e, 64))
	return p.Sub(p, one)
}

// pair is one side's ephemeral key of one transaction.
//
// math/big's running time depends on the exponent. An observer gains nothing from that
// here: the exponent is random, serves two exponentiations of one transaction and is then
// dropped, so there is no second sample. And what authenticates is the HMAC key, which
// math/big never sees.
type pair struct {
	group   Group
	private *big.Int
	public  []byte
}

func newPair(g Group, random io.Reader) (*pair, error) {
	raw := make([]byte, rfc7919[g].exponent)
	if _, err := io.ReadFull(random, raw); err != nil {
		return nil, fmt.Errorf("making a %v key: %w", g, err)
	}
	raw[0] |= 0x80 // of full length, thus never 0 or 1
	private := new(big.Int).SetBytes(raw)
	public := new(big.Int).Exp(big.NewInt(2), private, primes[g]())
	return &pair{g, private, public.FillBytes(make([]byte, g.Size()))}, nil
}

// secret is the shared secret, at the group's full length. It refuses a peer's value of 0,
// 1 or p−1, with which anybody could compute the secret. In these groups (p = 2q+1, q
// prime) there are no other such values.
func (k *pair) secret(peer []byte) ([]byte, error) {
	if len(peer) != k.group.Size() {
		return nil, fmt.Errorf("a %v value of %d bytes", k.group, len(peer))
	}
	p := primes[k.group]()
	y := new(big.Int).SetBytes(peer)
	if y.Cmp(big.NewInt(1)) <= 0 || y.Cmp(new(big.Int).Sub(p, big.NewInt(1))) >= 0 {
		return nil, errors.New("a DH value that gives the secret away")
	}
	return y.Exp(y, k.private, p).FillBytes(make([]byte, k.group.Size())), nil
}
