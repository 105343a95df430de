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

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// answerTime is how long a file system may take to say how full it is. A CO asks
// all the time, and for each volume: a dead one must not use up its patience.
const answerTime = 3 * time.Second

// questions are those to file systems that are not answered yet: one per volume. A
// hanging device would else collect a thread for each time that somebody asks.
type questions struct {
	patience time.Duration

	mu   sync.Mutex
	open map[string]*question // by volume
}

type question struct {
	path     string
	since    time.Time
	answered chan struct{} // closed when the answer is there
	answer   usage
	err      error
}

func newQuestions() *questions {
	return &questions{patience: answerTime, open: map[string]*question{}}
}

var errNoAnswer = errors.New("no answer")

// ask asks, or waits for the answer to the question that was asked before. The error
// is errNoAnswer if there is none in time.
func (q *questions) ask(volume, path string, usageOf func(path string) (usage, error)) (usage, error) {
	asked := q.begin(volume, path, usageOf)
	late := time.NewTimer(q.patience - time.Since(asked.since))
	defer late.Stop()
	select {
	case <-asked.answered:
		return asked.answer, asked.err
	case <-late.C:
	}
	return usage{}, fmt.Errorf("the file system on %s has not answered since %v: %w", asked.path, time.Since(asked.since).Round(time.Second), errNoAnswer)
}

func (q *questions) begin(volume, path string, usageOf func(path string) (usage, error)) *question {
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

// NodeGetVolumeStats tells how full a volume's file system is, or how large its raw
// device. It needs no manager; one that answers tells whether the device at the path
// is the volume's.
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
	if device != m.device {
		size, err := s.kernel.Size(device)
		if err != nil {
			return nil, status.Errorf(codes.Unavailable, "volume %s: %v", id, err)
		}
		return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
			{Unit: csi.VolumeUsage_BYTES, Total: clamp(size)},
		}}, nil
	}
	u, err := s.asked.ask(id, m.point, s.kernel.Usage)
	if errors.Is(err, errNoAnswer) {
		err = fmt.Errorf("%w%s", err, s.why(v))
	}
	if err != nil {
		return nil, status.Errorf(codes.Unavailable, "volume %s: %v", id, err)
	}
	return &csi.NodeGetVolumeStatsResponse{Usage: []*csi.VolumeUsage{
		{Unit: csi.VolumeUsage_BYTES, Total: clamp(u.bytes), Used: clamp(u.bytes - u.bytesFree), Available: clamp(u.bytesAvailable)},
		{Unit: csi.VolumeUsage_INODES, Total: clamp(u.inodes), Used: clamp(u.inodes - u.inodesFree), Available: clamp(u.inodesFree)},
	}}, nil
}

// mountAt is what is mounted at a path; NotFound if nothing is.
func (s *nodeServer) mountAt(path string) (mount, error) {
	point, err := s.kernel.Resolve(path)
	if err != nil {
		return mount{}, status.Error(codes.Unavailable, err.Error())
	}
	all, err := s.kernel.Mounts()
	if err != nil {
		return mount{}, status.Error(codes.Unavailable, err.Error())
	}
	m, ok := all.at(point)
	if !ok {
		return mount{}, status.Errorf(codes.NotFound, "%s: no volume is mounted there", path)
	}
	return m, nil
}

// recordsTime is how long the manager may take to say what it knows of a volume, to
// a call that can do without.
const recordsTime = time.Second

// volumeOn is the volume whose device is mounted, nil if the manager does not say in
// time. The error is NotFound for a volume that is not there, or not on this device;
// the manager may not know yet on which one it is.
func (s *nodeServer) volumeOn(ctx context.Context, id string, m mount, device block.DeviceNumber) (*pb.Volume, error) {
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
		return nil, status.Errorf(codes.NotFound, "volume %s: device %s, which is not the volume's, is mounted on %s", v.Name, device, m.point)
	}
	return v, nil
}

// why says what I/O of a volume waits for, as far as the manager knows.
func (s *nodeServer) why(v *pb.Volume) string {
	if v == nil {
		return ""
	}
	if waits := attachmentTo(v, string(s.cfg.Node)).GetWaitingFor(); waits != "" {
		return ": its I/O waits for " + waits
	}
	return ""
}
