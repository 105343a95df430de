// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"time"
)

// ServeHTTP is a part that answers HTTP requests on a listener until it is stopped.
func ServeHTTP(log *slog.Logger, name string, listener net.Listener, handler http.Handler) Part {
	server := &http.Server{Handler: handler, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: 2 * time.Minute, ErrorLog: slog.NewLogLogger(log.Handler(), slog.LevelDebug)}
	return Part{Name: name, Run: func(ctx context.Context) error {
		log.Info("serving HTTP", "part", name, "address", listener.Addr().String())
		defer context.AfterFunc(ctx, func() { server.Close() })()
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return nil
	}}
}
