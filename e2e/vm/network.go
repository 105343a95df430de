// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// Limits of a frame on QEMU's stream network, where each frame is preceded by its length.
const (
	minFrame = 14
	maxFrame = 68 << 10
)

// Network is an Ethernet switch between machines. The test can make it lose, delay and cut
// frames. It exists only in this process and does not touch the host's network. The harness
// assigns the addresses, 10.77.<number>.<place>.
//
// Faults are directed from one machine to another. They last until changed, also over
// reboots of the machines.
type Network struct {
	name   string
	number int // of the subnet
	mtu    int

	mu     sync.Mutex
	ports  map[string]*port           // by machine, those that run
	learnt map[[6]byte]*port          // by MAC address
	faults map[[2]string]*Fault       // by from, to
	delays map[[2]string]chan delayed // lines with a delay, by from, to
	held   map[[2]string][]held       // frames under Fault.Hold, by from, to
	rand   *rand.Rand
	closed chan struct{}
	hosts  int // addresses given
}

// Fault is a fault of the link from one machine to another. The zero value is a healthy
// link.
type Fault struct {
	Cut   bool
	Hold  bool // frames are kept until TakeHeld; what is kept then is lost
	Delay time.Duration
	Loss  float64 // share of frames lost, 0 to 1
}

type delayed struct {
	due   time.Time
	frame []byte
	to    *port
}

type held struct {
	frame []byte
	to    *port
}

// port is the port of a running machine.
type port struct {
	machine string
	conn    net.Conn
	out     chan []byte
	dropped atomic.Int64
}

func newNetwork(name string, number, mtu int, seed uint64) *Network {
	return &Network{
		name: name, number: number, mtu: mtu,
		ports:  make(map[string]*port),
		learnt: make(map[[6]byte]*port),
		faults: make(map[[2]string]*Fault),
		delays: make(map[[2]string]chan delayed),
		held:   make(map[[2]string][]held),
		rand:   rand.New(rand.NewPCG(seed, 0)),
		closed: make(chan struct{}),
	}
}

// address is the place-th address of the network.
func (n *Network) address(place int) string { return fmt.Sprintf("10.77.%d.%d", n.number, place) }

func (n *Network) nextPlace() int {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.hosts++
	return n.hosts
}

// Set sets the fault of the link from one machine to another. The zero Fault heals it.
func (n *Network) Set(from, to *Machine, f Fault) { n.set(from.name, to.name, f) }

// Cut cuts both directions between two machines. Frames vanish, and neither side is told.
func (n *Network) Cut(a, b *Machine) { n.SetBoth(a, b, Fault{Cut: true}) }

// Heal heals both directions between two machines.
func (n *Network) Heal(a, b *Machine) { n.SetBoth(a, b, Fault{}) }

// SetBoth sets the same fault for both directions between two machines.
func (n *Network) SetBoth(a, b *Machine, f Fault) {
	n.Set(a, b, f)
	n.Set(b, a, f)
}

// TakeHeld takes the frames that Fault.Hold keeps at this moment on the link from one machine to
// another, and returns a function that delivers them. Frames that come later are kept for the next call.
func (n *Network) TakeHeld(from, to *Machine) (deliver func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	key := [2]string{from.name, to.name}
	late := n.held[key]
	delete(n.held, key)
	return func() {
		for _, h := range late {
			h.to.send(h.frame)
		}
	}
}

// anyMachine stands for every other machine.
const anyMachine = "*"

// Isolate cuts a machine off from all others.
func (n *Network) Isolate(m *Machine) {
	n.set(m.name, anyMachine, Fault{Cut: true})
	n.set(anyMachine, m.name, Fault{Cut: true})
}

// Rejoin undoes Isolate. Faults between pairs stay.
func (n *Network) Rejoin(m *Machine) {
	n.set(m.name, anyMachine, Fault{})
	n.set(anyMachine, m.name, Fault{})
}

// HealAll heals every link.
func (n *Network) HealAll() {
	n.mu.Lock()
	defer n.mu.Unlock()
	clear(n.faults)
}

// Dropped returns how many frames were lost because a machine read too slowly.
func (n *Network) Dropped() int64 {
	n.mu.Lock()
	defer n.mu.Unlock()
	var total int64
	for _, p := range n.ports {
		total += p.dropped.Load()
	}
	return total
}

func (n *Network) set(from, to string, f Fault) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if f == (Fault{}) {
		delete(n.faults, [2]string{from, to})
		return
	}
	n.faults[[2]string{from, to}] = &f
}

// plug connects a machine's network device until conn ends.
func (n *Network) plug(machine string, conn net.Conn) {
	p := &port{machine: machine, conn: conn, out: make(chan []byte, 4096)}
	n.mu.Lock()
	n.ports[machine] = p
	n.mu.Unlock()
	go p.write(n.closed)
	n.read(p)
	n.unplug(p)
}

func (n *Network) unplug(p *port) {
	p.conn.Close()
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ports[p.machine] == p {
		delete(n.ports, p.machine)
	}
	for mac, at := range n.learnt {
		if at == p {
			delete(n.learnt, mac)
		}
	}
}

func (n *Network) close() { close(n.closed) }

// read reads frames from a machine until it disconnects.
func (n *Network) read(p *port) {
	r := bufio.NewReaderSize(p.conn, 256<<10)
	var head [4]byte
	for {
		if _, err := io.ReadFull(r, head[:]); err != nil {
			return
		}
		size := binary.BigEndian.Uint32(head[:])
		if size < minFrame || size > maxFrame {
			return
		}
		// Keep the length in front: it is written out with the frame.
		frame := make([]byte, 4+size)
		copy(frame, head[:])
		if _, err := io.ReadFull(r, frame[4:]); err != nil {
			return
		}
		n.forward(p, frame)
	}
}

// forward sends a frame to its destination, or to all machines if it is a broadcast or the
// destination is unknown.
func (n *Network) forward(from *port, frame []byte) {
	to, src := [6]byte(frame[4:10]), [6]byte(frame[10:16])
	n.mu.Lock()
	defer n.mu.Unlock()
	n.learnt[src] = from
	if p, ok := n.learnt[to]; ok && to[0]&1 == 0 {
		n.sendLocked(from, p, frame)
		return
	}
	for _, p := range n.ports {
		if p != from {
			n.sendLocked(from, p, frame)
		}
	}
}

func (n *Network) sendLocked(from, to *port, frame []byte) {
	f := n.faultLocked(from.machine, to.machine)
	if f.Cut || (f.Loss > 0 && n.rand.Float64() < f.Loss) {
		return
	}
	if f.Hold {
		key := [2]string{from.machine, to.machine}
		n.held[key] = append(n.held[key], held{frame, to})
		return
	}
	line, slow := n.delays[[2]string{from.machine, to.machine}]
	if f.Delay == 0 && !slow {
		to.send(frame)
		return
	}
	if !slow {
		line = make(chan delayed, 8192)
		n.delays[[2]string{from.machine, to.machine}] = line
		go n.runDelay(line)
	}
	select {
	case line <- delayed{time.Now().Add(f.Delay), frame, to}:
	default:
		to.dropped.Add(1)
	}
}

// faultLocked combines the faults that apply to a link.
func (n *Network) faultLocked(from, to string) Fault {
	var all Fault
	if len(n.faults) == 0 {
		return all
	}
	for _, key := range [][2]string{{from, to}, {from, anyMachine}, {anyMachine, to}} {
		f, ok := n.faults[key]
		if !ok {
			continue
		}
		all.Cut = all.Cut || f.Cut
		all.Hold = all.Hold || f.Hold
		all.Delay += f.Delay
		all.Loss = 1 - (1-all.Loss)*(1-f.Loss)
	}
	return all
}

// runDelay delays a link's frames and keeps their order. Once a link has had a delay, all
// its frames pass here, so that none overtakes another.
func (n *Network) runDelay(line chan delayed) {
	for {
		select {
		case <-n.closed:
			return
		case d := <-line:
			if wait := time.Until(d.due); wait > 0 {
				select {
				case <-n.closed:
					return
				case <-time.After(wait):
				}
			}
			d.to.send(d.frame)
		}
	}
}

// send queues a frame, and drops it if the queue is full, as a switch does.
func (p *port) send(frame []byte) {
	select {
	case p.out <- frame:
	default:
		p.dropped.Add(1)
	}
}

// write sends all waiting frames to the machine with one system call.
func (p *port) write(closed <-chan struct{}) {
	w := bufio.NewWriterSize(p.conn, 256<<10)
	for {
		select {
		case <-closed:
			return
		case frame := <-p.out:
			if _, err := w.Write(frame); err != nil {
				return
			}
		}
		if len(p.out) > 0 {
			continue
		}
		if err := w.Flush(); err != nil {
			return
		}
	}
}
