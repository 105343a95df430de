// SPDX-License-Identifier: Apache-2.0

// Package controller is the controller end of NVMe over TCP: what nvmet is in
// the Linux kernel, in Go, over anything that is a block.Device.
//
//	Target ─┬─ Port  (a listener, ANA states) ──▶ connections, one goroutine each
//	        └─ Subsystem ─┬─ Namespace ──▶ block.Device
//	                      └─ controllers (an admin connection and I/O connections of one host)
//
// A [Target] holds subsystems and ports; a subsystem is reached through the
// ports that it is linked to. Everything can be changed while hosts are
// connected, from any goroutine; hosts learn of it by asynchronous events.
//
// # Fences
//
// What Weft needs above all of a target is to know when a host can no longer
// write. [Subsystem.Close], [Subsystem.RemoveNamespace] and OnePerHost give it:
// when they have returned, every command that came before has left the
// Devices, and none comes any more.
//
// # Hostile peers
//
// Every length is checked before memory is taken for it. What one connection
// may hold is bounded by [Config].MemoryPerConnection, how long it may take to
// introduce itself by HandshakeTimeout, and how long for one PDU by
// StallTimeout. A peer that breaks the protocol gets a Terminate Connection
// Request that says where, and is cut off; others notice nothing.
//
// # Specifications
//
// NVM Express Base 2.0, NVM Command Set 1.0, and NVMe/TCP Transport 1.0, as
// Linux's nvme-tcp host expects them.
package controller
