// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"weft.dev/weft/proto/pki"
)

// Strangers that open connections and say nothing use up their own address's budget, and nobody
// else's. The budget is theirs again when they go.
func TestIdleConnectionsKeepNobodyFromMetrics(t *testing.T) {
	cert, err := pki.Throwaway(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := listener.Addr().String()
	listener = tls.NewListener(listener, &tls.Config{Certificates: []tls.Certificate{cert}})
	handler := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.TLS == nil {
			t.Error("the handler does not see the certificate")
		}
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- serveHTTP(discard, "metrics", listener, handler, budgets{conns: 8, connsOf: 3}).Run(ctx)
	}()
	defer func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	}()
	get := func(host string) error {
		client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true,
			TLSClientConfig:   &tls.Config{InsecureSkipVerify: true},
			DialContext:       (&net.Dialer{LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}).DialContext,
		}}
		answer, err := client.Get("https://" + address)
		if err != nil {
			return err
		}
		defer answer.Body.Close()
		_, err = io.Copy(io.Discard, answer.Body)
		return err
	}
	var idle []net.Conn
	closed := 0
	for range 6 {
		idle = append(idle, from(t, "127.0.0.2", address))
	}
	for _, conn := range idle {
		if closedWithin(conn, 200*time.Millisecond) {
			closed++
		}
	}
	if closed != 3 {
		t.Errorf("%d of 6 idle connections of one address were closed, want 3", closed)
	}
	if get("127.0.0.2") == nil {
		t.Error("an address has more connections than its budget")
	}
	if err := get("127.0.0.1"); err != nil {
		t.Errorf("another address: %v", err)
	}
	for _, conn := range idle {
		conn.Close()
	}
	for end := time.Now().Add(5 * time.Second); get("127.0.0.2") != nil; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatal("the budget of connections that are gone is not free again")
		}
	}
}
