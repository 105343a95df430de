// SPDX-License-Identifier: Apache-2.0

// Package guest runs inside the virtual machines of the scenarios. It has an init, which
// mounts the kernel's file systems and executes the test's requests from a virtio-serial
// port, and the messages that the two ends exchange.
//
//	test process                             guest
//	e2e/vm ── Request ──> /dev/vport?p1 ──> Server ──> commands, daemons, files, clock
//	       <── Reply ────                         <── their output and exit codes
//
// The port does not depend on the guest's network, so a test stays in control of a machine
// whose network it has cut. Each direction is one gob stream for the life of a boot.
// Requests run in parallel; replies carry the request's ID, and events (daemon logs, daemon
// exits, kernel messages) carry ID 0.
//
// Process 1 only starts the server and reaps orphans. If the server reaped them, it would
// take the exit codes that os/exec waits for. If the server ends, process 1 reports that on
// the console and resets the machine, so that a dead guest cannot look like one that
// passed.
package guest

import "io/fs"

// PortName is the name of the virtio-serial port that carries the messages.
const PortName = "weft.control"

// Serial numbers of the virtio disks that the guest knows by name.
const (
	// ToolsSerial is the read-only disk with programs, mounted at /tools.
	ToolsSerial = "weft-tools"
	// StateSerial is the small disk that survives boots, mounted at /var/lib/weft.
	StateSerial = "weft-state"
)

// Op is what a Request asks for.
type Op string

// The operations. The comments name the fields of Request that each one reads.
const (
	OpSetup  Op = "setup"  // Setup: name, addresses, modules; the first request of a boot
	OpRun    Op = "run"    // Argv Env Dir Data(stdin): run a command and stream its output
	OpStart  Op = "start"  // Name Argv Env Dir: start a daemon; its log and exit come as events
	OpSignal Op = "signal" // Target or Name, Signal: signal the process group
	OpRead   Op = "read"   // Path
	OpWrite  Op = "write"  // Path Data Mode Append
	OpClock  Op = "clock"  // returns the wall clock
	OpSet    Op = "set"    // Time: set the wall clock
	OpAdjust Op = "adjust" // Time: shift the wall clock by this much
	OpSync   Op = "sync"
	OpReset  Op = "reset" // sync when Sync is set, then reset the machine; no reply
)

// Request is one request of the test to the guest.
type Request struct {
	ID     uint64
	Op     Op
	Setup  *Setup
	Argv   []string
	Env    []string
	Dir    string
	Data   []byte
	Name   string // of a daemon
	Target uint64 // ID of a running OpRun
	Signal int
	Path   string
	Mode   fs.FileMode
	Append bool
	Time   int64 // nanoseconds since 1970
	Sync   bool
}

// Setup configures a booted machine as the test defined it.
type Setup struct {
	Hostname string
	Nets     []Net
	Modules  []string // "name" or "name parameter=value ..."
	Time     int64    // nanoseconds since 1970
	Kmsg     bool     // stream kernel messages as events
}

// Net is one network interface, found by its MAC address.
type Net struct {
	MAC  string
	Name string // the interface's new name
	CIDR string
	MTU  int
	RoCE string // an RDMA device in software of this name is made over it; "" for none
}

// Kind is the kind of a Reply.
type Kind string

// The kinds of Reply. Out, Err and Done answer a request; the rest are events.
const (
	KindHello Kind = "hello" // Text: kernel release; the server is ready
	KindOut   Kind = "out"   // Data
	KindErr   Kind = "err"   // Data
	KindDone  Kind = "done"  // Code, Text (an error), Time
	KindLog   Kind = "log"   // Name Data
	KindExit  Kind = "exit"  // Name Code Text
	KindKmsg  Kind = "kmsg"  // Data
)

// Reply is an answer to a request, or an event when ID is 0.
type Reply struct {
	ID   uint64
	Kind Kind
	Name string
	Data []byte
	Text string
	Code int
	Time int64 // nanoseconds since 1970, by the guest's clock
}
