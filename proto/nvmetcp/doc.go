// SPDX-License-Identifier: Apache-2.0

// Package nvmetcp holds what both ends of an NVMe/TCP connection share: the PDUs of the TCP
// transport, the commands and completions inside them, and the data structures that
// commands transfer. The ends themselves are proto/nvmetcp/host and
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
// A [Reader] reads PDUs from a connection with as few system calls as possible; a [Writer]
// gathers many PDUs into one write. Neither allocates memory per PDU. [Command] and
// [Completion] are the bytes on the wire, with methods that get and set fields. Everything
// else is a struct with Append, which adds its bytes to a slice, and a Parse function,
// which checks every length before it uses it. The package starts no goroutine and shares
// no state. Two goroutines must not use one value at once unless its documentation allows
// it.
//
// Section numbers are those of NVM Express Base Specification 2.0 ("Base"), NVMe
// over TCP Transport Specification 1.0 ("TCP") and NVM Command Set Specification
// 1.0 ("NVM"). Lengths and counts that are 0's based on the wire are plain counts
// in structs and accessors.
package nvmetcp
