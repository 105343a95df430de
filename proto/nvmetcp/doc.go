// SPDX-License-Identifier: Apache-2.0

// Package nvmetcp is what both ends of an NVMe/TCP connection share: the PDUs of
// the TCP transport, the commands and completions that they carry, and the data
// structures that commands move. The ends themselves are proto/nvmetcp/host and
// proto/nvmetcp/controller; proto/nvmetcp/dhchap authenticates them.
//
//	host                                    controller
//	ICReq            ───────────────────▶
//	                 ◀───────────────────   ICResp
//	CapsuleCmd(Read) ───────────────────▶
//	                 ◀───────────────────   C2HData … C2HData, CapsuleResp
//	CapsuleCmd(Write)───────────────────▶
//	                 ◀───────────────────   R2T
//	H2CData          ───────────────────▶
//	                 ◀───────────────────   CapsuleResp
//
// A [Reader] takes PDUs from a connection with as few reads as can be, a [Writer]
// gathers many PDUs into one write; neither takes memory per PDU. [Command] and
// [Completion] are the bytes that travel, with methods that read and set fields.
// Everything else is a struct with Append, which adds its bytes to a slice, and a
// Parse function, which checks every length before it uses it. All of it is pure:
// no goroutine is started here and no state is shared, and no value may be used
// by two goroutines at once unless its text says so.
//
// Section numbers are those of NVM Express Base Specification 2.0 ("Base"), NVMe
// over TCP Transport Specification 1.0 ("TCP") and NVM Command Set Specification
// 1.0 ("NVM"). Lengths and counts that are 0's based on the wire are plain counts
// in structs and accessors.
package nvmetcp
