// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/bundle"
	"weft.dev/weft/volmgr/cluster"
)

// This file makes support bundles. What is in them is chosen by kind, so that what somebody adds
// later is not in them by accident: records by cluster.Record.Tellable, messages without their
// fields of bytes, which is where secrets are, and files of agents by what package support's callers
// list.

// leftOut says what is in no bundle.
var leftOut = []string{
	"the master of the keys, the keys of exports, and private keys of certificates",
	"tokens",
	"the audit: who asked for what, and from where; `weft event list --audit` shows it",
	"data of volumes",
}

// chunksOfBundle passes what is written on to the caller.
type chunksOfBundle struct {
	stream grpc.ServerStreamingServer[pb.SupportBundleChunk]
}

// Write implements [io.Writer].
func (c chunksOfBundle) Write(p []byte) (n int, err error) {
	for n < len(p) && err == nil {
		part := p[n:min(len(p), n+chunk)]
		err = c.stream.Send(&pb.SupportBundleChunk{Data: part})
		n += len(part)
	}
	return n, err
}

// SupportBundle streams a support bundle.
func (m *Manager) SupportBundle(_ *pb.SupportBundleRequest, stream grpc.ServerStreamingServer[pb.SupportBundleChunk]) error {
	if !m.support.making.TryLock() {
		return toStatus(&cluster.Error{Kind: cluster.FailedPrecondition, Reason: cluster.ReasonBundled, Text: "another support bundle is being made", Hint: "repeat the command when that one is complete"})
	}
	defer m.support.making.Unlock()
	ctx := stream.Context()
	state, err := m.snapshot(ctx)
	if err != nil {
		return toStatus(err)
	}
	w := bundle.NewWriter(chunksOfBundle{stream}, bundle.Manifest{
		Made: m.cfg.Now().UTC(), Version: m.cfg.Version, Cluster: state.ClusterID().String(), Level: uint32(state.Level()),
		Term: state.Term(), Generation: state.Generation(), LeftOut: leftOut,
	})
	b := &bundling{m: m, state: state, w: w}
	b.records()
	b.observed()
	b.manager(ctx)
	b.figures(ctx)
	b.wanted()
	b.agents(ctx)
	if b.err == nil {
		b.err = ctx.Err()
	}
	if b.err != nil {
		return toStatus(b.err)
	}
	return toStatus(w.Close())
}

// bundling is a bundle that is being made.
type bundling struct {
	m     *Manager
	state *cluster.State
	w     *bundle.Writer
	err   error // of the stream
}

// add adds a file, or says why it is missing.
func (b *bundling) add(name string, data []byte, err error) {
	if err != nil {
		b.w.Miss(name, err.Error())
		return
	}
	if b.err == nil {
		b.err = b.w.Add(name, data)
	}
}

// toldRecord is a record in a bundle.
type toldRecord struct {
	Key   string          `json:"key"`
	Value json.RawMessage `json:"value"`
}

// records adds the records that may be told.
func (b *bundling) records() {
	var text []byte
	for _, r := range b.state.Records() {
		if !r.Tellable() {
			continue
		}
		line, err := json.Marshal(toldRecord{r.Key, r.Value})
		if err != nil {
			b.w.Miss(bundle.Records+": "+r.Key, err.Error())
			continue
		}
		text = append(append(text, line...), '\n')
	}
	b.add(bundle.Records, text, nil)
}

func (b *bundling) observed() {
	text, err := b.state.Observed()
	b.add(bundle.Observed, text, err)
}

// managerSays is what no record holds and the manager that leads knows by itself.
type managerSays struct {
	Version string          `json:"version"`
	Newest  block.Level     `json:"newest_level"`
	Wrong   []string        `json:"wrong"`              // with the managers
	List    json.RawMessage `json:"managers,omitempty"` // a ListManagersResponse
	Levels  json.RawMessage `json:"levels,omitempty"`   // an Upgrade, with managers alone
}

// manager adds what this manager knows of itself and of the others.
func (b *bundling) manager(ctx context.Context) {
	says := managerSays{Version: b.m.cfg.Version, Newest: b.m.cfg.Level}
	var err error
	if b.m.quorum != nil {
		says.Wrong = b.m.quorum.wrong()
		list, failed := b.m.ListManagers(ctx, &pb.ListManagersRequest{})
		if failed == nil {
			says.List, failed = tell(list)
		}
		if failed != nil {
			b.w.Miss("the list of the managers", failed.Error())
		}
		if len(list.GetManagers()) > 1 {
			b.w.Miss("the logs of the managers that follow", "only the manager that leads is asked; take them from the machines of the others")
		}
	}
	says.Levels, err = tell(&pb.Upgrade{Parts: b.m.managerLevels()})
	if err != nil {
		b.w.Miss("the levels of the managers", err.Error())
	}
	text, err := json.MarshalIndent(says, "", " ")
	b.add(bundle.Manager, text, err)
	if b.m.cfg.Recent != nil {
		b.add("manager/log.txt", withoutAudit(b.m.cfg.Recent()), nil)
	} else {
		b.w.Miss("manager/log.txt", "this manager does not keep its log")
	}
}

// withoutAudit is a log without the lines that say who asked for what; see spread.
func withoutAudit(log []byte) (kept []byte) {
	for line := range bytes.Lines(log) {
		if !bytes.Contains(line, []byte(" msg=audit ")) && !bytes.Contains(line, []byte(`,"msg":"audit",`)) {
			kept = append(kept, line...)
		}
	}
	return kept
}

// figures adds the I/O of the last seconds.
func (b *bundling) figures(ctx context.Context) {
	for name, of := range map[string]pb.FiguresOf{"volumes": pb.FiguresOf_FIGURES_OF_VOLUMES, "hosts": pb.FiguresOf_FIGURES_OF_HOSTS, "drives": pb.FiguresOf_FIGURES_OF_DRIVES} {
		all := &pb.GetFiguresResponse{}
		request := &pb.GetFiguresRequest{Of: of}
		for {
			page, err := b.m.GetFigures(ctx, request)
			if err != nil {
				b.w.Miss("figures/"+name+".json", err.Error())
				break
			}
			all.Figures = append(all.Figures, page.Figures...)
			if request.PageToken = page.NextPageToken; request.PageToken == "" {
				text, err := tell(all)
				b.add("figures/"+name+".json", text, err)
				break
			}
		}
	}
}

// wanted adds what each node is wanted to do.
func (b *bundling) wanted() {
	for _, n := range b.state.Nodes() {
		if n.TargetBoot != "" || n.Target.Known {
			text, err := tell(targetWanted(b.state.WantedTarget(n.Name)))
			b.add(agentDir(n.Name, targetWord)+"wanted.json", text, err)
		}
		if n.InitiatorBoot != "" || n.Initiator.Known {
			text, err := tell(initiatorWanted(b.state.WantedInitiator(n.Name)))
			b.add(agentDir(n.Name, initiatorWord)+"wanted.json", text, err)
		}
	}
}

// agentDir is the directory of an agent in a bundle.
func agentDir(node block.NodeName, kind string) string {
	return "nodes/" + string(node) + "/" + kind + "/"
}

// tell is a message as JSON, without its fields of bytes, at any depth: secrets are in no others.
func tell(m proto.Message) ([]byte, error) {
	m = proto.Clone(m)
	withoutBytes(m.ProtoReflect())
	text, err := protojson.MarshalOptions{UseProtoNames: true, Multiline: true}.Marshal(m)
	return text, err
}

func withoutBytes(m protoreflect.Message) {
	m.Range(func(f protoreflect.FieldDescriptor, v protoreflect.Value) bool {
		kind := f.Kind()
		if f.IsMap() {
			kind = f.MapValue().Kind()
		}
		switch {
		case kind == protoreflect.BytesKind:
			m.Clear(f)
		case kind != protoreflect.MessageKind && kind != protoreflect.GroupKind:
		case f.IsMap():
			v.Map().Range(func(_ protoreflect.MapKey, v protoreflect.Value) bool { withoutBytes(v.Message()); return true })
		case f.IsList():
			for i := range v.List().Len() {
				withoutBytes(v.List().Get(i).Message())
			}
		default:
			withoutBytes(v.Message())
		}
		return true
	})
}

// ---- what agents tell ----

// Words for the two kinds of agents.
const (
	targetWord    = "target"
	initiatorWord = "initiator"
)

// Bounds of what agents tell, so that a bundle of a large cluster stays a file that can be sent.
const (
	askedAtOnce    = 8
	agentMost      = 4 << 20   // bytes of one agent
	agentLeast     = 64 << 10  // bytes that each may have, however many there are
	agentsMost     = 128 << 20 // bytes of all agents
	agentFilesMost = 64
	agentPatience  = 20 * time.Second
)

// askedAgent is an agent that a bundle asks.
type askedAgent struct {
	key     agentName
	status  cluster.AgentStatus
	files   []toldFile
	missing string
}

type agentName struct {
	node block.NodeName
	kind string
}

// toldFile is a file that an agent has sent.
type toldFile struct {
	name    string
	data    []byte
	missing string
}

// agents adds what the agents tell, some of them at once.
func (b *bundling) agents(ctx context.Context) {
	var all []*askedAgent
	for _, n := range b.state.Nodes() {
		for kind, status := range map[string]cluster.AgentStatus{targetWord: n.Target, initiatorWord: n.Initiator} {
			if status.Known || kind == targetWord && n.TargetBoot != "" || kind == initiatorWord && n.InitiatorBoot != "" {
				all = append(all, &askedAgent{key: agentName{n.Name, kind}, status: status})
			}
		}
	}
	slices.SortFunc(all, func(x, y *askedAgent) int {
		return strings.Compare(agentDir(x.key.node, x.key.kind), agentDir(y.key.node, y.key.kind))
	})
	most := max(agentLeast, min(agentMost, agentsMost/max(1, len(all))))
	for some := range slices.Chunk(all, askedAtOnce) {
		var waiting sync.WaitGroup
		for _, a := range some {
			waiting.Go(func() { a.files, a.missing = b.m.support.ask(ctx, a.key, a.status, most) })
		}
		waiting.Wait()
		for _, a := range some {
			b.agent(a)
		}
	}
}

// agent adds what an agent has told.
func (b *bundling) agent(a *askedAgent) {
	dir := agentDir(a.key.node, a.key.kind)
	if a.missing != "" {
		b.w.Miss(dir, a.missing)
	}
	for _, f := range a.files {
		if f.missing != "" {
			b.w.Miss(dir+f.name, f.missing)
		}
		if len(f.data) > 0 || f.missing == "" {
			b.add(dir+f.name, f.data, nil)
		}
	}
}

// supporters are the agents that can be asked, by their streams.
type supporters struct {
	making sync.Mutex // held while a bundle is made

	mu     sync.Mutex
	agents map[agentName]*supporter
	number uint64 // of the last question
}

// supporter is the stream of an agent.
type supporter struct {
	questions chan *question
	ranges    bool          // it answers questions about ranges
	gone      chan struct{} // closed when the stream has ended, or another one of the agent has begun
	goes      func()        // closes gone
}

// question is what an agent is asked.
type question struct {
	number uint64
	most   int
	about  *pb.RangesQuestion // nil: about all that belongs into a bundle
	done   chan struct{}      // closed when the answer is complete

	mu     sync.Mutex
	ranges *pb.RangesAnswer
	files  []toldFile
	bytes  int
	wrong  string // why the rest of the answer is not taken
}

// ask asks an agent and waits for its answer, for a while.
func (s *supporters) ask(ctx context.Context, of agentName, status cluster.AgentStatus, most int) (files []toldFile, missing string) {
	q := &question{most: most, done: make(chan struct{})}
	agent := s.numbered(of, q)
	if agent == nil {
		return nil, notAsked(status)
	}
	missing = agent.answer(ctx, q)
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.wrong != "" {
		missing = q.wrong
	}
	return q.files, missing
}

// askRanges asks a target about a leg.
func (s *supporters) askRanges(ctx context.Context, of agentName, status cluster.AgentStatus, about *pb.RangesQuestion) (*pb.RangesAnswer, error) {
	q := &question{about: about, done: make(chan struct{})}
	switch agent := s.numbered(of, q); {
	case agent == nil && (status.Seen.IsZero() || !status.Online):
		return nil, errors.New("its agent is away")
	case agent == nil || !agent.ranges:
		return nil, fmt.Errorf("its agent, version %s, cannot tell: it is of an earlier version, or has just connected", status.Version)
	default:
		if missing := agent.answer(ctx, q); missing != "" {
			return nil, errors.New(missing)
		}
	}
	q.mu.Lock()
	defer q.mu.Unlock()
	switch {
	case q.ranges == nil:
		return nil, errors.New("its agent gave no answer")
	case q.ranges.GetFailed() != "":
		return nil, errors.New(q.ranges.GetFailed())
	}
	return q.ranges, nil
}

// numbered gives a question its number, and returns the agent that is to answer it; nil: it has no stream.
func (s *supporters) numbered(of agentName, q *question) *supporter {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.number++
	q.number = s.number
	return s.agents[of]
}

// answer asks the agent and waits until the answer is complete, or says why it is not.
func (agent *supporter) answer(ctx context.Context, q *question) (missing string) {
	patience := time.NewTimer(agentPatience)
	defer patience.Stop()
	asked := agent.questions
	for {
		select {
		case asked <- q:
			asked = nil
		case <-q.done:
			return ""
		case <-agent.gone:
			return "the agent went away while it answered"
		case <-patience.C:
			return fmt.Sprintf("the agent did not answer within %v", agentPatience)
		case <-ctx.Done():
			return "the question was given up"
		}
	}
}

// notAsked says why an agent without a stream was not asked.
func notAsked(status cluster.AgentStatus) string {
	switch {
	case status.Seen.IsZero():
		return "the agent has not reported to this manager"
	case !status.Online:
		return "the agent is away"
	}
	return fmt.Sprintf("its agent, version %s, does not answer questions of support bundles: it is of an earlier version, or has just connected", status.Version)
}

// take takes a piece of an answer.
func (q *question) take(a *pb.SupportAnswer) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if a.Last {
		q.ranges = a.GetRanges()
		select {
		case <-q.done:
		default:
			close(q.done)
		}
		return
	}
	name, last := a.File, len(q.files)-1
	switch {
	case q.wrong != "":
	case strings.Contains(name, "/") || !bundle.ValidName(name) || name == "wanted.json":
		q.wrong = "the agent sent a file whose name is not allowed"
	case q.bytes+len(a.Data) > q.most:
		q.wrong = fmt.Sprintf("the agent sent more than %d bytes", q.most)
	case last >= 0 && q.files[last].name == name:
		q.files[last].data = append(q.files[last].data, a.Data...)
		q.bytes += len(a.Data)
	case len(q.files) >= agentFilesMost:
		q.wrong = fmt.Sprintf("the agent sent more than %d files", agentFilesMost)
	default:
		shorten(&a.Missing)
		q.files = append(q.files, toldFile{name, slices.Clone(a.Data), a.Missing})
		q.bytes += len(a.Data)
	}
}

// add makes a stream the one of an agent, in place of an older one.
func (s *supporters) add(of agentName, ranges bool) *supporter {
	gone := make(chan struct{})
	agent := &supporter{questions: make(chan *question), ranges: ranges, gone: gone, goes: sync.OnceFunc(func() { close(gone) })}
	s.mu.Lock()
	defer s.mu.Unlock()
	if old := s.agents[of]; old != nil {
		old.goes()
	}
	if s.agents == nil {
		s.agents = map[agentName]*supporter{}
	}
	s.agents[of] = agent
	return agent
}

func (s *supporters) remove(of agentName, agent *supporter) {
	agent.goes()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.agents[of] == agent {
		delete(s.agents, of)
	}
}

// Support serves the stream of an agent that can be asked. It ends when this manager does not lead
// any more.
func (m *Manager) Support(stream grpc.BidiStreamingServer[pb.SupportAnswer, pb.SupportQuestion]) error {
	var over <-chan struct{}
	if err := m.look(stream.Context(), func() { over = m.live.Over() }); err != nil {
		return toStatus(err)
	}
	first, err := stream.Recv()
	if err != nil {
		return err
	}
	node, err := block.ParseNodeName(first.Node)
	if err != nil {
		return toStatus(&cluster.Error{Kind: cluster.InvalidArgument, Field: "node", Text: err.Error()})
	}
	kind, role := supportSource(first.Source)
	if err := m.speaks(stream.Context(), role, node); err != nil {
		return err
	}
	name := agentName{node, kind}
	agent := m.support.add(name, first.GetKnowsRanges())
	defer m.support.remove(name, agent)
	ended := make(chan error, 1)
	answers := make(chan *pb.SupportAnswer)
	go func() { ended <- receive(stream, answers, agent.gone) }()
	var asked *question
	for {
		select {
		case q := <-agent.questions:
			asked = q
			if err := stream.Send(&pb.SupportQuestion{Number: q.number, MostBytes: uint64(q.most), Ranges: q.about}); err != nil {
				return err
			}
		case a := <-answers:
			if asked != nil && a.Number == asked.number {
				asked.take(a)
			}
		case err := <-ended:
			return err
		case <-agent.gone:
			return errSuperseded
		case <-over:
			return errDeposed
		case <-m.ended:
			return toStatus(ErrStopped)
		}
	}
}

// receive passes answers on until the stream or the agent's turn ends.
func receive(stream grpc.BidiStreamingServer[pb.SupportAnswer, pb.SupportQuestion], answers chan<- *pb.SupportAnswer, gone <-chan struct{}) error {
	for {
		a, err := stream.Recv()
		if err != nil {
			return err
		}
		select {
		case answers <- a:
		case <-gone:
			return errors.New("another stream of the agent has begun")
		}
	}
}

// supportSource is the word for an agent's kind, and the role that its certificate must have.
func supportSource(source pb.SupportSource) (word string, role access.Role) {
	if source == pb.SupportSource_SUPPORT_SOURCE_TARGET {
		return targetWord, access.Target
	}
	return initiatorWord, access.Initiator
}
