// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"errors"
	"fmt"
	"math/big"
	"testing"
)

type stepper interface {
	Step([]byte) ([]byte, bool, error)
}

type outcome struct {
	host, controller       bool // done
	hostErr, controllerErr error
	messages               [][]byte
}

// run carries messages between the ends until neither has one to send. tamper may change
// each message, and may be nil.
func run(t *testing.T, host, controller stepper, tamper func(from string, m []byte) []byte) outcome {
	t.Helper()
	var o outcome
	var m []byte
	for range 8 {
		var done bool
		if m, done, o.hostErr = host.Step(m); done {
			o.host = true
		}
		if m == nil {
			return o
		}
		if tamper != nil {
			m = tamper("host", m)
		}
		o.messages = append(o.messages, m)
		if m, done, o.controllerErr = controller.Step(m); done {
			o.controller = true
		}
		if m == nil || o.hostErr != nil {
			return o
		}
		if tamper != nil {
			m = tamper("controller", m)
		}
		o.messages = append(o.messages, m)
	}
	t.Fatal("the exchange has not ended after 8 rounds")
	return o
}

func key(t testing.TB, h Hash, fill byte) Key {
	t.Helper()
	k, err := Generate(h, bytes.NewReader(bytes.Repeat([]byte{fill}, 64)))
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func config(t testing.TB) Config {
	t.Helper()
	return Config{
		HostNQN: "nqn.host", SubsystemNQN: "nqn.subsystem", HostKey: key(t, SHA256, 1),
		Hashes: []Hash{SHA256}, Groups: []Group{Null}, Transaction: 7,
	}
}

func ends(t testing.TB, hc, cc Config) (*Host, *Controller) {
	t.Helper()
	h, err := NewHost(hc)
	if err != nil {
		t.Fatal(err)
	}
	c, err := NewController(cc)
	if err != nil {
		t.Fatal(err)
	}
	return h, c
}

func mustBe(t *testing.T, err error, want Explanation, peer bool) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || e.Explanation != want || e.Peer != peer {
		t.Errorf("the error is %v, want %v, said by the peer: %v", err, want, peer)
	}
}

func TestTheEndsAgreeInEveryHashAndGroup(t *testing.T) {
	for hash := SHA256; hash <= SHA512; hash++ {
		for group := Null; group <= FFDHE8192; group++ {
			for _, both := range []bool{false, true} {
				t.Run(fmt.Sprintf("%v/%v/both=%v", hash, group, both), func(t *testing.T) {
					cfg := config(t)
					cfg.Hashes, cfg.Groups = []Hash{hash}, []Group{group}
					cfg.HostKey = key(t, hash, 1)
					want := 4
					if both {
						cfg.ControllerKey, want = key(t, hash, 2), 5
					}
					h, c := ends(t, cfg, cfg)
					o := run(t, h, c, nil)
					if !o.host || !o.controller || o.hostErr != nil || o.controllerErr != nil {
						t.Fatalf("%+v", o)
					}
					if len(o.messages) != want {
						t.Errorf("%d messages, want %d", len(o.messages), want)
					}
				})
			}
		}
	}
}

func TestAMessageIsReadWithPaddingBehindIt(t *testing.T) {
	cfg := config(t) // nvmet fills the host's whole buffer
	cfg.ControllerKey = key(t, SHA256, 2)
	h, c := ends(t, cfg, cfg)
	o := run(t, h, c, func(_ string, m []byte) []byte { return append(m, make([]byte, MaxMessage-len(m))...) })
	if !o.host || !o.controller {
		t.Errorf("%+v", o)
	}
}

func TestAHostWithTheWrongKeyIsRefused(t *testing.T) {
	hc := config(t)
	cc := hc
	hc.HostKey = key(t, SHA256, 9)
	h, c := ends(t, hc, cc)
	o := run(t, h, c, nil)
	if o.host || o.controller {
		t.Errorf("%+v", o)
	}
	mustBe(t, o.controllerErr, Failed, false)
	mustBe(t, o.hostErr, Failed, true)
}

func TestAHostOfAnotherNameIsRefusedWithTheSameSecret(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"host":      func(c *Config) { c.HostNQN += "x" },
		"subsystem": func(c *Config) { c.SubsystemNQN += "x" },
	} {
		hc := config(t)
		cc := hc
		hc.HostKey, cc.HostKey = key(t, 0, 1), key(t, 0, 1) // the key itself is not bound to a name
		change(&hc)
		h, c := ends(t, hc, cc)
		if o := run(t, h, c, nil); o.host || o.controller {
			t.Errorf("%s: %+v", name, o)
		}
	}
}

func TestAControllerThatFailsItsProofIsRefused(t *testing.T) {
	hc := config(t)
	hc.ControllerKey = key(t, SHA256, 2)
	cc := hc
	cc.ControllerKey = key(t, SHA256, 3)
	h, c := ends(t, hc, cc)
	o := run(t, h, c, nil)
	if o.host || o.controller {
		t.Errorf("%+v", o)
	}
	mustBe(t, o.hostErr, Failed, false)
	mustBe(t, o.controllerErr, Failed, true)
}

func TestAControllerThatLeavesItsProofOutIsRefused(t *testing.T) {
	hc := config(t)
	hc.ControllerKey = key(t, SHA256, 2)
	h, c := ends(t, hc, hc)
	o := run(t, h, c, func(from string, m []byte) []byte {
		if s, err := ParseSuccess1(m); err == nil {
			s.Proof = nil
			return s.Append(nil)
		}
		return m
	})
	if o.host || o.controller {
		t.Errorf("%+v", o)
	}
	mustBe(t, o.hostErr, Failed, false)
}

func TestAControllerWithoutAKeyFailsAHostThatAsksForOne(t *testing.T) {
	hc := config(t)
	cc := hc
	hc.ControllerKey = key(t, SHA256, 2)
	h, c := ends(t, hc, cc)
	o := run(t, h, c, nil)
	mustBe(t, o.controllerErr, Failed, false)
	mustBe(t, o.hostErr, Failed, true)
}

func TestAReplayedReplyIsRefused(t *testing.T) {
	cfg := config(t)
	h, c := ends(t, cfg, cfg)
	o := run(t, h, c, nil)
	negotiate, reply := o.messages[0], o.messages[2]
	_, again := ends(t, cfg, cfg)
	if _, _, err := again.Step(negotiate); err != nil {
		t.Fatal(err)
	}
	_, done, err := again.Step(reply)
	if done {
		t.Error("a recorded reply was accepted")
	}
	mustBe(t, err, Failed, false)
}

func TestAReplayedChallengeDoesNotProveAController(t *testing.T) {
	cfg := config(t)
	cfg.ControllerKey = key(t, SHA256, 2)
	h, c := ends(t, cfg, cfg)
	o := run(t, h, c, nil)
	challenge, success := o.messages[1], o.messages[3]
	again, _ := ends(t, cfg, cfg)
	if _, _, err := again.Step(nil); err != nil {
		t.Fatal(err)
	}
	if _, _, err := again.Step(challenge); err != nil {
		t.Fatal(err)
	}
	_, done, err := again.Step(success)
	if done {
		t.Error("a recorded controller was accepted")
	}
	mustBe(t, err, Failed, false)
}

func TestAChallengeSentBackIsRefused(t *testing.T) {
	cfg := config(t)
	cfg.ControllerKey = key(t, SHA256, 2)
	h, c := ends(t, cfg, cfg)
	var c1 []byte
	o := run(t, h, c, func(from string, m []byte) []byte {
		if x, err := ParseChallenge(m); err == nil {
			c1 = x.Value
		}
		if r, err := ParseReply(m); err == nil {
			r.Challenge = c1
			return r.Append(nil)
		}
		return m
	})
	mustBe(t, o.controllerErr, Failed, false)
}

func TestADowngradeIsRefused(t *testing.T) {
	strong := config(t)
	strong.Hashes, strong.Groups = []Hash{SHA512, SHA384}, []Group{FFDHE2048}
	weak := config(t)

	t.Run("by the controller: no hash", func(t *testing.T) {
		cc := strong
		cc.Groups = []Group{Null}
		h, c := ends(t, weak, cc)
		o := run(t, h, c, nil)
		mustBe(t, o.controllerErr, NoHash, false)
		mustBe(t, o.hostErr, NoHash, true)
	})
	t.Run("by the controller: no group", func(t *testing.T) {
		cc := strong
		cc.Hashes = []Hash{SHA256}
		h, c := ends(t, weak, cc)
		o := run(t, h, c, nil)
		mustBe(t, o.controllerErr, NoGroup, false)
		mustBe(t, o.hostErr, NoGroup, true)
	})
	offerWeak := func(from string, m []byte) []byte {
		if n, err := ParseNegotiate(m); err == nil {
			n.Hashes, n.Groups = []Hash{SHA256}, []Group{Null}
			return n.Append(nil)
		}
		return m
	}
	t.Run("by the host: another hash than offered", func(t *testing.T) {
		h, c := ends(t, strong, weak)
		o := run(t, h, c, offerWeak)
		mustBe(t, o.hostErr, NoHash, false)
		mustBe(t, o.controllerErr, NoHash, true)
	})
	t.Run("by the host: another group than offered", func(t *testing.T) {
		hc := strong
		hc.Hashes = []Hash{SHA256}
		h, c := ends(t, hc, weak)
		o := run(t, h, c, offerWeak)
		mustBe(t, o.hostErr, NoGroup, false)
		mustBe(t, o.controllerErr, NoGroup, true)
	})
}

func TestTheControllersOrderDecides(t *testing.T) {
	hc, cc := config(t), config(t)
	hc.Hashes, hc.Groups = nil, nil
	cc.Hashes, cc.Groups = []Hash{SHA512, SHA256}, []Group{FFDHE2048, Null}
	h, c := ends(t, hc, cc)
	o := run(t, h, c, nil)
	m, err := ParseChallenge(o.messages[1])
	if err != nil || m.Hash != SHA512 || m.Group != FFDHE2048 || !o.host || !o.controller {
		t.Errorf("%v %v %v %+v", m.Hash, m.Group, err, o)
	}
}

func TestASecureChannelIsRefused(t *testing.T) {
	cfg := config(t)
	_, c := ends(t, cfg, cfg)
	m := Negotiate{Transaction: 1, SecureChannel: 2, Hashes: cfg.Hashes, Groups: cfg.Groups}
	_, _, err := c.Step(m.Append(nil))
	mustBe(t, err, ChannelMismatch, false)
}

func TestAMessageOutOfTurnIsRefused(t *testing.T) {
	cfg := config(t)
	h, c := ends(t, cfg, cfg)
	o := run(t, h, c, nil)
	_, fresh := ends(t, cfg, cfg)
	_, _, err := fresh.Step(o.messages[2])
	mustBe(t, err, IncorrectMessage, false)
	_, done, err := fresh.Step(o.messages[0]) // after a failure it accepts nothing
	if done {
		t.Error("done after a failure")
	}
	mustBe(t, err, IncorrectMessage, false)

	other := cfg
	other.Transaction++
	h, _ = ends(t, other, cfg)
	if _, _, err := h.Step(nil); err != nil {
		t.Fatal(err)
	}
	_, _, err = h.Step(o.messages[1])
	mustBe(t, err, IncorrectMessage, false)
}

func TestADHValueThatGivesTheSecretAwayIsRefused(t *testing.T) {
	p := primes[FFDHE2048]()
	for name, y := range map[string]*big.Int{
		"0": big.NewInt(0), "1": big.NewInt(1), "p-1": new(big.Int).Sub(p, big.NewInt(1)), "p": p,
		"p+1": new(big.Int).Add(p, big.NewInt(1)),
	} {
		cfg := config(t)
		cfg.Groups = []Group{FFDHE2048}
		bad := y.FillBytes(make([]byte, FFDHE2048.Size()))
		h, c := ends(t, cfg, cfg)
		o := run(t, h, c, func(_ string, m []byte) []byte {
			if r, err := ParseReply(m); err == nil {
				r.DH = bad
				return r.Append(nil)
			}
			return m
		})
		if o.controller {
			t.Errorf("%s was taken", name)
		}
		mustBe(t, o.controllerErr, IncorrectPayload, false)
	}
}

func TestAConfigThatCanNotWorkIsRefused(t *testing.T) {
	for name, change := range map[string]func(*Config){
		"no host":       func(c *Config) { c.HostNQN = "" },
		"no subsystem":  func(c *Config) { c.SubsystemNQN = "" },
		"no key":        func(c *Config) { c.HostKey = Key{} },
		"unknown hash":  func(c *Config) { c.Hashes = []Hash{4} },
		"unknown group": func(c *Config) { c.Groups = []Group{6} },
	} {
		cfg := config(t)
		change(&cfg)
		if _, err := NewHost(cfg); err == nil {
			t.Errorf("%s: a host was made", name)
		}
		if _, err := NewController(cfg); err == nil {
			t.Errorf("%s: a controller was made", name)
		}
	}
}

func TestWithoutRandomnessNothingIsSaid(t *testing.T) {
	cfg := config(t)
	cfg.Random = bytes.NewReader(nil)
	_, c := ends(t, cfg, cfg)
	m := Negotiate{Transaction: 1, Hashes: cfg.Hashes, Groups: cfg.Groups}
	_, _, err := c.Step(m.Append(nil))
	mustBe(t, err, Failed, false)
}

func TestSequenceNumbersGoUpAndAreNeverZero(t *testing.T) {
	var s Sequence
	random := bytes.NewReader([]byte{0xfe, 0xff, 0xff, 0xff})
	for _, want := range []uint32{0xfffffffe, 0xffffffff, 1, 2} {
		got, err := s.next(random)
		if err != nil || got != want {
			t.Fatalf("%d %v, want %d", got, err, want)
		}
	}
}
