// SPDX-License-Identifier: Apache-2.0

package dhchap

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// The example of the specification, with each hash.
const exampleSecret = "ia6zGodOr4SEG0Zzaw398rpY0wqipUWj4jWjUh4HWUz6aQ2n"

func TestAKeyIsReadAndWrittenAsTheSpecificationDoes(t *testing.T) {
	for hash := Hash(0); hash <= SHA512; hash++ {
		s := fmt.Sprintf("DHHC-1:%02d:%s:", uint8(hash), exampleSecret)
		k, err := ParseKey(s)
		if err != nil {
			t.Fatal(err)
		}
		if got := k.Representation(); got != s {
			t.Errorf("%s is written as %s", s, got)
		}
	}
}

func TestAGeneratedKeyIsReadBack(t *testing.T) {
	for hash := Hash(0); hash <= SHA512; hash++ {
		k, err := Generate(hash, nil)
		if err != nil {
			t.Fatal(err)
		}
		again, err := ParseKey(k.Representation())
		if err != nil {
			t.Fatal(err)
		}
		if !again.Equal(k) {
			t.Errorf("a %v key is not the same after parsing", hash)
		}
		if want := max(32, hash.Size()); len(k.secret) != want {
			t.Errorf("a %v key has %d bytes, want %d", hash, len(k.secret), want)
		}
		if other, _ := Generate(hash, nil); other.Equal(k) {
			t.Error("two generated keys are the same")
		}
	}
	if _, err := Generate(4, nil); err == nil {
		t.Error("a key of an unknown hash was generated")
	}
	if _, err := Generate(SHA256, bytes.NewReader(make([]byte, 31))); err == nil {
		t.Error("a key was generated from too little randomness")
	}
}

func TestABrokenKeyIsRefused(t *testing.T) {
	for name, s := range map[string]string{
		"empty":            "",
		"prefix":           "DHHC-2:00:" + exampleSecret + ":",
		"no hash":          "DHHC-1:",
		"long hash":        "DHHC-1:001:" + exampleSecret + ":",
		"unknown hash":     "DHHC-1:04:" + exampleSecret + ":",
		"no end":           "DHHC-1:00:" + exampleSecret,
		"more":             "DHHC-1:00:" + exampleSecret + "::",
		"checksum":         "DHHC-1:00:ja" + exampleSecret[2:] + ":",
		"not base64":       "DHHC-1:00:!!" + exampleSecret[2:] + ":",
		"a line break":     "DHHC-1:00:" + exampleSecret[:8] + "\n" + exampleSecret[8:] + ":",
		"too short":        "DHHC-1:00:" + exampleSecret[:44] + ":",
		"nothing in it":    "DHHC-1:00::",
		"a space after it": "DHHC-1:00:" + exampleSecret + ": ",
	} {
		if _, err := ParseKey(s); err == nil {
			t.Errorf("%s: %q was read", name, s)
		} else if strings.Contains(err.Error(), exampleSecret[8:16]) {
			t.Errorf("%s: the error shows the secret: %v", name, err)
		}
	}
}

func TestAKeyNeverShowsItsSecret(t *testing.T) {
	k, err := ParseKey("DHHC-1:01:" + exampleSecret + ":")
	if err != nil {
		t.Fatal(err)
	}
	holder := struct{ K Key }{k}
	var log bytes.Buffer
	slog.New(slog.NewTextHandler(&log, nil)).Info("key", "k", k, "holder", holder)
	shown := log.String() + fmt.Sprintf("%v %+v %#v %s %x %q %d %v %+v %#v", k, k, k, k, k, k, k, holder, &holder, holder)
	if b, err := json.Marshal(holder); err == nil {
		t.Errorf("a key was encoded: %s", b)
	}
	for _, secret := range []string{exampleSecret[:8], k.secret, fmt.Sprintf("%x", k.secret)[:16]} {
		if strings.Contains(shown, secret) {
			t.Errorf("the secret is shown: %q", shown)
		}
	}
	if !strings.Contains(shown, "DHHC-1:01:(hidden)") {
		t.Errorf("the kind of key is not shown: %q", shown)
	}
}
