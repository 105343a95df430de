// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/block/ramdisk"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/controller"
)

// These tests need a kernel of their own, with nvmet-tcp and nvme-tcp loaded and /dev/ram0.
// WEFT_GUEST says that there is one (see e2e.TestKernel).

const configfs = "/sys/kernel/config"

func onKernel(t *testing.T) *Tree {
	t.Helper()
	if os.Getenv("WEFT_GUEST") == "" {
		t.Skip("needs a kernel of its own: go test -run TestKernel ./e2e")
	}
	if err := unix.Mount("configfs", configfs, "configfs", 0, ""); err != nil && !errors.Is(err, unix.EBUSY) {
		t.Fatal(err)
	}
	return New("/sys", "/dev")
}

// export makes this machine's nvmet export /dev/ram0 as namespace 5 to testHost.
func export(t *testing.T, nqn block.NQN, port string, uuid block.UUID) {
	t.Helper()
	root := filepath.Join(configfs, "nvmet")
	sub, p, host := filepath.Join(root, "subsystems", string(nqn)), filepath.Join(root, "ports", port), filepath.Join(root, "hosts", string(testHost.NQN))
	do := func(err error) {
		t.Helper()
		if err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	put := func(path, text string) { t.Helper(); do(os.WriteFile(path, []byte(text), 0)) }
	do(os.Mkdir(host, 0o755))
	do(os.Mkdir(sub, 0o755))
	ns := filepath.Join(sub, "namespaces/5")
	do(os.Mkdir(ns, 0o755))
	put(ns+"/device_path", "/dev/ram0")
	put(ns+"/device_uuid", uuid.String())
	put(ns+"/enable", "1")
	do(os.Symlink(host, filepath.Join(sub, "allowed_hosts", string(testHost.NQN))))
	do(os.Mkdir(p, 0o755))
	put(p+"/addr_trtype", "tcp")
	put(p+"/addr_adrfam", "ipv4")
	put(p+"/addr_traddr", "127.0.0.1")
	put(p+"/addr_trsvcid", "44"+port)
	do(os.Symlink(sub, filepath.Join(p, "subsystems", string(nqn))))
	t.Cleanup(func() {
		os.Remove(filepath.Join(p, "subsystems", string(nqn)))
		os.WriteFile(ns+"/enable", []byte("0"), 0)
		os.Remove(filepath.Join(sub, "allowed_hosts", string(testHost.NQN)))
		for _, dir := range []string{ns, sub, p, host} {
			os.Remove(dir)
		}
	})
}

func options(nqn block.NQN, port uint16) Options {
	return Options{
		Portal: block.Portal{Transport: block.TCP, Address: "127.0.0.1", Port: port}, NQN: nqn, Host: testHost,
		IOQueues: 1, KeepAlive: 2 * time.Second, ReconnectDelay: time.Second,
	}
}

// eventually waits for something that the kernel does asynchronously.
func eventually(t *testing.T, what string, is func() bool) time.Duration {
	t.Helper()
	began := time.Now()
	for range 300 {
		if is() {
			return time.Since(began)
		}
		time.Sleep(50 * time.Millisecond)
	}
	t.Fatalf("%s: not within 15 s", what)
	return 0
}

func TestKernelConnectsFindsAndDisconnects(t *testing.T) {
	k := onKernel(t)
	if err := k.Check(); err != nil {
		t.Fatal(err)
	}
	features, err := k.Supported()
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("options of this kernel: %v", features)
	woken := make(chan struct{}, 1)
	ctx, cancel := context.WithCancel(t.Context())
	watched := make(chan error, 1)
	go func() {
		watched <- Watch(ctx, func() {
			select {
			case woken <- struct{}{}:
			default:
			}
		})
	}()
	export(t, testNQN, "30", legUUID)

	c, err := k.Connect(t.Context(), options(testNQN, 4430))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Disconnect(context.WithoutCancel(ctx), c) })
	if c.State != Live || c.NQN != testNQN || c.HostNQN != testHost.NQN || c.Portal() != options(testNQN, 4430).Portal {
		t.Errorf("Connect = %+v, want it live, of %s, at 127.0.0.1:4430", c, testNQN)
	}
	if again, err := k.Connect(t.Context(), options(testNQN, 4430)); err != nil || again.Name != c.Name {
		t.Errorf("second Connect = %v, %v; want %s again", again.Name, err, c.Name)
	}
	var n Namespace
	eventually(t, "namespace", func() bool { n, err = k.FindNamespace(testNQN, 5, legUUID); return err == nil })
	t.Logf("found %+v", n)
	if err := errors.Join(k.Probe(n.Head, time.Second), k.Flush(n.Head, time.Second), k.SetWriteThrough(n.Head, true), k.SetIOTimeout(n.Paths[0], 3*time.Second)); err != nil {
		t.Error(err)
	}
	if got, _ := k.read("block/" + n.Name + "/queue/write_cache"); got != "write through" {
		t.Errorf("write_cache = %q, want \"write through\"", got)
	}
	if got, _ := k.read("block/" + n.Paths[0].Name + "/queue/io_timeout"); got != "3000" {
		t.Errorf("io_timeout = %q, want 3000", got)
	}
	plain := New("/sys", t.TempDir()) // has no character devices
	if err := os.Symlink("/dev/"+n.Name, filepath.Join(plain.dev, n.Name)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(plain.Probe(n.Head, time.Second), plain.Flush(n.Head, time.Second)); err != nil {
		t.Errorf("without commands that are passed through: %v", err)
	}
	wrote, read := make([]byte, 128<<10), make([]byte, 128<<10)
	for i := range wrote {
		wrote[i] = byte(i % 251)
	}
	if err := errors.Join(k.Overwrite(n.Head, wrote, 64<<10, time.Second), k.Read(n.Head, read, 64<<10, time.Second)); err != nil || !bytes.Equal(read, wrote) {
		t.Errorf("what was written beside the block device: %v, read as it was written: %v", err, bytes.Equal(read, wrote))
	}
	if err := plain.Overwrite(n.Head, wrote, 0, time.Second); !errors.Is(err, errors.ErrUnsupported) {
		t.Errorf("without commands that are passed through, nothing is written: %v, want %v", err, errors.ErrUnsupported)
	}
	wrong := n.Head
	wrong.Dev = "259:999"
	if err := k.Probe(wrong, time.Second); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("Probe of a name that is another device's = %v, want ErrNoNamespace", err)
	}
	wrong = n.Head
	wrong.UUID[0]++
	if err := k.Overwrite(wrong, wrote, 0, time.Second); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("a write to a leg whose name and number another one has = %v, want ErrNoNamespace", err)
	}
	select {
	case <-woken:
	case <-time.After(5 * time.Second):
		t.Error("no event of the new namespace came")
	}
	if err := k.Disconnect(t.Context(), c); err != nil {
		t.Error(err)
	}
	if err := k.Disconnect(t.Context(), c); err != nil {
		t.Errorf("second Disconnect = %v, want nil", err)
	}
	if _, err := k.FindNamespace(testNQN, 5, legUUID); !errors.Is(err, ErrNoNamespace) {
		t.Errorf("FindNamespace after Disconnect = %v, want ErrNoNamespace", err)
	}
	cancel()
	if err := <-watched; err != nil {
		t.Errorf("Watch = %v, want nil when its context ends", err)
	}
}

// The kernel gives a name again as soon as it can, and numbers the entries of sysfs anew.
func TestKernelDevicesThatTakeANameAreReadAnew(t *testing.T) {
	k := onKernel(t)
	second := block.SubsystemNQN(block.VolumeID{UUID: otherUUID}, 4, testHost, "t1")
	export(t, testNQN, "35", legUUID)
	export(t, second, "36", otherUUID)
	names := map[string]int{}
	ended := make(chan struct{})
	go func() { // as keepers do, also while a device is half there
		for t.Context().Err() == nil {
			select {
			case <-ended:
				return
			default:
				k.Controllers(nil)                    //nolint:errcheck // for what it keeps
				k.FindNamespace(testNQN, 5, legUUID)  //nolint:errcheck // the same
				k.FindNamespace(second, 5, otherUUID) //nolint:errcheck // the same
			}
		}
	}()
	defer close(ended)
	for round := range 10 {
		nqn, uuid, port := testNQN, legUUID, uint16(4435)
		if round%2 == 1 {
			nqn, uuid, port = second, otherUUID, 4436
		}
		c, err := k.Connect(t.Context(), options(nqn, port))
		if err != nil {
			t.Fatal(err)
		}
		var n Namespace
		eventually(t, "the namespace appears", func() bool { n, err = k.FindNamespace(nqn, 5, uuid); return err == nil && n.Live })
		names[c.Name+" "+n.Name]++
		for _, of := range []func(block.NQN) bool{nil, func(n block.NQN) bool { return n == nqn }} {
			if all, err := k.Controllers(of); err != nil || len(all) != 1 || all[0].NQN != nqn || all[0].Name != c.Name {
				t.Errorf("round %d: Controllers = %+v, %v; want %s of %s", round, all, err, c.Name, nqn)
			}
		}
		if err := k.Disconnect(t.Context(), c); err != nil {
			t.Fatal(err)
		}
		eventually(t, "the namespace goes", func() bool { _, err = k.FindNamespace(nqn, 5, uuid); return errors.Is(err, ErrNoNamespace) })
	}
	if len(names) > 1 {
		t.Errorf("the kernel gave no name again, so this shows nothing: %v", names)
	}
}

func TestKernelRefusalsAreExplained(t *testing.T) {
	k := onKernel(t)
	export(t, testNQN, "31", legUUID)
	stranger := options(testNQN, 4431)
	stranger.Host = block.HostFromID(otherUUID)
	for what, c := range map[string]struct {
		options Options
		want    unix.Errno
	}{
		"nobody listens":    {options(testNQN, 4499), unix.ECONNREFUSED},
		"unknown subsystem": {options(testNQN+"x", 4431), unix.EIO},
		"host not allowed":  {stranger, unix.EIO},
	} {
		if _, err := k.Connect(t.Context(), c.options); !errors.Is(err, c.want) {
			t.Errorf("%s: Connect = %v, want %v", what, err, c.want)
		}
	}
}

// A target falls silent with an admin command under way, and nobody destroys the connection. The command fails
// within seconds all the same, so that a process that is killed in it can end. Linux 6.1 alone would take a minute.
func TestKernelGivesUpAnAdminCommandOfASilentTarget(t *testing.T) {
	k := onKernel(t)
	export(t, testNQN, "37", legUUID)
	relay := silentRelay(t, "127.0.0.1:4437")
	c, err := k.Connect(t.Context(), options(testNQN, relay.port))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Disconnect(context.WithoutCancel(t.Context()), c) })
	identify := nvmetcp.Identify{CNS: nvmetcp.CNSController}.Command()
	data := make([]byte, nvmetcp.IdentifySize)
	if err := k.Admin(t.Context(), c, identify, data); err != nil {
		t.Fatalf("Admin while the target answers: %v", err)
	}
	relay.silent.Store(true)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 4*adminLimit)
	defer cancel()
	if err := k.Admin(ctx, c, identify, data); err == nil || ctx.Err() != nil {
		t.Errorf("Admin of a silent target = %v after %v, want the kernel's error", err, time.Since(began))
	}
	t.Logf("the kernel has given the command up after %v", time.Since(began).Round(time.Millisecond))
	relay.close() // so that Disconnect does not wait for it
}

// relay passes connections on to a target until it is silent: then it takes what comes, and passes
// nothing on, not even the end of a connection.
type relay struct {
	port   uint16
	silent atomic.Bool
	close  func()
}

func silentRelay(t *testing.T, target string) *relay {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	t.Cleanup(cancel)
	context.AfterFunc(ctx, func() { l.Close() })
	r := &relay{port: uint16(l.Addr().(*net.TCPAddr).Port), close: cancel}
	pass := func(to, from net.Conn) {
		b := make([]byte, 64<<10)
		for {
			n, err := from.Read(b)
			switch {
			case r.silent.Load() && err != nil: // the target has given the host up, which does not hear that
				return
			case r.silent.Load():
				continue
			case err == nil:
				_, err = to.Write(b[:n])
			}
			if err != nil {
				to.Close()
				return
			}
		}
	}
	go func() {
		for {
			host, err := l.Accept()
			if err != nil {
				return
			}
			out, err := net.Dial("tcp", target)
			if err != nil {
				host.Close()
				continue
			}
			context.AfterFunc(ctx, func() { host.Close(); out.Close() })
			go pass(out, host)
			go pass(host, out)
		}
	}()
	return r
}

func TestKernelReconnectsAfterItsSocketsAreDestroyed(t *testing.T) {
	k := onKernel(t)
	export(t, testNQN, "32", legUUID)
	c, err := k.Connect(t.Context(), options(testNQN, 4432))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { k.Disconnect(context.WithoutCancel(t.Context()), c) })
	n, err := k.DestroySockets(t.Context(), c.Portal())
	// The kernel may close the second of the two sockets by itself, in the error recovery that
	// follows the loss of the first.
	if err != nil || n < 1 {
		t.Fatalf("DestroySockets = %d, %v; want at least 1", n, err)
	}
	state := func() string {
		now, err := k.controllerNow(c.Name)
		if err != nil {
			t.Fatal(err)
		}
		return now.State
	}
	eventually(t, "the controller notices", func() bool { return state() != Live })
	t.Logf("live again after %v", eventually(t, "the controller reconnects", func() bool { return state() == Live }))
}

// proxy forwards connections to a port of this machine, until it is frozen: then its peers keep their
// connections, but nothing arrives any more.
func proxy(t *testing.T, to string) (port uint16, freeze func()) {
	s := newStrait(t, to)
	return s.port, func() { s.limit.Store(0) }
}

// everything is the limit of a strait that keeps nothing back.
const everything = math.MaxInt64

// A strait forwards connections to a port of this machine. More bytes than the limit do not arrive in either
// direction of a connection, as long as it stands.
type strait struct {
	port  uint16
	limit atomic.Int64
	conns atomic.Int64 // so far
	holds atomic.Int64 // the newest of them whose bytes are kept back
}

func newStrait(t *testing.T, to string) *strait {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s := &strait{port: netip.MustParseAddrPort(l.Addr().String()).Port()}
	s.limit.Store(everything)
	ended := make(chan struct{})
	t.Cleanup(func() { close(ended); l.Close() })
	pass := func(n int64, from, to net.Conn) {
		defer from.Close()
		defer to.Close()
		arrived := int64(0)
		for buffer := make([]byte, 64<<10); ; {
			read, err := from.Read(buffer)
			if err != nil {
				return
			}
			for arrived += int64(read); arrived > s.limit.Load(); {
				s.holds.Store(max(s.holds.Load(), n))
				select {
				case <-ended:
					return
				case <-time.After(20 * time.Millisecond):
				}
			}
			if _, err := to.Write(buffer[:read]); err != nil {
				return
			}
		}
	}
	go func() {
		for {
			near, err := l.Accept()
			if err != nil {
				return
			}
			far, err := net.Dial("tcp4", to)
			if err != nil {
				near.Close()
				continue
			}
			n := s.conns.Add(1)
			go pass(n, near, far)
			go pass(n, far, near)
		}
	}()
	return s
}

// toProbe names, in the environment, the head that this process only probes.
const toProbe = "WEFT_TEST_PROBE"

func TestMain(m *testing.M) {
	var h Head
	if n, _ := fmt.Sscan(os.Getenv(toProbe), &h.Name, &h.Dev, &h.NSID); n != 3 {
		os.Exit(m.Run())
	}
	fmt.Fprintln(os.Stderr, New("/sys", "/dev").Probe(h, time.Minute))
	os.Exit(1)
}

// killedInProbe kills a process that waits for the answer to a probe. Linux ends a process only when each of
// its threads has left the kernel.
func killedInProbe(t *testing.T, h Head) {
	other := exec.Command("/proc/self/exe")
	other.Env, other.Stderr = append(os.Environ(), fmt.Sprintf("%s=%s %s %d", toProbe, h.Name, h.Dev, h.NSID)), os.Stderr
	if err := other.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- other.Wait() }()
	select {
	case err := <-ended:
		t.Fatalf("the probe of a silent target ended at once: %v", err)
	case <-time.After(2 * time.Second):
	}
	if err := other.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case <-ended:
	case <-time.After(10 * time.Second):
		t.Fatal("a process that waited for a probe has not ended 10 s after it was killed")
	}
}

// A probe waits until a path answers, as the writes of a volume do; but an agent that waits can be killed, or no
// other one would be started.
func TestKernelAProbeWaitsForAPathAndCanBeKilled(t *testing.T) {
	k := onKernel(t)
	export(t, testNQN, "34", legUUID)
	port, freeze := proxy(t, "127.0.0.1:4434")
	o := options(testNQN, port)
	o.KeepAlive = 30 * time.Second // so that the probe is what finds it silent
	frozen, err := k.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	ends := func(c Controller) {
		k.DestroySockets(context.WithoutCancel(t.Context()), c.Portal()) //nolint:errcheck // it may have none any more
		k.Disconnect(context.WithoutCancel(t.Context()), c)              //nolint:errcheck // the same
	}
	defer ends(frozen)
	var n Namespace
	eventually(t, "the namespace appears", func() bool { n, err = k.FindNamespace(testNQN, 5, legUUID); return err == nil && n.Live })
	if err := errors.Join(k.Probe(n.Head, 5*time.Second), k.Flush(n.Head, 5*time.Second)); err != nil {
		t.Fatalf("while the target answers: %v", err)
	}
	freeze()
	killedInProbe(t, n.Head)

	probed, flushed := make(chan error, 1), make(chan error, 1)
	go func() { probed <- k.Probe(n.Head, 2*time.Second) }()
	select {
	case err := <-probed:
		t.Errorf("while no path answers, Probe = %v", err)
	case <-time.After(4 * time.Second): // the kernel has reset the controller meanwhile
	}
	go func() { flushed <- k.Flush(n.Head, 2*time.Second) }()
	other, err := k.Connect(t.Context(), options(testNQN, 4434))
	if err != nil {
		t.Fatal(err)
	}
	defer ends(other)
	for what, ended := range map[string]chan error{"Probe": probed, "Flush": flushed} {
		select {
		case err := <-ended:
			if err != nil {
				t.Errorf("when another path answers, %s = %v", what, err)
			}
		case <-time.After(3 * time.Second):
			t.Errorf("%s has not ended 3 s after another path was there", what)
		}
	}
}

// connecting returns a controller that has lost its connections through s, and that the kernel is connecting again: more
// bytes than the limit do not arrive now.
func (s *strait) connecting(t *testing.T, k *Tree, limit int64) Controller {
	t.Helper()
	c, err := k.Connect(t.Context(), options(testNQN, s.port))
	if err != nil {
		t.Fatal(err)
	}
	before := s.conns.Load()
	s.limit.Store(limit)
	if _, err := k.DestroySockets(t.Context(), c.Portal()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the kernel connects again", func() bool { return s.holds.Load() > before })
	return c
}

// deletion begins to delete a controller. ends waits for the end, and fails the test if that takes longer.
func deletion(t *testing.T, k *Tree, c Controller) (ends func(within time.Duration)) {
	began, deleted := time.Now(), make(chan error, 1)
	go func() { deleted <- k.Disconnect(context.WithoutCancel(t.Context()), c) }()
	return func(within time.Duration) {
		t.Helper()
		select {
		case err := <-deleted:
			t.Logf("deleted after %v: %v", time.Since(began), err)
			if err != nil {
				t.Error(err)
			}
		case <-time.After(within):
			t.Errorf("not deleted after %v", within)
			<-deleted
		}
	}
}

// A target is slow to answer when the kernel connects to it again, and its leg is given up. If the sockets went then,
// the kernel would not notice, and would wait for the answer that cannot come, for a minute.
func TestKernelADeletionWhileItConnectsEndsWithTheNextAnswer(t *testing.T) {
	for what, c := range map[string]struct {
		arrives   int64 // bytes in each direction, at most
		destroyed int   // sockets that the target has not answered on
		answers   bool
	}{
		"the target answers late":          {arrives: 128, answers: true}, // ICReq and ICResp have that size
		"the target accepts and is silent": {arrives: 0, destroyed: 1},
	} {
		t.Run(what, func(t *testing.T) {
			k := onKernel(t)
			export(t, testNQN, "35", legUUID)
			s := newStrait(t, "127.0.0.1:4435")
			ctrl := s.connecting(t, k, c.arrives)
			if n, err := k.DestroyUnanswered(t.Context(), ctrl.Portal()); n != c.destroyed || err != nil {
				t.Errorf("DestroyUnanswered = %d, %v; want %d", n, err, c.destroyed)
			}
			ends := deletion(t, k, ctrl)
			if c.answers {
				time.Sleep(time.Second)
				s.limit.Store(everything)
			}
			ends(15 * time.Second)
		})
	}
}

// Weft's target ends a controller that the kernel is connecting: the host may no longer connect. The kernel does not
// notice the end of a connection then; it is answered.
func TestKernelADeletionWhileItConnectsEndsWhenTheTargetEndsTheController(t *testing.T) {
	k := onKernel(t)
	target, err := controller.New(controller.Config{})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { target.Close(context.Background()) })
	hosts := []controller.Host{{NQN: testHost.NQN}}
	sub, err := target.AddSubsystem(controller.SubsystemConfig{NQN: testNQN, Serial: "1", Hosts: hosts})
	if err != nil {
		t.Fatal(err)
	}
	if err := sub.AddNamespace(controller.NamespaceConfig{NSID: 5, UUID: legUUID, Device: ramdisk.New(1<<20, 4096)}); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := target.Serve(l, controller.PortConfig{ID: 1, Link: []*controller.Subsystem{sub}}); err != nil {
		t.Fatal(err)
	}
	s := newStrait(t, l.Addr().String())
	ctrl := s.connecting(t, k, 128+72+1024) // ICReq and Connect with its data: what comes next is held
	ends := deletion(t, k, ctrl)
	time.Sleep(100 * time.Millisecond)
	if err := sub.SetHosts(nil, false); err != nil {
		t.Fatal(err)
	}
	s.limit.Store(everything)
	ends(15 * time.Second)
}

// A target that dies while a controller is being deleted: the kernel has asked it, and would wait for
// a minute. If its sockets go before the I/O under way has run out of time, the kernel cannot ask.
func TestKernelADeletionGoesOnOnceTheSocketsOfASilentTargetAreGone(t *testing.T) {
	k := onKernel(t)
	export(t, testNQN, "33", legUUID)
	port, freeze := proxy(t, "127.0.0.1:4433")
	o := options(testNQN, port)
	o.KeepAlive = 30 * time.Second // so that the kernel does not notice before the test has ended
	c, err := k.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	var n Namespace
	eventually(t, "the namespace appears", func() bool { n, err = k.FindNamespace(testNQN, 5, legUUID); return err == nil && n.Live })
	for _, path := range n.Paths {
		if err := k.SetIOTimeout(path, 10*time.Second); err != nil {
			t.Fatal(err)
		}
	}
	freeze()
	go k.Probe(n.Head, 10*time.Second) //nolint:errcheck // it fails when the controller goes
	time.Sleep(time.Second)            // on a busy machine it takes a while until the kernel has the command
	ends := deletion(t, k, c)
	time.Sleep(time.Second)
	if _, err := k.DestroySockets(t.Context(), c.Portal()); err != nil {
		t.Fatal(err)
	}
	ends(25 * time.Second)
}
