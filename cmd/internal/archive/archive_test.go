// SPDX-License-Identifier: Apache-2.0

package archive

import (
	"bytes"
	"context"
	"errors"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"
)

var about = Header{Version: version, Volume: "db1", Snapshot: "db1@tue", SnapshotID: "id", Since: "db1@mon", SinceID: "other", Size: 8 << 20, Taken: time.Unix(1795000000, 0).UTC()}

// written is a stream with three ranges.
func written(t testing.TB) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := NewWriter(&b, about)
	for _, err := range []error{err, w.Data(4096, bytes.Repeat([]byte{1}, 8192)), w.Zeroes(16384, PieceMost), w.Data(8<<20-4096, bytes.Repeat([]byte{2}, 4096)), w.Close()} {
		if err != nil {
			t.Fatal(err)
		}
	}
	return b.Bytes()
}

// readAll reads a stream to its end, or to its first error.
func readAll(b []byte) (all []Range, err error) {
	r, err := NewReader(bytes.NewReader(b))
	if err != nil {
		return nil, err
	}
	for {
		one, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all, nil
		}
		if err != nil {
			return all, err
		}
		one.Data = bytes.Clone(one.Data)
		all = append(all, one)
	}
}

func TestAStreamGivesWhatWasWritten(t *testing.T) {
	b := written(t)
	r, err := NewReader(bytes.NewReader(b))
	if err != nil || !reflect.DeepEqual(r.Header(), about) {
		t.Fatalf("header %+v, %v; want %+v", r.Header(), err, about)
	}
	all, err := readAll(b)
	want := []Range{{4096, 8192, bytes.Repeat([]byte{1}, 8192)}, {16384, PieceMost, nil}, {8<<20 - 4096, 4096, bytes.Repeat([]byte{2}, 4096)}}
	if err != nil || !reflect.DeepEqual(all, want) {
		t.Errorf("%d ranges, %v; want %d", len(all), err, len(want))
	}
}

func TestAStreamThatIsCutIsRefused(t *testing.T) {
	b := written(t)
	for n := range len(b) {
		if n > 300 && n < len(b)-100 && n%97 != 0 {
			continue
		}
		if _, err := readAll(b[:n]); err == nil || n > 300 && !errors.Is(err, ErrCut) {
			t.Errorf("the first %d bytes of %d: %v, want ErrCut", n, len(b), err)
		}
	}
}

func TestAStreamWithAnotherBitIsRefused(t *testing.T) {
	b := written(t)
	for n := range len(b) {
		if n > 400 && n < len(b)-200 && n%53 != 0 {
			continue
		}
		for bit := range 8 {
			damaged := bytes.Clone(b)
			damaged[n] ^= 1 << bit
			if _, err := readAll(damaged); err == nil {
				t.Errorf("bit %d of byte %d of %d is another one, and the stream is taken", bit, n, len(b))
			}
		}
	}
}

func TestOtherFilesAreRefused(t *testing.T) {
	newer := about
	for what, b := range map[string][]byte{"nothing": {}, "text": []byte("hello, this is no stream at all, but it is long enough"), "zeroes": make([]byte, 4096)} {
		if _, err := NewReader(bytes.NewReader(b)); err == nil {
			t.Errorf("%s: no error", what)
		}
	}
	var b bytes.Buffer
	newer.SnapshotID = ""
	if _, err := NewWriter(&b, newer); err != nil {
		t.Fatal(err)
	}
	if _, err := NewReader(&b); !errors.Is(err, ErrCorrupt) {
		t.Errorf("a header without an id: %v, want ErrCorrupt", err)
	}
}

func FuzzReader(f *testing.F) {
	f.Add(written(f))
	f.Fuzz(func(t *testing.T, b []byte) {
		all, _ := readAll(b)
		last := int64(0)
		for _, r := range all {
			if r.Offset < last || r.Len <= 0 || r.Len > PieceMost {
				t.Errorf("range %d+%d after %d", r.Offset, r.Len, last)
			}
			last = r.Offset + r.Len
		}
	})
}

func TestWhatFollowsAStreamIsRefused(t *testing.T) {
	all := written(t)
	for more, want := range map[string]error{"": nil, "x": ErrMore, string(all): ErrMore} {
		r, err := NewReader(strings.NewReader(string(all) + more))
		for err == nil {
			_, err = r.Next()
		}
		if !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if err := r.Ended(); !errors.Is(err, want) {
			t.Errorf("%d bytes follow: %v, want %v", len(more), err, want)
		}
	}
}

// Who waits for a silent sender is told why the wait ends.
func TestAReadOfASilentInputEndsWithItsContext(t *testing.T) {
	from, to := io.Pipe()
	defer to.Close()
	ctx, stop := context.WithCancelCause(t.Context())
	r := interruptible(ctx, from)
	go to.Write([]byte("begin"))
	p := make([]byte, 5)
	if _, err := io.ReadFull(r, p); err != nil || string(p) != "begin" {
		t.Fatalf("%q, %v", p, err)
	}
	enough := errors.New("enough")
	stop(enough)
	if _, err := r.Read(p); !errors.Is(err, enough) {
		t.Errorf("%v, want %v", err, enough)
	}
}
