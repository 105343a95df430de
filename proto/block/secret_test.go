// SPDX-License-Identifier: Apache-2.0

package block

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

func TestASecretIsShownToNobody(t *testing.T) {
	const text = "0123456789abcdef0123456789abcdef"
	keys, err := ParseKeys([]byte(text), []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	holder := struct {
		Keys  Keys
		Other *Keys
	}{keys, &keys}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "keys", keys, "secret", keys.Host, "holder", holder)
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "keys", keys, "secret", keys.Host, "holder", holder)
	encoded, err := json.Marshal(holder)
	if err != nil {
		t.Fatal(err)
	}
	shown := log.String() + string(encoded)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%X", "%d"} {
		shown += fmt.Sprintf(verb+verb+verb, keys.Host, keys, holder)
	}
	for _, secret := range []string{text[:8], fmt.Sprintf("%x", text)[:16], "MDEyMzQ1Njc"} {
		if strings.Contains(shown, secret) {
			t.Errorf("the secret is shown: %s", shown)
		}
	}
	if !strings.Contains(shown, redacted) {
		t.Errorf("nothing says that there is a secret: %s", shown)
	}
	if got := string(keys.Host.Reveal()); got != text {
		t.Errorf("the secret is %q, want %q", got, text)
	}
}

func TestKeysAreBothOrNone(t *testing.T) {
	whole := make([]byte, SecretSize)
	for _, c := range []struct {
		host, controller []byte
		ok               bool
	}{{nil, nil, true}, {whole, whole, true}, {whole, nil, false}, {nil, whole, false}, {whole[1:], whole, false}} {
		if _, err := ParseKeys(c.host, c.controller); (err == nil) != c.ok {
			t.Errorf("keys of %d and %d bytes: %v", len(c.host), len(c.controller), err)
		}
	}
}

func TestAProvenHostBelongsToOneSubsystem(t *testing.T) {
	h := HostFromID(UUIDFromRandom([16]byte{1}))
	other := HostFromID(UUIDFromRandom([16]byte{2}))
	v := VolumeID{UUIDFromRandom([16]byte{3})}
	seen := map[NQN]bool{h.NQN: true}
	for _, n := range []NQN{
		SubsystemNQN(v, 1, h, "t1"), SubsystemNQN(v, 2, h, "t1"), SubsystemNQN(v, 1, h, "t2"), SharedNQN(v, 1, 7, h, "t1"), SubsystemNQN(v, 1, other, "t1"),
	} {
		p := ProvenHost(n)
		if seen[p.NQN] || p != HostFromID(p.ID) {
			t.Errorf("%s: host %v was used before, or its id does not fit", n, p)
		}
		seen[p.NQN] = true
		mine := strings.Contains(string(n), h.Short())
		if h.Connects(n, p.NQN) != mine || other.Connects(n, p.NQN) == mine {
			t.Errorf("%s: %s is taken for another host's", n, p.NQN)
		}
		if !h.Connects(n, h.NQN) || h.Connects(n, ProvenHost(SubsystemNQN(v, 99, h, "t1")).NQN) {
			t.Errorf("%s: the host's own name counts, and that of another subsystem does not", n)
		}
	}
}
