// SPDX-License-Identifier: Apache-2.0

package blockdev

import (
	"bytes"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// The generic netlink family "nbd" (linux/nbd-netlink.h).
const (
	nbdCmdConnect     = 1
	nbdCmdDisconnect  = 2
	nbdCmdReconfigure = 3

	nbdAttrIndex       = 1
	nbdAttrSize        = 2
	nbdAttrBlockSize   = 3
	nbdAttrTimeout     = 4
	nbdAttrServerFlags = 5
	nbdAttrClientFlags = 6
	nbdAttrSockets     = 7
	nbdAttrDeadTimeout = 8
	nbdAttrBackend     = 10

	nbdSockItem = 1
	nbdSockFD   = 1

	nbdHasFlags        = 1 << 0
	nbdReadOnly        = 1 << 1
	nbdSendFlush       = 1 << 2
	nbdSendFUA         = 1 << 3
	nbdSendTrim        = 1 << 5
	nbdSendWriteZeroes = 1 << 6 // from Linux 6.12 on; ignored before
	nbdCanMultiConn    = 1 << 8
)

// nbdConfig is the configuration of a device for the driver.
type nbdConfig struct {
	geometry  block.Geometry
	sockets   []int
	mark      string
	resumable bool
}

// flags sets FUA only together with a cache, as the driver requires.
func (c nbdConfig) flags() uint64 {
	f := uint64(nbdHasFlags | nbdCanMultiConn)
	if c.geometry.ReadOnly {
		f |= nbdReadOnly
	}
	if c.geometry.VolatileCache {
		f |= nbdSendFlush | nbdSendFUA
	}
	if c.geometry.DiscardUnit > 0 {
		f |= nbdSendTrim | nbdSendWriteZeroes
	}
	return f
}

// nbdConnect sets up a free device, or a new one.
func nbdConnect(c nbdConfig) (index uint32, err error) {
	timeout, dead := uint64(nbdNever), uint64(0)
	if c.resumable {
		timeout, dead = 0, nbdNever
	}
	answers, err := nbdCall(nbdCmdConnect, append(c.attributes(),
		u64(nbdAttrBlockSize, uint64(c.geometry.BlockSize)),
		u64(nbdAttrTimeout, timeout),
		u64(nbdAttrDeadTimeout, dead),
		u64(nbdAttrServerFlags, c.flags()),
		u64(nbdAttrClientFlags, 0),
	)...)
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		if b := attribute(m, nbdAttrIndex); len(b) == 4 {
			return nl.NativeEndian().Uint32(b), nil
		}
	}
	return 0, errors.New("the driver did not say which device")
}

// nbdReconfigure gives a device new sockets in place of dead ones, and a size.
func nbdReconfigure(index uint32, c nbdConfig) error {
	_, err := nbdCall(nbdCmdReconfigure, append(c.attributes(), u32(nbdAttrIndex, index))...)
	return err
}

// nbdDisconnect ends a device: pending I/O fails.
func nbdDisconnect(index uint32) error {
	_, err := nbdCall(nbdCmdDisconnect, u32(nbdAttrIndex, index))
	if err != nil {
		return fmt.Errorf("disconnect nbd%d: %w", index, err)
	}
	return nil
}

func (c nbdConfig) attributes() []*nl.RtAttr {
	all := []*nl.RtAttr{
		u64(nbdAttrSize, uint64(c.geometry.Size)),
		nl.NewRtAttr(nbdAttrBackend, nl.ZeroTerminated(c.mark)),
	}
	if len(c.sockets) > 0 {
		list := nl.NewRtAttr(nbdAttrSockets|unix.NLA_F_NESTED, nil)
		for _, fd := range c.sockets {
			list.AddRtAttr(nbdSockItem|unix.NLA_F_NESTED, nil).AddRtAttr(nbdSockFD, nl.Uint32Attr(uint32(fd)))
		}
		all = append(all, list)
	}
	return all
}

func u32(kind int, v uint32) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint32Attr(v)) }
func u64(kind int, v uint64) *nl.RtAttr { return nl.NewRtAttr(kind, nl.Uint64Attr(v)) }

func nbdCall(command uint8, attributes ...*nl.RtAttr) ([][]byte, error) {
	family, err := nbdFamily()
	if err != nil {
		return nil, err
	}
	return genl(int(family), command, attributes...)
}

// nbdFamily returns the family's current number; the module may have been reloaded since the
// last call.
func nbdFamily() (uint16, error) {
	answers, err := genl(unix.GENL_ID_CTRL, unix.CTRL_CMD_GETFAMILY, nl.NewRtAttr(unix.CTRL_ATTR_FAMILY_NAME, nl.ZeroTerminated("nbd")))
	if err != nil {
		return 0, err
	}
	for _, m := range answers {
		if b := attribute(m, unix.CTRL_ATTR_FAMILY_ID); len(b) == 2 {
			return nl.NativeEndian().Uint16(b), nil
		}
	}
	return 0, errors.New("netlink family nbd has no number")
}

func genl(family int, command uint8, attributes ...*nl.RtAttr) ([][]byte, error) {
	req := nl.NewNetlinkRequest(family, unix.NLM_F_ACK)
	req.AddData(&nl.Genlmsg{Command: command, Version: 1})
	for _, a := range attributes {
		req.AddData(a)
	}
	return req.Execute(unix.NETLINK_GENERIC, 0)
}

// attribute finds an attribute of a generic netlink message.
func attribute(message []byte, kind uint16) []byte {
	if len(message) < nl.SizeofGenlmsg {
		return nil
	}
	all, err := nl.ParseRouteAttr(message[nl.SizeofGenlmsg:])
	if err != nil {
		return nil
	}
	for _, a := range all {
		if a.Attr.Type&nl.NLA_TYPE_MASK == kind {
			return bytes.Clone(a.Value)
		}
	}
	return nil
}
