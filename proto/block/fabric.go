// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"strconv"
	"strings"
)

// NQN is an NVMe Qualified Name (NVM Express Base 2.0, 4.7): at most 223 bytes.
type NQN string

// nqnPrefix begins the name of every subsystem that Weft exports. What does not
// begin so in nvmet was made by somebody else and is left alone.
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

// Host is an initiator's identity. Both halves are always given together: from
// Linux 6.5 on, a host NQN must keep one and the same host ID.
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

// SubsystemNQN names the subsystem through which one target exports its legs of
// a volume to one host at one epoch. A new epoch is a new name, so whatever an
// older one still has open leads nowhere. The target is part of the name, so
// that a host never merges two targets' controllers into one subsystem.
func SubsystemNQN(v VolumeID, e Epoch, h Host, target NodeName) NQN {
	return SharedNQN(v, e, 0, h, target)
}

// SharedNQN is SubsystemNQN where several hosts share an epoch. A host may leave it
// and be let in again, so each grant has a number of its own and with it a new name.
func SharedNQN(v VolumeID, e Epoch, grant uint64, h Host, target NodeName) NQN {
	number := ""
	if grant != 0 {
		number = fmt.Sprintf("-%d", grant)
	}
	return NQN(fmt.Sprintf("%s%v.%d%s.%s.%s", nqnPrefix, v, e, number, h.Short(), target))
}

// Grant is the number of the grant that SharedNQN put into a name; 0 if there is none.
func (n NQN) Grant() uint64 {
	if _, _, _, _, err := ParseSubsystemNQN(n); err != nil {
		return 0
	}
	rest, _ := strings.CutPrefix(string(n), nqnPrefix)
	_, number, _ := strings.Cut(strings.SplitN(rest, ".", 4)[1], "-")
	grant, _ := strconv.ParseUint(number, 10, 64)
	return grant
}

// ParseSubsystemNQN reads what SubsystemNQN or SharedNQN made, but for the number of
// the grant; host is the host's short form.
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

// NamespaceUUID is the identity under which a leg is exported: a host never
// finds the same one twice, across epochs or after the leg went stale.
func NamespaceUUID(l LegID, e Epoch, revision uint64) UUID {
	return derive("weft namespace", l.String(), strconv.FormatUint(uint64(e), 10), strconv.FormatUint(revision, 10))
}

// SerialNumber is the controller serial of a volume's subsystems: 20 hex digits of its id.
func SerialNumber(v VolumeID) string { return strings.ReplaceAll(v.String(), "-", "")[:20] }

// Transport is the fabric a portal speaks.
type Transport string

// The transports that nvmet and nvme-fabrics know by these names (trtype, transport).
const (
	TCP  Transport = "tcp"
	RDMA Transport = "rdma"
)

// DefaultPort is the NVMe-oF port that IANA assigned (trsvcid).
const DefaultPort uint16 = 4420

// Portal is where a target listens.
type Portal struct {
	Transport Transport
	Address   string // IP address, without brackets
	Port      uint16
	Rail      string // the network rail it sits on; may be empty
}

// String prints tcp://192.0.2.1:4420, with brackets around IPv6, and #rail if there is one.
func (p Portal) String() string {
	address := p.Address
	if strings.Contains(address, ":") {
		address = "[" + address + "]"
	}
	s := fmt.Sprintf("%s://%s:%d", p.Transport, address, p.Port)
	if p.Rail != "" {
		s += "#" + p.Rail
	}
	return s
}

// ParsePortal reads what String prints; the transport and the port may be left
// out and are then tcp and 4420.
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
