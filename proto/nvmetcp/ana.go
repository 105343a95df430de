// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import "fmt"

// ANAState is the state of a controller's access to a namespace (Base, 8.1.1).
type ANAState uint8

// The states.
const (
	ANAStateOptimized    ANAState = 0x01
	ANAStateNonOptimized ANAState = 0x02
	ANAStateInaccessible ANAState = 0x03
	ANAStateLost         ANAState = 0x04
	ANAStateChange       ANAState = 0x0f
)

func (s ANAState) String() string {
	switch s {
	case ANAStateOptimized:
		return "optimized"
	case ANAStateNonOptimized:
		return "non-optimized"
	case ANAStateInaccessible:
		return "inaccessible"
	case ANAStateLost:
		return "persistent-loss"
	case ANAStateChange:
		return "change"
	}
	return fmt.Sprintf("ANA state %#x", uint8(s))
}

// Status is the status of commands in this state; Success if they are served.
func (s ANAState) Status() Status {
	switch s {
	case ANAStateOptimized, ANAStateNonOptimized:
		return Success
	case ANAStateLost:
		return ANAPersistentLoss
	case ANAStateChange:
		return ANATransition
	}
	return ANAInaccessible
}

// ANAGroup is one group of LogANA.
type ANAGroup struct {
	ID         uint32
	Changes    uint64
	State      ANAState
	Namespaces []uint32 // empty if only groups were asked for
}

// ANALog is LogANA (Base, figure 216).
type ANALog struct {
	Changes uint64
	Groups  []ANAGroup
}

const (
	anaHeaderSize = 16
	anaGroupSize  = 32
)

// Append adds the log to b.
func (a ANALog) Append(b []byte) []byte {
	b = le.AppendUint64(b, a.Changes)
	b = le.AppendUint16(b, uint16(len(a.Groups)))
	b = append(b, make([]byte, 6)...)
	for _, g := range a.Groups {
		b = le.AppendUint32(b, g.ID)
		b = le.AppendUint32(b, uint32(len(g.Namespaces)))
		b = le.AppendUint64(b, g.Changes)
		b = append(b, byte(g.State))
		b = append(b, make([]byte, 15)...)
		for _, id := range g.Namespaces {
			b = le.AppendUint32(b, id)
		}
	}
	return b
}

// ParseANALog parses a complete log and ignores any bytes after it.
func ParseANALog(b []byte) (ANALog, error) {
	if len(b) < anaHeaderSize {
		return ANALog{}, short("ANA log", len(b), anaHeaderSize)
	}
	a := ANALog{Changes: le.Uint64(b)}
	n := int(le.Uint16(b[8:]))
	b = b[anaHeaderSize:]
	if n*anaGroupSize > len(b) {
		return a, short("ANA log", len(b), n*anaGroupSize)
	}
	for range n {
		if len(b) < anaGroupSize {
			return a, short("ANA group", len(b), anaGroupSize)
		}
		g := ANAGroup{ID: le.Uint32(b), Changes: le.Uint64(b[8:]), State: ANAState(b[16] & 15)}
		count := uint64(le.Uint32(b[4:]))
		b = b[anaGroupSize:]
		if count*4 > uint64(len(b)) {
			return a, fmt.Errorf("parse ANA log: group %d has %d namespaces, %d bytes are left", g.ID, count, len(b))
		}
		for i := range int(count) {
			g.Namespaces = append(g.Namespaces, le.Uint32(b[4*i:]))
		}
		b = b[4*count:]
		a.Groups = append(a.Groups, g)
	}
	return a, nil
}
