// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"

	"weft.dev/weft/proto/nvmetcp/dhchap"
)

// hints say what an errno of a connect means: the kernel returns one errno for many causes and
// writes the details to its log. (Measured on 5.15 to 7.2.)
var hints = map[unix.Errno]string{
	unix.EIO:          "the target refused: no such subsystem, host not allowed, or authentication; the kernel log has the status",
	unix.ECONNREFUSED: "nothing listens there: the target is down, or does not export yet",
	unix.ECONNRESET:   "the target closed the connection",
	unix.EINVAL:       "the kernel refused an option: transport module missing, duplicate controller id, or host id and host NQN used with other partners before",
	unix.ENODEV:       "no such network interface",
	unix.ENETUNREACH:  "no route to the target",
	unix.EHOSTUNREACH: "the target does not answer",
	unix.ETIMEDOUT:    "the target does not answer",
	unix.EAGAIN:       "the target accepted the connection and then sent nothing",
	unix.EBUSY:        "the transport module or the controller is being removed",
	unix.ENOKEY:       "no TLS key",
	unix.EKEYREJECTED: "TLS key rejected",
	unix.ENOENT:       "no /dev/nvme-fabrics: module nvme-fabrics is not loaded",
}

func connectError(o Options, err error) error {
	e := &Error{Op: "connect " + string(o.NQN) + " at", Path: o.Portal.String(), Err: errno(err)}
	if n, ok := errors.AsType[unix.Errno](err); ok {
		e.Hint = hints[n]
	}
	return e
}

// Supported lists the options that the kernel accepts.
func (t *Tree) Supported() (Features, error) {
	b, err := os.ReadFile(t.fabricsNode())
	if errors.Is(err, unix.EINVAL) { // before 5.19 there is nothing to read without a write
		return Features{}, nil
	}
	if err != nil {
		return nil, &Error{Op: "read", Path: t.fabricsNode(), Hint: hintOf(err), Err: errno(err)}
	}
	return parseFeatures(string(b)), nil
}

func hintOf(err error) string {
	if n, ok := errors.AsType[unix.Errno](err); ok {
		return hints[n]
	}
	return ""
}

func (t *Tree) fabricsNode() string { return filepath.Join(t.dev, "nvme-fabrics") }

// Connect makes a controller and returns when it is live; its namespaces appear a little
// later. If the controller exists already, it is returned as it is. The kernel gives up on a
// silent target after about 13 s with TCP, and after more than a minute with RDMA; meanwhile it
// makes no other controller. If ctx ends first the call is left behind, and a controller that it
// still makes is found by [Tree.Controllers].
func (t *Tree) Connect(ctx context.Context, o Options) (Controller, error) {
	if err := o.Check(); err != nil {
		return Controller{}, fmt.Errorf("connect %s: %w", o.NQN, err)
	}
	made := make(chan int, 1)
	err := t.await(ctx, "connect", string(o.NQN)+" at "+o.Portal.String(), func() error {
		features, err := t.Supported() // waits while anybody connects: the kernel has one lock for all
		if err != nil {
			return err
		}
		if unknown := features.missing(o); len(unknown) > 0 {
			return fmt.Errorf("connect %s: this kernel's nvme-fabrics has no option %s", o.NQN, strings.Join(unknown, ", "))
		}
		if ctx.Err() != nil { // given up meanwhile
			return context.Cause(ctx)
		}
		instance, err := t.create(o)
		if err != nil {
			return err
		}
		made <- instance
		return t.conceal(instance)
	})
	if errors.Is(err, unix.EALREADY) {
		return t.connected(o)
	}
	if err != nil {
		return Controller{}, err
	}
	return t.controllerNow(fmt.Sprintf("nvme%d", <-made))
}

// conceal makes the keys of a controller readable for root alone. Sysfs shows them to everybody,
// from the moment at which the kernel begins to connect.
func (t *Tree) conceal(instance int) error {
	for _, name := range []string{"dhchap_secret", "dhchap_ctrl_secret"} {
		file := t.path(fmt.Sprintf("class/nvme/nvme%d/%s", instance, name))
		if err := os.Chmod(file, 0o600); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return &Error{Op: "conceal", Path: file, Err: errno(err)}
		}
	}
	return nil
}

// create writes the options and reads the outcome from the same descriptor.
func (t *Tree) create(o Options) (instance int, err error) {
	fd, err := unix.Open(t.fabricsNode(), unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		return 0, connectError(o, err)
	}
	defer unix.Close(fd)
	if _, err := unix.Write(fd, []byte(o.line(dhchap.Key.Representation))); err != nil {
		return 0, connectError(o, err)
	}
	var buf [256]byte
	n, err := unix.Read(fd, buf[:])
	if err != nil {
		return 0, connectError(o, err)
	}
	var cntlid int
	if _, err := fmt.Sscanf(string(buf[:n]), "instance=%d,cntlid=%d", &instance, &cntlid); err != nil {
		return 0, connectError(o, fmt.Errorf("kernel answered %q", buf[:n]))
	}
	return instance, nil
}

// connected finds the existing controller after the kernel answered EALREADY.
func (t *Tree) connected(o Options) (Controller, error) {
	all, err := t.Controllers(func(n block.NQN) bool { return n == o.NQN })
	if err != nil {
		return Controller{}, err
	}
	for _, c := range all {
		if c.HostNQN == o.Host.NQN && c.Address.At(o.Portal) {
			return c, nil
		}
	}
	return Controller{}, connectError(o, unix.EALREADY)
}

// Disconnect deletes a controller. This takes 0.3 s if the target answers or the controller is
// reconnecting, but 27 to 89 s for a live controller of a target that has fallen silent:
// destroy its sockets first.
//
// A controller that is gone counts as disconnected, even if another one has its name by now:
// the kernel reuses numbers.
func (t *Tree) Disconnect(ctx context.Context, c Controller) error {
	return t.await(ctx, "disconnect", c.Name, func() error {
		err := t.remove(c)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
			return nil
		}
		return err
	})
}

// SetFailFast decides what becomes of I/O on a controller when the kernel notices that the
// connection is gone: it fails at once, or waits for the connection. Once the kernel connects anew
// it keeps the old setting; late reports that it may do so already. This is for RDMA: there are no
// sockets to destroy, and a controller that is connecting to a silent target is deleted only when
// that attempt ends, after more than a minute.
func (t *Tree) SetFailFast(c Controller, on bool) (late bool, err error) {
	value := "-1"
	if on {
		value = "0"
	}
	if err := t.tell(c, "fast_io_fail_tmo", value); err != nil {
		return false, err
	}
	now, err := t.controllerNow(c.Name)
	return now.NQN != c.NQN || now.State != Live && now.State != Resetting, err
}

// SetReconnectDelay sets how long the kernel waits, in whole seconds, before each attempt to connect a
// controller again whose connection is lost from now on.
func (t *Tree) SetReconnectDelay(c Controller, d time.Duration) error {
	return t.tell(c, "reconnect_delay", strconv.Itoa(int(d/time.Second)))
}

func (t *Tree) remove(c Controller) error { return t.tell(c, "delete_controller", "1") }

// tell opens the file before it checks whose it is: if the controller goes in between, the file
// goes with it, and the write reaches no other controller.
func (t *Tree) tell(c Controller, name, value string) error {
	dir := "class/nvme/" + c.Name + "/"
	f, err := t.open(dir + name)
	if err != nil {
		return err
	}
	defer f.Close()
	if now, _, err := t.controller(c.Name); err != nil || now.NQN != c.NQN || now.HostNQN != c.HostNQN {
		return err
	}
	return t.put(f, value)
}
