// SPDX-License-Identifier: Apache-2.0

// Stranger looks at machines as somebody does who only reaches their network: it tries each TCP
// port up to the last, talks to those that are open, and prints what it got, as JSON.
//
//	stranger -last 5000 -calls /weft.v1.Manager/GetStatus,… HOST…
package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
)

// finding is an open port, and what it answered.
type finding struct {
	Host    string
	Port    int
	Answers map[string][]byte // to plain bytes, by what they are; those without an answer are missing
	TLS     bool              // it speaks TLS with a client that shows no certificate
	Calls   map[string]string // by gRPC method: "STATUS MESSAGE", and the length of what came with it
	Names   []string          // that its certificate tells
}

// greetings are what a stranger says first.
var greetings = map[string]string{
	"nothing":  "",
	"HTTP":     "GET /metrics HTTP/1.0\r\n\r\n",
	"HTTP/2":   "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00",
	"noise":    strings.Repeat("\xff", 256),
	"NVMe/TCP": "\x00\x00\x80\x00\x80" + strings.Repeat("\x00", 123), // ICReq
}

func main() {
	calls := flag.String("calls", "", "gRPC `methods` to call, separated by commas")
	last := flag.Int("last", 65535, "the last `port` to try")
	flag.Parse()
	if err := run(flag.Args(), strings.Split(*calls, ","), *last); err != nil {
		fmt.Fprintln(os.Stderr, "stranger:", err)
		os.Exit(1)
	}
}

func run(hosts, calls []string, last int) error {
	found := make([][]finding, len(hosts))
	var all errgroup.Group
	for i, host := range hosts {
		all.Go(func() (err error) {
			found[i], err = look(host, calls, last)
			return err
		})
	}
	if err := all.Wait(); err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(slices.Concat(found...))
}

// look scans a host, and talks to each open port.
func look(host string, calls []string, last int) ([]finding, error) {
	open, err := scan(host, last)
	if err != nil {
		return nil, err
	}
	found := make([]finding, len(open))
	for i, port := range open {
		found[i] = finding{Host: host, Port: port, Answers: map[string][]byte{}, Calls: map[string]string{}}
		if err := found[i].ask(calls); err != nil {
			return nil, err
		}
	}
	return found, nil
}

// scan returns the ports of a host that accept a connection. A port that neither accepts nor
// refuses is an error: the scan would say nothing about it.
func scan(host string, last int) (open []int, err error) {
	const workers = 16
	ports := make(chan int)
	var mu sync.Mutex
	var all sync.WaitGroup
	for range workers {
		all.Go(func() {
			for port := range ports {
				conn, failed := net.DialTimeout("tcp", address(host, port), 20*time.Second)
				mu.Lock()
				switch {
				case failed == nil:
					conn.Close()
					open = append(open, port)
				case !errors.Is(failed, syscall.ECONNREFUSED):
					err = failed
				}
				mu.Unlock()
			}
		})
	}
	for port := 1; port <= last; port++ {
		ports <- port
	}
	close(ports)
	all.Wait()
	slices.Sort(open)
	return open, err
}

func address(host string, port int) string { return net.JoinHostPort(host, strconv.Itoa(port)) }

// ask talks to the port in each way.
func (f *finding) ask(calls []string) error {
	if err := f.greet(); err != nil {
		return err
	}
	lax := &tls.Config{InsecureSkipVerify: true, NextProtos: []string{"h2"}} //nolint:gosec // a stranger does not mind
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	conn, err := (&tls.Dialer{Config: lax}).DialContext(ctx, "tcp", address(f.Host, f.Port))
	if err != nil {
		return nil // no TLS, or not for us
	}
	f.TLS = true
	for _, c := range conn.(*tls.Conn).ConnectionState().PeerCertificates {
		f.Names = append(f.Names, append(slices.Clone(c.DNSNames), c.Subject.String())...)
		for _, uri := range c.URIs {
			f.Names = append(f.Names, uri.String())
		}
	}
	conn.Close()
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: lax, ForceAttemptHTTP2: true}, Timeout: time.Minute}
	for _, call := range calls {
		f.Calls[call] = called(client, "https://"+address(f.Host, f.Port)+call)
	}
	return nil
}

// greet says each greeting over a connection of its own.
func (f *finding) greet() error {
	var mu sync.Mutex
	var all errgroup.Group
	for name, text := range greetings {
		all.Go(func() error {
			answer, err := answered(address(f.Host, f.Port), text)
			mu.Lock()
			defer mu.Unlock()
			if len(answer) > 0 {
				f.Answers[name] = answer
			}
			return err
		})
	}
	return all.Wait()
}

// called is what a gRPC call without any field ended with.
func called(client *http.Client, url string) string {
	const empty = "\x00\x00\x00\x00\x00" // not compressed, of length 0
	request, err := http.NewRequest(http.MethodPost, url, strings.NewReader(empty))
	if err != nil {
		return err.Error()
	}
	request.Header.Set("Content-Type", "application/grpc")
	request.Header.Set("TE", "trailers")
	response, err := client.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	body, err := io.ReadAll(response.Body)
	if err != nil {
		return err.Error()
	}
	get := func(name string) string { return response.Header.Get(name) + response.Trailer.Get(name) }
	return fmt.Sprintf("%s %s, %d bytes", get("Grpc-Status"), get("Grpc-Message"), len(body))
}

// answered returns what a port answers to some bytes, until it hangs up or is silent for a while.
func answered(address, text string) ([]byte, error) {
	conn, err := net.DialTimeout("tcp", address, 20*time.Second)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(3 * time.Second)); err != nil {
		return nil, err
	}
	_, _ = io.WriteString(conn, text) // it may hang up at once
	got, err := io.ReadAll(io.LimitReader(conn, 1<<16))
	if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) && !errors.Is(err, syscall.ECONNRESET) {
		return nil, err
	}
	return bytes.Clone(got), nil
}
