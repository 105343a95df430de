// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/csi/mount"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// answerTime is how long a file system may take to say how full it is. A CO asks often, and for
// each volume: a dead one must not use up its time.
const answerTime = 3 * time.Second

// questions are unanswered questions to file systems, one per volume. Otherwise a hanging device
// would collect a thread for every question.
type questions struct {
	patience time.Duration

	mu   sync.Mutex
	open map[string]*question // by volume
}

type question struct {
	path     string
	since    time.Time
	answered chan struct{} // closed when the answer has arrived
	answer   mount.Usage
	err      error
}

func newQuestions() *questions {
	return &questions{patience: answerTime, open: map[string]*question{}}
}

var errNoAnswer = errors.New("no answer")

// ask asks, or waits for the answer to a question already asked. The error is errNoAnswer if there
// is none in time.
func (q *questions) ask(volume, path string, usageOf func(path string) (mount.Usage, error)) (mount.Usage, error) {
	asked := q.begin(volume, path, usageOf)
	late := time.NewTimer(q.patience - time.Since(asked.since))
	defer late.Stop()
	select {
	case <-asked.answered:
		return asked.answer, asked.err
	case <-late.C:
	}
	return mount.Usage{}, fmt.Errorf("the file system on %s has not answered since %v: %w", asked.path, time.Since(asked.since).Round(time.Second), errNoAnswer)
}

func (q *questions) begin(volume, path string, usageOf func(path string) (mount.Usage, error)) *question {
	q.mu.Lock()
	defer q.mu.Unlock()
	if asked, ok := q.open[volume]; ok {
		return asked
	}
	asked := &question{path: path, since: time.Now(), answered: make(chan struct{})}
	q.open[volume] = asked
	go func() {
		asked.answer, asked.err = usageOf(path)
		q.mu.Lock()
		delete(q.open, volume)
		q.mu.Unlock()
		close(asked.answered)
	}()
	return asked
}

// NodeGetVolumeStats says how full a volume's file system is, or how large its raw device. It works
// without a manager; with one it also checks that the device at the path is the volume's.
func (s *nodeServer) NodeGetVolumeStats(ctx context.Context, r *csi.NodeGetVolumeStatsRequest) (*csi.NodeGetVolumeStatsResponse, error) {
	id, path := r.GetVolumeId(), r.GetVolumePath()
	if err := missingID(id); err != nil {
		return nil, err
	}
	if path == "" {
		return nil, status.Error(codes.InvalidArgument, "volume_path: missing")
	}
	m, err := s.mountAt(path)
	if err != nil {
		return nil, err
	}
	device := s.deviceOf(m)
	v, err := s.volumeOn(ctx, id, m, device)
	if err != nil {
		return nil, err
	}
	if device != m.Device {
		size, err := s.kernel.Size(device)
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "volume %s: %v", id, err)
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: clamp(size)},
		}}, nil
	}
	u, err := s.asked.ask(id, m.Point, s.kernel.Usage)
	if errors.Is(err, errNoAnswer) {
		err = fmt.Errorf("%w%s", err, s.why(v))
	}
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "volume %s: %v", id, err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: clamp(u.Bytes), Used: clamp(u.Bytes - u.BytesFree), Available: clamp(u.BytesAvailable)},
		{Unit: csi.VolumeUsage_INODES, Total: clamp(u.Inodes), Used: clamp(u.Inodes - u.InodesFree), Available: clamp(u.InodesFree)},
	}}, nil
}

// mountAt is the mount at a path; NotFound if there is none.
func (s *nodeServer) mountAt(path string) (mount.Mount, error) {
	point, err := s.kernel.Resolve(path)
	if err != nil {
		return mount.Mount{}, status.Error(codes.Unavailable, err.Error())
	}
	all, err := s.kernel.Mounts()
	if err != nil {
		return mount.Mount{}, status.Error(codes.Unavailable, err.Error())
	}
	m, ok := all.At(point)
	if !ok {
		return mount.Mount{}, status.Errorf(codes.NotFound, "%s: no volume is mounted there", path)
	}
	return m, nil
}

// recordsTime is how long the manager may take to describe a volume to a call that can do without.
const recordsTime = time.Second

// volumeOn returns the volume whose device is mounted, nil if the manager does not answer in time.
// The error is NotFound if the volume does not exist, or is on another device; the manager may not
// know its device yet.
func (s *nodeServer) volumeOn(ctx context.Context, id string, m mount.Mount, device block.DeviceNumber) (*pb.Volume, error) {
	ctx, cancel := context.WithTimeout(ctx, recordsTime)
	defer cancel()
	v, err := s.volume(ctx, id)
	switch {
	case status.Code(err) == codes.NotFound:
		return nil, err
	case err != nil:
		logOf(ctx).Debug("manager does not answer", "err", err)
		return nil, nil
	}
	a := attachmentTo(v, string(s.cfg.Node))
	if number := a.GetDeviceNumber(); a == nil || number != "" && number != device.String() {
		return nil, status.Errorf(codes.NotFound, "volume %s: device %s, which is not the volume's, is mounted on %s", v.Name, device, m.Point)
	}
	return v, nil
}

// why says why I/O to a volume waits, as far as the manager knows.
func (s *nodeServer) why(v *pb.Volume) string {
	if v == nil {
		return ""
	}
	if waits := attachmentTo(v, string(s.cfg.Node)).GetWaitingFor(); waits != "" {
		return ": its I/O waits for " + waits
	}
	return ""
}
