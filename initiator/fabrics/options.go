// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"bufio"
	"fmt"
	"io"
	"net/netip"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// Options are the options of a controller. Each field names the option of /dev/nvme-fabrics
// that it becomes.
//
// ctrl_loss_tmo is always -1 and fast_io_fail_tmo is not given: when the last path of a leg is
// lost, its I/O must wait until the loss is recorded, however long that takes. See SetFailFast for
// the exception.
type Options struct {
	Portal         block.Portal  // transport, traddr, trsvcid
	NQN            block.NQN     // nqn
	Host           block.Host    // hostnqn, hostid: always both, since the kernel would invent a missing one
	HostAddress    string        // host_traddr; empty lets routing choose
	HostInterface  string        // host_iface; tcp only
	IOQueues       int           // nr_io_queues; 0 leaves it to the kernel: one per CPU
	QueueSize      int           // queue_size, 16 to 1024; 0 is 128
	KeepAlive      time.Duration // keep_alive_tmo, whole seconds; 0 is 5 s
	ReconnectDelay time.Duration // reconnect_delay, whole seconds; 0 is 1 s
	DataDigest     bool          // data_digest; tcp only
	HostKey        dhchap.Key    // dhchap_secret; zero: none
	ControllerKey  dhchap.Key    // dhchap_ctrl_secret; zero: the target proves nothing
}

// Check says what is wrong with o, and names the field.
func (o Options) Check() error {
	if o.Portal.Transport != block.TCP && o.Portal.Transport != block.RDMA {
		return fmt.Errorf("transport %q: must be tcp or rdma", o.Portal.Transport)
	}
	if _, err := netip.ParseAddr(o.Portal.Address); err != nil {
		return fmt.Errorf("address: %w", err)
	}
	if _, err := block.ParseNQN(string(o.NQN)); err != nil {
		return err
	}
	if _, err := block.ParseNQN(string(o.Host.NQN)); err != nil {
		return fmt.Errorf("host: %w", err)
	}
	switch {
	case o.Portal.Port == 0:
		return fmt.Errorf("port: missing; the kernel's default for tcp is the discovery port")
	case o.Host.ID.IsZero():
		return fmt.Errorf("host id: missing")
	case o.IOQueues < 0:
		return fmt.Errorf("io queues %d: must not be negative", o.IOQueues)
	case o.QueueSize != 0 && (o.QueueSize < 16 || o.QueueSize > 1024):
		return fmt.Errorf("queue size %d: must be 16 to 1024", o.QueueSize)
	case strings.ContainsAny(o.HostAddress+o.HostInterface, ", \n="):
		return fmt.Errorf("host address %q, interface %q: must hold no comma, space or =", o.HostAddress, o.HostInterface)
	}
	return nil
}

// String is the line that /dev/nvme-fabrics takes, without the keys.
func (o Options) String() string { return o.line(dhchap.Key.String) }

// line is the line that /dev/nvme-fabrics takes, with keys as show has them.
func (o Options) line(show func(dhchap.Key) string) string {
	var b strings.Builder
	add := func(key, value string) {
		if value == "" {
			return
		}
		if b.Len() > 0 {
			b.WriteByte(',')
		}
		b.WriteString(key + "=" + value)
	}
	number := func(n int) string {
		if n == 0 {
			return ""
		}
		return strconv.Itoa(n)
	}
	add("transport", string(o.Portal.Transport))
	add("traddr", o.Portal.Address)
	add("trsvcid", strconv.Itoa(int(o.Portal.Port)))
	add("host_traddr", o.HostAddress)
	add("host_iface", o.HostInterface)
	add("nqn", string(o.NQN))
	add("hostnqn", string(o.Host.NQN))
	add("hostid", o.Host.ID.String())
	add("nr_io_queues", number(o.IOQueues))
	add("queue_size", number(o.QueueSize))
	add("keep_alive_tmo", number(seconds(o.KeepAlive)))
	add("reconnect_delay", strconv.Itoa(max(seconds(o.ReconnectDelay), 1)))
	add("ctrl_loss_tmo", "-1")
	if !o.HostKey.IsZero() {
		add("dhchap_secret", show(o.HostKey))
	}
	if !o.ControllerKey.IsZero() {
		add("dhchap_ctrl_secret", show(o.ControllerKey))
	}
	if o.DataDigest {
		b.WriteString(",data_digest")
	}
	return b.String()
}

// seconds rounds up: the kernel counts whole seconds, and 0 means "none" or "default".
func seconds(d time.Duration) int {
	return int((d + time.Second - 1) / time.Second)
}

// Features are the options that this kernel's /dev/nvme-fabrics lists.
type Features map[string]bool

// authenticates is a function of the kernel's NVMe host that is there only if it was built with
// NVME_HOST_AUTH (before 6.7: NVME_AUTH). Linux 6.1 lists the options for the keys, and takes them,
// without being able to use them.
const authenticates = "nvme_auth_negotiate"

// Authenticate reports whether a kernel with these options and symbols (/proc/kallsyms) can prove
// its identity to targets.
func (f Features) Authenticate(symbols io.Reader) bool {
	if !f["dhchap_secret"] || !f["dhchap_ctrl_secret"] {
		return false
	}
	lines := bufio.NewScanner(symbols)
	for lines.Scan() {
		if words := strings.Fields(lines.Text()); len(words) > 2 && words[2] == authenticates {
			return true
		}
	}
	return false
}

// parseFeatures reads "instance=-1,cntlid=-1,transport=%s,traddr=%s,…".
func parseFeatures(text string) Features {
	f := Features{}
	for word := range strings.SplitSeq(strings.TrimSpace(text), ",") {
		if key, _, _ := strings.Cut(word, "="); key != "" {
			f[key] = true
		}
	}
	delete(f, "instance")
	delete(f, "cntlid")
	return f
}

// missing lists the options of o that the kernel does not know. Kernels before 5.19 list no
// options; there only trying tells.
func (f Features) missing(o Options) []string {
	if len(f) == 0 {
		return nil
	}
	var unknown []string
	for word := range strings.SplitSeq(o.String(), ",") {
		if key, _, _ := strings.Cut(word, "="); !f[key] {
			unknown = append(unknown, key)
		}
	}
	return unknown
}
