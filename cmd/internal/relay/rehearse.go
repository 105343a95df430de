// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/nvmetcp/host"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/target"
	"weft.dev/weft/target/drive"
)

// A program that is installed anew may be unable to serve here: it may be broken, or not be allowed what it
// needs. So before the previous process stops, the next one rehearses: an agent serves a drive in memory to a
// host in this process, hands over to another agent, and that one serves what the host has written. If that
// goes wrong, the previous process goes on, and no host has noticed.
//
// It is also the first time that the program does all of this. That takes longer than the second time, and
// no host waits for it. So the process that is to hand over rehearses as well.

// rehearseFor bounds the rehearsal, which takes 0.1 s. On a machine that is busier than that, hosts would not
// wait for the next process either.
const rehearseFor = 15 * time.Second

// rehearse returns an error if this program does not serve as it should. Where hosts wait for no process, since
// the kernel serves all that there is, nobody rehearses.
func rehearse(ctx context.Context, log *slog.Logger) error {
	ctx, cancel := context.WithTimeoutCause(ctx, rehearseFor, fmt.Errorf("not within %v", rehearseFor))
	defer cancel()
	began := time.Now()
	s, err := setStage()
	if err != nil {
		log.Warn("taking over without a rehearsal", "err", err)
		return nil
	}
	defer s.close()
	if err := s.play(ctx); err != nil {
		return fmt.Errorf("rehearse, with a drive in memory: %w", err)
	}
	log.Info("rehearsed", "in", time.Since(began).Round(time.Millisecond))
	return nil
}

// stage is what a rehearsal needs: a drive in memory, and the portal at which its leg is served.
type stage struct {
	memory   *os.File
	path     string // leads to memory
	listener net.Listener
	portal   block.Portal
	medium   func(path string, data block.Device) block.Device // for tests; nil: the memory as it is
}

// The names on the stage. Nobody else hears of them.
var (
	stageCluster = block.ClusterID{UUID: stageID(1)}
	stageDrive   = block.DriveID{UUID: stageID(2)}
	stageVolume  = block.VolumeID{UUID: stageID(3)}
	stageLeg     = block.LegID{UUID: stageID(4)}
	stageHost    = block.HostFromID(stageID(5))
	stageNQN     = block.SubsystemNQN(stageVolume, stageEpoch, stageHost, stageNode)
	stageSpace   = block.NamespaceUUID(stageLeg, stageEpoch, 0)
)

const (
	stageNode  = "rehearsal"
	stageEpoch = block.Epoch(1)
)

func stageID(n byte) block.UUID { return block.UUIDFromRandom([16]byte{n}) }

func setStage() (_ *stage, retErr error) {
	s := &stage{}
	defer func() {
		if retErr != nil {
			s.close()
		}
	}()
	fd, err := unix.MemfdCreate("rehearsal", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, fmt.Errorf("a drive in memory: %w", err)
	}
	s.memory, s.path = os.NewFile(uintptr(fd), "rehearsal"), fmt.Sprintf("/proc/self/fd/%d", fd)
	if err := s.memory.Truncate(int64(drive.MinSize)); err != nil {
		return nil, fmt.Errorf("a drive in memory: %w", err)
	}
	if err := drive.FormatPath(s.path, stageCluster, stageDrive, ""); err != nil {
		return nil, fmt.Errorf("a drive in memory: %w", err)
	}
	if s.listener, err = net.Listen("tcp", "127.0.0.1:0"); err != nil {
		return nil, err
	}
	at := s.listener.Addr().(*net.TCPAddr) //nolint:forcetypeassert // it listens on TCP
	s.portal = block.Portal{Transport: block.TCP, Address: at.IP.String(), Port: uint16(at.Port)}
	return s, nil
}

// close may be called after the agents have closed the listener.
func (s *stage) close() {
	if s.memory != nil {
		s.memory.Close()
	}
	if s.listener != nil {
		s.listener.Close()
	}
}

// estate is what the first agent takes over: a drive without legs, and a leg that is wanted.
func (s *stage) estate() (target.Estate, error) {
	volume, leg := stageVolume.String(), stageLeg.String()
	message, err := proto.Marshal(&pb.TargetHandover{
		Devices: []*pb.Device{{Path: s.path, DriveId: stageDrive.String()}},
		Wanted: &pb.TargetWanted{
			Generation: 1, ClusterId: stageCluster.String(),
			Legs: []*pb.WantedLeg{{
				LegId: leg, DriveId: stageDrive.String(), Extents: []*pb.Extent{{Count: 1}}, SizeBytes: uint64(block.MiB),
				Volume: &pb.VolumeLabel{VolumeId: volume, SizeBytes: uint64(block.MiB), Epoch: uint64(stageEpoch)},
			}},
			Admissions: []*pb.Admission{{VolumeId: volume, Epoch: uint64(stageEpoch)}},
			Exports: []*pb.WantedExport{{
				VolumeId: volume, Epoch: uint64(stageEpoch), Nqn: string(stageNQN), Serial: block.SerialNumber(stageVolume),
				Host:       &pb.Host{Nqn: string(stageHost.NQN), Id: stageHost.ID.String()},
				Namespaces: []*pb.WantedNamespace{{Nsid: 1, LegId: leg, Uuid: stageSpace.String()}},
			}},
		},
	})
	if err != nil {
		return target.Estate{}, err
	}
	return target.Unpack(message, nil)
}

// play is the rehearsal.
func (s *stage) play(ctx context.Context) error {
	begin, err := s.estate()
	if err != nil {
		return err
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	first, err := s.serve(begin, fail)
	if err != nil {
		return err
	}
	defer first.end(nil)
	c, d, err := s.connect(ctx)
	if err != nil {
		return err
	}
	defer context.AfterFunc(ctx, c.Cut)() // I/O fails then, and would wait for ever
	defer c.Cut()
	if err := writeBlock(d, 1); err != nil {
		return errors.Join(err, context.Cause(ctx))
	}
	left, err := first.handOver()
	if err != nil {
		return err
	}
	second, err := s.serve(left, fail)
	if err != nil {
		return err
	}
	defer second.end(nil)
	for _, step := range []func() error{
		func() error { return readBlock(d, 1) },
		func() error { return writeBlock(d, 2) },
		func() error { return readBlock(d, 2) },
		func() error { return c.Close(ctx) },
	} {
		if err := step(); err != nil {
			return errors.Join(err, context.Cause(ctx))
		}
	}
	return nil
}

// actor is an agent that runs.
type actor struct {
	agent *target.Agent
	end   func(cause error) // once; later calls do nothing
	err   error             // of Run, after end
}

// serve starts an agent with what another one has left. If it ends by itself, fail is called.
func (s *stage) serve(left target.Estate, fail func(error)) (*actor, error) {
	a, err := target.New(target.Config{
		Node: stageNode, Portals: []block.Portal{s.portal}, Manager: nobody{}, Datapath: target.User,
		Files: []string{s.path}, FilesOnly: true, Rehearsal: true, Medium: s.medium,
		Listen: func(block.Portal) (net.Listener, error) { return s.listener, nil },
	})
	if err == nil {
		err = a.Inherit(left)
	}
	if err != nil {
		return nil, errors.Join(err, left.Close())
	}
	x, ended := &actor{agent: a}, make(chan struct{})
	ctx, cancel := context.WithCancelCause(context.Background())
	x.end = func(cause error) { cancel(cause); <-ended }
	go func() {
		defer close(ended)
		if x.err = a.Run(ctx); ctx.Err() == nil {
			fail(fmt.Errorf("the agent has ended: %w", x.err))
		}
	}()
	return x, nil
}

// handOver ends the agent, and returns what it leaves, as another process would receive it.
func (x *actor) handOver() (target.Estate, error) {
	x.end(target.ErrHandOver)
	if !errors.Is(x.err, target.ErrHandOver) {
		return target.Estate{}, fmt.Errorf("hand over: %w", x.err)
	}
	estate := x.agent.Estate()
	message, sockets, err := estate.Pack(true)
	if err := errors.Join(err, estate.Close()); err != nil {
		target.CloseAll(sockets)
		return target.Estate{}, fmt.Errorf("hand over: %w", err)
	}
	return target.Unpack(message, sockets)
}

// connect connects a host to the leg once it is exported.
func (s *stage) connect(ctx context.Context) (*host.Controller, block.Device, error) {
	for {
		c, err := host.Connect(ctx, host.Config{Portals: []string{s.portal.HostPort()}, Subsystem: stageNQN, Host: stageHost, IOQueues: 1})
		if err == nil {
			var d block.Device
			if d, err = c.Namespace(1, stageSpace); err == nil {
				return c, d, nil
			}
			c.Cut()
		}
		select {
		case <-ctx.Done():
			return nil, nil, fmt.Errorf("connect: %w", errors.Join(err, context.Cause(ctx)))
		case <-time.After(10 * time.Millisecond):
		}
	}
}

const blockSize = 4096

func writeBlock(d block.Device, content byte) error {
	return block.WriteAt(d, bytes.Repeat([]byte{content}, blockSize), 0)
}

// readBlock returns an error if the block does not hold what was written.
func readBlock(d block.Device, content byte) error {
	b := make([]byte, blockSize)
	if err := block.ReadAt(d, b, 0); err != nil {
		return err
	}
	if !bytes.Equal(b, bytes.Repeat([]byte{content}, blockSize)) {
		return errors.New("a block does not hold what was written")
	}
	return nil
}

// nobody is a manager that never answers.
type nobody struct{ pb.AgentsClient }

var errNobody = errors.New("there is no manager in a rehearsal")

// Target implements [pb.AgentsClient].
func (nobody) Target(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.TargetReport, pb.TargetWanted], error) {
	return nil, errNobody
}

// Figures implements [pb.AgentsClient].
func (nobody) Figures(context.Context, ...grpc.CallOption) (grpc.ClientStreamingClient[pb.FiguresReport, pb.FiguresResponse], error) {
	return nil, errNobody
}

// Support implements [pb.AgentsClient].
func (nobody) Support(context.Context, ...grpc.CallOption) (grpc.BidiStreamingClient[pb.SupportAnswer, pb.SupportQuestion], error) {
	return nil, errNobody
}
