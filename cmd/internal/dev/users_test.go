// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/rogpeppe/go-internal/testscript"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
)

// The test runs its own program as another user, under this name.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"probe": probeMain})
}

// nobody is a user that owns nothing.
const nobody = 65534

// spoken collects the output of a running command, so that a test can read it.
type spoken struct {
	mu   sync.Mutex
	text bytes.Buffer
}

func (s *spoken) Write(p []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.Write(p)
}

func (s *spoken) String() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.text.String()
}

// await returns the text after a word at the beginning of a line.
func (s *spoken) await(t *testing.T, word string) string {
	t.Helper()
	for deadline := time.Now().Add(30 * time.Second); time.Now().Before(deadline); time.Sleep(20 * time.Millisecond) {
		for line := range strings.Lines(s.String()) {
			if _, rest, ok := strings.Cut(line, "weft dev: "+word); ok {
				return strings.TrimSpace(rest)
			}
		}
	}
	t.Fatalf("dev did not say %q:\n%s", word, s)
	return ""
}

// Only the user can reach weft dev: the manager and the drives' data, whatever the directory's mode
// was.
func TestOtherUsersReachNothingOfDev(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("needs root, to become another user")
	}
	defer syscall.Umask(syscall.Umask(0)) // the umask must not be the reason
	dir, err := os.MkdirTemp("", "weft")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(dir)
	place, probe := filepath.Join(dir, "dev"), filepath.Join(dir, "probe")
	program, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	for _, err := range []error{os.Chmod(dir, 0o755), os.Mkdir(place, 0o755), os.Chmod(place, 0o755), os.WriteFile(probe, program, 0o755)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	said := &spoken{}
	ctx, stop := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() {
		err := run(ctx, options{dir: place, driveSize: "1GiB", device: noBlockDevice, logLevel: "info"}, &cli.Globals{Stdout: said, Stderr: said, Version: "test"})
		if err != nil && !errors.Is(err, context.Canceled) {
			t.Error(err)
		}
	})
	defer running.Wait()
	defer stop()
	manager := said.await(t, "manager")
	said.await(t, "try:")
	served := attachOne(t, manager, "db1")

	for _, address := range listeners(t) {
		if !strings.HasPrefix(served, "nvme-tcp://"+address+"/") {
			t.Errorf("it listens for all users at %s", address)
		}
	}
	args := append(append(sockets(t, place), listeners(t)...), served)
	if got := tried(t, probe, 0, args); strings.Count(got, "reached") < 5 {
		t.Errorf("its own user reaches %s", got)
	}
	if got := tried(t, probe, nobody, args); got != "" {
		t.Errorf("another user reaches\n%s", got)
	}
}

// attachOne creates and attaches a volume and returns the path that shows it.
func attachOne(t *testing.T, manager, name string) string {
	t.Helper()
	conn, err := daemon.Dial(manager, daemon.TLSFiles{})
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	api := pb.NewManagerClient(conn)
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	if _, err := api.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: name, SizeBytes: 16 << 20, Copies: 2}); err != nil {
		t.Fatal(err)
	}
	node, err := cli.NodeOrThis("")
	if err != nil {
		t.Fatal(err)
	}
	for {
		a, err := api.Attach(ctx, &pb.AttachRequest{Volume: name, Node: node})
		if ctx.Err() != nil {
			t.Fatalf("%s is %v, %v", name, a, err)
		}
		if a.GetDevice() != "" {
			return a.GetDevice()
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// sockets lists the sockets in a directory.
func sockets(t *testing.T, dir string) (all []string) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type() == fs.ModeSocket {
			all = append(all, "unix:"+path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// listeners lists the addresses on which this process listens over TCP.
func listeners(t *testing.T) (all []string) {
	t.Helper()
	own := map[string]bool{}
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	for _, fd := range fds {
		if to, err := os.Readlink("/proc/self/fd/" + fd.Name()); err == nil {
			own[strings.TrimSuffix(strings.TrimPrefix(to, "socket:["), "]")] = true
		}
	}
	table, err := os.ReadFile("/proc/self/net/tcp")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		f := strings.Fields(line)
		if len(f) > 9 && f[3] == "0A" && own[f[9]] { // LISTEN
			address, port, _ := strings.Cut(f[1], ":")
			raw, _ := hex.DecodeString(address + port)
			all = append(all, fmt.Sprintf("%d.%d.%d.%d:%d", raw[3], raw[2], raw[1], raw[0], int(raw[4])<<8|int(raw[5])))
		}
	}
	return all
}

// tried runs the probe as a user and returns its output.
func tried(t *testing.T, probe string, user uint32, args []string) string {
	t.Helper()
	cmd := exec.Command(probe, args...)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("probe as user %d: %v\n%s", user, err, out)
	}
	return string(out)
}

// probeMain prints at which of its arguments it reaches something useful: a socket, a manager, or a
// volume.
func probeMain() {
	var random [16]byte
	rand.Read(random[:])
	me := block.HostFromID(block.UUIDFromRandom(random))
	for _, address := range os.Args[1:] {
		if path, ok := strings.CutPrefix(address, "unix:"); ok {
			if c, err := net.Dial("unix", path); err == nil {
				c.Close()
				fmt.Println("reached", address)
			}
			continue
		}
		probeTCP(address, me)
	}
}

func probeTCP(address string, me block.Host) {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	at, volume, whole := strings.Cut(strings.TrimPrefix(address, "nvme-tcp://"), "/")
	volume, own, _ := strings.Cut(volume, "?host=")
	if id, err := block.ParseUUID(own); err == nil && os.Geteuid() == 0 { // the user who was told the id
		me = block.HostFromID(id)
	}
	if found, err := host.DiscoverWith(ctx, host.Config{Portals: []string{at}, Host: me}); err == nil && len(found) > 0 {
		fmt.Println("reached an NVMe target at", address, found)
	}
	if whole {
		if c, err := host.Connect(ctx, host.Config{Portals: []string{at}, Subsystem: block.NQN(volume), Host: me}); err == nil {
			c.Cut()
			fmt.Println("reached", address)
		}
		return
	}
	conn, err := daemon.Dial(at, daemon.TLSFiles{})
	if err != nil {
		return
	}
	defer conn.Close()
	if _, err := pb.NewManagerClient(conn).GetStatus(ctx, &pb.GetStatusRequest{}); err == nil {
		fmt.Println("reached a manager at", address)
	}
}
