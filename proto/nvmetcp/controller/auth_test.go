// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// keyed is a world whose host A has keys.
func keyed(t *testing.T) (w *world, hostKey, controllerKey dhchap.Key) {
	t.Helper()
	hostKey, err := dhchap.Generate(dhchap.SHA256, nil)
	if err != nil {
		t.Fatal(err)
	}
	if controllerKey, err = dhchap.Generate(dhchap.SHA256, nil); err != nil {
		t.Fatal(err)
	}
	return newWorld(t, func(c *Config, s *SubsystemConfig) {
		c.HandshakeTimeout = patience
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: hostKey, ControllerKey: controllerKey}, {NQN: hostB.NQN}}
	}), hostKey, controllerKey
}

// authenticate authenticates the host with the given keys, and returns the outcome.
func (p *peer) authenticate(h block.Host, hostKey, controllerKey dhchap.Key) error {
	p.t.Helper()
	return p.authenticateTo(testNQN, h, hostKey, controllerKey)
}

func (p *peer) authenticateTo(subsystem block.NQN, h block.Host, hostKey, controllerKey dhchap.Key) error {
	p.t.Helper()
	m, err := dhchap.NewHost(dhchap.Config{
		HostNQN: string(h.NQN), SubsystemNQN: string(subsystem), HostKey: hostKey, ControllerKey: controllerKey,
		Groups: []dhchap.Group{dhchap.FFDHE2048},
	})
	if err != nil {
		p.t.Fatal(err)
	}
	var in []byte
	for {
		out, done, err := m.Step(in)
		if out != nil {
			send := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: uint32(len(out))}
			p.must(p.do(send.Command(true), out, nil))
		}
		if done || err != nil {
			return err
		}
		in = make([]byte, 4096)
		receive := nvmetcp.AuthCommand{Receive: true, Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: 4096}
		p.must(p.do(receive.Command(false), nil, in))
	}
}

func TestAHostWithAKeyMustProveIt(t *testing.T) {
	w, hostKey, controllerKey := keyed(t)
	for _, mutual := range []dhchap.Key{{}, controllerKey} {
		p := w.dial()
		p.greet()
		p.must(p.connect(hostA, testNQN, 0, 0xffff))
		result := nvmetcp.ParseConnectResult(p.last.Result())
		if !result.AuthRequired {
			t.Fatal("connect does not ask for authentication")
		}
		p.want(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyCAP), nil, nil), nvmetcp.AuthenticationRequired)
		if err := p.authenticate(hostA, hostKey, mutual); err != nil {
			t.Fatal(err)
		}
		p.enable()

		io := w.dial() // each queue authenticates on its own
		io.greet()
		io.must(io.connect(hostA, testNQN, 1, result.ControllerID))
		io.want(io.flush(), nvmetcp.AuthenticationRequired)
		if err := io.authenticate(hostA, hostKey, mutual); err != nil {
			t.Fatal(err)
		}
		io.must(io.flush())
	}
	w.attach(hostB) // has no keys
}

func TestAHostWithAnotherKeyIsCutOff(t *testing.T) {
	w, _, _ := keyed(t)
	other, _ := dhchap.Generate(dhchap.SHA256, nil)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, 0xffff))
	if err := p.authenticate(hostA, other, dhchap.Key{}); err == nil {
		t.Fatal("a wrong key was accepted")
	}
	p.ended()
}

func TestAHostThatDoesNotProveItselfIsCutOff(t *testing.T) {
	hostKey, _ := dhchap.Generate(dhchap.SHA256, nil)
	w := newWorld(t, func(c *Config, s *SubsystemConfig) {
		c.HandshakeTimeout = 2 * moment
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: hostKey}}
	})
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, 0xffff))
	p.ended()
}

// Each connection without a proof is told once: of a host with a wrong key, of one that goes away,
// of one that sends other commands, and of one that stays silent. One that the target itself withdraws
// is not, nor one with a proof.
func TestEachHostWithoutAProofIsTold(t *testing.T) {
	told := make(chan Unproven, 9)
	hostKey, other := newKey(t), newKey(t)
	w := newWorld(t, func(c *Config, s *SubsystemConfig) {
		c.HandshakeTimeout, c.Unproven = 20*moment, func(u Unproven) { told <- u }
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: hostKey}}
	})
	for _, attempt := range []func(*peer){
		func(p *peer) { _ = p.prove(proofOf(other, dhchap.Key{})) },
		func(p *peer) { p.conn.Close() },
		func(p *peer) {
			p.want(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil), nvmetcp.AuthenticationRequired)
		},
		func(*peer) {},
	} {
		p := w.unproven()
		attempt(p)
		var u Unproven
		select {
		case u = <-told:
		case <-time.After(patience):
			t.Fatal("nobody is told")
		}
		if u.Subsystem != testNQN || u.Host != hostA.NQN || u.Address != p.conn.LocalAddr().String() || u.Err == nil {
			t.Errorf("told %+v", u)
		}
	}
	good, proof := w.unproven(), proofOf(hostKey, dhchap.Key{})
	proof.Groups = []dhchap.Group{dhchap.Null}
	if err := good.prove(proof); err != nil {
		t.Fatal(err)
	}
	good.conn.Close()
	waiting := w.unproven()
	if err := w.sub.SetHosts(nil, false); err != nil {
		t.Fatal(err)
	}
	waiting.ended()
	soon(t, "all are gone", func() bool { return len(w.sub.Controllers()) == 0 })
	if len(told) > 0 {
		t.Errorf("told of one that was not refused: %+v", <-told)
	}
}

// TestGuessingIsBounded: each attempt costs the target a DH key.
func TestGuessingIsBounded(t *testing.T) {
	w, _, _ := keyed(t)
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, 0xffff))
	message := dhchap.Negotiate{Transaction: 1, Hashes: []dhchap.Hash{dhchap.SHA256}, Groups: []dhchap.Group{dhchap.Null}}
	negotiate := message.Append(nil)
	send := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: uint32(len(negotiate))}
	for range maxAuthAttempts {
		p.must(p.do(send.Command(true), negotiate, nil))
	}
	p.want(p.do(send.Command(true), negotiate, nil), nvmetcp.CommandSequenceError)
}

func TestNoKeyNoAuthentication(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	p.want(p.do(nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1, Length: 16}.Command(true), make([]byte, 16), nil), nvmetcp.InvalidOpcode)
}
