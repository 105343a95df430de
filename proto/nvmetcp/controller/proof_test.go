// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

func newKey(t *testing.T) dhchap.Key {
	t.Helper()
	k, err := dhchap.Generate(dhchap.SHA256, nil)
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// prove runs one transaction of a host that knows the keys.
func (p *peer) prove(cfg dhchap.Config) error {
	p.t.Helper()
	h, err := dhchap.NewHost(cfg)
	if err != nil {
		p.t.Fatal(err)
	}
	auth := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1}
	var in []byte
	for {
		out, done, err := h.Step(in)
		if out != nil {
			auth.Receive, auth.Length = false, uint32(len(out))
			p.must(p.do(auth.Command(true), out, nil))
		}
		if done || err != nil {
			return err
		}
		in = make([]byte, dhchap.MaxMessage)
		auth.Receive, auth.Length = true, dhchap.MaxMessage
		p.must(p.do(auth.Command(false), nil, in))
	}
}

// unproven is an admin queue of a host that has to authenticate.
func (w *world) unproven() *peer {
	w.t.Helper()
	p := w.dial()
	p.greet()
	p.must(p.connect(hostA, testNQN, 0, nvmetcp.DynamicController))
	if !nvmetcp.ParseConnectResult(p.last.Result()).AuthRequired {
		w.t.Error("Connect does not ask for a proof")
	}
	return p
}

func proofOf(host, controller dhchap.Key) dhchap.Config {
	return dhchap.Config{HostNQN: string(hostA.NQN), SubsystemNQN: string(testNQN), HostKey: host, ControllerKey: controller}
}

func TestNothingIsDoneBeforeTheProof(t *testing.T) {
	host, controller := newKey(t), newKey(t)
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) {
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: host, ControllerKey: controller}}
	})
	p := w.unproven()
	p.want(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil), nvmetcp.AuthenticationRequired)
	if err := p.prove(proofOf(host, controller)); err != nil {
		t.Fatal(err)
	}
	p.must(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil))
}

func TestNewKeysCountWhenTheHostProvesItselfAgain(t *testing.T) {
	first, second := newKey(t), newKey(t)
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) {
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: first}}
	})
	p := w.unproven()
	if err := p.prove(proofOf(first, dhchap.Key{})); err != nil {
		t.Fatal(err)
	}
	if err := w.sub.SetHosts([]Host{{NQN: hostA.NQN, HostKey: second}}, false); err != nil {
		t.Fatal(err)
	}
	p.must(p.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil)) // the old proof holds until the next authentication
	if err := p.prove(proofOf(second, dhchap.Key{})); err != nil {
		t.Errorf("with the new key: %v", err)
	}
	if err := p.prove(proofOf(first, dhchap.Key{})); err == nil {
		t.Error("the old key is accepted after the new one")
	}
	p.ended()
}

func TestAHostIsHeldToTheHashesAndGroupsThatItMayUse(t *testing.T) {
	k := newKey(t)
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) {
		s.Hosts = []Host{{NQN: hostA.NQN, HostKey: k, Hashes: []dhchap.Hash{dhchap.SHA512}, Groups: []dhchap.Group{dhchap.FFDHE3072}}}
	})
	weak := proofOf(k, dhchap.Key{})
	weak.Hashes = []dhchap.Hash{dhchap.SHA256, dhchap.SHA384}
	p := w.unproven()
	if err := p.prove(weak); err == nil {
		t.Error("a host authenticated with a hash that it may not use")
	}
	p.ended()
	weak.Hashes, weak.Groups = nil, []dhchap.Group{dhchap.Null}
	p = w.unproven()
	if err := p.prove(weak); err == nil {
		t.Error("a host authenticated with a group that it may not use")
	}
	p.ended()
	if err := w.unproven().prove(proofOf(k, dhchap.Key{})); err != nil {
		t.Error(err)
	}
}

// TestOnlyAProofReplacesAController: anybody can connect under a host's name. Without a
// proof that must not disconnect the host.
func TestOnlyAProofReplacesAController(t *testing.T) {
	host := newKey(t)
	w := newWorld(t, func(_ *Config, s *SubsystemConfig) {
		s.PerHost, s.Hosts = 1, []Host{{NQN: hostA.NQN, HostKey: host}}
	})
	prove := func(p *peer) *peer {
		t.Helper()
		if err := p.prove(proofOf(host, dhchap.Key{})); err != nil {
			t.Fatal(err)
		}
		return p
	}
	old := prove(w.unproven())
	old.must(old.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil))
	w.unproven()
	next := w.unproven()
	old.must(old.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil))
	prove(next)
	old.ended()
	soon(t, "the others are gone", func() bool { return len(w.sub.Controllers()) == 1 })
	next.must(next.do(nvmetcp.PropertyGetCommand(nvmetcp.PropertyVS), nil, nil))
}
