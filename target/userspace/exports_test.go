// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/nvmet/memfs"
)

// slowly is a listener whose Close waits.
type slowly struct {
	net.Listener
	closing chan struct{}
	goOn    chan struct{}
}

func (l *slowly) Close() error {
	err := l.Listener.Close()
	close(l.closing)
	<-l.goOn
	return err
}

// A port that is closed waits for hosts that are connecting, and they may wait for a drive that hangs. All other
// exports go on meanwhile, and the target can stop.
func TestAPortThatClosesHoldsUpNothingElse(t *testing.T) {
	l := &slowly{closing: make(chan struct{}), goOn: make(chan struct{})}
	listen := func(block.Portal) (_ net.Listener, err error) {
		l.Listener, err = net.Listen("tcp", "127.0.0.1:0")
		return l, err
	}
	e, err := NewExports(slog.New(slog.DiscardHandler), listen, nil)
	must(t, err)
	const nqn = "nqn.2026-11.dev.weft:test"
	must(t, e.server.AddSubsystem(memfs.Subsystem{NQN: nqn, Serial: "1", Model: "weft", CntlidMin: 1, CntlidMax: 9}))
	must(t, e.server.Link(memfs.Port{ID: 1, Portal: block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: 4420}}, nqn))
	unlinked, went := make(chan error, 1), make(chan struct{})
	go func() { unlinked <- e.server.Unlink(1, nqn) }()
	<-l.closing
	go func() {
		e.SetPaths(nil)
		close(went)
	}()
	select {
	case <-went:
	case <-time.After(10 * time.Second):
		t.Error("the exports wait for the port")
	}
	close(l.goOn)
	must(t, <-unlinked)
	must(t, e.Close(t.Context()))
}
