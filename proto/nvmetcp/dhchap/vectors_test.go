// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"math/big"
	"os"
	"testing"
)

type hexBytes []byte

func (h *hexBytes) UnmarshalText(b []byte) (err error) {
	*h, err = hex.DecodeString(string(b))
	return err
}

// vectors holds the output of testdata/vectors.py.
type vectors struct {
	Primes map[Group]hexBytes `json:"primes_sha256"`
	Cases  []struct {
		Hash            Hash
		Group           Group
		HostNQN         string `json:"host_nqn"`
		SubsystemNQN    string `json:"subsystem_nqn"`
		Transaction     uint16
		HostKey         string `json:"host_key"`
		ControllerKey   string `json:"controller_key"`
		C1, C2          hexBytes
		S1, S2          uint32
		Private, Peer   hexBytes
		HostProof       hexBytes `json:"host_proof"`
		ControllerProof hexBytes `json:"controller_proof"`
	}
}

func readVectors(t *testing.T) *vectors {
	t.Helper()
	raw, err := os.ReadFile("testdata/vectors.json")
	if err != nil {
		t.Fatal(err)
	}
	v := new(vectors)
	if err := json.Unmarshal(raw, v); err != nil {
		t.Fatal(err)
	}
	return v
}

func TestThePrimesAreThoseOfOpenSSL(t *testing.T) {
	v := readVectors(t)
	for g := FFDHE2048; g <= FFDHE8192; g++ {
		p := primes[g]()
		if got := sha256.Sum256(p.Bytes()); p.BitLen() != 8*g.Size() || !bytes.Equal(got[:], v.Primes[g]) {
			t.Errorf("%v: a prime of %d bits and digest %x, want %x", g, p.BitLen(), got, v.Primes[g])
		}
	}
}

func TestProofsAreThoseOfAnIndependentComputation(t *testing.T) {
	v := readVectors(t)
	if len(v.Cases) != 36 {
		t.Fatalf("%d cases", len(v.Cases))
	}
	for _, c := range v.Cases {
		hostKey, err := ParseKey(c.HostKey)
		if err != nil {
			t.Fatal(err)
		}
		controllerKey, err := ParseKey(c.ControllerKey)
		if err != nil {
			t.Fatal(err)
		}
		t.Run(fmt.Sprintf("%v/%v/%v", c.Hash, c.Group, hostKey), func(t *testing.T) {
			x := exchange{hash: c.Hash, transaction: c.Transaction, hostNQN: c.HostNQN, subsystem: c.SubsystemNQN}
			if c.Group != Null {
				k := pair{group: c.Group, private: new(big.Int).SetBytes(c.Private)}
				if x.session, err = k.secret(c.Peer); err != nil {
					t.Fatal(err)
				}
			}
			if got := x.hostProof(hostKey, c.C1, c.S1); !bytes.Equal(got, c.HostProof) {
				t.Errorf("the host's proof is %x, want %x", got, c.HostProof)
			}
			if got := x.controllerProof(controllerKey, c.C2, c.S2); !bytes.Equal(got, c.ControllerProof) {
				t.Errorf("the controller's proof is %x, want %x", got, c.ControllerProof)
			}
		})
	}
}
