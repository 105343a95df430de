// SPDX-License-Identifier: Apache-2.0

package target

import (
	"cmp"
	"context"
	"fmt"
	"time"

	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/raid/dm"
)

// answerSupport answers questions for support bundles until ctx ends. It runs as long as the agent
// works in one data path.
func (a *Agent) answerSupport(ctx context.Context, drives *openDrives) {
	mapper := lazy[mapper]{open: a.kernel.mapper}
	s := &support.Agent{
		Manager: a.config.Manager, Node: string(a.config.Node), Source: pb.SupportSource_SUPPORT_SOURCE_TARGET,
		Collect: func(ctx context.Context) []support.File {
			if refused := a.refuses(); refused != "" {
				return []support.File{{Name: "all", Missing: refused}}
			}
			files := []support.File{legsTold(&mapper), exportsTold(ctx, "nvmet.txt", a.kernel.exports)}
			if p := a.kernel.process; p != nil {
				files = append(files, exportsTold(ctx, "process.txt", p))
			}
			if a.config.Support != nil {
				files = append(files, a.config.Support(ctx)...)
			}
			return files
		},
		Ranges: func(ctx context.Context, q *pb.RangesQuestion) *pb.RangesAnswer {
			if refused := a.refuses(); refused != "" {
				return &pb.RangesAnswer{Failed: refused}
			}
			return answerWithin(ctx, rangesFor, func() *pb.RangesAnswer { return rangesOf(drives, q) })
		},
		Ended: func(err error) { a.log.Debug("questions of support bundles are not answered", "err", err) },
	}
	s.Run(ctx)
}

// rangesFor is how long an answer about ranges is awaited: it waits for what changes the tree, which may hang in
// the drive.
const rangesFor = 30 * time.Second

// answerWithin returns an answer, or that there is none in time. What answers goes on then.
func answerWithin(ctx context.Context, limit time.Duration, ask func() *pb.RangesAnswer) *pb.RangesAnswer {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer in %v: does the drive answer?", limit))
	defer cancel()
	answer := make(chan *pb.RangesAnswer, 1)
	go func() { answer <- ask() }()
	select {
	case a := <-answer:
		return a
	case <-ctx.Done():
		return &pb.RangesAnswer{Failed: context.Cause(ctx).Error()}
	}
}

// refuses says why no question of the manager is answered; empty: they are.
func (a *Agent) refuses() string {
	a.mu.Lock()
	defer a.mu.Unlock()
	if cmp.Or(a.other, a.behind) == "" {
		return ""
	}
	return "the agent does not obey this manager"
}

// legsTold is the node's legs as mapped devices.
func legsTold(open *lazy[mapper]) support.File {
	const name = "dm.txt"
	m, err := open.get()
	if err != nil {
		return support.File{Name: name, Missing: err.Error()}
	}
	devices, err := m.Devices(dmPrefix)
	return support.Text(name, dm.Told(devices), err)
}

// exportsTold tells what one target exports: nvmet, the process that stands in for it, or the one beside it.
func exportsTold(ctx context.Context, name string, open func() (exporter, error)) support.File {
	e, err := open()
	if err != nil {
		return support.File{Name: name, Missing: err.Error()}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("no answer in %v", patience))
	defer cancel()
	c, err := e.Read(ctx)
	return support.Text(name, c.Told(), err)
}
