// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/sync/errgroup"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pki"
)

// Readers says who may read a daemon's metrics. Programs on the same machine may, over plain HTTP;
// others over TLS, with a certificate of the cluster.
type Readers struct {
	TLS   TLSFiles     // of the daemon, which shows its certificate
	Plain bool         // everybody may, over plain HTTP: --insecure-plain-tcp
	Guard access.Guard // who may, over TLS

	waiting bool // see WhileWaiting
}

// WhileWaiting does what a daemon waits for before it has a certificate, and answers /healthz
// meanwhile, with a certificate that proves nothing: a probe must not restart a daemon that waits.
func WhileWaiting(ctx context.Context, o Options, log *slog.Logger, readers Readers, wait func(context.Context) error) error {
	readers.waiting = true
	alive, err := ServeMetrics(o, log, NewMetrics(), nil, readers)
	if err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	serving, stop := context.WithCancel(ctx)
	for _, part := range alive {
		group.Go(func() error { return part.Run(serving) })
	}
	group.Go(func() error {
		defer stop()
		return wait(ctx)
	})
	return group.Wait()
}

// ServeMetrics serves a component's metrics if the options ask for metrics.
func ServeMetrics(o Options, log *slog.Logger, m *Metrics, component any, readers Readers) ([]Part, error) {
	if o.MetricsListen == "" {
		return nil, nil
	}
	if c, ok := component.(prometheus.Collector); ok {
		if err := m.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	listener, err := readers.listen(o.MetricsListen, log)
	if err != nil {
		return nil, fmt.Errorf("--metrics-listen %s: %w", o.MetricsListen, err)
	}
	return []Part{ServeHTTP(log, "metrics", listener, m.routes(readers))}, nil
}

// listen listens on an address of metrics, with TLS unless only this machine reaches it.
func (r Readers) listen(text string, log *slog.Logger) (net.Listener, error) {
	address, here := metricsAddress(text)
	config, err := r.config(here)
	if err != nil {
		return nil, err
	}
	listener, err := net.Listen("tcp", address)
	if err != nil {
		return nil, err
	}
	if config != nil {
		return tls.NewListener(listener, config), nil
	}
	if !here {
		log.Warn("plain TCP: everyone who reaches this address may read the metrics", "address", listener.Addr().String())
	}
	return listener, nil
}

// metricsAddress is where metrics are served, and whether only this machine reaches that. A port
// alone is one of the loopback address.
func metricsAddress(text string) (address string, here bool) {
	if strings.Trim(text, "0123456789") == "" {
		return net.JoinHostPort("127.0.0.1", text), true
	}
	host, _, err := net.SplitHostPort(text)
	if err != nil {
		return text, false // net.Listen says why
	}
	ip := net.ParseIP(host)
	return text, host == "localhost" || ip != nil && ip.IsLoopback()
}

// config is that of TLS, which is not needed for programs on this machine; nil: plain HTTP.
func (r Readers) config(here bool) (*tls.Config, error) {
	switch {
	case here:
		return nil, nil
	case r.waiting && !r.Plain && r.TLS.Off():
		cert, err := pki.Throwaway(time.Now())
		return &tls.Config{MinVersion: tls.VersionTLS13, Certificates: []tls.Certificate{cert}}, err
	case !r.TLS.Off():
		if _, err := r.TLS.read(); err != nil { // a mistake in the files shows at the start
			return nil, err
		}
		return &tls.Config{MinVersion: tls.VersionTLS13, GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) { return r.TLS.read() }}, nil
	case r.Plain:
		return nil, nil
	}
	return nil, errors.New("others than this machine's programs would read the metrics, and this daemon has no certificate: give a port alone, let it join a cluster, or give --insecure-plain-tcp")
}

// read is the configuration of a server whose clients need no certificate for /healthz. It serves
// with a certificate that has ended, too: a probe must not restart an agent for that.
func (f TLSFiles) read() (*tls.Config, error) {
	if f.Identity == "" {
		config, err := f.server()
		if err == nil {
			config.ClientAuth = tls.VerifyClientCertIfGiven
		}
		return config, err
	}
	c, err := pki.ReadCredential(f.Identity)
	if err != nil {
		return nil, err
	}
	if c.Cert == nil {
		return nil, fmt.Errorf("%s: it has no certificate yet: join first", f.Identity)
	}
	return c.Server(f.now()), nil
}

// reconnectBefore is how long before the end of its certificate a reader has to connect anew.
const reconnectBefore = time.Hour

// routes serves /metrics to those who may read it, and /healthz to everybody.
func (m *Metrics) routes(readers Readers) http.Handler {
	mux := http.NewServeMux()
	metrics := promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{})
	mux.HandleFunc("GET /metrics", func(w http.ResponseWriter, r *http.Request) {
		if r.TLS != nil {
			peer := readers.TLS.peer(*r.TLS)
			left := peer.Ends.Sub(readers.TLS.now()())
			if !peer.Ends.IsZero() && left < reconnectBefore { // it may have another one by now
				w.Header().Set("Connection", "close")
			}
			if !peer.Ends.IsZero() && left < 0 {
				http.Error(w, "the certificate of this connection has ended", http.StatusForbidden)
				return
			}
			if err := readers.Guard.MayReadMetrics(peer); err != nil {
				http.Error(w, status.Convert(err).Message(), http.StatusForbidden)
				return
			}
		}
		metrics.ServeHTTP(w, r)
	})
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if err := m.alive(r.Context()); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
			return
		}
		w.Write([]byte("ok\n"))
	})
	return mux
}

func (m *Metrics) alive(ctx context.Context) error {
	if m.Alive == nil {
		return nil
	}
	return m.Alive(ctx)
}
