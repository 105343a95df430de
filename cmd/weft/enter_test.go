// SPDX-License-Identifier: Apache-2.0

package main

import (
	"log/slog"
	"path/filepath"
	"testing"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/access"
)

// An agent speaks plain TCP only when it is told to: a socket among its managers does not open the
// others.
func TestASocketAmongTheManagersOpensNoPlainTCP(t *testing.T) {
	e := member.Entry{Path: filepath.Join(t.TempDir(), "identity.pem"), Role: access.Target, Node: "t1", Log: slog.New(slog.DiscardHandler)}
	for managers, closed := range map[string]bool{"unix:/run/a.sock": false, "unix:/run/a.sock,192.0.2.1:4480": true, "192.0.2.1:4480": true} {
		e.Managers = managers
		if _, _, err := enter(t.Context(), daemon.Options{}, e, daemon.TLSFiles{}, false); (err != nil) != closed {
			t.Errorf("managers %s without a credential: %v", managers, err)
		}
	}
}
