// SPDX-License-Identifier: Apache-2.0

// Package host is the host end of NVMe over TCP: what nvme-tcp is in the Linux
// kernel, in Go. A namespace of a controller becomes a [block.Device].
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
// A [Controller] connects again, with growing pauses and for ever, until Cut or
// Close. IOs that were under way, and those submitted meanwhile, wait: they are
// neither failed nor acknowledged, and are sent (again) over the new connection,
// to the namespace that has the same UUID. If another one has its place they
// fail with [block.ErrGone]. After Cut everything fails with ErrGone.
//
// # What sending again can do
//
// A write that was under way when the connection was lost may still be on its way
// in the target, and land after it has been sent again, acknowledged and
// overwritten by a newer one. This end cannot prevent that: the old connection is
// reset, but what the target has taken is the target's. Weft's own target closes
// the hole: a host that connects again is answered only after its older
// controllers are drained (controller.SubsystemConfig.OnePerHost). With another
// target the window is as long as it takes to notice a dead connection; Linux's
// own host has the same. A user who cannot live with it cuts instead of waiting.
//
// A target that lost its power may have lost writes that it acknowledged and that
// no Flush made durable. [State.Session] grows with every connection, so that
// whoever relies on a volatile cache can see it.
//
// # What it does not do
//
// TLS, metadata, protection information, zoned and key-value command sets, and
// SGLs of several descriptors, which TCP does not need.
package host
