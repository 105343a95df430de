// SPDX-License-Identifier: Apache-2.0

package dm

import (
	"testing"

	"weft.dev/weft/proto/block"
)

func TestParametersOfForeignTargetsAreNotTold(t *testing.T) {
	device := func(name string, target Target) State {
		return State{Info{Name: name, UUID: "WEFT-1", Number: block.DeviceNumber{Major: 253, Minor: 4}, Live: true, Suspended: name == "b"}, Whole(1*block.MiB, target)}
	}
	got := Told([]State{
		device("a", Linear{Device: "8:0", Offset: 512}),
		device("b", Other{"crypt", "aes-xts-plain64 000102030405 0 8:0 0"}),
		device("c", ErrorTarget{}),
	})
	want := `a 253:4 uuid WEFT-1 open 0 events 0
  0 2048 linear 8:0 1
b 253:4 uuid WEFT-1 open 0 events 0 suspended
  0 2048 crypt [not told]
c 253:4 uuid WEFT-1 open 0 events 0
  0 2048 error
`
	if got != want {
		t.Errorf("told\n%s\nwant\n%s", got, want)
	}
}
