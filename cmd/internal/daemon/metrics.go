// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"path"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/metric"
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
			Name: metric.GRPCCalls, Help: "Calls answered, by method and gRPC code; a stream is counted when it ends.",
		}, []string{"method", "code"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: metric.GRPCCallSeconds, Help: "Duration of calls, without streams.",
			Buckets: prometheus.ExponentialBuckets(0.0005, 4, 8), NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 100,
		}, []string{"method"}),
		handshakes: prometheus.NewCounter(prometheus.CounterOpts{
			Name: metric.GRPCHandshakesRefused, Help: "Connections that ended in the handshake: no TLS, a certificate that is not good, too slow, or too many.",
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
