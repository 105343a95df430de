// SPDX-License-Identifier: Apache-2.0

package nvmetcp

// These checks apply to a PDU's header before anything else of the PDU is read or
// allocated. An FEI is an offset in the common header: 0 type, 1 flags, 2 HLEN, 3 PDO, 4
// PLEN.

func isIC(t Type) bool        { return t == TypeICReq || t == TypeICResp }
func isTermReq(t Type) bool   { return t == TypeH2CTermReq || t == TypeC2HTermReq }
func carriesData(t Type) bool { return t == TypeCapsuleCmd || t == TypeH2CData || t == TypeC2HData }

// headerSize is the HLEN that a PDU must have, or 0 if this end does not receive it.
func (r Role) headerSize(t Type) uint8 {
	if r == RoleController {
		switch t {
		case TypeICReq:
			return ICSize
		case TypeH2CTermReq:
			return TermReqSize
		case TypeCapsuleCmd:
			return CapsuleCmdSize
		case TypeH2CData:
			return DataHeaderSize
		}
		return 0
	}
	switch t {
	case TypeICResp:
		return ICSize
	case TypeC2HTermReq:
		return TermReqSize
	case TypeCapsuleResp:
		return CapsuleRespSize
	case TypeC2HData, TypeR2T:
		return DataHeaderSize
	}
	return 0
}

// headerDigest is the length of the digest behind a header of type t.
func (c *ReaderConfig) headerDigest(t Type) int {
	if c.HeaderDigest && !isIC(t) && !isTermReq(t) {
		return DigestSize
	}
	return 0
}

// check returns an error if a PDU with header h, whose bytes are raw, must not be received.
func (c *ReaderConfig) check(h Header, raw []byte) error {
	size := c.Role.headerSize(h.Type)
	switch {
	case size == 0:
		return fatal(FESInvalidHeader, 0, raw, "%v is not for this end of the connection", h.Type)
	case h.HLen != size:
		return fatal(FESInvalidHeader, 2, raw, "%v has header length %d, not %d", h.Type, h.HLen, size)
	}
	if err := c.checkFlags(h, raw); err != nil {
		return err
	}
	least := uint32(size) + uint32(c.headerDigest(h.Type))
	switch {
	case isTermReq(h.Type):
		if h.PLen < least || h.PLen > least+MaxTermReqData {
			return fatal(FESInvalidHeader, 4, raw, "%v has length %d", h.Type, h.PLen)
		}
	case h.PLen == least && h.Type != TypeH2CData && h.Type != TypeC2HData:
	case !carriesData(h.Type) || h.PLen <= least:
		return fatal(FESInvalidHeader, 4, raw, "%v has length %d, not %d", h.Type, h.PLen, least)
	default:
		return c.checkData(h, raw, least)
	}
	return nil
}

func (c *ReaderConfig) checkFlags(h Header, raw []byte) error {
	var want, may uint8
	if c.headerDigest(h.Type) != 0 {
		want |= FlagHeaderDigest
	}
	switch h.Type {
	case TypeH2CData:
		may = FlagLastPDU
	case TypeC2HData:
		may = FlagLastPDU | FlagSuccess
	}
	if carriesData(h.Type) && c.DataDigest {
		may |= FlagDataDigest // whether it must be set depends on whether there is data
	}
	if h.Flags&want != want || h.Flags&^(want|may) != 0 {
		return fatal(FESInvalidHeader, 1, raw, "%v has flags %#02x", h.Type, h.Flags)
	}
	if h.Flags&(FlagLastPDU|FlagSuccess) == FlagSuccess {
		return fatal(FESInvalidHeader, 1, raw, "%v has SUCCESS without LAST_PDU", h.Type)
	}
	return nil
}

// checkData checks a PDU that carries data; least is the smallest valid data offset.
func (c *ReaderConfig) checkData(h Header, raw []byte, least uint32) error {
	pdo, digest := uint32(h.PDO), uint32(0)
	if c.DataDigest {
		digest = DigestSize
	}
	limit := c.MaxData
	if h.Type == TypeCapsuleCmd {
		limit = c.MaxCapsuleData
	}
	switch {
	case c.DataDigest && h.Flags&FlagDataDigest == 0:
		return fatal(FESInvalidHeader, 1, raw, "%v has data without the digest that was agreed on", h.Type)
	case pdo < least || pdo%(4*(uint32(c.Align)+1)) != 0:
		return fatal(FESInvalidHeader, 3, raw, "%v has data offset %d", h.Type, pdo)
	case h.PLen <= pdo+digest:
		return fatal(FESInvalidHeader, 4, raw, "%v has length %d and data at %d", h.Type, h.PLen, pdo)
	case h.PLen-pdo-digest > limit:
		return fatal(FESLimitExceeded, 4, raw, "%v has %d bytes of data, at most %d are agreed on", h.Type, h.PLen-pdo-digest, limit)
	}
	return nil
}
