// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/volmgr"
)

// Over plain TCP a manager serves only its own machine, unless a flag says otherwise.
func TestWhereAManagerAnswers(t *testing.T) {
	tls := daemon.TLSFiles{CA: "ca", Cert: "cert", Key: "key"}
	for _, c := range []struct {
		listen string
		plain  bool
		tls    daemon.TLSFiles
		want   string
		warned bool
	}{
		{want: ":4480"},
		{plain: true, want: "127.0.0.1:4480"},
		{tls: tls, want: ":4480"},
		{listen: "127.0.0.1:0", plain: true, want: "127.0.0.1:0"},
		{listen: "0.0.0.0:0", want: "0.0.0.0:0"},
		{listen: "127.0.0.1:0", tls: tls, want: "127.0.0.1:0"},
		{listen: "0.0.0.0:0", plain: true, want: "0.0.0.0:0", warned: true},
		{listen: ":0", plain: true, want: ":0", warned: true},
		{listen: "0.0.0.0:0", tls: tls, want: "0.0.0.0:0"},
	} {
		o := volmgrOptions{listen: c.listen, plain: c.plain, tls: c.tls}
		if got := o.address(); got != c.want {
			t.Errorf("--listen %q, TLS %v: it answers at %s, want %s", c.listen, c.tls, got, c.want)
		}
		if c.listen == "" {
			continue // that address may be in use
		}
		var log bytes.Buffer
		listener, err := o.open(slog.New(slog.NewTextHandler(&log, nil)))
		if err != nil {
			t.Fatal(err)
		}
		listener.Close()
		if got := strings.Contains(log.String(), "level=WARN") && strings.Contains(log.String(), "may do everything"); got != c.warned {
			t.Errorf("--listen %q, TLS %v: warned %v, want %v:\n%s", c.listen, c.tls, got, c.warned, &log)
		}
	}
}

// The process that made the store may still be answering the agents: ending because of it would end
// the container before it has printed what it found.
func TestAManagerWaitsForTheAddressOfTheRebuild(t *testing.T) {
	rebuild, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer rebuild.Close()
	o := volmgrOptions{plain: true, dataDir: filepath.Join(t.TempDir(), "store"), listen: rebuild.Addr().String()}
	if _, err := volmgr.Init(volmgr.Config{Dir: o.dataDir}); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), 1500*time.Millisecond) // the manager checks once a second
	defer cancel()
	if err := o.untilStore(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("untilStore = %v while the address is in use, want it to wait", err)
	}
	rebuild.Close()
	if err := o.untilStore(t.Context()); err != nil {
		t.Errorf("untilStore = %v when the address is free", err)
	}
}
