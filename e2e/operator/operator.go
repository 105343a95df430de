// SPDX-License-Identifier: Apache-2.0

// Package operator does for a test what a cluster's operator does: it runs weft commands,
// shows the cluster's state, and checks whether drives are ready.
package operator

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"weft.dev/weft/proto/pb"
)

// Operator operates one cluster. Its methods may be called from any goroutine.
type Operator struct {
	Program string // path of weft on this machine
	Manager string // address of the volume manager
	Config  string // directory in which the operator is logged in; empty: plain TCP
}

// CommandError means that a weft command exited with a code other than 0.
type CommandError struct {
	Args   []string
	Code   int
	Stderr string
}

func (e *CommandError) Error() string {
	return fmt.Sprintf("weft %s: exit code %d: %s", strings.Join(e.Args, " "), e.Code, strings.TrimSpace(e.Stderr))
}

// patience is the time limit of a command.
const patience = 3 * time.Minute

// Try runs a weft command and returns its standard output. If the command fails, the error
// is a *CommandError.
func (o Operator) Try(ctx context.Context, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	cmd := exec.CommandContext(ctx, o.Program, args...)
	cmd.Env = append(os.Environ(), "WEFT_MANAGER="+o.Manager, cmp.Or(o.config(), PlainTCP))
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err := cmd.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = &CommandError{args, exit.ExitCode(), stderr.String()}
	}
	return stdout.String(), err
}

// config is the setting that names the directory of the operator's login.
func (o Operator) config() string {
	if o.Config == "" {
		return ""
	}
	return "XDG_CONFIG_HOME=" + o.Config
}

// State is the output that an operator would look at first when something is wrong.
func (o Operator) State(ctx context.Context) string {
	var out strings.Builder
	for _, args := range [][]string{{"status"}, {"volume", "list"}, {"attachment", "list"}, {"event", "list"}} {
		text, err := o.Try(ctx, args...)
		fmt.Fprintf(&out, "$ weft %s\n%s", strings.Join(args, " "), text)
		if err != nil {
			fmt.Fprintln(&out, err)
		}
	}
	return out.String()
}

// DrivesReady returns nil if all drives known to the manager are usable.
func DrivesReady(ctx context.Context, manager pb.ManagerClient) error {
	drives, err := manager.ListDrives(ctx, &pb.ListDrivesRequest{})
	if err != nil {
		return err
	}
	for _, d := range drives.Drives {
		if d.State != pb.DriveState_DRIVE_STATE_READY {
			return fmt.Errorf("drive %s of %s is %v: %s", d.Device, d.Node, d.State, d.Reason)
		}
	}
	return nil
}
