// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// await checks the condition is whenever told fires, until it is true.
func await(t testing.TB, told <-chan struct{}, what string, is func() bool) {
	t.Helper()
	deadline := time.After(patience)
	for !is() {
		select {
		case <-told:
		case <-deadline:
			t.Fatalf("waited %v for %s", patience, what)
		}
	}
}

// teller returns a callback that does not block, and the channel it signals.
func teller() (func(), <-chan struct{}) {
	c := make(chan struct{}, 1)
	return func() {
		select {
		case c <- struct{}{}:
		default:
		}
	}, c
}

func TestNamespacesComeChangeAndGo(t *testing.T) {
	device := ramdisk.New(block.MiB, blocks)
	w := newWorld(t, device)
	cfg := w.config()
	var told <-chan struct{}
	cfg.OnNamespaces, told = teller()
	c := connect(t, cfg)
	w.add(7, uuidB, ramdisk.New(2*block.MiB, 512))
	await(t, told, "the second namespace", func() bool { return len(c.Namespaces()) == 2 })
	n, err := c.Namespace(7, uuidB)
	if err != nil || n.Geometry().Size != 2*block.MiB || n.Geometry().BlockSize != 512 {
		t.Fatalf("%+v: %v", n, err)
	}
	if err := block.WriteAt(n, noise(512, 1), 512); err != nil {
		t.Error(err)
	}
	if again, _ := c.Namespace(0, uuidB); again != n {
		t.Error("the same namespace is a different object")
	}
	if _, err := c.Namespace(7, uuidA); !errors.Is(err, block.ErrGone) {
		t.Errorf("a namespace with a wrong UUID: %v", err)
	}
	if err := w.sub.RemoveNamespace(t.Context(), 7); err != nil {
		t.Fatal(err)
	}
	await(t, told, "the second namespace to go", func() bool { return len(c.Namespaces()) == 1 })
	if err := block.WriteAt(n, noise(512, 1), 512); !errors.Is(err, block.ErrGone) {
		t.Errorf("write to a namespace that was removed: %v", err)
	}
	w.add(7, uuidB, ramdisk.New(2*block.MiB, 512))
	await(t, told, "the second namespace again", func() bool { return len(c.Namespaces()) == 2 })
	if err := block.WriteAt(n, noise(512, 1), 512); err != nil {
		t.Errorf("write to a namespace that came back: %v", err)
	}
}

func TestKeysOpenTheDoor(t *testing.T) {
	key, err := dhchap.Generate(1, nil)
	if err != nil {
		t.Fatal(err)
	}
	back, err := dhchap.Generate(1, nil)
	if err != nil {
		t.Fatal(err)
	}
	wrong, err := dhchap.Generate(1, nil)
	if err != nil {
		t.Fatal(err)
	}
	w := newWorld(t, ramdisk.New(block.MiB, blocks), func(_ *controller.Config, s *controller.SubsystemConfig) {
		s.Hosts = []controller.Host{{NQN: me.NQN, HostKey: key, ControllerKey: back}}
	})
	for name, c := range map[string]struct {
		host, controller dhchap.Key
		ok               bool
	}{
		"host key":             {key, dhchap.Key{}, true},
		"both keys":            {key, back, true},
		"no key":               {dhchap.Key{}, dhchap.Key{}, false},
		"wrong host key":       {wrong, dhchap.Key{}, false},
		"wrong controller key": {key, wrong, false},
	} {
		t.Run(name, func(t *testing.T) {
			cfg := w.config()
			cfg.HostKey, cfg.ControllerKey = c.host, c.controller
			limit := 150 * time.Millisecond
			if c.ok {
				limit = patience
			}
			ctx, cancel := context.WithTimeout(t.Context(), limit)
			defer cancel()
			h, err := Connect(ctx, cfg)
			if c.ok != (err == nil) {
				t.Fatal(err)
			}
			if err == nil {
				if err := block.WriteAt(space(t, h, uuidA), noise(4096, 1), 0); err != nil {
					t.Error(err)
				}
				if err := h.Close(ctx); err != nil {
					t.Error(err)
				}
			}
		})
	}
}

func TestDiscoverFindsWhatThereIs(t *testing.T) {
	w := newWorld(t, ramdisk.New(block.MiB, blocks))
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	found, err := Discover(ctx, w.addr, me)
	if err != nil {
		t.Fatal(err)
	}
	ours := 0
	for _, e := range found {
		if e.Subsystem == testNQN && e.Transport == nvmetcp.TransportTCP && e.Type == nvmetcp.SubsystemNVM && e.Address+":"+e.Service == w.addr {
			ours++
		}
	}
	if ours != 1 {
		t.Errorf("%+v", found)
	}
}

func TestReservationsKeepOthersOut(t *testing.T) {
	other := block.Host{NQN: "nqn.2014-08.org.nvmexpress:uuid:b", ID: block.UUID{0xb}}
	w := newWorld(t, ramdisk.New(block.MiB, blocks), func(_ *controller.Config, s *controller.SubsystemConfig) {
		s.Hosts = append(s.Hosts, controller.Host{NQN: other.NQN})
	})
	a := space(t, connect(t, w.config()), uuidA)
	cfg := w.config()
	cfg.Host = other
	b := space(t, connect(t, cfg), uuidA)
	ctx := t.Context()
	if err := a.Register(ctx, nvmetcp.ReservationRegister{New: 1}); err != nil {
		t.Fatal(err)
	}
	if err := a.Acquire(ctx, nvmetcp.ReservationAcquire{Current: 1, Type: nvmetcp.WriteExclusive}); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(b, noise(4096, 1), 0); !errors.Is(err, nvmetcp.ReservationConflict) {
		t.Errorf("write of another host: %v", err)
	}
	s, err := b.Reservations(ctx)
	if err != nil || s.Type != nvmetcp.WriteExclusive || len(s.Registrants) != 1 || s.Registrants[0].HostID != me.ID || !s.Registrants[0].Holder {
		t.Errorf("%+v: %v", s, err)
	}
	if err := a.Release(ctx, nvmetcp.ReservationRelease{Current: 1, Type: nvmetcp.WriteExclusive}); err != nil {
		t.Fatal(err)
	}
	if err := block.WriteAt(b, noise(4096, 1), 0); err != nil {
		t.Error(err)
	}
}
