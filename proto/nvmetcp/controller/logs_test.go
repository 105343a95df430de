// SPDX-License-Identifier: Apache-2.0

package controller

import (
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

// nvme-cli reads as much of the ANA log as Identify announces, in pieces of 4 KiB.
func TestTheANALogIsReadInPiecesToItsEnd(t *testing.T) {
	w := newWorld(t)
	p := w.admin(hostA)
	var log []byte
	for at := 0; at < anaLogSize; at += 4096 {
		piece := make([]byte, min(4096, anaLogSize-at))
		get := nvmetcp.GetLog{ID: nvmetcp.LogANA, Length: uint64(len(piece)), Offset: uint64(at)}
		p.must(p.do(get.Command(), nil, piece))
		log = append(log, piece...)
	}
	got, err := nvmetcp.ParseANALog(log)
	if err != nil || len(got.Groups) != 1 || len(got.Groups[0].Namespaces) != 1 {
		t.Errorf("%+v %v, want one group with one namespace", got, err)
	}
	get := nvmetcp.GetLog{ID: nvmetcp.LogANA, Length: 4, Offset: anaLogSize + 4}
	p.want(p.do(get.Command(), nil, make([]byte, 4)), nvmetcp.InvalidField)
}
