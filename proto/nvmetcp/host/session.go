// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// session is one association with a controller: an admin queue, IO queues, and the
// controller's properties. All of it ends together.
type session struct {
	c      *Controller
	number uint64
	portal string
	id     uint16 // CNTLID

	admin *queue
	io    []*queue
	turn  atomic.Uint32

	caps    nvmetcp.Capabilities
	about   nvmetcp.Controller
	nvm     nvmetcp.NVMController
	maxIO   int64 // bytes of one command
	capsule int   // bytes of in-capsule data on IO queues

	events chan nvmetcp.Event
	scans  chan struct{} // a scan of the namespaces was asked for

	once sync.Once
	dead chan struct{}
	err  error // why it is dead
}

// adminDepth is Linux's value, and the smallest that a controller must accept.
const adminDepth = 32

// maxIOWithoutMDTS is the largest command if the controller states no limit.
const maxIOWithoutMDTS = 1 << 20

// fail ends the session; the first reason is kept.
func (s *session) fail(err error) {
	s.once.Do(func() {
		s.err = err
		close(s.dead)
	})
}

// queues returns all queues.
func (s *session) queues() []*queue {
	if s.admin == nil {
		return s.io
	}
	return append([]*queue{s.admin}, s.io...)
}

// submit gives an IO to a queue, or returns false if the session has ended.
func (s *session) submit(r *request) bool {
	i := uint32(0)
	if len(s.io) > 1 {
		i = s.turn.Add(1) % uint32(len(s.io))
	}
	return s.io[i].submit(r)
}

// open opens a session through a portal. On error it leaves nothing behind.
func (c *Controller) open(ctx context.Context, portal string, number uint64) (_ *session, err error) {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.ConnectTimeout)
	defer cancel()
	s := &session{c: c, number: number, portal: portal, id: nvmetcp.DynamicController,
		events: make(chan nvmetcp.Event, 8), scans: make(chan struct{}, 1), dead: make(chan struct{})}
	defer func() {
		if err != nil {
			s.fail(err)
			s.stop()
			err = fmt.Errorf("connect to %s at %s: %w", c.cfg.Subsystem, portal, s.err)
		}
	}()
	if s.admin, err = s.connect(ctx, 0); err != nil {
		return nil, fmt.Errorf("admin queue: %w", err)
	}
	if err := s.enable(ctx); err != nil {
		return nil, err
	}
	if c.cfg.discovery {
		return s, nil
	}
	return s, s.openIO(ctx)
}

// stop ends all connections and returns the unfinished IOs. Other commands fail.
func (s *session) stop() (unfinished list) {
	for _, q := range s.queues() {
		all := q.stop()
		for r := all.pop(); r != nil; r = all.pop() {
			if r.done != nil {
				r.tell(errLost)
				continue
			}
			unfinished.push(r)
		}
	}
	return unfinished
}

// connect opens a queue: TCP, ICReq, Connect, authentication.
func (s *session) connect(ctx context.Context, id uint16) (*queue, error) {
	q, err := s.dial(ctx, id)
	if err != nil {
		return nil, err
	}
	if err := s.introduce(ctx, q); err != nil {
		left := q.stop()
		for r := left.pop(); r != nil; r = left.pop() {
			r.tell(errLost)
		}
		return nil, err
	}
	return q, nil
}

// dial connects and negotiates the connection's parameters.
func (s *session) dial(ctx context.Context, id uint16) (*queue, error) {
	cfg := &s.c.cfg
	conn, err := cfg.Dial(ctx, "tcp", s.portal)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.SetDeadline(time.Unix(1, 0)) }) //nolint:errcheck // interrupts reads and writes
	defer stop()
	q, err := s.agree(conn, id)
	if err != nil {
		conn.Close() //nolint:errcheck // nothing important was sent
		if cause := context.Cause(ctx); cause != nil {
			err = errors.Join(cause, err)
		}
		return nil, err
	}
	return q, nil
}

// agree exchanges ICReq and ICResp.
func (s *session) agree(conn net.Conn, id uint16) (*queue, error) {
	cfg := &s.c.cfg
	size, depth := cfg.BufferSize, cfg.QueueDepth
	if id == 0 {
		size, depth = 16<<10, adminDepth-1
	}
	q := newQueue(id, conn, depth, s)
	want := nvmetcp.ICReq{HeaderDigest: cfg.HeaderDigest, DataDigest: cfg.DataDigest, MaxR2T: 1}
	if _, err := conn.Write(want.Append(nil)); err != nil {
		return nil, err
	}
	rc := nvmetcp.ReaderConfig{Role: nvmetcp.RoleHost, MaxData: 1 << 31, BufferSize: size}
	q.reader = nvmetcp.NewReader(q, rc)
	pdu, err := q.reader.Next()
	if err != nil {
		return nil, fmt.Errorf("receive ICResp: %w", err)
	}
	if pdu.Type == nvmetcp.TypeC2HTermReq {
		return nil, q.reader.TermReq()
	}
	if pdu.Type != nvmetcp.TypeICResp {
		return nil, fmt.Errorf("receive ICResp: %v came", pdu.Type)
	}
	got, err := nvmetcp.ParseICResp(pdu.Head)
	if err != nil {
		return nil, err
	}
	if got.HeaderDigest != want.HeaderDigest || got.DataDigest != want.DataDigest {
		return nil, fmt.Errorf("controller wants header digest %v, data digest %v; asked for %v, %v",
			got.HeaderDigest, got.DataDigest, want.HeaderDigest, want.DataDigest)
	}
	rc.HeaderDigest, rc.DataDigest = got.HeaderDigest, got.DataDigest
	q.reader.Configure(rc)
	q.writer = nvmetcp.NewWriter(nil, nvmetcp.WriterConfig{HeaderDigest: got.HeaderDigest, DataDigest: got.DataDigest, Align: got.CPDA})
	q.maxData = int(min(got.MaxH2CData, 1<<30))
	q.capsule = maxFabricsCapsule
	if id != 0 {
		q.capsule = s.capsule
	}
	return q, nil
}

// introduce sends Connect and authenticates the host.
func (s *session) introduce(ctx context.Context, q *queue) error {
	cfg := &s.c.cfg
	depth := len(q.slots)
	if q.id != 0 {
		depth = min(depth, int(s.caps.MaxQueueEntries)-1)
		q.setDepth(depth)
	}
	q.start()
	connect := nvmetcp.Connect{QueueID: q.id, QueueSize: uint32(depth) + 1}
	if q.id == 0 && cfg.KATO > 0 {
		connect.KATO = cfg.KATO
	}
	data := nvmetcp.ConnectData{HostID: cfg.Host.ID, ControllerID: s.id, Subsystem: cfg.Subsystem, Host: cfg.Host.NQN}
	c, err := q.do(ctx, connect.Command(), data.Append(nil))
	if err != nil {
		return fmt.Errorf("connect command: %w", err)
	}
	result := nvmetcp.ParseConnectResult(c.Result())
	if result.SecureChannel {
		return errors.New("controller asks for a secure channel, which is not supported")
	}
	if result.AuthRequired || !cfg.ControllerKey.IsZero() {
		if err := s.authenticate(ctx, q); err != nil {
			return fmt.Errorf("authenticate: %w", err)
		}
	}
	if q.id == 0 {
		s.id = result.ControllerID
	}
	return nil
}

// authenticate proves the host's identity and, if there is a key for it, checks the
// controller's.
func (s *session) authenticate(ctx context.Context, q *queue) error {
	cfg := &s.c.cfg
	if cfg.HostKey.IsZero() {
		return errors.New("controller asks for it and there is no host key")
	}
	h, err := dhchap.NewHost(dhchap.Config{
		HostNQN: string(cfg.Host.NQN), SubsystemNQN: string(cfg.Subsystem),
		HostKey: cfg.HostKey, ControllerKey: cfg.ControllerKey, Hashes: cfg.AuthHashes, Groups: cfg.AuthGroups,
		Transaction: uint16(s.c.transactions.Add(1)),
	})
	if err != nil {
		return err
	}
	auth := nvmetcp.AuthCommand{Protocol: nvmetcp.AuthProtocol, SPSP0: 1, SPSP1: 1}
	var in []byte
	for {
		out, done, failed := h.Step(in)
		if out != nil {
			auth.Receive, auth.Length = false, uint32(len(out))
			if _, err := q.do(ctx, auth.Command(true), out); err != nil && failed == nil {
				return err
			}
		}
		if failed != nil || done {
			return failed
		}
		auth.Receive, auth.Length = true, dhchap.MaxMessage
		in = make([]byte, dhchap.MaxMessage)
		if _, err := q.do(ctx, auth.Command(false), in); err != nil {
			return err
		}
	}
}

// enable enables the controller and reads its properties.
func (s *session) enable(ctx context.Context) error {
	caps, err := s.property(ctx, nvmetcp.PropertyCAP)
	if err != nil {
		return err
	}
	s.caps = nvmetcp.ParseCapabilities(caps)
	if s.caps.MaxQueueEntries < 2 {
		return errors.New("controller allows queues of 1 entry only")
	}
	config := nvmetcp.Configuration{Enable: true, SubmissionEntrySize: 6, CompletionEntrySize: 4}
	if err := s.setProperty(ctx, nvmetcp.PropertyCC, uint64(config.Encode())); err != nil {
		return err
	}
	if err := s.await(ctx, "to become ready", func(c nvmetcp.ControllerStatus) bool { return c.Ready }); err != nil {
		return err
	}
	s.about, err = identified(ctx, s, nvmetcp.Identify{CNS: nvmetcp.CNSController},
		func(b []byte) (nvmetcp.Controller, error) { return nvmetcp.ParseController(b) })
	if err != nil {
		return err
	}
	s.c.replaces.Store(s.about.PerHost == 1)
	s.c.replacer.Store(s.about.Replacer)
	s.maxIO = maxIOWithoutMDTS
	if s.about.MDTS > 0 && s.about.MDTS < 32 {
		s.maxIO = min(int64(1)<<(12+s.caps.MinPageSize)<<s.about.MDTS, 16<<20)
	}
	if n := int64(s.about.IOCapsule)*16 - nvmetcp.CommandSize; n > 0 {
		s.capsule = int(min(n, 1<<20))
	}
	return nil
}

// await polls CSTS: no event reports its changes.
func (s *session) await(ctx context.Context, what string, is func(nvmetcp.ControllerStatus) bool) error {
	ticker := time.NewTicker(10 * time.Millisecond)
	defer ticker.Stop()
	for {
		v, err := s.property(ctx, nvmetcp.PropertyCSTS)
		if err != nil {
			return err
		}
		status := nvmetcp.ParseControllerStatus(uint32(v))
		if is(status) {
			return nil
		}
		if status.Fatal {
			return fmt.Errorf("wait for the controller %s: it has a fatal status", what)
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for the controller %s: %w", what, context.Cause(ctx))
		case <-s.dead:
			return s.err
		case <-ticker.C:
		}
	}
}

// openIO opens the IO queues and asks for events.
func (s *session) openIO(ctx context.Context) error {
	want := nvmetcp.QueueCounts{Submission: uint32(s.c.cfg.IOQueues), Completion: uint32(s.c.cfg.IOQueues)}
	v, err := s.setFeature(ctx, nvmetcp.FeatureQueues, want.Encode())
	if err != nil {
		return err
	}
	got := nvmetcp.ParseQueueCounts(v)
	n := min(want.Submission, got.Submission, got.Completion)
	for id := uint32(1); id <= n; id++ {
		q, err := s.connect(ctx, uint16(id))
		if err != nil {
			return fmt.Errorf("queue %d: %w", id, err)
		}
		s.io = append(s.io, q)
	}
	if s.nvm, err = identified(ctx, s, nvmetcp.Identify{CNS: nvmetcp.CNSControllerOfSet}, nvmetcp.ParseNVMController); err != nil {
		s.nvm = nvmetcp.NVMController{} // older controllers do not have it
	}
	if events := s.about.OAES & (nvmetcp.EventNamespaces | nvmetcp.EventANA); events != 0 {
		if _, err := s.setFeature(ctx, nvmetcp.FeatureAsyncEvents, events); err != nil {
			return err
		}
	}
	s.askForEvent()
	select {
	case <-s.dead:
		return s.err
	default:
		return nil
	}
}
