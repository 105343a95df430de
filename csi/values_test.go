// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"fmt"
	"maps"
	"math"
	"math/rand/v2"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"github.com/google/go-cmp/cmp"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/testing/protocmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

func TestPublishContextIsReadBack(t *testing.T) {
	for _, mode := range []pb.AttachMode{pb.AttachMode_ATTACH_MODE_EXCLUSIVE, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY, pb.AttachMode_ATTACH_MODE_SHARED_BLOCK} {
		want := publication{volume: "db1", epoch: 7, mode: mode}
		if got, err := parsePublication(want.context()); err != nil || got != want {
			t.Errorf("parsePublication(%v) = %v, %v; want %v", want.context(), got, err, want)
		}
	}
	good := publication{volume: "db1", epoch: 7, mode: pb.AttachMode_ATTACH_MODE_EXCLUSIVE}.context()
	for key := range good {
		for _, value := range []string{"", "UNSPECIFIED", "-1", "0"} {
			if key == publishVolume && value == "0" {
				continue // a name like any other
			}
			bad := maps.Clone(good)
			bad[key] = value
			if _, err := parsePublication(bad); err == nil || !strings.Contains(err.Error(), key) {
				t.Errorf("parsePublication(%v) = %v, want an error that names %s", bad, err, key)
			}
		}
	}
}

func TestNodeSegmentsAreNeverEmpty(t *testing.T) {
	got, _ := nodeSegments("c1", map[string]string{"node": "n1", "rack": "r1"})
	want := map[string]string{"topology.weft.dev/cluster": "c1", "topology.weft.dev/rack": "r1"}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodeSegments (-want +got):\n%s", diff)
	}
	if got, _ := nodeSegments("c1", nil); len(got) != 1 {
		t.Errorf("nodeSegments of a node without labels = %v, want the cluster", got)
	}
}

// A label given to a node by an operator must not prevent the kubelet from registering the driver.
func TestALabelThatKubernetesWouldRefuseIsNoSegment(t *testing.T) {
	long := strings.Repeat("x", 63)
	good := map[string]string{"rack": "r1", "a": "b", "A.b_c-9": "Z.b_c-9", long: long}
	labels := maps.Clone(good)
	maps.Copy(labels, map[string]string{
		"example.com/rack": "r1", "": "x", "-a": "x", "a-": "x", "ü": "x", "two words": "x", long + "x": "x", "a\n": "x",
		"owner": "team of Ops", "note": long + "x", "empty": "", "begins": "-x", "ends": "x.", "slash": "a/b", "line": "a\n",
		"RACK": "r2", "Cluster": "c2", "cluster": "c3",
	})
	delete(good, "rack") // of two that differ only in case, the first is taken
	good["RACK"] = "r2"
	want := map[string]string{topologyCluster: "c1"}
	for label, value := range good {
		want[topologyPrefix+label] = value
	}
	got, leftOut := nodeSegments("c1", labels)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodeSegments (-want +got):\n%s", diff)
	}
	if len(leftOut) != len(labels)-len(good) {
		t.Errorf("left out are %v, %d of %d labels; want %d", leftOut, len(leftOut), len(labels), len(labels)-len(good))
	}
}

func TestVolumeNamesAreValidAndDiffer(t *testing.T) {
	names := []string{
		"pvc-0b1c2d3e-0001-4000-8000-000000000001", "db1", "a.b_c-d",
		"DB1", "db 1", "Données/ops", "..", "", "-x", "ü", strings.Repeat("a", 63), strings.Repeat("a", 64), strings.Repeat("a", 128),
		strings.Repeat("a", 127) + "b", "0b1c2d3e-0001-4000-8000-000000000001", "volume", "\x00", "\x01", "a\n",
	}
	for _, name := range names {
		names = append(names, string(volumeName(name))) // a name that looks like a mapped one
	}
	random := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		b := make([]byte, random.IntN(129))
		for i := range b {
			b[i] = "aAbB09-._ /:%"[random.IntN(13)]
		}
		names = append(names, string(b))
	}
	from := map[block.VolumeName]string{}
	for _, name := range names {
		weft := volumeName(name)
		if _, err := block.ParseVolumeName(string(weft)); err != nil {
			t.Errorf("volumeName(%q) = %q: %v", name, weft, err)
		}
		if _, err := block.ParseVolumeID(string(weft)); err == nil {
			t.Errorf("volumeName(%q) = %q, which reads as a volume's id", name, weft)
		}
		if other, ok := from[weft]; ok && other != name {
			t.Errorf("volumeName is %q for both %q and %q", weft, name, other)
		}
		from[weft] = name
	}
	// A name that is the mapped form of another one must not be confused with it.
	for _, name := range []string{"DB1", strings.Repeat("a", 64)} {
		if m := volumeName(name); volumeName(string(m)) == m {
			t.Errorf("volumeName(%q) = %q, which is also the name of a volume called that", name, m)
		}
	}
	if got := volumeName("pvc-0b1c2d3e-0001-4000-8000-000000000001"); got != "pvc-0b1c2d3e-0001-4000-8000-000000000001" {
		t.Errorf("volumeName of a name that can be a volume's = %q, want it", got)
	}
}

// TestSizesStayWithinTheRange compares with the slow, obvious rule.
func TestSizesStayWithinTheRange(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	near := func() int64 {
		base := []int64{0, 4096, 1 << 20, 5 << 20, 1 << 30, 1 << 40}[random.IntN(6)]
		return max(0, base+int64(random.IntN(3)-1)*int64([]int{1, 4096, 1 << 20}[random.IntN(3)]))
	}
	for range 20000 {
		r := &csi.CapacityRange{RequiredBytes: near(), LimitBytes: near()}
		sizes, err := parseRange(r)
		if err != nil {
			if r.LimitBytes == 0 || r.LimitBytes >= r.RequiredBytes {
				t.Fatalf("parseRange(%v) = %v, want no error", r, err)
			}
			continue
		}
		size, err := sizes.choose()
		// The smallest possible size.
		least := max(uint64(r.RequiredBytes), uint64(minSize))
		least = (least + 4095) / 4096 * 4096
		possible := r.LimitBytes == 0 || least <= uint64(r.LimitBytes)
		switch {
		case !possible && status.Code(err) != codes.OutOfRange:
			t.Fatalf("choose(%v) = %v, %v; want OutOfRange", r, size, err)
		case possible && (err != nil || !sizes.holds(size) || size%sizeUnit != 0 || size < minSize):
			t.Fatalf("choose(%v) = %v, %v; want a size in the range", r, size, err)
		}
	}
}

func TestRangesThatCanNotBe(t *testing.T) {
	for _, test := range []struct {
		required, limit int64
		want            codes.Code
	}{
		{-1, 0, codes.InvalidArgument},
		{0, -1, codes.InvalidArgument},
		{2 << 30, 1 << 30, codes.InvalidArgument},
		{math.MaxInt64, 0, codes.OutOfRange},
	} {
		_, err := parseRange(&csi.CapacityRange{RequiredBytes: test.required, LimitBytes: test.limit})
		if status.Code(err) != test.want {
			t.Errorf("parseRange(%d to %d) = %v, want %v", test.required, test.limit, err, test.want)
		}
	}
	if size, err := (sizeRange{}).choose(); err != nil || size != block.GiB {
		t.Errorf("choose without a range = %v, %v; want 1GiB", size, err)
	}
	if size, err := (sizeRange{limit: 10*block.MiB + 5}).choose(); err != nil || size != 10*block.MiB {
		t.Errorf("choose with a limit of 10MiB and 5 bytes = %v, %v; want 10MiB", size, err)
	}
}

func TestParametersNameTheOffender(t *testing.T) {
	for _, test := range []struct{ key, value string }{
		{"copies", "0"}, {"copies", "many"}, {"copies", "-1"}, {"copies", "99"}, {"stripes", "9999"}, {"stripes", "1.5"},
		{"chunkSize", "3KiB"}, {"chunkSize", "big"}, {"pool", ""}, {"spread", ""}, {"transport", "rdma"}, {"thin", "yes"}, {"fsType", "ntfs"},
		{"Copies", "2"}, {"replicas", "2"}, {"csi.storage.k8s.io/other", "x"},
	} {
		_, err := parseParameters(map[string]string{"copies": "1", test.key: test.value})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), test.key) {
			t.Errorf("parseParameters(%s: %q) = %v, want InvalidArgument that names %s", test.key, test.value, err, test.key)
		}
	}
	p, err := parseParameters(map[string]string{
		"copies": "3", "stripes": "4", "chunkSize": "64KiB", "pool": "fast", "spread": "rack", "transport": "tcp", "fsType": "xfs", "authentication": "require", "integrity": "true", "thin": "true",
		"csi.storage.k8s.io/pvc/name": "data",
	})
	want := parameters{3, 4, 64 * block.KiB, "fast", "rack", "require", true, true, "tcp", "xfs", map[string]string{"csi.storage.k8s.io/pvc/name": "data"}}
	if diff := cmp.Diff(want, p, cmp.AllowUnexported(parameters{})); diff != "" || err != nil {
		t.Errorf("parseParameters = %v (-want +got):\n%s", err, diff)
	}
}

func TestMutableParametersAreLabelsAndWhatVolumeSetChanges(t *testing.T) {
	for _, key := range []string{"copies", "authentication", "rebuildRate", "scrubEvery", "scrubRate", "stripes", "labels.", "labels.csi.weft.dev/name", "labels.csi.storage.k8s.io/pvc/name", "labels.weft.dev/formatted", "iops"} {
		_, err := parseMutable(map[string]string{key: "x"})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), key) {
			t.Errorf("parseMutable(%s) = %v, want InvalidArgument that names it", key, err)
		}
	}
	got, err := parseMutable(map[string]string{"labels.tier": "gold", "labels.old": "", "csi.storage.k8s.io/pv/name": "pv"})
	if err != nil || !maps.Equal(got.SetLabels, map[string]string{"tier": "gold"}) || len(got.RemoveLabels) != 1 || got.RemoveLabels[0] != "old" {
		t.Errorf("parseMutable = %v, %v; want tier set and old removed", got, err)
	}
	got, err = parseMutable(map[string]string{"copies": "3", "authentication": "require", "rebuildRate": "100MiB", "scrubEvery": "7d", "scrubRate": "off"})
	want := &pb.UpdateVolumeRequest{
		Copies: 3, Authentication: "require", RebuildBytesPerSecond: new(uint64(100 << 20)),
		ScrubEverySeconds: new(uint64(7 * 24 * 3600)), ScrubBytesPerSecond: new(uint64(0)),
	}
	if diff := cmp.Diff(want, got, protocmp.Transform()); err != nil || diff != "" {
		t.Errorf("parseMutable = %v (-want +got):\n%s", err, diff)
	}
}

func capability(mode accessMode, fs string, raw bool) *csi.VolumeCapability {
	c := &csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: mode}}
	if raw {
		c.AccessType = &csi.VolumeCapability_Block{Block: &csi.VolumeCapability_BlockVolume{}}
	} else {
		c.AccessType = &csi.VolumeCapability_Mount{Mount: &csi.VolumeCapability_MountVolume{FsType: fs}}
	}
	return c
}

const (
	singleWriter = csi.VolumeCapability_AccessMode_SINGLE_NODE_SINGLE_WRITER
	multiWriter  = csi.VolumeCapability_AccessMode_SINGLE_NODE_MULTI_WRITER
	manyReaders  = csi.VolumeCapability_AccessMode_MULTI_NODE_READER_ONLY
	manyWriters  = csi.VolumeCapability_AccessMode_MULTI_NODE_MULTI_WRITER
	oneOfMany    = csi.VolumeCapability_AccessMode_MULTI_NODE_SINGLE_WRITER
)

func TestAccessModes(t *testing.T) {
	const exclusive, readOnly, shared = pb.AttachMode_ATTACH_MODE_EXCLUSIVE, pb.AttachMode_ATTACH_MODE_SHARED_READ_ONLY, pb.AttachMode_ATTACH_MODE_SHARED_BLOCK
	for _, test := range []struct {
		cap    *csi.VolumeCapability
		copies uint32
		want   pb.AttachMode // 0: InvalidArgument
	}{
		{capability(singleWriter, "ext4", false), 2, exclusive},
		{capability(multiWriter, "", true), 3, exclusive},
		{capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_WRITER, "xfs", false), 1, exclusive},
		{capability(csi.VolumeCapability_AccessMode_SINGLE_NODE_READER_ONLY, "", false), 1, exclusive},
		{capability(manyReaders, "ext4", false), 2, readOnly},
		{capability(manyReaders, "", true), 2, readOnly},
		{capability(manyWriters, "", true), 1, shared},
		{capability(manyWriters, "", true), 2, 0},
		{capability(manyWriters, "ext4", false), 1, 0},
		{capability(oneOfMany, "", true), 1, 0},
		{capability(csi.VolumeCapability_AccessMode_UNKNOWN, "", true), 1, 0},
		{capability(singleWriter, "ntfs", false), 1, 0},
		{&csi.VolumeCapability{AccessMode: &csi.VolumeCapability_AccessMode{Mode: singleWriter}}, 1, 0},
		{nil, 1, 0},
	} {
		got, err := attachMode(test.cap, test.copies)
		if got != test.want || (test.want == 0) != (status.Code(err) == codes.InvalidArgument) {
			t.Errorf("attachMode(%v, %d copies) = %v, %v; want %v", test.cap, test.copies, got, err, test.want)
		}
	}
}

func TestTopologyTerms(t *testing.T) {
	term := func(pairs ...string) *csi.Topology {
		segments := map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			segments["topology.weft.dev/"+pairs[i]] = pairs[i+1]
		}
		return &csi.Topology{Segments: segments}
	}
	requirement := func(terms ...*csi.Topology) *csi.TopologyRequirement {
		return &csi.TopologyRequirement{Requisite: terms, Preferred: terms}
	}
	for _, test := range []struct {
		name       string
		r          *csi.TopologyRequirement
		required   string // as returned by placement.text
		preferred  int
		accessible []*csi.Topology
	}{
		{"no terms", nil, "", 0, []*csi.Topology{term("cluster", "c1")}},
		{"nodes' own", requirement(term("cluster", "c1", "rack", "r1"), term("cluster", "c1", "rack", "r2")), "", 2, []*csi.Topology{term("cluster", "c1")}},
		{"the cluster alone", requirement(term("cluster", "c1")), "", 0, []*csi.Topology{term("cluster", "c1")}},
		{"an administrator's", requirement(term("rack", "r2"), term("rack", "r1")), "rack=r1|rack=r2", 2,
			[]*csi.Topology{term("cluster", "c1", "rack", "r2"), term("cluster", "c1", "rack", "r1")}},
		{"one of another cluster", requirement(term("cluster", "c2", "rack", "r1"), term("cluster", "c1", "rack", "r2")), "", 1, []*csi.Topology{term("cluster", "c1")}},
	} {
		p, err := parseTopology("c1", test.r)
		if err != nil || p.text() != test.required || len(p.preferred) != test.preferred {
			t.Errorf("%s: parseTopology = %q and %d preferred, %v; want %q and %d", test.name, p.text(), len(p.preferred), err, test.required, test.preferred)
		}
		if got := fmt.Sprint(p.accessible("c1")); got != fmt.Sprint(test.accessible) {
			t.Errorf("%s: accessible = %v, want %v", test.name, got, test.accessible)
		}
	}
	if _, err := parseTopology("c1", requirement(term("cluster", "c2"))); status.Code(err) != codes.ResourceExhausted {
		t.Errorf("parseTopology of another cluster's terms = %v, want ResourceExhausted", err)
	}
	foreign := &csi.TopologyRequirement{Requisite: []*csi.Topology{{Segments: map[string]string{"topology.kubernetes.io/zone": "z1"}}}}
	if _, err := parseTopology("c1", foreign); status.Code(err) != codes.InvalidArgument {
		t.Errorf("parseTopology of a foreign key = %v, want InvalidArgument", err)
	}
}

func TestTokensAreReadBackAndNoOthers(t *testing.T) {
	id, err := block.ParseVolumeID("0b1c2d3e-0001-4000-8000-000000000001")
	if err != nil {
		t.Fatal(err)
	}
	want := cursor{time.Unix(12, 345), id}
	if got, err := parseToken(want.token()); err != nil || got.compare(want) != 0 {
		t.Errorf("parseToken(%q) = %v, %v; want %v", want.token(), got, err, want)
	}
	for _, token := range []string{"invalid-token", "1", ".", "1.x", "x." + id.String(), " 1." + id.String(), "+1." + id.String(), want.token() + "x"} {
		if _, err := parseToken(token); status.Code(err) != codes.Aborted {
			t.Errorf("parseToken(%q) = %v, want Aborted", token, err)
		}
	}
}

// The provisioner passes a class's own keys to GetCapacity, but not to CreateVolume.
func TestCapacityIsAskedWithTheWholeClass(t *testing.T) {
	p, err := parseParameters(classParameters(map[string]string{
		"copies": "1", "csi.storage.k8s.io/fstype": "xfs", "csi.storage.k8s.io/provisioner-secret-name": "s", "csi.storage.k8s.io/pvc/name": "data",
	}))
	if err != nil || p.copies != 1 {
		t.Errorf("parseParameters of a class' = %+v, %v; want one copy", p, err)
	}
	if _, err := parseParameters(classParameters(map[string]string{"copys": "1"})); status.Code(err) != codes.InvalidArgument {
		t.Errorf("an unknown key = %v, want InvalidArgument", err)
	}
}

// The parameters of a StorageClass, their defaults and their bounds are those of the table of
// properties, and the reference lists just these.
func TestParametersAreThoseOfTheTable(t *testing.T) {
	plain, err := parseParameters(nil)
	if err != nil {
		t.Fatal(err)
	}
	_, unknown := parseParameters(map[string]string{"iops": "1"})
	reference, err := os.ReadFile("../docs/kubernetes.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, p := range block.Properties() {
		if p.Parameter == "" {
			continue
		}
		got, err := parseParameters(map[string]string{p.Parameter: p.Default})
		if p == block.PropertyFileSystem {
			got.fsType = "" // the node takes its default, unless the volume has a file system
		}
		if diff := cmp.Diff(plain, got, cmp.AllowUnexported(parameters{})); err != nil || diff != "" {
			t.Errorf("%s=%s, its default, makes a difference (%v):\n%s", p.Parameter, p.Default, err, diff)
		}
		bad := ""
		if p.Most > 0 {
			bad = fmt.Sprint(p.Most + 1)
		} else if p.Choices != "" {
			bad = "other"
		}
		if _, err := parseParameters(map[string]string{p.Parameter: bad}); err == nil || !strings.Contains(err.Error(), "parameters: "+p.Parameter) {
			t.Errorf("%s=%q: %v, want it refused by name", p.Parameter, bad, err)
		}
		if !strings.Contains(fmt.Sprint(unknown), p.Parameter) {
			t.Errorf("%v lacks %s", unknown, p.Parameter)
		}
		row := regexp.MustCompile("(?m)^\\| `" + p.Parameter + "`[^|]*\\| `" + p.Default + "` \\|")
		if !row.Match(reference) {
			t.Errorf("docs/kubernetes.md has no row for %s with default %s", p.Parameter, p.Default)
		}
	}
	if defaultFSType != block.PropertyFileSystem.Default {
		t.Errorf("a node makes %s, the table says %s", defaultFSType, block.PropertyFileSystem.Default)
	}
}
