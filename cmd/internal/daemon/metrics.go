// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"
)

// Metrics is a daemon's own registry: the daemon's metrics, the Go runtime and the process, and the
// calls of its gRPC server.
type Metrics struct {
	*prometheus.Registry
	Alive func(context.Context) error // nil: a daemon counts as alive while it serves /healthz

	calls      *prometheus.CounterVec
	seconds    *prometheus.HistogramVec
	handshakes prometheus.Counter
}

// NewMetrics makes a registry.
func NewMetrics() *Metrics {
	m := &Metrics{
		Registry: prometheus.NewRegistry(),
		calls: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "weft_grpc_calls_total", Help: "Calls answered, by method and gRPC code; a stream is counted when it ends.",
		}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "weft_grpc_call_seconds", Help: "Duration of calls, without streams.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8),
		}, []string{"method"}),
		handshakes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "weft_grpc_handshakes_refused_total", Help: "Connections that ended in the handshake: no TLS, a certificate that is not good, too slow, or too many.",
		}),
	}
	m.MustRegister(m.calls, m.seconds, m.handshakes, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

func (m *Metrics) unary(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (any, error) {
	start := time.Now()
	reply, err := handle(ctx, req)
	method := path.Base(info.FullMethod)
	m.seconds.WithLabelValues(method).Observe(time.Since(start).Seconds())
	m.calls.WithLabelValues(method, status.Code(err).String()).Inc()
	return reply, err
}

func (m *Metrics) stream(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
	err := handle(server, stream)
	m.calls.WithLabelValues(path.Base(info.FullMethod), status.Code(err).String()).Inc()
	return err
}

// routes serves /metrics and /healthz.
func (m *Metrics) routes() http.Handler {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(m.Registry, promhttp.HandlerOpts{}))
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, r *http.Request) {
		if m.Alive != nil {
			if err := m.Alive(r.Context()); err != nil {
				http.Error(w, err.Error(), http.StatusServiceUnavailable)
				return
			}
		}
		w.Write([]byte("ok\n"))
	})
	return mux
}

// Serve is a part that serves /metrics and /healthz on a listener.
func (m *Metrics) Serve(log *slog.Logger, listener net.Listener) Part {
	return ServeHTTP(log, "metrics", listener, m.routes())
}

// ServeMetrics serves a component's metrics if the options ask for metrics.
func ServeMetrics(o Options, log *slog.Logger, m *Metrics, component any) ([]Part, error) {
	if o.MetricsListen == "" {
		return nil, nil
	}
	if c, ok := component.(prometheus.Collector); ok {
		if err := m.Register(c); err != nil {
			return nil, fmt.Errorf("register metrics: %w", err)
		}
	}
	listener, err := net.Listen("tcp", o.MetricsListen)
	if err != nil {
		return nil, fmt.Errorf("serve metrics: %w", err)
	}
	return []Part{m.Serve(log, listener)}, nil
}
