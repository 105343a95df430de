// SPDX-License-Identifier: Apache-2.0

package nvmet

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/proto/block"
)

// ErrDraining is the cause of a step that the kernel has not finished in time. The kernel continues
// with it: the next Do of the same step waits for the same call, and Apply begins no other step on
// its object.
var ErrDraining = errors.New("still draining")

// Error is an operation that configfs has refused or not finished. It unwraps to the errno, or to
// [ErrDraining].
type Error struct {
	Op   Op
	Path string
	Err  error
}

func (e *Error) Error() string { return fmt.Sprintf("%s %s: %v", e.Op, e.Path, e.Err) }
func (e *Error) Unwrap() error { return e.Err }

// Tree is nvmet's directory in configfs. Its methods may be called concurrently.
type Tree struct {
	root    string
	files   Files
	reading chan struct{} // holds one token per Read under way

	mu    sync.Mutex
	calls map[string]*call // in the kernel now, by path
	able  *bool            // the answer of Authenticates
}

// probe is a host that Authenticates makes for a moment.
const probe = "hosts/nqn.2026-11.dev.weft:probe"

// Authenticates reports whether this nvmet can demand that a host proves its identity: since Linux
// 6.0 a host's directory has a file for its key, if the kernel was built with NVME_TARGET_AUTH.
func (t *Tree) Authenticates() (bool, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.able != nil {
		return *t.able, nil
	}
	where := path.Join(t.root, probe)
	if err := t.files.Mkdir(where); err != nil && !errors.Is(err, fs.ErrExist) { // it may be left over
		return false, &Error{Mkdir, probe, cause(err)}
	}
	_, host := t.files.Read(path.Join(where, "dhchap_key"))
	_, controller := t.files.Read(path.Join(where, "dhchap_ctrl_key"))
	if err := t.files.Rmdir(where); err != nil {
		return false, &Error{Rmdir, probe, cause(err)}
	}
	able := host == nil && controller == nil
	t.able = &able
	return able, nil
}

// call is a step that is in the kernel.
type call struct {
	step Step
	done chan struct{}
	err  error // valid once done is closed
}

// Open opens nvmet's directory, such as /sys/kernel/config/nvmet. If it is missing, the error is
// fs.ErrNotExist: configfs is not mounted, or the module nvmet is not loaded.
func Open(root string) (*Tree, error) {
	return OpenOn(root, kernelFiles{})
}

// OpenOn is Open on something other than the kernel.
func OpenOn(root string, f Files) (*Tree, error) {
	root, err := filepath.Abs(root)
	if err != nil {
		return nil, &Error{"open", root, err}
	}
	if _, err := f.ReadDir(path.Join(root, "subsystems")); err != nil {
		return nil, &Error{"open", root, cause(err)}
	}
	return &Tree{root: root, files: f, reading: make(chan struct{}, 1), calls: map[string]*call{}}, nil
}

// Do carries out one step and waits for it until ctx ends; the kernel's work cannot be cancelled
// and continues after that. While a call is under way, the same step waits for it, and another step
// on its path is refused with ErrDraining.
func (t *Tree) Do(ctx context.Context, s Step) error {
	c, err := t.start(s)
	if err != nil {
		return err
	}
	select {
	case <-c.done:
		return c.err
	case <-ctx.Done():
		return &Error{s.Op, s.Path, fmt.Errorf("%w: %w", ErrDraining, context.Cause(ctx))}
	}
}

func (t *Tree) start(s Step) (*call, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c, ok := t.calls[s.Path]; ok {
		if c.step.Op != s.Op || c.step.Arg != s.Arg || c.step.Secret != s.Secret {
			return nil, &Error{s.Op, s.Path, fmt.Errorf("%w: %v", ErrDraining, c.step)}
		}
		return c, nil
	}
	c := &call{step: s, done: make(chan struct{})}
	t.calls[s.Path] = c
	go t.run(c)
	return c, nil
}

// run is the only place where a goroutine, and with it a thread, may hang in the kernel.
func (t *Tree) run(c *call) {
	if err := t.perform(c.step); err != nil {
		c.err = &Error{c.step.Op, c.step.Path, cause(err)}
	}
	t.mu.Lock()
	delete(t.calls, c.step.Path)
	t.mu.Unlock()
	close(c.done)
}

func (t *Tree) perform(s Step) error {
	where := path.Join(t.root, s.Path)
	switch s.Op {
	case Mkdir:
		return t.files.Mkdir(where)
	case Rmdir:
		return t.files.Rmdir(where)
	case Write:
		if !s.Secret.IsZero() {
			return t.files.WriteSecret(where, string(s.Secret.Reveal()))
		}
		return t.files.Write(where, s.Arg)
	case Symlink:
		return t.files.Symlink(path.Join(t.root, s.Arg), where)
	case Unlink:
		return t.files.Unlink(where)
	}
	return fmt.Errorf("unknown operation %q", s.Op)
}

// Failure is a step that was not carried out, and why.
type Failure struct {
	Step Step
	Err  error
}

// Apply carries out steps in order, waiting at most patience for each, and skips those that depend
// on a failed one. If an earlier Apply still has a call in the kernel for a step's object, it does
// not wait again. It returns how many steps were done.
func (t *Tree) Apply(ctx context.Context, steps []Step, patience time.Duration) (done int, failures []Failure) {
	broken := map[string]bool{}
	for _, s := range steps {
		if broken[s.Object] || broken[s.Needs] {
			broken[s.Object] = broken[s.Object] || !s.Alone
			continue
		}
		if err := t.apply(ctx, s, patience); err != nil {
			broken[s.Object] = !s.Alone
			failures = append(failures, Failure{s, err})
			continue
		}
		done++
	}
	return done, failures
}

func (t *Tree) apply(ctx context.Context, s Step, patience time.Duration) error {
	if c := t.busy(s.Object); c != nil {
		return &Error{c.step.Op, c.step.Path, ErrDraining}
	}
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not done in %v", patience))
	defer cancel()
	return t.Do(ctx, s)
}

func (t *Tree) busy(object string) *call {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, c := range t.calls {
		if c.step.Object == object {
			return c
		}
	}
	return nil
}

// Busy reports whether a call on the subsystem n is still in the kernel.
func (t *Tree) Busy(n block.NQN) bool { return t.busy(subsystemPath(n)) != nil }

// Read returns all that nvmet exports now, ours or not. Some attributes wait for a lock that a
// drain holds, so Read too may last until ctx ends.
func (t *Tree) Read(ctx context.Context) (Config, error) {
	type result struct {
		config Config
		err    error
	}
	select {
	case t.reading <- struct{}{}:
	case <-ctx.Done():
		return Config{}, &Error{"read", t.root, fmt.Errorf("%w: %w", ErrDraining, context.Cause(ctx))}
	}
	results := make(chan result, 1)
	go func() {
		c, err := t.readSettled()
		<-t.reading
		results <- result{c, err}
	}()
	select {
	case r := <-results:
		return r.config, r.err
	case <-ctx.Done():
		return Config{}, &Error{"read", t.root, fmt.Errorf("%w: %w", ErrDraining, context.Cause(ctx))}
	}
}

// readSettled reads again when something disappeared between listing and reading it, as others may
// change their objects at any time.
func (t *Tree) readSettled() (c Config, err error) {
	for range 5 {
		r := reader{root: t.root, files: t.files}
		c = r.config()
		if r.err == nil || !errors.Is(r.err, fs.ErrNotExist) {
			return c.sorted(), r.err
		}
		err = r.err
	}
	return Config{}, err
}

// reader reads until the first error and keeps that error.
type reader struct {
	root  string
	files Files
	err   error
}

func (r *reader) config() Config {
	var c Config
	for _, n := range r.list("subsystems") {
		c.Subsystems = append(c.Subsystems, r.subsystem(block.NQN(n)))
	}
	for _, name := range r.list("ports") {
		id, err := strconv.ParseUint(name, 0, 16)
		if err != nil {
			continue // nvmet refuses such names
		}
		c.Ports = append(c.Ports, r.port(name, uint16(id)))
	}
	for _, n := range r.list("hosts") {
		c.Hosts = append(c.Hosts, block.NQN(n))
		if k := r.keys(n); k != (Keys{}) {
			if c.Keys == nil {
				c.Keys = map[block.NQN]Keys{}
			}
			c.Keys[block.NQN(n)] = k
		}
	}
	return c
}

// keys reads a host's keys. Kernels that know none, and hosts that are gone by now, have none.
func (r *reader) keys(host string) Keys {
	read := func(file string) block.Secret {
		text, err := r.files.Read(path.Join(r.root, "hosts", host, file))
		if err != nil {
			return block.Secret{}
		}
		return block.NewSecret([]byte(strings.TrimRight(text, " \n\x00")))
	}
	return Keys{Host: read("dhchap_key"), Controller: read("dhchap_ctrl_key")}
}

func (r *reader) subsystem(n block.NQN) Subsystem {
	dir := subsystemPath(n)
	return Subsystem{
		NQN:          n,
		Serial:       r.value(dir, "attr_serial"),
		Model:        r.value(dir, "attr_model"),
		CntlidMin:    uint16(r.number(dir, "attr_cntlid_min")),
		CntlidMax:    uint16(r.number(dir, "attr_cntlid_max")),
		AllowAnyHost: r.number(dir, "attr_allow_any_host") != 0,
		AllowedHosts: r.links(path.Join(dir, "allowed_hosts")),
		Namespaces:   r.namespaces(n),
	}
}

func (r *reader) namespaces(n block.NQN) []Namespace {
	var out []Namespace
	for _, name := range r.list(subsystemPath(n) + "/namespaces") {
		nsid, err := strconv.ParseUint(name, 0, 32)
		if err != nil {
			continue // nvmet refuses such names
		}
		ns := Namespace{NSID: uint32(nsid)}
		if strconv.FormatUint(nsid, 10) != name {
			ns.Alias = name
		}
		dir := namespacePath(n, ns)
		if ns.Device = r.value(dir, "device_path"); ns.Device == "(null)" {
			ns.Device = ""
		}
		ns.UUID = r.uuid(dir, "device_uuid")
		ns.NGUID = r.uuid(dir, "device_nguid")
		ns.Enabled = r.number(dir, "enable") != 0
		out = append(out, ns)
	}
	return out
}

func (r *reader) port(name string, id uint16) Port {
	dir := "ports/" + name
	svcid, err := strconv.ParseUint(r.value(dir, "addr_trsvcid"), 10, 16)
	if err != nil {
		svcid = 0 // not set yet, or not ours
	}
	return Port{
		ID: id,
		Portal: block.Portal{
			Transport: block.Transport(r.value(dir, "addr_trtype")),
			Address:   r.value(dir, "addr_traddr"),
			Port:      uint16(svcid),
		},
		Subsystems: r.links(path.Join(dir, "subsystems")),
	}
}

func (r *reader) links(dir string) []Link {
	var out []Link
	for _, name := range r.list(dir) {
		to, err := r.files.Readlink(path.Join(r.root, dir, name))
		r.keep("readlink", path.Join(dir, name), err)
		out = append(out, Link{Name: name, To: block.NQN(path.Base(to))})
	}
	return out
}

func (r *reader) list(dir string) []string {
	if r.err != nil {
		return nil
	}
	names, err := r.files.ReadDir(path.Join(r.root, dir))
	r.keep("readdir", dir, err)
	return names
}

func (r *reader) value(dir, attr string) string {
	if r.err != nil {
		return ""
	}
	v, err := r.files.Read(path.Join(r.root, dir, attr))
	r.keep("read", path.Join(dir, attr), err)
	return strings.TrimRight(v, " \n") // attr_serial may be padded
}

func (r *reader) number(dir, attr string) uint64 {
	text := r.value(dir, attr)
	if r.err != nil {
		return 0
	}
	n, err := strconv.ParseUint(text, 10, 64)
	r.keep("read", path.Join(dir, attr), err)
	return n
}

func (r *reader) uuid(dir, attr string) block.UUID {
	text := r.value(dir, attr)
	if r.err != nil {
		return block.UUID{}
	}
	u, err := block.ParseUUID(text)
	r.keep("read", path.Join(dir, attr), err)
	return u
}

func (r *reader) keep(op Op, path string, err error) {
	if r.err == nil && err != nil {
		r.err = &Error{op, path, cause(err)}
	}
}

// cause strips the path that package os adds, since Error has its own.
func cause(err error) error {
	if e, ok := errors.AsType[*fs.PathError](err); ok {
		return e.Err
	}
	return err
}
