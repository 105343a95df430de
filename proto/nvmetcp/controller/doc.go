// SPDX-License-Identifier: Apache-2.0

// Package controller is the controller end of NVMe over TCP, as nvmet is in the Linux
// kernel. It serves anything that is a block.Device.
//
//	Target ─┬─ Port  (a listener, ANA states) ──▶ connections, one goroutine each
//	        └─ Subsystem ─┬─ Namespace ──▶ block.Device
//	                      └─ controllers (an admin connection and I/O connections of one host)
//
// A [Target] holds subsystems and ports. Hosts reach a subsystem through the ports that it
// is linked to. Everything can be changed from any goroutine while hosts are connected;
// asynchronous events notify the hosts.
//
// # Fences
//
// Weft's main demand on a target is to know when a host can no longer write.
// [Subsystem.Close], [Subsystem.RemoveNamespace] and PerHost provide this: when they
// have returned, all earlier commands have left the Devices, and no new ones can enter.
//
// # Hostile peers
//
// Every length is checked before memory is allocated for it. [Config] limits each
// connection: MemoryPerConnection its memory, HandshakeTimeout the time to connect, and
// StallTimeout the time for one PDU. A peer that breaks the protocol gets a Terminate
// Connection Request with the reason and is disconnected; other hosts are not affected.
// One whose first byte begins no PDU of a host is disconnected without a word.
//
// # Specifications
//
// NVM Express Base 2.0, NVM Command Set 1.0, and NVMe/TCP Transport 1.0, as
// Linux's nvme-tcp host expects them.
package controller
