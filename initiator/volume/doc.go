// SPDX-License-Identifier: Apache-2.0

// Package volume decides for one volume of this host. Given the wanted state, what the host
// remembers and what one look has found, [Plan] lists the next steps, ordered so that stopping
// after any step is safe. It does no I/O, reads no clock, and knows neither device-mapper nor
// the user-space engine: it works on values of its own.
//
//	[Wanted]   what the manager wants: a layout, and a [Link] for each leg to use
//	[Memory]   what the host remembers, since looking cannot show it
//	[Seen]     what one look has found:
//	    ColumnSeen, CopySeen    each place of the volume, and the state of its copy
//	    LegSeen, WaySeen        how each leg answers, on each path to it
//	    PathSeen                the connections: each is a subsystem at a portal
//	    DeviceSeen              the block device
//	[Order]    a step; each kind has its own type
//	[Verdict]  the report for people and the manager
//
// A volume is kept by the kernel (package initiator) or by this process (package
// initiator/userspace). Both observe and carry out orders; [Capabilities] lists what only one
// of them can do.
//
// One rule comes first: a write that did not reach a leg is acknowledged only after the
// manager has durably recorded that leg as stale. So when a leg is lost, the manager records
// the loss, this host notes it on its disk, and only then are the leg's connections cut and
// I/O continues without it.
//
// The phases are stored nowhere; Plan derives them from what it sees:
//
//	            legs connected,                all copies equal,
//	            volume built                   device made
//	connecting ──────────────► equalizing ──────────────► serving ◄────► stalled
//	     │                          │                        │   a leg is lost and its loss
//	     │         detach wanted, or the epoch is over       │   not (yet) recorded; I/O is
//	     └──────────────────────────┴───────► detaching ◄────┴──────┘   held
//	                                              │
//	                    the device was closed and │ every leg had all writes
//	                 detached_unclean ◄───────────┴──────────► detached_clean
package volume
