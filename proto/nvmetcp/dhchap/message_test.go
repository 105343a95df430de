// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"encoding/hex"
	"reflect"
	"strings"
	"testing"
)

// layouts are messages whose bytes are laid out as in the specification's figures.
var layouts = []struct {
	name string
	msg  interface{ Append([]byte) []byte }
	hex  string
}{
	{
		"negotiate",
		&Negotiate{Transaction: 0x1234, SecureChannel: 2, Hashes: []Hash{1, 3}, Groups: []Group{0, 5, 1}},
		"00000000 3412 02 01 01000203 0103" + strings.Repeat("00", 28) + "000501" + strings.Repeat("00", 27),
	},
	{
		"challenge",
		&Challenge{Transaction: 0x1234, Hash: 1, Group: 4, Sequence: 0x0a0b0c0d, Value: []byte{1, 2, 3}, DH: []byte{9, 8}},
		"01010000 3412 03 00 01 04 0200 0d0c0b0a 010203 0908",
	},
	{
		"reply",
		&Reply{Transaction: 0x1234, Sequence: 0x0a0b0c0d, Proof: []byte{1, 2, 3}, Challenge: []byte{4, 5, 6}, DH: []byte{9, 8}},
		"01020000 3412 03 00 01 00 0200 0d0c0b0a 010203 040506 0908",
	},
	{
		"reply without a challenge",
		&Reply{Transaction: 0x1234, Proof: []byte{1, 2, 3}, DH: []byte{}},
		"01020000 3412 03 00 00 00 0000 00000000 010203 000000",
	},
	{
		"success1",
		&Success1{Transaction: 0x1234, HashLen: 3, Proof: []byte{1, 2, 3}},
		"01030000 3412 03 00 01 00000000000000 010203",
	},
	{
		"success1 without a proof",
		&Success1{Transaction: 0x1234, HashLen: 32},
		"01030000 3412 20 00 00 00000000000000",
	},
	{"success2", &Success2{Transaction: 0x1234}, "01040000 3412 00000000000000000000"},
	{"failure1", &Failure{KindFailure1, 0x1234, 1, NoGroup}, "00f10000 3412 01 05"},
	{"failure2", &Failure{KindFailure2, 0x1234, 1, Failed}, "00f00000 3412 01 01"},
}

// parse reads any message by its kind.
func parse(b []byte) (interface{ Append([]byte) []byte }, error) {
	kind, _, err := KindOf(b)
	if err != nil {
		return nil, err
	}
	switch kind {
	case KindNegotiate:
		m, err := ParseNegotiate(b)
		return &m, err
	case KindChallenge:
		m, err := ParseChallenge(b)
		return &m, err
	case KindReply:
		m, err := ParseReply(b)
		return &m, err
	case KindSuccess1:
		m, err := ParseSuccess1(b)
		return &m, err
	case KindSuccess2:
		m, err := ParseSuccess2(b)
		return &m, err
	}
	m, err := ParseFailure(b)
	return &m, err
}

func TestMessagesHaveTheirLayout(t *testing.T) {
	for _, l := range layouts {
		want, err := hex.DecodeString(strings.ReplaceAll(l.hex, " ", ""))
		if err != nil {
			t.Fatal(err)
		}
		if got := l.msg.Append([]byte("before"))[6:]; !bytes.Equal(got, want) {
			t.Errorf("%s is written as\n%x, want\n%x", l.name, got, want)
		}
		got, err := parse(want)
		if err != nil || !reflect.DeepEqual(got, l.msg) {
			t.Errorf("%s is read as\n%+v (%v), want\n%+v", l.name, got, err, l.msg)
		}
		for n := range want { // no prefix of a message is a message
			if m, err := parse(want[:n]); err == nil {
				t.Errorf("%s: the first %d bytes were read as %+v", l.name, n, m)
			}
		}
	}
}

func TestAnOfferOfOtherProtocolsIsPassedOver(t *testing.T) {
	m := Negotiate{Transaction: 1, Hashes: []Hash{SHA256}, Groups: []Group{Null}}
	b := m.Append(nil)
	other := append([]byte(nil), b[negotiateLen:]...)
	other[0] = 7
	two := append(append(append([]byte(nil), b[:negotiateLen]...), other...), b[negotiateLen:]...)
	two[7] = 2
	if got, err := ParseNegotiate(two); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("%+v %v", got, err)
	}
	two[7] = 1
	if _, err := ParseNegotiate(two); err == nil {
		t.Error("an offer without DH-HMAC-CHAP was read")
	}
	b[negotiateLen+4], b[negotiateLen+2] = 200, 2 // an unknown hash before SHA-256, in its second place
	b[negotiateLen+5] = uint8(SHA256)
	if got, err := ParseNegotiate(b); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("%+v %v", got, err)
	}
	b[negotiateLen+2] = maxIDs + 1
	if _, err := ParseNegotiate(b); err == nil {
		t.Error("31 hashes were read")
	}
}

func TestAnOverlongMessageIsRefused(t *testing.T) {
	m := Success2{1}
	b := append(m.Append(nil), make([]byte, MaxMessage)...)
	if _, err := parse(b); err == nil {
		t.Errorf("%d bytes were read", len(b))
	}
}
