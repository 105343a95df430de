// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"crypto/rand"
	"fmt"
	"log/slog"
	"path"
	"runtime/debug"
	"strings"
	"sync/atomic"
	"time"

	"github.com/kubernetes-csi/csi-lib-utils/protosanitizer"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pb"
)

// metrics use the names of csi-lib-utils, for which dashboards exist.
type metrics struct {
	seconds *prometheus.HistogramVec
	steps   *prometheus.HistogramVec
}

func newMetrics() *metrics {
	return &metrics{seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:        metric.CSIOperationSeconds,
		Help:        "Duration of CSI calls, by method and gRPC code.",
		ConstLabels: prometheus.Labels{"driver_name": DriverName},
		Buckets:     []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 15, 30, 60, 120, 300, 600},
	}, []string{"method_name", "grpc_status_code"}), steps: prometheus.NewHistogramVec(prometheus.HistogramOpts{
		Name:    metric.CSIStepSeconds,
		Help:    "How long the steps of staging, publishing and their opposites took on this node: wait (for the device), open, look, check, queue (for making a file system), make, mount, grow, bind, unmount.",
		Buckets: []float64{.001, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300, 1800},
	}, []string{"step"})}
}

type logKey struct{}

// callLog is the log of a call; facts learned during the call are added to it.
type callLog struct{ atomic.Pointer[slog.Logger] }

// withLog attaches a log to a call.
func withLog(ctx context.Context, log *slog.Logger) context.Context {
	call := &callLog{}
	call.Store(log)
	return context.WithValue(ctx, logKey{}, call)
}

// logOf is the log of the call that ctx belongs to: each line carries the call's method, request id
// and volume.
func logOf(ctx context.Context) *slog.Logger {
	if call, ok := ctx.Value(logKey{}).(*callLog); ok {
		return call.Load()
	}
	return slog.New(slog.DiscardHandler)
}

// logVolume adds the volume to the log of a call that did not name it.
func logVolume(ctx context.Context, id string) {
	if call, ok := ctx.Value(logKey{}).(*callLog); ok {
		call.Store(call.Load().With("volume", id))
	}
}

// quiet are calls that a CO makes often and that change nothing.
var quiet = map[string]bool{
	"Probe": true, "GetPluginInfo": true, "GetPluginCapabilities": true,
	"ControllerGetCapabilities": true, "NodeGetCapabilities": true, "NodeGetInfo": true,
	"GetCapacity": true, "ListSnapshots": true, "GetSnapshot": true, "ListVolumes": true, "ControllerGetVolume": true,
	"ControllerGetVolumeHealth": true, "ControllerListVolumeHealth": true,
	"NodeGetVolumeStats": true, "NodeGetVolumeHealth": true, "NodeGetStorageHealth": true,
}

// observe logs and times a call, and turns a panic into an answer: one volume's call must not end
// those of all others. The request's id goes to the manager with each call made on its behalf, and
// the manager logs it too.
func (d *Driver) observe(ctx context.Context, req any, info *grpc.UnaryServerInfo, handle grpc.UnaryHandler) (reply any, err error) {
	rpc := path.Base(info.FullMethod)
	request := d.requests.next()
	log := d.cfg.Log.With("rpc", rpc, "request", request)
	if subject := subjectOf(req); subject.Key != "" {
		log = log.With(subject)
	}
	ctx = metadata.AppendToOutgoingContext(withLog(ctx, log), pb.RequestKey, request)
	log.Debug("call", "message", protosanitizer.StripSecrets(req))
	start := time.Now()
	slow := time.AfterFunc(d.cfg.SlowAfter, func() {
		logOf(ctx).Warn("call is slow and still running", "after", d.cfg.SlowAfter)
	})
	defer func() {
		slow.Stop()
		log := logOf(ctx)
		if p := recover(); p != nil {
			log.Error("panic", "value", p, "stack", string(debug.Stack()))
			// Not a final code: work that the call began may still go on.
			reply, err = nil, status.Errorf(codes.Unavailable, "%s: panic: %v", rpc, p)
		}
		took, code := time.Since(start), status.Code(err)
		d.metrics.seconds.WithLabelValues(info.FullMethod, code.String()).Observe(took.Seconds())
		log.Log(ctx, levelOf(rpc, code), "answered", "code", code, "took", took, "err", err)
	}()
	return handle(ctx, req)
}

// observeStream logs and counts the calls that stream their answer, and ends them when the driver is told
// to stop.
func (d *Driver) observeStream(stopping context.Context) grpc.StreamServerInterceptor {
	return func(server any, stream grpc.ServerStream, info *grpc.StreamServerInfo, handle grpc.StreamHandler) error {
		about := &grpc.UnaryServerInfo{FullMethod: info.FullMethod}
		_, err := d.observe(stream.Context(), nil, about, func(ctx context.Context, req any) (any, error) {
			return endWith(stopping)(ctx, req, about, func(ctx context.Context, _ any) (any, error) {
				return nil, handle(server, observedStream{stream, ctx})
			})
		})
		return err
	}
}

// observedStream is a stream with another context.
type observedStream struct {
	grpc.ServerStream
	ctx context.Context
}

func (s observedStream) Context() context.Context { return s.ctx }

// requestIDs generates ids that no other process uses.
type requestIDs struct {
	process string
	last    atomic.Uint64
}

func newRequestIDs() *requestIDs { return &requestIDs{process: strings.ToLower(rand.Text()[:6])} }

func (r *requestIDs) next() string { return fmt.Sprintf("%s-%d", r.process, r.last.Add(1)) }

// subjectOf names the volume or other subject of a request.
func subjectOf(req any) slog.Attr {
	if r, ok := req.(interface{ GetVolumeId() string }); ok {
		return slog.String("volume", r.GetVolumeId())
	}
	if r, ok := req.(interface{ GetName() string }); ok {
		return slog.String("name", r.GetName())
	}
	return slog.Attr{}
}

func levelOf(rpc string, code codes.Code) slog.Level {
	switch code {
	case codes.OK:
		if quiet[rpc] {
			return slog.LevelDebug
		}
		return slog.LevelInfo
	case codes.Unimplemented:
		return slog.LevelDebug
	case codes.Aborted, codes.Canceled, codes.DeadlineExceeded:
		return slog.LevelInfo // the CO will ask again
	}
	return slog.LevelWarn
}
