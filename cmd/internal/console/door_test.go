// SPDX-License-Identifier: Apache-2.0

package console

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"
)

// Anybody may send a form to the console's port. One that does not arrive holds nothing for long, while
// a page that waits for news stays.
func TestAFormThatDoesNotArriveIsCutOff(t *testing.T) {
	over := make(chan error, 2)
	web := httptest.NewServer(secured(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			select {
			case <-r.Context().Done():
				over <- r.Context().Err()
			case <-time.After(time.Second):
				over <- nil
			}
			return
		}
		_, err := io.ReadAll(r.Body)
		over <- err
	}), 100*time.Millisecond))
	defer web.Close()
	send := func(text string) {
		conn, err := net.Dial("tcp", web.Listener.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { conn.Close() })
		fmt.Fprintf(conn, text, web.Listener.Addr())
	}
	send("POST /login HTTP/1.1\r\nHost: %s\r\nContent-Length: 100\r\n\r\nlink=")
	select {
	case err := <-over:
		if err == nil {
			t.Error("a form of which a part is missing is taken")
		}
	case <-time.After(10 * time.Second):
		t.Fatal("a form that does not arrive is waited for")
	}
	send("GET /news HTTP/1.1\r\nHost: %s\r\n\r\n")
	if err := <-over; err != nil {
		t.Errorf("a page that waits for news: %v", err)
	}
}
