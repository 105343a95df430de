// SPDX-License-Identifier: Apache-2.0

package cluster

import (
	"crypto/sha256"
	"errors"
	"flag"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/volmgr/evidence"
)

var rewrite = flag.Bool("rewrite", false, "write the transcripts' outcomes anew")

// A transcript in testdata is paragraphs of a sentence, commands, "----" and
// the outcome. Rewrite them with -rewrite, and commit the difference only if
// you understand and want it.
func TestTranscripts(t *testing.T) {
	files, err := filepath.Glob("testdata/*.txt")
	if err != nil || len(files) < 10 {
		t.Fatalf("Glob(testdata/*.txt) = %d files, %v; want the transcripts", len(files), err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".txt"), func(t *testing.T) { runTranscript(t, file) })
	}
}

func runTranscript(t *testing.T, file string) {
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	s := newScript(t)
	var out strings.Builder
	for paragraph := range strings.SplitSeq(strings.Trim(string(text), "\n"), "\n\n") {
		commands, _, _ := strings.Cut(paragraph+"\n", "----\n")
		out.WriteString(commands + "----\n")
		for line := range strings.Lines(commands) {
			if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
				out.WriteString(s.run(line))
			}
		}
		out.WriteString("\n")
	}
	got := strings.TrimRight(out.String(), "\n") + "\n"
	if *rewrite {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if diff := cmp.Diff(string(text), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

// script runs commands against a state and the simulated agents around it, and
// keeps the store that a manager would keep.
type script struct {
	t       *testing.T
	state   *State
	store   map[string][]byte
	now     time.Time
	seeds   int
	session uint64
	targets map[string]*simTarget
	hosts   map[string]*scriptHost
}

type scriptHost struct {
	boot   int
	phase  map[string]Phase
	gaveUp GaveUp
	whole  bool // it compares all of the copies
	scrub  *ScrubReport
	heals  *HealReport
	scrubs bool
	copies []CopyReport
	old    block.Epoch // an older epoch that it reports on; 0: the volume's
	heard  uint64      // the last generation that reaches it; 0: all do
	of     block.ClusterID
	notes  map[block.VolumeID]evidence.Note // on its disk
	uses   map[block.VolumeID][]block.LegID // the legs that it says it uses; nil: it does not tell
	able   bool                             // to authenticate
	run    string                           // the process that can heal; empty: it cannot
}

var t0 = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

func testCluster() block.ClusterID { return block.ClusterID{UUID: testSeed(0).id(0)} }

func testSeed(n int) Seed { return sha256.Sum256([]byte("test seed " + strconv.Itoa(n))) }

func newScript(t *testing.T) *script {
	s := &script{t: t, store: map[string][]byte{}, now: t0, session: 1, targets: map[string]*simTarget{}, hosts: map[string]*scriptHost{}}
	state, records := New(testCluster())
	s.state = state
	keep(s.store, records)
	return s
}

func keep(store map[string][]byte, records []Record) {
	for _, r := range records {
		if r.Value == nil {
			delete(store, r.Key)
		} else {
			store[r.Key] = r.Value
		}
	}
}

func loadStore(t *testing.T, store map[string][]byte) *State {
	t.Helper()
	var records []Record
	for _, key := range slices.Sorted(maps.Keys(store)) {
		records = append(records, Record{key, store[key]})
	}
	s, err := Load(records)
	if err != nil {
		t.Fatalf("Load = %v", err)
	}
	if got := s.Records(); !reflect.DeepEqual(records, got) { // cmp takes a second over 10000 events
		t.Fatalf("Load(records).Records() (-want +got):\n%s", cmp.Diff(records, got))
	}
	return s
}

// step applies an input, keeps its records, checks that they say everything,
// and prints the outcome.
func (s *script) step(in Input) string {
	out, err := s.state.Step(s.now, in)
	keep(s.store, out.Records)
	var want []Record
	for _, key := range slices.Sorted(maps.Keys(s.store)) {
		want = append(want, Record{key, s.store[key]})
	}
	if got := s.state.Records(); !reflect.DeepEqual(want, got) {
		diff := cmp.Diff(want, got)
		s.t.Fatalf("after %T: the store differs from the state (-store +state):\n%s", in, diff)
	}
	if err != nil {
		return printError(err)
	}
	var b strings.Builder
	if refusal, ok := out.Result.(*Error); ok {
		b.WriteString(printError(refusal))
	}
	for _, e := range out.Events {
		fmt.Fprintf(&b, "%s: %s%s\n", e.Kind, e.Object, because(e.Text))
	}
	if len(out.Wake) > 0 {
		fmt.Fprintf(&b, "wake %v\n", out.Wake)
	}
	return b.String()
}

var kindNames = map[Kind]string{
	InvalidArgument: "invalid argument", NotFound: "not found", AlreadyExists: "already exists",
	FailedPrecondition: "failed precondition", ResourceExhausted: "resource exhausted", Unimplemented: "unimplemented",
}

func printError(err error) string {
	var e *Error
	if !errors.As(err, &e) {
		return fmt.Sprintf("untyped error: %v\n", err)
	}
	kind := kindNames[e.Kind]
	if e.Reason != "" {
		kind += " " + e.Reason
	}
	if e.Field != "" {
		kind += " field " + e.Field
	}
	text := fmt.Sprintf("%s\n  %s\n", kind, e.Text)
	if e.Hint != "" {
		text += "  hint: " + e.Hint + "\n"
	}
	return text
}

// args are the words after a command; key=value words are options.
type args struct {
	words   []string
	options map[string]string
}

func parseArgs(fields []string) args {
	a := args{options: map[string]string{}}
	for _, f := range fields {
		if key, value, ok := strings.Cut(f, "="); ok {
			a.options[key] = value
		} else {
			a.words = append(a.words, f)
		}
	}
	return a
}

func (a args) word(i int) string {
	if i < len(a.words) {
		return a.words[i]
	}
	return ""
}

func (a args) node(i int) block.NodeName { return block.NodeName(a.word(i)) }
func (a args) has(word string) bool      { return slices.Contains(a.words, word) }

func (a args) number(key string, def int) int {
	if n, err := strconv.Atoi(a.options[key]); err == nil {
		return n
	}
	return def
}

func (s *script) size(text string) block.Size {
	if text == "" {
		return 0
	}
	n, err := block.ParseSize(text)
	if err != nil {
		s.t.Fatal(err)
	}
	return n
}

func (s *script) seed() Seed {
	s.seeds++
	return testSeed(s.seeds)
}

func (s *script) run(line string) string {
	fields := strings.Fields(line)
	a := parseArgs(fields[1:])
	do, ok := scriptCommands[fields[0]]
	if !ok {
		s.t.Fatalf("unknown command %q", line)
	}
	return do(s, a)
}

var scriptCommands = map[string]func(*script, args) string{
	"target":      (*script).newTarget,
	"host":        (*script).newHost,
	"create":      (*script).create,
	"comply":      (*script).comply,
	"report":      func(s *script, a args) string { return s.reportTarget(s.targets[a.word(0)]) },
	"repeat":      (*script).repeat,
	"serve":       func(s *script, a args) string { return s.host(a.word(0), a.word(1), PhaseServing) },
	"uses":        (*script).uses,
	"equalize":    (*script).equalize,
	"stall":       func(s *script, a args) string { return s.host(a.word(0), a.word(1), PhaseStalled) },
	"mounted":     func(s *script, a args) string { return s.host(a.word(0), a.word(1), PhaseDetaching) },
	"release":     (*script).release,
	"deaf":        func(s *script, a args) string { s.hosts[a.word(0)].heard = s.state.Generation(); return "" },
	"hear":        func(s *script, a args) string { s.hosts[a.word(0)].heard = 0; return s.reportHost(a.word(0)) },
	"give-up":     (*script).giveUp,
	"old-device":  (*script).oldDevice,
	"lost":        (*script).lost,
	"stops":       (*script).stops,
	"reboot":      (*script).reboot,
	"wait":        (*script).wait,
	"clock":       (*script).clock,
	"restart":     (*script).restart,
	"term":        func(s *script, a args) string { return s.step(BeginTerm{Seed: s.seed()}) },
	"able":        (*script).able,
	"refuses":     (*script).refuses,
	"stale":       (*script).stale,
	"leaves-out":  (*script).leavesOut,
	"in-sync":     (*script).inSync,
	"foreign":     (*script).foreign,
	"belongs":     (*script).belongs,
	"nodes":       (*script).listNodes,
	"unplug":      (*script).unplug,
	"fail":        (*script).fail,
	"cache":       (*script).cache,
	"return":      (*script).returns,
	"health":      (*script).health,
	"scrub":       (*script).scrub,
	"scrubbed":    (*script).scrubbed,
	"scrub-every": (*script).scrubEvery,
	"can-scrub": func(s *script, a args) string {
		s.hosts[a.word(0)].scrubs = true
		return s.reportHost(a.word(0))
	},
	"wanted-scrub": (*script).wantedScrub,
	"copied":       (*script).copied,
	"rebuild-rate": (*script).rebuildRate,
	"rebuilds":     (*script).rebuilds,
	"rebalance":    (*script).rebalance,
	"add-drive":    (*script).addDrive,
	"evict-drive":  (*script).evictDrive,
	"policy":       (*script).policy,
	"plug":         (*script).plug,
	"drives":       (*script).listDrives,
	"attach": func(s *script, a args) string {
		return s.step(Attach{Volume: a.word(0), Node: a.node(1), Mode: AttachMode(a.options["mode"]), KeepsRecord: a.options["by"] != "hand"})
	},
	"detach": (*script).detach,
	"add-host": func(s *script, a args) string {
		return s.step(AddHost{Node: a.node(0), NQN: block.NQN(a.word(1)), Authenticate: a.has("authenticate")})
	},
	// heals c1: its agent can heal volumes; again, and it is another process
	"heals": func(s *script, a args) string {
		s.hosts[a.word(0)].run += "run "
		return s.reportHost(a.word(0))
	},
	"heal-after": func(s *script, a args) string {
		after, _ := time.ParseDuration(a.word(0))
		s.state.SetPolicy(Policy{HealAfter: after})
		return ""
	},
	"replace-after": func(s *script, a args) string {
		after, _ := time.ParseDuration(a.word(0))
		s.state.SetPolicy(Policy{ReplaceAfter: after})
		return ""
	},
	"evacuate-after": func(s *script, a args) string {
		after, _ := time.ParseDuration(a.word(0))
		s.state.SetPolicy(Policy{EvacuateAfter: after})
		return ""
	},
	"move": func(s *script, a args) string {
		in := MoveLeg{Volume: a.word(0), To: block.NodeName(a.options["to"])}
		fmt.Sscanf(a.word(1), "%d.%d", &in.Column, &in.Copy)
		return s.step(in)
	},
	"drain-drive": func(s *script, a args) string { // the first one of a node, or the one of a name
		drives := s.state.Drives(a.node(0))
		i := max(0, slices.IndexFunc(drives, func(d Drive) bool { return d.Device == "/dev/"+a.word(1) }))
		return s.step(DrainDrive{Drive: drives[i].ID, Cancel: a.has("cancel")})
	},
	"cordon":   func(s *script, a args) string { return s.step(CordonNode{Node: a.node(0), Drain: a.has("drain")}) },
	"uncordon": func(s *script, a args) string { return s.step(UncordonNode{a.node(0)}) },
	"maintain": func(s *script, a args) string {
		d, _ := time.ParseDuration(a.options["for"])
		return s.step(MaintainNode{Node: a.node(0), For: d, Force: a.has("force")})
	},
	"dependents": func(s *script, a args) string {
		var nodes []block.NodeName
		for i := range a.words {
			nodes = append(nodes, a.node(i))
		}
		return fmt.Sprintln("without", nodes, "stop", s.state.Dependents(nodes...))
	},
	"update": (*script).update,
	"expand": func(s *script, a args) string {
		return s.step(ExpandVolume{a.word(0), s.size(a.options["size"])})
	},
	"slow": func(s *script, a args) string { s.targets[a.word(0)].slow = true; return "" },
	"mute": func(s *script, a args) string {
		s.targets[a.word(0)].mute = !a.has("no-more")
		return s.reportTarget(s.targets[a.word(0)])
	},
	"zero": func(s *script, a args) string {
		s.targets[a.word(0)].zero()
		return s.reportTarget(s.targets[a.word(0)])
	},
	"delete":       func(s *script, a args) string { return s.step(DeleteVolume{a.word(0)}) },
	"seal":         func(s *script, a args) string { return s.step(SealVolume{a.word(0)}) },
	"confirm-dead": func(s *script, a args) string { return s.step(ConfirmNodeDead{a.node(0)}) },
	"remove-node":  func(s *script, a args) string { return s.step(RemoveNode{a.node(0)}) },
	"label":        func(s *script, a args) string { return s.step(SetNodeLabels{a.node(0), a.options}) },
	"pool":         func(s *script, a args) string { return s.step(CreatePool{a.word(0), a.options}) },
	"delete-pool":  func(s *script, a args) string { return s.step(DeletePool{a.word(0)}) },
	"promote":      (*script).promote,
	"volume":       (*script).volume,
	"explain":      (*script).explain,
	"wanted":       (*script).wanted,
	"status":       (*script).status,
	"events":       (*script).listEvents,
}

// newTarget brings a target with drives into the cluster: target t1 rack=r1
// drives=10GiB,10GiB, with "volatile" for drives that cache writes
func (s *script) newTarget(a args) string {
	var sizes []block.Size
	for text := range strings.SplitSeq(a.options["drives"], ",") {
		sizes = append(sizes, s.size(text))
	}
	delete(a.options, "drives")
	t := newSimTarget(a.node(0), a.options, sizes...)
	for i := range t.devices {
		t.devices[i].VolatileCache = a.has("volatile")
	}
	s.targets[a.word(0)] = t
	out := s.reportTarget(t)
	if a.has("bare") {
		return out
	}
	for _, d := range t.devices {
		out += s.step(AddDrive{Node: t.name, Device: d.Path, Seed: s.seed()})
	}
	return out + s.comply(a)
}

func (s *script) reportTarget(t *simTarget) string {
	return s.step(TargetReported{Session: s.session, Report: t.report()})
}

// repeat sends an agent's report that nothing has changed; with "reached", except that it has
// acted on the newest wanted state.
func (s *script) repeat(a args) string {
	generation := uint64(0)
	if a.has("reached") {
		generation = s.state.Generation()
	}
	if s.hosts[a.word(0)] != nil {
		return s.step(InitiatorRepeated{s.session, a.node(0), generation})
	}
	return s.step(TargetRepeated{s.session, a.node(0), generation})
}

// comply makes targets carry out their wanted states and report; all if none is named.
func (s *script) comply(a args) (out string) {
	names := a.words
	if len(names) == 0 {
		names = slices.Sorted(maps.Keys(s.targets))
	}
	for _, name := range names {
		if t := s.targets[name]; t != nil {
			t.comply(s.state.WantedTarget(t.name))
			out += s.reportTarget(t)
		}
	}
	return out
}

func hostOf(name string) block.Host { return block.HostFromID(Seed(sha256.Sum256([]byte(name))).id(0)) }

func (s *script) newHost(a args) string {
	s.hosts[a.word(0)] = &scriptHost{boot: 1, phase: map[string]Phase{}, uses: map[block.VolumeID][]block.LegID{}, notes: map[block.VolumeID]evidence.Note{}, of: clusterIn(a)}
	return s.reportHost(a.word(0))
}

func (s *script) reportHost(name string) string {
	return s.step(InitiatorReported{s.session, s.hostReport(name)})
}

func (s *script) hostReport(name string) InitiatorReport {
	h := s.hosts[name]
	r := InitiatorReport{Node: block.NodeName(name), BootID: fmt.Sprintf("%s-boot-%d", name, h.boot), Host: hostOf(name), ClusterID: h.of, Generation: s.state.Generation(), Authenticates: h.able, Heals: h.run}
	if h.heard != 0 {
		r.Generation = h.heard
	}
	for _, volume := range slices.Sorted(maps.Keys(h.phase)) {
		v, err := s.state.Volume(volume)
		if err == nil && h.phase[volume] != "" {
			grant := uint64(0)
			if a := s.state.volumes.Get(v.ID).attachmentOf(block.NodeName(name)); a != nil {
				grant = a.Grant
			}
			a := AttachmentReport{Volume: v.ID, Epoch: v.Epoch, Grant: grant, Phase: h.phase[volume], Device: "/dev/weft/" + volume, GaveUp: h.gaveUp}
			a.Scrub, a.Scrubs, a.Copies, a.Heals = h.scrub, h.scrubs, h.copies, h.heals
			if a.Phase == PhaseEqualizing && h.whole {
				a.WaitingFor, a.ResyncDone, a.ResyncTotal = "all of the copies to be compared, because of the host's reason", block.GiB, 8*block.GiB
			}
			a.InUse, a.Tells = h.uses[v.ID], h.uses[v.ID] != nil
			if a.Phase == PhaseDetaching {
				a.WaitingFor = "the file system on /mnt"
			}
			if h.old != 0 {
				a.Epoch, a.WaitingFor = h.old, fmt.Sprintf("the file system on /mnt has the device of epoch %d open, which is over", h.old)
			}
			r.Attachments = append(r.Attachments, a)
		}
	}
	for _, id := range sorted(h.notes) {
		r.Evidence = append(r.Evidence, h.notes[id])
	}
	return r
}

// note makes a host note which legs of a volume are in sync, as the manager has just told it.
func (s *script) note(host, volume string) {
	v, err := s.state.Volume(volume)
	if err != nil || s.hosts[host] == nil || v.Layout.Copies == 1 {
		return
	}
	e := evidence.Note{Volume: v.ID, Epoch: v.Epoch}
	for _, l := range v.Legs {
		if l.State == LegInSync {
			e.Legs = append(e.Legs, evidence.NotedLeg{Leg: l.ID, Revision: l.Revision})
		}
	}
	s.hosts[host].notes[v.ID] = e
}

func (s *script) host(name, volume string, phase Phase) string {
	s.hosts[name].phase[volume] = phase
	if phase == PhaseServing {
		s.note(name, volume)
	}
	return s.reportHost(name)
}

// uses makes a host say which legs take part in the I/O of a volume: uses c1 db1 0.0 0.1
func (s *script) uses(a args) string {
	var legs []block.LegID
	for _, name := range a.words[2:] {
		legs = append(legs, s.legArg(a.word(1), name).ID)
	}
	h := s.hosts[a.word(0)]
	h.uses[s.state.idOf(block.VolumeName(a.word(1)))] = legs
	return s.reportHost(a.word(0))
}

// equalize lets a host make the copies equal: equalize c1 db1 [whole]
func (s *script) equalize(a args) string {
	s.hosts[a.word(0)].whole = a.has("whole")
	return s.host(a.word(0), a.word(1), PhaseEqualizing)
}

func (s *script) release(a args) string {
	phase := PhaseDetachedClean
	if a.has("unclean") {
		phase = PhaseDetachedUnclean
	}
	out := s.host(a.word(0), a.word(1), phase)
	h := s.hosts[a.word(0)]
	delete(h.phase, a.word(1))
	if v, err := s.state.Volume(a.word(1)); err == nil && phase == PhaseDetachedClean {
		delete(h.notes, v.ID)
	}
	return out
}

// giveUp makes a host fail its device: give-up c1 db1 [lost]
func (s *script) giveUp(a args) string {
	h := s.hosts[a.word(0)]
	h.gaveUp = GaveUp{Why: "the host's reason", WritesLost: a.has("lost")}
	defer func() { h.gaveUp = GaveUp{} }()
	return s.release(args{words: []string{a.word(0), a.word(1), "unclean"}})
}

// oldDevice makes a host report a device of an older epoch: old-device c1 db1 epoch=1
func (s *script) oldDevice(a args) string {
	h := s.hosts[a.word(0)]
	h.old = block.Epoch(a.number("epoch", 0))
	defer func() { h.old = 0 }()
	return s.host(a.word(0), a.word(1), PhaseDetaching)
}

func (s *script) lost(a args) string {
	if s.targets[a.word(0)] != nil {
		return s.step(TargetLost{s.session, a.node(0)})
	}
	return s.step(InitiatorLost{s.session, a.node(0)})
}

// stops makes a target say that it stops: stops t1; or, with "no-more", be there again.
func (s *script) stops(a args) string {
	t := s.targets[a.word(0)]
	t.stopping = !a.has("no-more")
	return s.reportTarget(t)
}

func (s *script) reboot(a args) string {
	if t := s.targets[a.word(0)]; t != nil {
		t.reboot()
		return s.reportTarget(t)
	}
	h := s.hosts[a.word(0)]
	h.boot++
	h.phase = map[string]Phase{}
	return s.reportHost(a.word(0))
}

// wait lets time pass; agents named with "for" report each second meanwhile.
func (s *script) wait(a args) (out string) {
	d, err := time.ParseDuration(a.word(0))
	if err != nil {
		s.t.Fatal(err)
	}
	for end := s.now.Add(d); s.now.Before(end); {
		s.now = s.now.Add(time.Second)
		for _, name := range a.words[1:] {
			if t := s.targets[name]; t != nil {
				out += s.reportTarget(t)
			} else if s.hosts[name] != nil {
				out += s.reportHost(name)
			}
		}
		out += s.step(Tick{})
	}
	return out
}

// clock sets the clock forward or back: clock -24h
func (s *script) clock(a args) string {
	d, err := time.ParseDuration(a.word(0))
	if err != nil {
		s.t.Fatal(err)
	}
	s.now = s.now.Add(d)
	return ""
}

// restart is a manager that crashed and loads its store; the streams are new.
func (s *script) restart(args) string {
	s.state = loadStore(s.t, s.store)
	s.session++
	return ""
}

func (s *script) create(a args) string {
	o := a.options
	in := CreateVolume{
		Name: block.VolumeName(a.word(0)), Size: s.size(o["size"]), Copies: a.number("copies", 0),
		Stripes: a.number("stripes", 0), Chunk: s.size(o["chunk"]), Pool: o["pool"], Spread: o["spread"], Authentication: o["authentication"], Seed: s.seed(),
	}
	return s.step(in)
}

func (s *script) detach(a args) string {
	if a.has("cancel") {
		return s.step(CancelDetach{Volume: a.word(0), Node: block.NodeName(a.options["node"])})
	}
	return s.step(Detach{Volume: a.word(0), Node: block.NodeName(a.options["node"]), Force: a.has("force")})
}

// legArg finds leg "column.copy" of a volume.
func (s *script) legArg(volume, name string) Leg {
	v, err := s.state.Volume(volume)
	if err != nil {
		s.t.Fatal(err)
	}
	for _, l := range v.Legs {
		if fmt.Sprintf("%d.%d", l.Column, l.Copy) == name {
			return l
		}
	}
	s.t.Fatalf("volume %s has no leg %s", volume, name)
	return Leg{}
}

// stale c1 db1 0.1 [0.2 ...] [epoch=n] [revision=n], under which the host used the legs
func (s *script) stale(a args) string {
	v, err := s.state.Volume(a.word(1))
	if err != nil {
		return printError(err)
	}
	in := RecordStale{Node: a.node(0), Volume: v.ID, Epoch: block.Epoch(a.number("epoch", int(v.Epoch))), Reason: "write failed", Revisions: map[block.LegID]uint64{},
		Number: uint64(a.number("number", 0)), Term: uint64(a.number("term", 0))}
	for _, name := range a.words[2:] {
		leg := s.legArg(a.word(1), name).ID
		in.Legs, in.Revisions[leg] = append(in.Legs, leg), uint64(a.number("revision", 0))
	}
	out := s.step(in)
	s.note(a.word(0), a.word(1))
	return out
}

// leaves-out c1 db1 0.1 ... [late]: the host does as it is asked; late: as it was asked once.
func (s *script) leavesOut(a args) string {
	v, err := s.state.Volume(a.word(1))
	if err != nil {
		return printError(err)
	}
	in := RecordStale{Node: a.node(0), Volume: v.ID, Epoch: v.Epoch, Reasons: map[block.LegID]StaleReason{}}
	for _, name := range a.words[2:] {
		if name == "late" {
			continue
		}
		leg := s.legArg(a.word(1), name).ID
		if a.has("late") {
			in.Legs = append(in.Legs, leg)
			in.Reasons[leg] = StaleReason{Word: leftOutReason, Text: "its target was about to stop"}
			continue
		}
		for _, attachment := range s.state.WantedInitiator(in.Node).Attachments {
			for _, l := range attachment.Legs {
				if l.Leg == leg && l.LeaveOut != "" {
					in.Legs = append(in.Legs, leg)
					in.Reasons[leg] = StaleReason{Word: leftOutReason, Text: l.LeaveOut}
				}
			}
		}
	}
	if len(in.Legs) == 0 {
		return "it is not asked to\n"
	}
	return s.step(in)
}

// in-sync c1 db1 0.1 [revision=n] [epoch=n]
func (s *script) inSync(a args) string {
	v, err := s.state.Volume(a.word(1))
	if err != nil {
		return printError(err)
	}
	in := RecordInSync{Node: a.node(0), Volume: v.ID, Epoch: block.Epoch(a.number("epoch", int(v.Epoch)))}
	for _, name := range a.words[2:] {
		l := s.legArg(a.word(1), name)
		in.Legs = append(in.Legs, RebuiltLeg{Leg: l.ID, Revision: uint64(a.number("revision", int(l.Revision))), Copied: block.GiB})
	}
	out := s.step(in)
	s.note(a.word(0), a.word(1))
	return out
}

// foreign t1 /dev/nvme0n1 ext4,gpt puts signatures on a device, holders=... makes it
// busy. foreign t1 /dev/nvme0n1 drive elsewhere makes it another cluster's drive.
func (s *script) foreign(a args) string {
	t := s.targets[a.word(0)]
	for i := range t.devices {
		if d := &t.devices[i]; d.Path == a.word(1) {
			d.Signatures = strings.Split(strings.ReplaceAll(a.word(2), "+", " "), ",")
			d.DriveID, d.Cluster = block.DriveID{}, block.ClusterID{}
			if a.word(2) == "drive" { // with a label of ours, of a cluster
				d.DriveID, d.Cluster = block.DriveID{UUID: testSeed(7).id(uint32(i))}, clusterIn(a)
				d.Signatures = []string{fmt.Sprintf("weft drive %v of cluster %v", d.DriveID, d.Cluster)}
			}
			d.Holders = slices.DeleteFunc([]string{a.options["holders"]}, func(h string) bool { return h == "" })
		}
	}
	return s.reportTarget(t)
}

// eraseWord is the word of force=...; force=label is the one that the device needs.
func (s *script) eraseWord(a args) string {
	if a.options["force"] != "label" {
		return strings.ReplaceAll(a.options["force"], "+", ", ")
	}
	device, _ := findDevice(s.targets[a.word(0)].devices, a.word(1))
	return EraseWord(device)
}

// belongs makes an agent one of this cluster or of another: belongs c1 elsewhere
func (s *script) belongs(a args) string {
	of := clusterIn(a)
	if t := s.targets[a.word(0)]; t != nil {
		t.of = of
		return s.reportTarget(t)
	}
	s.hosts[a.word(0)].of = of
	return s.reportHost(a.word(0))
}

// clusterIn is this cluster, or another one if the command says elsewhere.
func clusterIn(a args) block.ClusterID {
	if a.has("elsewhere") {
		return block.ClusterID{UUID: testSeed(9).id(0)}
	}
	return testCluster()
}

func (s *script) listNodes(args) (text string) {
	for _, n := range s.state.Nodes() {
		text += fmt.Sprintf("%s target %v initiator %v", n.Name, n.Target.Online, n.Initiator.Online)
		for agent, refused := range map[string]string{"target": n.Target.Refused, "initiator": n.Initiator.Refused} {
			if refused != "" {
				text += fmt.Sprintf("; its %s %s", agent, refused)
			}
		}
		for _, waits := range n.StopWaits {
			text += "; to be stopped it waits for " + waits
		}
		for _, volume := range n.StopsIO {
			text += "; it stops " + volume
		}
		text += "\n"
	}
	return text
}

// fail t1 says_what gives a target's drives an error; without a text it clears the error.
func (s *script) fail(a args) string {
	for _, d := range s.targets[a.word(0)].drives {
		d.error = strings.ReplaceAll(a.word(1), "_", " ")
	}
	return s.reportTarget(s.targets[a.word(0)])
}

func (s *script) unplug(a args) string {
	t := s.targets[a.word(0)]
	for _, d := range t.drives {
		d.gone = !a.has("back")
	}
	return s.reportTarget(t)
}

// cache t1 volatile|none changes the caches of a target's drives; with "later" the change is
// not reported yet.
func (s *script) cache(a args) string {
	t := s.targets[a.word(0)]
	for i := range t.devices {
		t.devices[i].VolatileCache = a.has("volatile")
	}
	if a.has("later") {
		return ""
	}
	return s.reportTarget(t)
}

// returns brings the drives of a target back with a new incarnation: return t1 as=2; later:
// only its next report says so
func (s *script) returns(a args) string {
	t := s.targets[a.word(0)]
	t.returns(a.options["as"])
	if a.has("later") {
		return ""
	}
	return s.reportTarget(t)
}

func (s *script) addDrive(a args) string {
	in := AddDrive{Node: a.node(0), Device: a.word(1), ForceErase: s.eraseWord(a), Seed: s.seed()}
	if class := a.options["class"]; class != "" {
		in.Labels = map[string]string{"class": class}
	}
	return s.step(in)
}

func (s *script) evictDrive(a args) string {
	for _, d := range s.state.Drives(a.node(0)) {
		if d.Device == a.word(1) {
			return s.step(EvictDrive{d.ID})
		}
	}
	return "no such drive\n"
}

func (s *script) promote(a args) string {
	return s.step(PromoteStaleLeg{Volume: a.word(0), Leg: s.legArg(a.word(0), a.word(1)).ID, AcceptDataLoss: a.has("accept")})
}

func (s *script) volume(a args) string {
	v, err := s.state.Volume(a.word(0))
	if err != nil {
		return printError(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %s %v epoch %d generation %d clean %v\n", v.Name, v.State, v.Health, v.Layout, v.Epoch, v.Generation, v.Clean)
	for _, l := range v.Legs {
		fmt.Fprintf(&b, "  %d.%d %s %v %s revision %d%s\n", l.Column, l.Copy, l.Node, l.Extents, l.State, l.Revision, because(l.Reason))
	}
	if at := v.Attachment; at != nil {
		fmt.Fprintf(&b, "  %s to %s epoch %d boot %s equalize %v", at.State, at.Node, at.Epoch, at.BootID, at.Equalize)
		if at.WaitingFor != "" {
			fmt.Fprintf(&b, "; waiting for %s", at.WaitingFor)
		}
		b.WriteString("\n")
	}
	if at := v.Heal; at != nil {
		fmt.Fprintf(&b, "  healed by %s, %s, epoch %d equalize %v", at.Node, at.State, at.Epoch, at.Equalize)
		if at.WaitingFor != "" {
			fmt.Fprintf(&b, "; waiting for %s", at.WaitingFor)
		}
		b.WriteString("\n")
	}
	for _, at := range v.Shared {
		fmt.Fprintf(&b, "  %s to %s %s epoch %d boot %s", at.State, at.Node, at.Mode, at.Epoch, at.BootID)
		if at.WaitingFor != "" {
			fmt.Fprintf(&b, "; waiting for %s", at.WaitingFor)
		}
		b.WriteString("\n")
	}
	for _, l := range v.FormerHosts {
		fmt.Fprintf(&b, "  %s may still have it, %s\n", l.BootID, l.Mode.words())
	}
	for _, why := range v.FenceWaitsFor {
		fmt.Fprintf(&b, "  to be sure that no earlier host writes: %s\n", why)
	}
	if v.ExpandingTo != 0 {
		fmt.Fprintf(&b, "  %v, expanding to %v\n", v.Size, v.ExpandingTo)
	}
	if v.Formatted != "" || len(v.Labels) > 0 {
		fmt.Fprintf(&b, "  formatted %q labels %v\n", v.Formatted, v.Labels)
	}
	return b.String()
}

// update changes a volume: update db1 set.tier=gold remove.owner= formatted=ext4
func (s *script) update(a args) string {
	in := UpdateVolume{Volume: a.word(0), Formatted: strings.ReplaceAll(a.options["formatted"], "_", " "), SetLabels: map[string]string{}, Copies: a.number("copies", 0), Authentication: a.options["authentication"]}
	for key, value := range a.options {
		if name, ok := strings.CutPrefix(key, "set."); ok {
			in.SetLabels[name] = value
		}
		if name, ok := strings.CutPrefix(key, "remove."); ok {
			in.RemoveLabels = append(in.RemoveLabels, name)
		}
	}
	return s.step(in)
}

func (s *script) explain(a args) string {
	e, err := s.state.Explain(a.word(0))
	if err != nil {
		return printError(err)
	}
	var b strings.Builder
	fmt.Fprintf(&b, "%s\n", e.Summary)
	for _, part := range []struct {
		name  string
		lines []string
	}{{"fact", e.Facts}, {"wait", e.Waits}, {"action", e.Actions}} {
		for _, line := range part.lines {
			fmt.Fprintf(&b, "  %s: %s\n", part.name, line)
		}
	}
	return b.String()
}

// since says since which epoch a host alone had a volume, if that is not the present one.
func since(w WantedAttachment) string {
	if w.Mode != AttachExclusive || w.SinceEpoch == w.Epoch {
		return ""
	}
	return fmt.Sprintf(" since epoch %d", w.SinceEpoch)
}

func (s *script) wanted(a args) string {
	var b strings.Builder
	if s.hosts[a.word(0)] != nil {
		for _, w := range s.state.WantedInitiator(a.node(0)).Attachments {
			fmt.Fprintf(&b, "attachment %s epoch %d boot %s equalize %v detach %v%s\n", w.VolumeName, w.Epoch, w.BootID, w.Equalize, w.Detach, sharedMode(w.Mode)+grantNumber(w.Grant)+since(w))
			if a.has("size") {
				fmt.Fprintf(&b, "  %v, legs %v\n", w.Size, w.LegSize)
			}
			for _, l := range w.Legs {
				fmt.Fprintf(&b, "  %d.%d %s revision %d on %s nsid %d %v%s", l.Column, l.Copy, l.State, l.Revision, l.Node, l.NSID, l.Portals, map[bool]string{true: "", false: " flushed"}[l.WriteThrough])
				if l.Reborn != 0 {
					fmt.Fprintf(&b, " reborn %d", l.Reborn)
				}
				b.WriteString(identity(l.Keys, l.Host, l.NQN))
				b.WriteString("\n")
			}
		}
		return b.String()
	}
	w := s.state.WantedTarget(a.node(0))
	if w.MayStop {
		b.WriteString("may stop\n")
	}
	for _, d := range w.Drives {
		fmt.Fprintf(&b, "drive %s force %q remove %v\n", d.Device, d.ForceErase, d.Remove)
	}
	for _, l := range w.Legs {
		fmt.Fprintf(&b, "leg %d.%d of %s %v %v revision %d remove %v; label epoch %d generation %d in sync %d clean %v\n", l.Column, l.Copy,
			l.Volume.Name, l.Extents, l.Size, l.Revision, l.Remove, l.Volume.Epoch, l.Volume.Generation, len(l.Volume.InSync), l.Volume.Clean)
	}
	for _, x := range w.Admissions {
		fmt.Fprintf(&b, "admit epoch %d\n", x.Epoch)
	}
	for _, x := range w.Exports {
		fmt.Fprintf(&b, "export epoch %d to %s%s:", x.Epoch, x.Host.Short(), grantNumber(x.NQN.Grant()))
		for _, n := range x.Namespaces {
			fmt.Fprintf(&b, " nsid %d", n.NSID)
		}
		if x.ReadOnly {
			b.WriteString(" read-only")
		}
		b.WriteString(identity(x.Keys, x.Host, x.NQN))
		b.WriteString("\n")
	}
	for _, d := range w.Discovered {
		_, epoch, _, node, _ := block.ParseSubsystemNQN(d.NQN)
		fmt.Fprintf(&b, "discovery tells host %s of epoch %d on %s at %s, keys %v\n", d.Host[len(d.Host)-1:], epoch, node, d.Portal, !d.Keys.IsZero())
	}
	return b.String()
}

// identity is the fingerprint of keys, and as which host they are used; empty if there are none.
func identity(k block.Keys, as block.Host, nqn block.NQN) string {
	if k.IsZero() {
		return ""
	}
	sum := sha256.Sum256(append(k.Host.Reveal(), k.Controller.Reveal()...))
	return fmt.Sprintf(" with keys %x, as the host of this subsystem: %v", sum[:3], as == block.ProvenHost(nqn))
}

// able sets whether an agent can authenticate: "yes", "no", and for a target "unknown" or "old".
func (s *script) able(a args) string {
	if t := s.targets[a.word(0)]; t != nil {
		t.able = map[string]Ability{"yes": AbilityYes, "no": AbilityNo, "unknown": AbilityUnknown}[a.word(1)]
		return s.reportTarget(t)
	}
	s.hosts[a.word(0)].able = a.word(1) == "yes"
	return s.reportHost(a.word(0))
}

// refuses makes a target report so many refused hosts, since its start, the last of them on a volume.
func (s *script) refuses(a args) string {
	t := s.targets[a.word(0)]
	t.refusals = Refusals{Count: uint64(a.number("count", 0)), Host: hostOf("stranger").NQN, Address: "192.0.2.66:40000", Reason: "the host does not know its key"}
	if v, err := s.state.Volume(a.word(1)); err == nil {
		t.refusals.NQN = block.SubsystemNQN(v.ID, v.Epoch, hostOf("c1"), t.name)
	}
	return s.reportTarget(t)
}

func grantNumber(n uint64) string {
	if n == 0 {
		return ""
	}
	return fmt.Sprintf(" by grant %d", n)
}

func sharedMode(m AttachMode) string {
	if m.shared() {
		return " " + m.words()
	}
	return ""
}

func (s *script) status(args) string {
	st := s.state.Status()
	text := fmt.Sprintf("%v of %v used; nodes %d (%d offline), drives %d (%d not ready), volumes %d (%d degraded, %d unavailable), attachments %d\n",
		st.Allocated, st.Capacity, st.Nodes, st.NodesOffline, st.Drives, st.DrivesNotReady, st.Volumes, st.VolumesDegraded, st.VolumesUnavailable, st.Attachments)
	for _, w := range st.Wrong {
		text += "  wrong: " + w + "\n"
	}
	return text
}

func (s *script) listEvents(a args) string {
	text := ""
	for _, e := range s.state.Events(strings.Join(a.words, " "), uint64(a.number("after", 0)), a.number("limit", 0)) {
		text += fmt.Sprintf("%d %s %s %s%s\n", e.Seq, e.Severity, e.Kind, e.Object, because(e.Text))
	}
	return text
}
