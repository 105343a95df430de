// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"weft.dev/weft/proto/pb"
)

// Legs are named as `weft explain` shows them, or by the beginning of an id.
func TestLegsAreNamedByPlaceOrID(t *testing.T) {
	v := &pb.Volume{Name: "db1", Legs: []*pb.Leg{
		{Id: "aaaa1111-0000-4000-8000-000000000000", Column: 0, Copy: 0}, {Id: "aaaa2222-0000-4000-8000-000000000000", Column: 0, Copy: 1},
		{Id: "bbbb1111-0000-4000-8000-000000000000", Column: 1, Copy: 0}, {Id: "bbbb2222-0000-4000-8000-000000000000", Column: 1, Copy: 1},
	}}
	for names, want := range map[string]string{
		"0.1": "aaaa2222", "0.1 1.0": "aaaa2222 bbbb1111", "BBBB2222": "bbbb2222", "1.1 aaaa1111": "bbbb2222 aaaa1111",
		"2.0": "not found", "0.1 aaaa1": "the same column", "aaaa": "2 ids begin with that", "cccc": "not found",
	} {
		legs, err := legsOf(v, strings.Fields(names))
		var got []string
		for _, l := range legs {
			got = append(got, l.GetId()[:8])
		}
		if err != nil {
			if !strings.Contains(err.Error(), want) {
				t.Errorf("legsOf(%s) = %v, want %q", names, err, want)
			}
			continue
		}
		if strings.Join(got, " ") != want {
			t.Errorf("legsOf(%s) = %v, want %s", names, got, want)
		}
	}
}
