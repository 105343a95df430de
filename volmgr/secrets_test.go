// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/cluster"
	"weft.dev/weft/volmgr/store"
)

// leaks names the places that hold one of the secrets: as it is, in hex or in base64.
func leaks(places map[string][]byte, secrets [][]byte) (found []string) {
	for name, content := range places {
		for _, s := range secrets {
			for _, form := range [][]byte{s, []byte(hex.EncodeToString(s)), []byte(base64.StdEncoding.EncodeToString(s)[:40])} {
				if bytes.Contains(content, form) {
					found = append(found, name)
				}
			}
		}
	}
	return found
}

// stored are the records of a manager that has stopped.
func stored(t *testing.T, dir string) []cluster.Record {
	t.Helper()
	var s interface {
		Load() ([]cluster.Record, error)
		Close() error
	}
	var err error
	if *overQuorum {
		s, err = store.OpenReplica(dir, slog.New(slog.DiscardHandler))
	} else {
		s, err = store.Open(dir, slog.New(slog.DiscardHandler))
	}
	if err != nil {
		t.Fatal(err)
	}
	records, err := s.Load()
	if err := errors.Join(err, s.Close()); err != nil {
		t.Fatal(err)
	}
	return records
}

// The keys of a grant go to the two ends of an export alone, and are on no disk. The secret that they
// follow from is in the store, which its owner alone may read, and in no backup.
func TestSecretsAreToldToTheEndsOfAnExportAlone(t *testing.T) {
	var log bytes.Buffer
	var mu sync.Mutex
	keys := map[string]int{} // how often each was told
	r := &rig{t: t, dir: initialized(t), log: slog.New(slog.NewJSONHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	r.keys = func(k *pb.ExportKeys) {
		mu.Lock()
		defer mu.Unlock()
		keys[string(k.Host)]++
		keys[string(k.Controller)]++
	}
	r.start()
	defer func() { r.stop() }()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	r.withAgents(ctx, "t1", "t2")
	r.attachNew(ctx, "db1")
	var secrets [][]byte
	mu.Lock()
	for k, n := range keys {
		if secrets = append(secrets, []byte(k)); len(k) != 32 || n < 2 {
			t.Errorf("a key of %d bytes was told %d times; want 32 bytes, to both ends", len(k), n)
		}
	}
	mu.Unlock()
	if len(secrets) != 4 {
		t.Fatalf("%d keys were told; want two for each of two targets", len(secrets))
	}

	places := map[string][]byte{"the backup": r.backup(ctx).Bytes()}
	for name, ask := range map[string]func() (proto.Message, error){
		"volume":  func() (proto.Message, error) { return r.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"}) },
		"nodes":   func() (proto.Message, error) { return r.ListNodes(ctx, &pb.ListNodesRequest{}) },
		"events":  func() (proto.Message, error) { return r.ListEvents(ctx, &pb.ListEventsRequest{}) },
		"explain": func() (proto.Message, error) { return r.ExplainVolume(ctx, &pb.ExplainVolumeRequest{Volume: "db1"}) },
	} {
		m, err := ask()
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if places["the answer about "+name], err = proto.Marshal(m); err != nil {
			t.Fatal(err)
		}
	}
	cancel()
	r.stop()
	places["the log"] = log.Bytes()

	var master [][]byte
	for _, record := range stored(t, r.dir) {
		if record.Secret() {
			raw, err := hex.DecodeString(string(record.Value))
			if err != nil {
				t.Fatal(err)
			}
			master = append(master, raw)
		}
	}
	if len(master) != 1 {
		t.Fatalf("the store has %d secret records, want the master alone", len(master))
	}
	for _, place := range leaks(places, append(secrets, master...)) {
		t.Errorf("a secret is in %s", place)
	}

	files := map[string][]byte{}
	if err := filepath.WalkDir(r.dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		files[path], err = os.ReadFile(path)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	for _, place := range leaks(files, secrets) {
		t.Errorf("the key of a grant is in %s", place)
	}
	if info, err := os.Stat(r.dir); err != nil || info.Mode().Perm()&0o077 != 0 {
		t.Errorf("%s: %v, %v; want it closed to others", r.dir, info.Mode(), err)
	}
}
