// SPDX-License-Identifier: Apache-2.0

package interop

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/target/backend"
)

// linuxHost is the kernel's nvme-tcp.
type linuxHost struct{}

func (linuxHost) ours() bool { return false }

// linuxSession is one controller per portal, with the devices over them.
type linuxSession struct {
	t    *testing.T
	name block.NQN
	dirs []string // /sys/class/nvme/nvme<n>
}

func (linuxHost) connect(t *testing.T, s served, o options) (session, error) {
	t.Helper()
	o = o.withDefaults(s)
	c := &linuxSession{t: t, name: s.nqn()}
	t.Cleanup(c.disconnect)
	for _, p := range o.portals {
		instance, err := fabricsConnect(optionLine(s.nqn(), p, o))
		if err != nil {
			return nil, err
		}
		c.dirs = append(c.dirs, fmt.Sprintf("/sys/class/nvme/nvme%d", instance))
	}
	return c, nil
}

func optionLine(nqn block.NQN, portal string, o options) string {
	address, service, _ := net.SplitHostPort(portal)
	line := fmt.Sprintf("transport=tcp,traddr=%s,trsvcid=%s,nqn=%s,hostnqn=%s,hostid=%s,nr_io_queues=%d,keep_alive_tmo=%d,reconnect_delay=1,ctrl_loss_tmo=-1",
		address, service, nqn, o.host.NQN, o.host.ID, o.queues, int(o.keepAlive.Seconds()))
	if o.headerDigest {
		line += ",hdr_digest"
	}
	if o.dataDigest {
		line += ",data_digest"
	}
	if !o.hostKey.IsZero() {
		line += ",dhchap_secret=" + o.hostKey.Representation()
	}
	if !o.controllerKey.IsZero() {
		line += ",dhchap_ctrl_secret=" + o.controllerKey.Representation()
	}
	return line
}

// fabricsConnect creates a controller and returns its number.
func fabricsConnect(line string) (instance int, err error) {
	fd, err := unix.Open("/dev/nvme-fabrics", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(line)); err != nil {
		return 0, err
	}
	var buf [256]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, err
	}
	var cntlid int
	_, err = fmt.Sscanf(string(buf[:n]), "instance=%d,cntlid=%d", &instance, &cntlid)
	return instance, err
}

func (linuxHost) discover(t *testing.T, portal string, id block.Host) map[entry]int {
	t.Helper()
	address, service, _ := net.SplitHostPort(portal)
	out := run(t, "nvme", "discover", "-t", "tcp", "-a", address, "-s", service, "-q", string(id.NQN), "-I", id.ID.String(), "-o", "json")
	var log struct {
		Records []struct {
			NQN     block.NQN `json:"subnqn"`
			Address string    `json:"traddr"`
			Service string    `json:"trsvcid"`
		} `json:"records"`
	}
	if strings.HasPrefix(strings.TrimSpace(out), "{") { // otherwise the output says that there is nothing
		if err := json.Unmarshal([]byte(out), &log); err != nil {
			t.Fatalf("%v in what nvme discover says:\n%s", err, out)
		}
	}
	found := map[entry]int{}
	for _, r := range log.Records {
		found[entry{r.NQN, net.JoinHostPort(r.Address, r.Service)}]++
	}
	return found
}

// run runs a program that must succeed, and returns its output.
func run(t *testing.T, name string, args ...string) string {
	t.Helper()
	out, err := tryRun(name, args...)
	if err != nil {
		t.Fatalf("%s %s: %v\n%s", name, strings.Join(args, " "), err, out)
	}
	return out
}

func tryRun(name string, args ...string) (string, error) {
	cmd := exec.Command(name, args...)
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return string(out) + stderr.String(), err
	}
	return string(out), nil
}

// lbaSize is the size of a logical block of a device.
func lbaSize(path string) int {
	n, _ := strconv.Atoi(text("/sys/block/" + filepath.Base(path) + "/queue/logical_block_size"))
	return n
}

// heads returns the subsystem's block devices, by NSID.
func (c *linuxSession) heads() map[uint32]string {
	found := map[uint32]string{}
	all, _ := filepath.Glob("/sys/block/nvme*n*")
	for _, dir := range all {
		if strings.Contains(filepath.Base(dir), "c") || text(dir+"/device/subsysnqn") != string(c.name) {
			continue // the hidden device of one path, or another subsystem's
		}
		if nsid, err := strconv.ParseUint(text(dir+"/nsid"), 10, 32); err == nil {
			found[uint32(nsid)] = filepath.Base(dir)
		}
	}
	return found
}

func (c *linuxSession) namespaces() map[uint32]int64 {
	sizes := map[uint32]int64{}
	for nsid, name := range c.heads() {
		if n, err := strconv.ParseInt(text("/sys/block/"+name+"/size"), 10, 64); err == nil {
			sizes[nsid] = 512 * n
		}
	}
	return sizes
}

func (c *linuxSession) path(nsid uint32) string {
	c.t.Helper()
	var path string
	eventually(c.t, fmt.Sprintf("namespace %d appears", nsid), func() bool {
		name, ok := c.heads()[nsid]
		path = "/dev/" + name
		_, err := os.Stat(path)
		return ok && err == nil && c.namespaces()[nsid] > 0
	})
	return path
}

func (c *linuxSession) device(nsid uint32) block.Device {
	c.t.Helper()
	f, err := backend.Open(c.path(nsid), backend.Options{})
	must(c.t, err)
	c.t.Cleanup(func() { f.Close() })
	if !f.Direct() {
		c.t.Fatalf("%s is not open for direct I/O", c.path(nsid))
	}
	return f
}

func (c *linuxSession) live(i int) bool { return text(c.dirs[i]+"/state") == "live" }

func (c *linuxSession) ana(i int, nsid uint32) anaState {
	all, _ := filepath.Glob(c.dirs[i] + "/nvme*c*n*")
	for _, dir := range all {
		if text(dir+"/nsid") == strconv.Itoa(int(nsid)) {
			return anaState(text(dir + "/ana_state"))
		}
	}
	return ""
}

func (c *linuxSession) queues(i int) int {
	n, _ := strconv.Atoi(text(c.dirs[i] + "/queue_count"))
	return n - 1 // the admin queue
}

func (c *linuxSession) reset(i int) {
	c.t.Helper()
	must(c.t, os.WriteFile(c.dirs[i]+"/reset_controller", []byte("1"), 0))
}

func (c *linuxSession) disconnect() {
	for _, dir := range c.dirs {
		_ = os.WriteFile(dir+"/delete_controller", []byte("1"), 0)
	}
	c.dirs = nil
}
