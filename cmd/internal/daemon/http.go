// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"
)

// httpBudgets bound the connections to a port of metrics or of the console, which anybody may open. A
// browser has six at once, and several people may be behind one address.
var httpBudgets = budgets{conns: 1024, connsOf: 128}

// ServeHTTP is a part that answers HTTP requests on a listener until it is stopped.
func ServeHTTP(log *slog.Logger, name string, listener net.Listener, handler http.Handler) Part {
	return serveHTTP(log, name, listener, handler, httpBudgets)
}

func serveHTTP(log *slog.Logger, name string, listener net.Listener, handler http.Handler, most budgets) Part {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, ConnState: counted(most), ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	return Part{Name: name, Run: func(ctx context.Context) error {
		log.Info("serving HTTP", "part", name, "address", listener.Addr().String())
		defer context.AfterFunc(ctx, func() { server.Close() })()
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}}
}

// counted closes the connections of a server beyond its budget.
func counted(most budgets) func(net.Conn, http.ConnState) {
	usage, open := newUsage(most), sync.Map{} // of functions that end a connection's count
	return func(conn net.Conn, state http.ConnState) {
		switch state {
		case http.StateNew:
			give, err := usage.take("connections", hostOf(conn.RemoteAddr()), most.connsOf, most.conns)
			if err != nil {
				conn.Close()
				return
			}
			open.Store(conn, give)
		case http.StateClosed, http.StateHijacked:
			if give, ok := open.LoadAndDelete(conn); ok {
				give.(func())()
			}
		}
	}
}
