// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"bytes"
	"crypto/tls"
	"runtime"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"weft.dev/weft/proto/pb"
)

// headersOf are the headers of a stranger's call to join.
func headersOf(t *testing.T) []byte {
	t.Helper()
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, h := range [][2]string{{":method", "POST"}, {":scheme", "https"}, {":path", pb.Identities_Join_FullMethodName}, {":authority", "weft"}, {"content-type", "application/grpc"}, {"te", "trailers"}} {
		if err := enc.WriteField(hpack.HeaderField{Name: h[0], Value: h[1]}); err != nil {
			t.Fatal(err)
		}
	}
	return block.Bytes()
}

// A stranger floods the server with what HTTP/2 lets everybody send, and reads no answer. Its
// connection ends, what the server holds for it is bounded, and a member is served meanwhile.
func TestFloodsOfFramesHarmNobody(t *testing.T) {
	headers := headersOf(t)
	for name, flood := range map[string]func(f *http2.Framer, i uint32) error{
		"calls that are reset at once": func(f *http2.Framer, i uint32) error {
			if err := f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: headers, EndHeaders: true}); err != nil {
				return err
			}
			return f.WriteRSTStream(2*i+1, http2.ErrCodeCancel)
		},
		"calls that do not end": func(f *http2.Framer, i uint32) error {
			return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 2*i + 1, BlockFragment: headers, EndHeaders: true})
		},
		"settings": func(f *http2.Framer, _ uint32) error {
			return f.WriteSettings(http2.Setting{ID: http2.SettingInitialWindowSize, Val: 1 << 16})
		},
		"pings": func(f *http2.Framer, _ uint32) error { return f.WritePing(false, [8]byte{1}) },
		"headers that do not end": func(f *http2.Framer, i uint32) error {
			if i == 0 {
				return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: headers})
			}
			return f.WriteContinuation(1, false, bytes.Repeat([]byte{0x40, 1, 'a', 1, 'b'}, 3000)) // a: b
		},
	} {
		t.Run(name, func(t *testing.T) {
			address, member, _ := closedServer(t)
			before := heap()
			conn := tls.Client(from(t, "127.0.0.2", address), &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}})
			conn.SetDeadline(time.Now().Add(20 * time.Second))
			if _, err := conn.Write([]byte(http2.ClientPreface)); err != nil {
				t.Fatal(err)
			}
			framer := http2.NewFramer(conn, nil)
			if err := framer.WriteSettings(); err != nil {
				t.Fatal(err)
			}
			over := make(chan uint32)
			go func() {
				i := uint32(0)
				for flood(framer, i) == nil {
					i++
				}
				over <- i
			}()
			if err := checkHealth(t, address, member); err != nil {
				t.Errorf("a member: %v", err)
			}
			held := heap() - before
			select {
			case sent := <-over:
				t.Logf("cut off after %d", sent)
			case <-time.After(10 * time.Second):
				t.Error("the flood goes on")
			}
			if held = max(held, heap()-before); held > 32<<20 {
				t.Errorf("the server holds %d MiB more", held>>20)
			}
		})
	}
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}
