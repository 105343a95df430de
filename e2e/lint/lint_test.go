// SPDX-License-Identifier: Apache-2.0

// Package lint holds the structure of the tree: who may import whom, what the
// pure packages may not touch, how large packages and functions are, and that each
// package and each exported name says what it is.
package lint

import (
	"encoding/json"
	"fmt"
	"go/parser"
	"go/token"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
)

const module = "weft.dev/weft"

// arrows lists, for each part of the tree, the parts of Weft that it may
// import: cmd → components → raid → proto/block. Components never import one
// another; what one needs of another is in proto.
var arrows = map[string][]string{
	"proto/block":        {},
	"proto/pb":           {},
	"proto/access":       {"proto/block", "proto/pb"},
	"proto/agentlock":    {},
	"proto/authority":    {"proto/block", "proto/durable"},
	"proto/beat":         {},
	"proto/durable":      {},
	"proto/figures":      {},
	"proto/parts":        {"proto/pb"},
	"proto/pki":          {"proto/access", "proto/block", "proto/durable"},
	"proto/pages":        {"proto/pb"},
	"proto/support":      {"proto/pb"},
	"proto/managers":     {"proto/pb"},
	"proto/metric":       {},
	"raid":               {"proto/block"},
	"raid/pace":          {"proto/block"},
	"raid/dm":            {"proto/block", "proto/figures"},
	"raid/dm/mirror":     {"raid", "raid/dm", "proto/block"}, // raid/dm: its plain values
	"volmgr/image":       {"proto/block"},
	"volmgr/evidence":    {"volmgr/image", "proto/block"},
	"volmgr/placement":   {"volmgr/image", "proto/block"},
	"volmgr/rebalance":   {"proto/block"},
	"volmgr/audit":       {},
	"volmgr/bundle":      {},
	"volmgr/backoff":     {"volmgr/cow", "proto/block"},
	"volmgr/cow":         {},
	"volmgr/trust":       {},
	"volmgr/event":       {},
	"volmgr/health":      {},
	"volmgr/keys":        {"proto/block"},
	"volmgr/labelset":    {},
	"volmgr/drivepolicy": {"proto/block"},
	"volmgr/cluster":     {"volmgr/audit", "volmgr/backoff", "volmgr/cow", "volmgr/drivepolicy", "volmgr/event", "volmgr/evidence", "volmgr/health", "volmgr/image", "volmgr/keys", "volmgr/labelset", "volmgr/placement", "volmgr/rebalance", "volmgr/trust", "proto/block"},
	"volmgr/store":       {"volmgr/cluster", "volmgr/quorum", "proto/block", "proto/durable"},
	"volmgr/replicated":  {"volmgr/cluster", "volmgr/quorum", "volmgr/quorum/member", "volmgr/quorum/wal", "volmgr/store", "proto/beat", "proto/block"},
	"volmgr/quorum":      {"volmgr/quorum/wal"}, // its plain values
	"volmgr/quorum/wal":  {"proto/block", "proto/durable"},
	"volmgr":             {"volmgr/audit", "volmgr/cluster", "volmgr/drivepolicy", "volmgr/event", "volmgr/evidence", "volmgr/health", "volmgr/image", "volmgr/labelset", "volmgr/live", "volmgr/quorum", "volmgr/quorum/member", "volmgr/quorum/transport", "volmgr/replicated", "volmgr/store", "volmgr/trust", "proto/access", "proto/beat", "proto/block", "proto/durable", "proto/figures", "proto/nvmetcp/dhchap", "proto/parts", "proto/pb", "proto/pki", "volmgr/bundle", "proto/metric", "raid"},
	"target/drive":       {"proto/block", "proto/figures", "proto/nvmetcp", "proto/pb"},
	"target/backend":     {"proto/block"},
	"target/integrity":   {"proto/block"},
	"target/mapped":      {"proto/block"},
	"target/treecheck":   {"proto/block"},                                               // not target/mapped: it checks what that writes
	"target/nvmet":       {"target/nvmet/memfs", "proto/nvmetcp/dhchap", "proto/block"}, // memfs: in nvmettest
	"proto/uevent":       {},
	"target/written":     {"raid/checkpoint", "proto/block"},
	"target/discovery":   {"target/userspace", "proto/nvmetcp", "proto/nvmetcp/controller", "proto/nvmetcp/dhchap", "proto/block", "proto/pb"},
	"target":             {"target/discovery", "target/drive", "target/mapped", "target/nvmet", "target/userspace", "target/written", "proto/figures", "proto/figures/wire", "proto/nvmetcp/dhchap", "proto/nvmetcp/host", "proto/uevent", "raid/checkpoint", "raid/dm", "proto/agentlock", "proto/authority", "proto/beat", "proto/block", "proto/managers", "proto/parts", "proto/pb", "proto/support", "proto/metric"},
	"initiator/fabrics":  {"initiator/uring", "proto/block", "proto/durable", "proto/nvmetcp", "proto/nvmetcp/dhchap", "proto/uevent"},
	"initiator/ahead":    {"raid", "raid/dm/mirror", "raid/pace", "proto/block"},
	"initiator/lists":    {"raid/checkpoint", "proto/block", "proto/nvmetcp", "proto/nvmetcp/dhchap", "proto/nvmetcp/host"},
	"initiator/compare":  {"initiator/volume", "proto/block", "raid"},
	"initiator":          {"initiator/ahead", "initiator/compare", "initiator/fsfreeze", "initiator/keeper", "initiator/lists", "initiator/volume", "initiator/fabrics", "raid/checkpoint", "proto/nvmetcp", "proto/nvmetcp/host", "initiator/userspace", "initiator/blockdev", "initiator/evidence", "raid/dm", "raid/dm/mirror", "raid/pace", "proto/agentlock", "proto/authority", "proto/beat", "proto/block", "proto/durable", "proto/figures", "proto/figures/wire", "proto/managers", "proto/nvmetcp/dhchap", "proto/parts", "proto/pb", "proto/support", "proto/metric"},
	"csi":                {"csi/mount", "proto/block", "proto/pb", "proto/metric"},
	"csi/mount":          {"proto/block"},
	"csi/drain":          {"proto/pb"},
	"deploy":             {"deploy/binary"}, // what makes manifests, the image and packages: of the tree, not in it
	"deploy/binary":      {},
	"cmd":                {"cmd", "volmgr", "target", "initiator", "csi", "raid", "proto"},
	"e2e":                {"e2e", "proto"},
	"proto/figures/wire": {"proto/beat", "proto/figures", "proto/pb"},
	"volmgr/live":        {"proto/block", "proto/figures", "proto/figures/wire", "proto/pb"},

	"volmgr/quorum/wal/waltest": {"volmgr/quorum/wal"},
	"volmgr/quorum/member":      {"volmgr/quorum", "volmgr/quorum/wal", "proto/block"},
	"volmgr/quorum/transport":   {"volmgr/quorum", "volmgr/quorum/member", "proto/block", "proto/pb"},

	// The user-space data path: one interface, block.Device, from the drive's
	// file on the target to the device node on the client.
	"proto/block/ramdisk":       {"proto/block"},
	"proto/nvmetcp":             {"proto/block"},
	"proto/nvmetcp/dhchap":      {},
	"proto/nvmetcp/reservation": {},
	"proto/nvmetcp/socket":      {},
	"proto/nvmetcp/controller":  {"proto/nvmetcp", "proto/nvmetcp/dhchap", "proto/nvmetcp/reservation", "proto/nvmetcp/socket", "proto/beat", "proto/block"},
	"proto/nvmetcp/namespace":   {"proto/nvmetcp/host", "proto/block"},
	"proto/nvmetcp/host":        {"proto/nvmetcp", "proto/nvmetcp/dhchap", "proto/nvmetcp/socket", "proto/beat", "proto/block"},
	"raid/checkpoint":           {"raid", "proto/block"},
	"raid/engine":               {"raid", "raid/checkpoint", "raid/pace", "proto/block", "proto/figures"},
	"raid/engine/history":       {},
	"target/userspace":          {"target/nvmet", "target/nvmet/memfs", "target/drive", "target/backend", "target/integrity", "target/mapped", "raid/dm", "raid/checkpoint", "proto/agentlock", "proto/figures", "proto/nvmetcp/controller", "proto/nvmetcp/dhchap", "proto/nvmetcp", "proto/block", "proto/durable", "proto/pb"},
	"initiator/blockdev":        {"initiator/uring", "proto/block"},
	"initiator/uring":           {},
	"initiator/fsfreeze":        {"proto/block"},
	"initiator/keeper":          {"initiator/evidence", "initiator/fsfreeze", "initiator/volume", "proto/beat", "proto/block", "proto/durable", "proto/figures", "proto/pb"},
	"initiator/evidence":        {"initiator/volume", "proto/block", "proto/durable", "proto/pb"},
	"initiator/volume":          {"proto/block"},
	"initiator/userspace":       {"initiator/keeper", "initiator/lists", "initiator/volume", "initiator/blockdev", "initiator/evidence", "raid/checkpoint", "raid/engine", "proto/nvmetcp/dhchap", "proto/nvmetcp/host", "proto/nvmetcp", "proto/block", "proto/pb", "proto/beat"},
	"e2e/kube":                  {"e2e/kube/parts", "e2e/operator", "initiator/blockdev", "proto/managers", "proto/pages", "proto/pb"},
	"e2e/kube/parts":            {},
	"e2e/bench/fio":             {"e2e/vm"},
	"e2e/bench/columns":         {"e2e/bench/fio", "e2e/vm", "raid/dm", "raid/engine", "initiator/blockdev", "proto/block"},
	"e2e/bench/datapath":        {"e2e/vm", "target/backend", "target/mapped", "raid/dm", "raid/engine", "initiator/blockdev", "proto/nvmetcp", "proto/block"},
	"e2e/fault/vm":              {"e2e/testbed", "e2e/vm", "proto/pb"},
	"e2e/bench/failover":        {"e2e/operator", "initiator", "initiator/userspace", "proto/block", "proto/pages", "proto/pb"},
	"e2e/explore":               {"volmgr/cluster", "volmgr/evidence", "initiator/volume", "proto/block"},
	"e2e/crash":                 {"e2e/operator", "volmgr", "target", "initiator", "initiator/blockdev", "initiator/userspace", "proto/block", "proto/pages", "proto/pb"},
	"e2e/fault":                 {"volmgr", "volmgr/cluster", "volmgr/store", "volmgr/replicated", "volmgr/quorum", "volmgr/quorum/member", "volmgr/quorum/wal", "volmgr/quorum/wal/waltest", "target", "target/backend", "target/userspace", "initiator", "initiator/userspace", "initiator/blockdev", "raid/engine", "proto/nvmetcp", "proto/nvmetcp/dhchap", "proto/nvmetcp/host", "proto/nvmetcp/controller", "proto/block", "proto/managers", "proto/pb", "e2e/workload"},
}

// without lists, for parts of the tree, what none of their imports may lead to.
var without = map[string]string{
	"raid/engine":         "raid/dm", // the user-space path needs no device-mapper
	"initiator/userspace": "raid/dm",
}

// bans lists standard and outside packages that only the named parts may import.
var bans = map[string][]string{
	"golang.org/x/sys/unix":        {"raid/dm", "target/nvmet", "target/drive", "target", "proto/uevent", "proto/agentlock", "initiator/fabrics", "initiator/fsfreeze", "initiator", "e2e", "cmd/internal", "target/userspace", "initiator/blockdev", "proto/nvmetcp", "csi"},
	"github.com/dgraph-io/badger":  {"volmgr/store"},
	"go.etcd.io/raft":              {"volmgr/quorum"},
	"github.com/container-storage": {"csi", "e2e/csi"},
	"github.com/spf13/cobra":       {"cmd"},
	"github.com/u-root":            {"e2e"},
	"github.com/hanwen/go-fuse":    {"initiator/blockdev"},
}

// pure packages decide and do nothing: no I/O, no clock, no logger, no randomness.
var pure = []string{"raid", "raid/dm/mirror", "volmgr/audit", "volmgr/backoff", "volmgr/cluster", "volmgr/cow", "volmgr/drivepolicy", "volmgr/event", "volmgr/evidence", "volmgr/health", "volmgr/image", "volmgr/keys", "volmgr/labelset", "volmgr/placement", "volmgr/quorum", "volmgr/rebalance", "volmgr/trust", "proto/block", "proto/nvmetcp/reservation", "initiator/volume"}

var impure = []string{"os", "net", "context", "log", "log/slog", "syscall", "math/rand", "math/rand/v2", "crypto/rand", "io/fs", "os/exec"}

type pkg struct {
	ImportPath string
	Dir        string
	Name       string
	GoFiles    []string
	Imports    []string
	Deps       []string // what the imports lead to
}

func packages(t *testing.T) []pkg {
	t.Helper()
	all, err := listed()
	if err != nil {
		t.Fatal(err)
	}
	return all
}

var listed = sync.OnceValues(func() ([]pkg, error) {
	out, err := exec.Command("go", "list", "-json=ImportPath,Dir,Name,GoFiles,Imports,Deps", module+"/...").Output()
	if err != nil {
		return nil, fmt.Errorf("go list: %w", err)
	}
	var all []pkg
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p pkg
		if err := d.Decode(&p); err != nil {
			return nil, err
		}
		all = append(all, p)
	}
	if len(all) < 5 {
		return nil, fmt.Errorf("go list found %d packages, want the whole tree", len(all))
	}
	return all, nil
})

// within reports whether path is one of parts or, for parts that are trees, below one.
func within(path string, parts []string) bool {
	return slices.ContainsFunc(parts, func(p string) bool {
		return path == p || strings.HasPrefix(path, p+"/")
	})
}

// rule finds the arrow of the nearest folder.
func rule(path string) (allowed []string, ok bool) {
	for p := path; p != "."; p = filepath.Dir(p) {
		if allowed, ok = arrows[p]; ok {
			return allowed, true
		}
	}
	return nil, false
}

func TestImportsFollowTheArrows(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		allowed, ok := rule(path)
		if !ok {
			t.Errorf("package %s has no arrow: say in %s what it may import", path, "e2e/lint")
			continue
		}
		tree := strings.HasPrefix(path, "cmd") || strings.HasPrefix(path, "e2e")
		for _, imported := range p.Imports {
			part, ours := strings.CutPrefix(imported, module+"/")
			if !ours {
				continue
			}
			if !slices.Contains(allowed, part) && !(tree && within(part, allowed)) {
				t.Errorf("package %s imports %s; it may import %v", path, part, allowed)
			}
		}
	}
}

func TestPackagesDoWithout(t *testing.T) {
	found := 0
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		unwanted, ok := without[path]
		if !ok {
			continue
		}
		found++
		for _, dep := range p.Deps {
			if within(strings.TrimPrefix(dep, module+"/"), []string{unwanted}) {
				t.Errorf("package %s depends on %s; it must do without %s", path, dep, unwanted)
			}
		}
	}
	if found != len(without) {
		t.Errorf("%d of the packages %v were found", found, without)
	}
}

func TestOutsidePackagesStayInTheirRooms(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		for _, imported := range p.Imports {
			for banned, rooms := range bans {
				if strings.HasPrefix(imported, banned) && !within(path, rooms) {
					t.Errorf("package %s imports %s; only %v may", path, imported, rooms)
				}
			}
		}
	}
}

func TestPurePackagesDoNoIO(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		if !slices.Contains(pure, path) {
			continue
		}
		for _, imported := range p.Imports {
			if slices.Contains(impure, imported) {
				t.Errorf("package %s imports %s; decisions take no part in I/O", path, imported)
			}
		}
		for _, file := range p.GoFiles {
			text, err := os.ReadFile(filepath.Join(p.Dir, file))
			if err != nil {
				t.Fatal(err)
			}
			if call := regexp.MustCompile(`\btime\.(Now|Since|Until|Sleep|After|NewTimer|NewTicker|Tick)\(`).Find(text); call != nil {
				t.Errorf("%s/%s calls %s…); times come with the input", path, file, call)
			}
		}
	}
}

func TestEveryPackageHasOnePackageComment(t *testing.T) {
	for _, p := range packages(t) {
		if p.Name == "main" && strings.Contains(p.ImportPath, "/cmd/") && !strings.HasSuffix(p.ImportPath, "cmd/weft") || strings.HasSuffix(p.ImportPath, "proto/pb") {
			continue
		}
		comments := 0
		for _, file := range p.GoFiles {
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join(p.Dir, file), nil, parser.PackageClauseOnly|parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			if f.Doc != nil && len(strings.TrimSpace(f.Doc.Text())) > 0 {
				comments++
			}
		}
		if len(p.GoFiles) > 0 && comments != 1 {
			t.Errorf("package %s has %d package comments, want 1", p.ImportPath, comments)
		}
	}
}

func TestEveryFileNamesItsLicence(t *testing.T) {
	for _, p := range packages(t) {
		if strings.HasSuffix(p.ImportPath, "proto/pb") {
			continue
		}
		files, _ := filepath.Glob(filepath.Join(p.Dir, "*.go"))
		for _, file := range files {
			text, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			line, _, _ := strings.Cut(string(text), "\n")
			if ours := "// SPDX-License-Identifier: Apache-2.0"; line != ours && line != ours+" OR GPL-2.0-only" {
				t.Errorf("%s does not begin with its SPDX line", file)
			}
		}
	}
}
