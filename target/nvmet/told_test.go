// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"testing"

	"weft.dev/weft/proto/block"
)

func TestKeysAreNotTold(t *testing.T) {
	c := Config{
		Ports:      []Port{{ID: 7, Portal: block.Portal{Transport: block.TCP, Address: "192.0.2.1", Port: 4420}, Subsystems: []Link{{"s", "s"}}}},
		Subsystems: []Subsystem{{NQN: "s", Serial: "1", Model: Model, CntlidMin: 1, CntlidMax: 9, AllowedHosts: []Link{{"h", "h"}}, Namespaces: []Namespace{{NSID: 2, Alias: "0x2", Device: "/dev/dm-1", Enabled: true}}}},
		Hosts:      []block.NQN{"g", "h"},
		Keys:       map[block.NQN]Keys{"h": {Host: block.NewSecret([]byte("DHHC-1:01:secret:"))}},
	}
	want := `port 7 at tcp://192.0.2.1:4420
  subsystem s
subsystem s serial "1" model "Weft" cntlid 1-9
  host h
  namespace 2 as 0x2 device /dev/dm-1 uuid 00000000-0000-0000-0000-000000000000 nguid 00000000-0000-0000-0000-000000000000 enabled true
host g proves nothing
host h proves its identity
`
	if got := c.Told(); got != want {
		t.Errorf("told\n%s\nwant\n%s", got, want)
	}
}
