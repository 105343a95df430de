// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

func TestAnImageOfAnUnknownKindIsRefusedByName(t *testing.T) {
	s := grid(1, 2, 1, fixed(64))
	if _, err := s.Step(time.Unix(1, 0), CreateVolume{Name: "db1", Size: block.GiB, Seed: testSeed(1)}); err != nil {
		t.Fatal(err)
	}
	records := s.Records()
	if _, err := Load(records); err != nil {
		t.Fatalf("plain images: %v", err)
	}
	for i := range records {
		if bytes.Contains(records[i].Value, []byte(`"image"`)) {
			t.Errorf("%s spells a plain image out, which older stores do not", records[i].Key)
		}
		records[i].Value = bytes.Replace(records[i].Value, []byte(`"extents":[`), []byte(`"image":"WOVEN","extents":[`), 1)
	}
	if _, err := Load(records); err == nil || !strings.Contains(err.Error(), `image of kind "WOVEN": this version knows plain ones, those with checksums, and mapped ones`) {
		t.Errorf("a woven image: %v", err)
	}
}
