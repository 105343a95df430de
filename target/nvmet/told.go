// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"fmt"
	"strings"
)

// Told is the configuration as text, for people. Of keys it says only that they are there.
func (c Config) Told() string {
	var b strings.Builder
	for _, p := range c.Ports {
		fmt.Fprintf(&b, "port %d at %v\n", p.ID, p.Portal)
		for _, l := range p.Subsystems {
			fmt.Fprintf(&b, "  subsystem %s\n", l.To)
		}
	}
	for _, s := range c.Subsystems {
		fmt.Fprintf(&b, "subsystem %s serial %q model %q cntlid %d-%d\n", s.NQN, s.Serial, s.Model, s.CntlidMin, s.CntlidMax)
		if s.AllowAnyHost {
			b.WriteString("  any host is allowed\n")
		}
		for _, l := range s.AllowedHosts {
			fmt.Fprintf(&b, "  host %s\n", l.To)
		}
		for _, n := range s.Namespaces {
			fmt.Fprintf(&b, "  namespace %d%s device %s uuid %v nguid %v enabled %v\n", n.NSID, alias(n), n.Device, n.UUID, n.NGUID, n.Enabled)
		}
	}
	for _, h := range c.Hosts {
		proof := "proves nothing"
		if k := c.Keys[h]; k != (Keys{}) {
			proof = "proves its identity"
		}
		fmt.Fprintf(&b, "host %s %s\n", h, proof)
	}
	return b.String()
}

func alias(n Namespace) string {
	if n.Alias == "" {
		return ""
	}
	return " as " + n.Alias
}
