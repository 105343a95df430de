// SPDX-License-Identifier: Apache-2.0

// Package host is the host end of NVMe over TCP, as nvme-tcp is in the Linux kernel. It
// makes a controller's namespace a [block.Device].
//
//	c, err := host.Connect(ctx, host.Config{
//		Portals: []string{"192.0.2.1:4420"}, Subsystem: nqn, Host: me,
//	})
//	d, err := c.Namespace(1, uuid)
//	d.Submit(&block.IO{Op: block.OpRead, Off: 0, Len: 4096, Data: p, Done: …})
//
//	Namespace.Submit ─▶ request ─┬▶ queue 1: writer ══TCP══▶ controller
//	   (splits by MDTS)          └▶ queue 2: reader ◀══TCP══
//	                     held ◀─ connection lost;  new connection ─▶ sent again
//
// # Losing the connection
//
// A [Controller] reconnects, with growing pauses and without limit, until Cut or Close. IOs
// in flight and new ones wait meanwhile: they neither fail nor complete. They are sent
// (again) over the new connection, to the namespace with the same UUID. If that NSID now
// belongs to another namespace, they fail with [block.ErrGone]. After Cut all IOs fail with
// ErrGone.
//
// # Risks of sending again
//
// A write in flight when the connection was lost may still be inside the target. It may
// land after the host has sent it again, the target has acknowledged it, and a newer write
// has replaced its data. The host cannot prevent that: it resets the old connection, but
// cannot call back what the target has received. Weft's own target closes the hole: it
// answers a host that reconnects only after draining the host's older controllers
// (controller.SubsystemConfig.PerHost), whichever of its portals the host comes through, and
// says so (Controller.Replaces). So Controller.Move is safe there: it continues through another
// portal when one falls silent. With another target the window lasts until that
// target notices the dead connection; Linux's own host has the same window. A user who
// cannot accept this calls Cut instead of waiting.
//
// A target that loses power may lose writes that it acknowledged and that no Flush made
// durable. [State.Session] grows with every connection, so that a user that relies on a
// volatile cache can detect this.
//
// # Not supported
//
// TLS, metadata, protection information, zoned and key-value command sets, and
// SGLs of several descriptors, which TCP does not need.
package host
