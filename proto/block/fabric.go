// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"strconv"
	"strings"
)

// NQN is an NVMe Qualified Name (NVM Express Base 2.0, 4.7): at most 223 bytes.
type NQN string

// nqnPrefix begins the name of every subsystem that Weft exports. Subsystems with other
// names in nvmet are not ours, and Weft leaves them alone.
const nqnPrefix = "nqn.2026-11.dev.weft:"

// ParseNQN checks the length and form of s. nvmet does not: it truncates names
// over 223 bytes, and nothing can then connect to them.
func ParseNQN(s string) (NQN, error) {
	if len(s) > 223 {
		return "", fmt.Errorf("nqn %.40q…: %d bytes, at most 223 allowed", s, len(s))
	}
	if !strings.HasPrefix(s, "nqn.") || strings.ContainsAny(s, " \t\n,/\x00") {
		return "", fmt.Errorf("nqn %q: must begin with \"nqn.\" and hold no space, comma or slash", s)
	}
	return NQN(s), nil
}

// Ours reports whether n names a subsystem that Weft exports.
func (n NQN) Ours() bool { return strings.HasPrefix(string(n), nqnPrefix) }

// Host is an initiator's identity. Always pass both halves: since Linux 6.5 the kernel
// refuses a host NQN that comes with two different host IDs.
type Host struct {
	NQN NQN
	ID  UUID
}

// HostFromID is the identity of a machine whose host ID is id.
func HostFromID(id UUID) Host {
	return Host{NQN: NQN("nqn.2014-08.org.nvmexpress:uuid:" + id.String()), ID: id}
}

// Short is the first 8 hex digits of the host ID, for names.
func (h Host) Short() string { return h.ID.String()[:8] }

// SubsystemNQN names the subsystem through which one target exports its legs of a volume to
// one host at one epoch. Each epoch gets a new name, so a connection left over from an
// older epoch leads nowhere. The target's name is included so that a host never merges two
// targets' controllers into one subsystem.
func SubsystemNQN(v VolumeID, e Epoch, h Host, target NodeName) NQN {
	return SharedNQN(v, e, 0, h, target)
}

// SharedNQN is SubsystemNQN for an epoch that several hosts share. A host may detach and
// attach again within the epoch, so each grant is numbered and has a name of its own.
func SharedNQN(v VolumeID, e Epoch, grant uint64, h Host, target NodeName) NQN {
	number := ""
	if grant != 0 {
		number = fmt.Sprintf("-%d", grant)
	}
	return NQN(fmt.Sprintf("%s%v.%d%s.%s.%s", nqnPrefix, v, e, number, h.Short(), target))
}

// Grant returns the grant number in a name made by SharedNQN, or 0.
func (n NQN) Grant() uint64 {
	if _, _, _, _, err := ParseSubsystemNQN(n); err != nil {
		return 0
	}
	rest, _ := strings.CutPrefix(string(n), nqnPrefix)
	_, number, _ := strings.Cut(strings.SplitN(rest, ".", 4)[1], "-")
	grant, _ := strconv.ParseUint(number, 10, 64)
	return grant
}

// ParseSubsystemNQN reads a name made by SubsystemNQN or SharedNQN, except for the grant
// number (see Grant). The result host is the host's short form.
func ParseSubsystemNQN(n NQN) (v VolumeID, e Epoch, host string, target NodeName, err error) {
	rest, ok := strings.CutPrefix(string(n), nqnPrefix)
	parts := strings.SplitN(rest, ".", 4)
	if !ok || len(parts) != 4 || len(parts[2]) != 8 {
		return v, 0, "", "", fmt.Errorf("nqn %q: not of the form %s<volume>.<epoch>[-<grant>].<host>.<target>", n, nqnPrefix)
	}
	if v, err = ParseVolumeID(parts[0]); err != nil {
		return v, 0, "", "", fmt.Errorf("nqn %q: %w", n, err)
	}
	epoch, grant, shared := strings.Cut(parts[1], "-")
	number, err := strconv.ParseUint(epoch, 10, 64)
	if err != nil {
		return v, 0, "", "", fmt.Errorf("nqn %q: epoch: %w", n, err)
	}
	if _, err := strconv.ParseUint(grant, 10, 64); err != nil && shared {
		return v, 0, "", "", fmt.Errorf("nqn %q: grant: %w", n, err)
	}
	if target, err = ParseNodeName(parts[3]); err != nil {
		return v, 0, "", "", fmt.Errorf("nqn %q: %w", n, err)
	}
	return v, Epoch(number), parts[2], target, nil
}

// NamespaceUUID is the identity under which a leg is exported. It changes with the epoch
// and whenever the leg goes stale, so a host never sees the same identity twice.
func NamespaceUUID(l LegID, e Epoch, revision uint64) UUID {
	return derive("weft namespace", l.String(), strconv.FormatUint(uint64(e), 10), strconv.FormatUint(revision, 10))
}

// SerialNumber is the controller serial of a volume's subsystems: 20 hex digits of its id.
func SerialNumber(v VolumeID) string { return strings.ReplaceAll(v.String(), "-", "")[:20] }

// Transport is a fabric's transport protocol.
type Transport string

// The transports, spelled as nvmet (trtype) and nvme-fabrics (transport) spell them.
const (
	TCP  Transport = "tcp"
	RDMA Transport = "rdma"
)

// DefaultPort is the NVMe-oF port that IANA assigned (trsvcid).
const DefaultPort uint16 = 4420

// Portal is an address that a target listens on.
type Portal struct {
	Transport Transport
	Address   string // IP address, without brackets
	Port      uint16
	Rail      string // network rail of the address; may be empty
}

// String prints tcp://192.0.2.1:4420, with brackets around IPv6, and #rail if there is one.
func (p Portal) String() string {
	s := string(p.Transport) + "://" + p.HostPort()
	if p.Rail != "" {
		s += "#" + p.Rail
	}
	return s
}

// HostPort is the portal's address as package net takes it: 192.0.2.1:4420, with brackets around IPv6.
func (p Portal) HostPort() string {
	address := p.Address
	if strings.Contains(address, ":") {
		address = "[" + address + "]"
	}
	return fmt.Sprintf("%s:%d", address, p.Port)
}

// Lists is where the target of a kernel's portal answers for lists of writes: at the next port, over TCP.
// Ok is false if there is no next port.
func (p Portal) Lists() (lists Portal, ok bool) {
	p.Transport, p.Port = TCP, p.Port+1
	return p, p.Port != 0
}

// Process returns the portal at which a target whose portal p is the kernel's serves, from the agent's process,
// what the kernel cannot: a port that the kernel has for itself is not shared. ok is false if there is none.
func (p Portal) Process() (process Portal, ok bool) {
	p.Transport, p.Port = TCP, p.Port+2
	return p, p.Port > 1
}

// ServedBy is the part of a target in the kernel that serves a subsystem.
type ServedBy uint32

// The parts. Programs of earlier versions know SamePart alone, and take the others for it.
const (
	SamePart  ServedBy = iota // whichever it is
	InProcess                 // the agent's process, at Portal.Process
	InKernel
)

func (s ServedBy) String() string {
	switch s {
	case SamePart:
		return "the same part"
	case InProcess:
		return "the process"
	case InKernel:
		return "the kernel"
	}
	return fmt.Sprintf("part %d", uint32(s))
}

// ParsePortal reads the form that String prints. The transport defaults to tcp and the port
// to 4420.
func ParsePortal(text string) (Portal, error) {
	p := Portal{Transport: TCP, Port: DefaultPort}
	rest := text
	if t, r, ok := strings.Cut(rest, "://"); ok {
		p.Transport, rest = Transport(t), r
	}
	if p.Transport != TCP && p.Transport != RDMA {
		return Portal{}, fmt.Errorf("portal %q: transport must be tcp or rdma", text)
	}
	rest, p.Rail, _ = strings.Cut(rest, "#")
	port := ""
	switch {
	case strings.HasPrefix(rest, "["):
		end := strings.IndexByte(rest, ']')
		if end < 0 {
			return Portal{}, fmt.Errorf("portal %q: no closing ]", text)
		}
		p.Address, port = rest[1:end], strings.TrimPrefix(rest[end+1:], ":")
	case strings.Count(rest, ":") > 1:
		p.Address = rest
	default:
		p.Address, port, _ = strings.Cut(rest, ":")
	}
	if port != "" {
		n, err := strconv.ParseUint(port, 10, 16)
		if err != nil || n == 0 {
			return Portal{}, fmt.Errorf("portal %q: port must be 1 to 65535", text)
		}
		p.Port = uint16(n)
	}
	if p.Address == "" || strings.ContainsAny(p.Address, " ,/\n") {
		return Portal{}, fmt.Errorf("portal %q: no address", text)
	}
	return p, nil
}
