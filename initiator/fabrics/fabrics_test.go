// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
	"weft.dev/weft/proto/uevent"
)

var (
	legUUID   = block.UUIDFromRandom([16]byte{1})
	otherUUID = block.UUIDFromRandom([16]byte{2})
	testHost  = block.HostFromID(block.UUIDFromRandom([16]byte{3}))
	testNQN   = block.SubsystemNQN(block.VolumeID{UUID: legUUID}, 4, testHost, "t1")
)

// tree makes a sysfs of the given files, as a running kernel shows them.
func tree(t testing.TB, files map[string]string) *Tree {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, "sys", name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return New(filepath.Join(root, "sys"), filepath.Join(root, "dev"))
}

// subsystem adds one with a head of each nsid, through one controller.
func addSubsystem(files map[string]string, s, c int, state string, heads map[int]block.UUID) {
	sub := fmt.Sprintf("class/nvme-subsystem/nvme-subsys%d/", s)
	ctl := fmt.Sprintf("class/nvme/nvme%d/", c)
	files[sub+"subsysnqn"] = string(testNQN)
	files[sub+fmt.Sprintf("nvme%d/state", c)] = state // a link to the controller
	files[ctl+"subsysnqn"] = string(testNQN)
	files[ctl+"state"] = state
	files[ctl+"transport"] = "tcp"
	files[ctl+"uevent"] = "MAJOR=244\nNVME_TRTYPE=tcp\nNVME_TRADDR=192.0.2.1\nNVME_TRSVCID=4420\nNVME_HOST_TRADDR=none\nNVME_HOST_IFACE=eth0"
	files[ctl+"hostnqn"] = string(testHost.NQN)
	files[ctl+"hostid"] = testHost.ID.String()
	for i, uuid := range heads {
		head := fmt.Sprintf("nvme%dn%d", s, i)
		files[sub+head+"/nsid"] = "5"
		dir := "block/" + head + "/"
		files[dir+"hidden"], files[dir+"nsid"], files[dir+"uuid"] = "0", "5", uuid.String()
		files[dir+"size"], files[dir+"dev"], files[dir+"wwid"] = "2048", fmt.Sprintf("259:%d", i), "uuid."+uuid.String()
		files[dir+"queue/write_cache"] = "write back"
		path := fmt.Sprintf("block/nvme%dc%dn%d/", s, c, i)
		files[path+"ana_state"], files[path+"hidden"], files[path+"queue/io_timeout"] = "optimized", "1", "30000"
	}
}

func TestNamespaceIsFoundByItsIdentity(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, Live, map[int]block.UUID{1: otherUUID, 2: legUUID})
	k := tree(t, files)
	got, err := k.FindNamespace(testNQN, 5, legUUID)
	want := Namespace{
		Head:  Head{Name: "nvme0n2", NSID: 5, UUID: legUUID, Dev: "259:2", Size: block.MiB},
		Paths: []Path{{Name: "nvme0c3n2", Controller: "nvme3"}},
		Live:  true,
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("FindNamespace = %v (-want +got)\n%s", err, diff)
	}
	for what, find := range map[string]func() (Namespace, error){
		"another nqn":  func() (Namespace, error) { return k.FindNamespace(testNQN+"x", 5, legUUID) },
		"another nsid": func() (Namespace, error) { return k.FindNamespace(testNQN, 6, legUUID) },
		"another uuid": func() (Namespace, error) { return k.FindNamespace(testNQN, 5, testHost.ID) },
	} {
		if n, err := find(); !errors.Is(err, ErrNoNamespace) {
			t.Errorf("FindNamespace of %s = %v, %v; want ErrNoNamespace", what, n, err)
		}
	}
}

func TestGhostsAreNotFound(t *testing.T) {
	for what, spoil := range map[string]func(map[string]string){
		"no size": func(f map[string]string) { f["block/nvme0n1/size"] = "0" },
		"hidden":  func(f map[string]string) { f["block/nvme0n1/hidden"] = "1" },
		"no path": func(f map[string]string) {
			delete(f, "block/nvme0c3n1/hidden")
			delete(f, "block/nvme0c3n1/ana_state")
			delete(f, "block/nvme0c3n1/queue/io_timeout")
		},
		"half gone":     func(f map[string]string) { delete(f, "block/nvme0n1/dev") },
		"garbage nsid":  func(f map[string]string) { f["block/nvme0n1/nsid"] = "7" },
		"other's paths": func(f map[string]string) { delete(f, "class/nvme-subsystem/nvme-subsys0/nvme3/state") },
	} {
		files := map[string]string{}
		addSubsystem(files, 0, 3, Live, map[int]block.UUID{1: legUUID})
		spoil(files)
		if n, err := tree(t, files).FindNamespace(testNQN, 5, legUUID); !errors.Is(err, ErrNoNamespace) {
			t.Errorf("%s: FindNamespace = %v, %v; want ErrNoNamespace", what, n, err)
		}
	}
}

func TestLiveHeadIsPreferredToASilentOne(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, Connecting, map[int]block.UUID{1: legUUID})
	k := tree(t, files)
	if n, err := k.FindNamespace(testNQN, 5, legUUID); !errors.Is(err, ErrNoLivePath) || n.Name != "nvme0n1" || n.Live {
		t.Errorf("FindNamespace = %v, %v; want nvme0n1 and ErrNoLivePath", n, err)
	}
	addSubsystem(files, 7, 8, Live, map[int]block.UUID{2: legUUID})
	if n, err := tree(t, files).FindNamespace(testNQN, 5, legUUID); err != nil || n.Name != "nvme7n2" || !n.Live {
		t.Errorf("FindNamespace = %v, %v; want nvme7n2", n, err)
	}
}

func TestControllersAreRead(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, "deleting (no IO)", nil)
	got, err := tree(t, files).Controllers(nil)
	want := []Controller{{
		Name: "nvme3", Instance: 3, State: "deleting (no IO)", Transport: block.TCP, NQN: testNQN, HostNQN: testHost.NQN, HostID: testHost.ID.String(),
		Address: Address{Traddr: "192.0.2.1", Trsvcid: "4420", HostIface: "eth0"},
	}}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("Controllers = %v (-want +got)\n%s", err, diff)
	}
	if !got[0].Going() {
		t.Error("a controller that is deleted is not going")
	}
}

func TestSettingsAreWrittenWhereTheyDiffer(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, Live, map[int]block.UUID{1: legUUID})
	files["module/nvme_core/parameters/max_retries"] = "5"
	files["class/nvme-subsystem/nvme-subsys0/iopolicy"] = "numa"
	addSubsystem(files, 1, 4, Live, map[int]block.UUID{1: otherUUID})
	files["class/nvme-subsystem/nvme-subsys1/subsysnqn"] = string(testNQN) // listed twice, see FindNamespace
	files["class/nvme-subsystem/nvme-subsys1/iopolicy"] = "queue-depth"
	k := tree(t, files)
	if _, err := k.FindNamespace(testNQN, 5, legUUID); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(k.SpreadPaths(testNQN), k.SetWriteThrough(Head{Name: "nvme0n1"}, true), k.SetIOTimeout(Path{Name: "nvme0c3n1"}, 5*time.Second), k.RetryMost()); err != nil {
		t.Fatal(err)
	}
	// As in sysfs, a write is one write(2) over the old value, so a plain file keeps the rest
	// of a longer one.
	for name, want := range map[string]string{"block/nvme0n1/queue/write_cache": "write through", "block/nvme0c3n1/queue/io_timeout": "5000", "module/nvme_core/parameters/max_retries": "255", "class/nvme-subsystem/nvme-subsys0/iopolicy": "round-robin", "class/nvme-subsystem/nvme-subsys1/iopolicy": "queue-depth"} {
		if got, err := k.read(name); err != nil || !strings.HasPrefix(got, want) {
			t.Errorf("%s = %q, %v; want %q", name, got, err, want)
		}
	}
	if err := k.SetWriteThrough(Head{Name: "nvme0n1"}, false); err != nil {
		t.Fatal(err)
	}
	if got, err := k.read("block/nvme0n1/queue/write_cache"); err != nil || !strings.HasPrefix(got, "write back") {
		t.Errorf("the cache of a drive that has got one is %q, %v", got, err)
	}
	if err := k.SetWriteThrough(Head{Name: "nvme9n1"}, true); !errors.Is(err, unix.ENOENT) {
		t.Errorf("SetWriteThrough of a device that is gone = %v, want ENOENT", err)
	}
}

func TestKernelsWithoutMultipathAreRefused(t *testing.T) {
	const parameter = "module/nvme_core/parameters/multipath"
	for value, ok := range map[string]bool{"Y": true, "N": false} {
		if err := tree(t, map[string]string{parameter: value}).Check(); (err == nil) != ok {
			t.Errorf("Check with multipath=%s = %v", value, err)
		}
	}
	if err := tree(t, nil).Check(); err == nil {
		t.Error("Check without nvme_core = nil, want an error")
	}
}

func TestOptionsBecomeOneLine(t *testing.T) {
	o := Options{
		Portal: block.Portal{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}, NQN: testNQN, Host: testHost,
		IOQueues: 4, KeepAlive: 1500 * time.Millisecond,
	}
	want := "transport=tcp,traddr=192.0.2.1,trsvcid=4420,nqn=" + string(testNQN) + ",hostnqn=" + string(testHost.NQN) +
		",hostid=" + testHost.ID.String() + ",nr_io_queues=4,keep_alive_tmo=2,reconnect_delay=1,ctrl_loss_tmo=-1"
	if got := o.String(); got != want || o.Check() != nil {
		t.Errorf("String = %s, Check = %v\nwant %s", got, o.Check(), want)
	}
	for what, spoil := range map[string]func(*Options){
		"transport":  func(o *Options) { o.Portal.Transport = "fc" },
		"address":    func(o *Options) { o.Portal.Address = "192.0.2.1,nqn=x" },
		"port":       func(o *Options) { o.Portal.Port = 0 },
		"nqn":        func(o *Options) { o.NQN = "nqn.a,b" },
		"host":       func(o *Options) { o.Host.NQN = "" },
		"host id":    func(o *Options) { o.Host.ID = block.UUID{} },
		"queues":     func(o *Options) { o.IOQueues = -1 },
		"queue size": func(o *Options) { o.QueueSize = 8 },
		"interface":  func(o *Options) { o.HostInterface = "eth0,x=1" },
	} {
		bad := o
		spoil(&bad)
		if bad.Check() == nil {
			t.Errorf("Check with a bad %s = nil", what)
		}
	}
}

func TestFeaturesAreThoseThatTheKernelLists(t *testing.T) {
	o := Options{Portal: block.Portal{Transport: block.TCP, Address: "::1", Port: 1}, NQN: testNQN, Host: testHost, HostInterface: "eth0"}
	f := parseFeatures("instance=-1,cntlid=-1,transport=%s,traddr=%s,trsvcid=%s,nqn=%s,hostnqn=%s,hostid=%s,reconnect_delay=%d,ctrl_loss_tmo=%d\n")
	if got, want := f.missing(o), []string{"host_iface"}; !cmp.Equal(got, want) {
		t.Errorf("missing = %v, want %v", got, want)
	}
	if got := parseFeatures("").missing(o); got != nil {
		t.Errorf("missing of a kernel that lists nothing = %v, want nil", got)
	}
}

func TestKeysReachTheKernelAndNobodyElse(t *testing.T) {
	key, err := dhchap.NewKey(dhchap.SHA256, bytes.Repeat([]byte{7}, 32))
	if err != nil {
		t.Fatal(err)
	}
	o := Options{Portal: block.Portal{Transport: block.TCP, Address: "::1", Port: 1}, NQN: testNQN, Host: testHost, HostKey: key, ControllerKey: key}
	want := ",dhchap_secret=" + key.Representation() + ",dhchap_ctrl_secret=" + key.Representation()
	if got := o.line(dhchap.Key.Representation); !strings.Contains(got, want) {
		t.Errorf("the line lacks %s", want)
	}
	shown := fmt.Sprintf("%v %+v %s", o, o, connectError(o, unix.EIO))
	if strings.Contains(shown, key.Representation()[11:20]) {
		t.Errorf("a key is shown: %s", shown)
	}
	if got, want := parseFeatures("transport=%s,traddr=%s,trsvcid=%s,nqn=%s,hostnqn=%s,hostid=%s,reconnect_delay=%d,ctrl_loss_tmo=%d").missing(o),
		[]string{"dhchap_secret", "dhchap_ctrl_secret"}; !cmp.Equal(got, want) {
		t.Errorf("missing = %v, want %v", got, want)
	}
}

func TestAKernelAuthenticatesIfItWasBuiltToDoSo(t *testing.T) {
	const listed = "transport=%s,dhchap_secret=%s,dhchap_ctrl_secret=%s"
	const with = "0000000000000000 T nvme_auth_free\t[nvme_core]\n0000000000000000 T nvme_auth_negotiate\t[nvme_core]\n"
	for _, c := range []struct {
		options, symbols string
		want             bool
	}{{listed, with, true}, {listed, "0000000000000000 T nvme_auth_negotiated\n", false}, {listed, "", false}, {"transport=%s", with, false}, {"dhchap_secret=%s", with, false}} {
		if got := parseFeatures(c.options).Authenticate(strings.NewReader(c.symbols)); got != c.want {
			t.Errorf("%q with symbols %q: %v", c.options, c.symbols, got)
		}
	}
}

func TestErrnosOfConnectSayWhatTheyMean(t *testing.T) {
	o := Options{NQN: testNQN}
	for n := range hints {
		err := connectError(o, n)
		if !errors.Is(err, n) || !strings.Contains(err.Error(), hints[n]) {
			t.Errorf("connectError(%v) = %v, want the errno and its meaning", n, err)
		}
	}
}

func TestCommandsAreSentAgainWhereTheKernelWouldDoSo(t *testing.T) {
	for result, want := range map[int32]error{
		0: nil, -int32(unix.EINTR): errNoAnswer, -int32(unix.EINVAL): errNoAnswer, -int32(unix.EOPNOTSUPP): errNotPassed,
		int32(nvmetcp.HostPathingError): errNoAnswer, int32(nvmetcp.ANATransition): errNoAnswer, int32(nvmetcp.ANAInaccessible | nvmetcp.DNR): nvmetcp.ANAInaccessible,
		-int32(unix.EACCES):              errNotPassed,
		int32(nvmetcp.NamespaceNotReady): errNoAnswer, int32(nvmetcp.NamespaceNotReady | nvmetcp.DNR): nvmetcp.NamespaceNotReady,
		int32(nvmetcp.InternalError): nvmetcp.InternalError,
	} {
		if got := outcome(result); !errors.Is(got, want) {
			t.Errorf("outcome(%#x) = %v, want %v", result, got, want)
		}
	}
}

func TestCallsThatStayInTheKernelAreLeftBehind(t *testing.T) {
	k := New("", "")
	release, began := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	err := k.await(ctx, "delete", "nvme0", func() error { close(began); <-release; return nil })
	<-began
	if !errors.Is(err, ctx.Err()) {
		t.Errorf("await = %v, want the context's error", err)
	}
	if err := k.await(t.Context(), "delete", "nvme0", func() error { return nil }); !errors.Is(err, ErrBusy) {
		t.Errorf("await of the same object = %v, want ErrBusy", err)
	}
	if err := k.await(t.Context(), "delete", "nvme1", func() error { return nil }); err != nil {
		t.Errorf("await of another object = %v, want nil", err)
	}
	close(release)
	for range 100 {
		if err = k.await(t.Context(), "delete", "nvme0", func() error { return nil }); err == nil {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("await after the call has returned = %v, want nil", err)
}

func TestHostIdentityIsMadeOnceAndGarbageIsLeftAlone(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	first, err := HostIdentity(dir, [16]byte{1})
	if err != nil {
		t.Fatal(err)
	}
	second, err := HostIdentity(dir, [16]byte{2})
	if err != nil || second != first {
		t.Errorf("HostIdentity = %v, %v; want %v again", second, err, first)
	}
	file := filepath.Join(dir, "hostid")
	if info, err := os.Stat(file); err != nil || info.Mode().Perm() != 0o644 {
		t.Errorf("mode of hostid = %v, %v; want 0644", info.Mode(), err)
	}
	for _, garbage := range []string{"", "hello\n", "00000000-0000-0000-0000-000000000000\n"} {
		if err := os.WriteFile(file, []byte(garbage), 0o644); err != nil {
			t.Fatal(err)
		}
		_, err := HostIdentity(dir, [16]byte{3})
		after, _ := os.ReadFile(file)
		if err == nil || string(after) != garbage {
			t.Errorf("HostIdentity over %q = %v, left %q; want an error and the file as it was", garbage, err, after)
		}
	}
}

func TestNamesOfTheKernelAreTakenApart(t *testing.T) {
	for name, want := range map[string]diskName{
		"nvme3": {-1, 3, -1}, "nvme0n2": {0, -1, 2}, "nvme10c3n21": {10, 3, 21},
	} {
		if got, ok := parseName(name); !ok || got != want {
			t.Errorf("parseName(%q) = %v, %v; want %v", name, got, ok, want)
		}
	}
	for _, bad := range []string{"", "nvme", "nvme-subsys0", "nvme0n1p1", "nvme0c1", "nvme0n", "nvmen1", "sda", "nvme0c0n1x", "nvme99999999999n1"} {
		if got, ok := parseName(bad); ok {
			t.Errorf("parseName(%q) = %v, want none", bad, got)
		}
	}
}

func TestEventsOfOthersAreSkipped(t *testing.T) {
	for event, want := range map[string]bool{
		"add@/devices/virtual/nvme-subsystem/nvme-subsys0/nvme0n1\x00ACTION=add\x00": true,
		"change@/devices/virtual/block/dm-3\x00":                                     true,
		"add@/devices/pci0000:00/net/eth0\x00":                                       false,
		"libudev\x00\xfe\xed":                                                        false,
		"":                                                                           false,
	} {
		e, ok := uevent.Parse([]byte(event))
		if got := ok && concerns(e); got != want {
			t.Errorf("concerns(%q) = %v, want %v", event, got, want)
		}
	}
}

func FuzzAddress(f *testing.F) {
	for _, seed := range []string{
		"NVME_TRADDR=192.0.2.1\nNVME_TRSVCID=4420\n", "NVME_TRADDR=2001:db8::1\nNVME_TRSVCID=4420\nNVME_HOST_TRADDR=::\nNVME_HOST_IFACE=eth0",
		"", "\n\n=\n=", "NVME_TRTYPE=pcie", "NVME_TRADDR=fe80::1%eth0\nNVME_TRSVCID=x",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		a := ParseAddress(text)
		c := Controller{Transport: block.TCP, Address: a}
		p := c.Portal()
		if a.Traddr != "" && p.Port != 0 && fmt.Sprint(p.Port) == a.Trsvcid && !a.At(p) {
			t.Errorf("ParseAddress(%q) = %+v is not at its own portal %v", text, a, p)
		}
	})
}

func TestDisconnectLeavesAControllerThatHasTakenTheName(t *testing.T) {
	files := map[string]string{"class/nvme/nvme3/delete_controller": ""}
	addSubsystem(files, 3, 3, Live, nil)
	k := tree(t, files)
	c, err := k.controllerNow("nvme3")
	if err != nil {
		t.Fatal(err)
	}
	other := c
	other.NQN = block.SubsystemNQN(block.VolumeID{UUID: otherUUID}, 1, testHost, "t1")
	if err := k.Disconnect(t.Context(), other); err != nil {
		t.Errorf("Disconnect of one that is gone = %v, want nil", err)
	}
	if got, _ := k.read("class/nvme/nvme3/delete_controller"); got != "" {
		t.Errorf("the controller that has its name now was deleted (%q)", got)
	}
	if err := k.Disconnect(t.Context(), c); err != nil {
		t.Errorf("Disconnect = %v, want nil", err)
	}
	if got, _ := k.read("class/nvme/nvme3/delete_controller"); got != "1" {
		t.Errorf("delete_controller = %q, want 1", got)
	}
}

// Sysfs makes the keys of a controller readable by everybody.
func TestOnlyRootMayReadAKey(t *testing.T) {
	k := tree(t, map[string]string{"class/nvme/nvme3/dhchap_secret": "a key", "class/nvme/nvme3/dhchap_ctrl_secret": "another", "class/nvme/nvme4/state": "live"})
	for _, instance := range []int{3, 4} {
		if err := k.conceal(instance); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"dhchap_secret", "dhchap_ctrl_secret"} {
		info, err := os.Stat(k.path("class/nvme/nvme3/" + name))
		if err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, %v; want it for its owner alone", name, info.Mode(), err)
		}
	}
}

func TestOnlyRDMAFailsFastAndSaysSo(t *testing.T) {
	files := map[string]string{"class/nvme/nvme3/fast_io_fail_tmo": ""} // "off" in the kernel; a plain file keeps what is not overwritten
	addSubsystem(files, 3, 3, Live, nil)
	files["class/nvme/nvme3/transport"] = "rdma"
	k := tree(t, files)
	look := func() Controller {
		t.Helper()
		c, err := k.controllerNow("nvme3")
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	if c := look(); c.FailsFast || c.Transport != block.RDMA {
		t.Errorf("at first it is %+v, want that its I/O waits", c)
	}
	for _, on := range []bool{true, false} {
		if late, err := k.SetFailFast(look(), on); late || err != nil {
			t.Errorf("SetFailFast(%v) of a live controller = %v, %v, want in time", on, late, err)
		}
		if c := look(); c.FailsFast != on {
			t.Errorf("after SetFailFast(%v) it is %+v", on, c)
		}
	}
	for state, want := range map[string]bool{Resetting: false, Connecting: true} {
		if err := os.WriteFile(k.path("class/nvme/nvme3/state"), []byte(state+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		if late, err := k.SetFailFast(look(), true); late != want || err != nil {
			t.Errorf("SetFailFast of one that is %s: late %v, %v, want %v", state, late, err, want)
		}
	}
}
