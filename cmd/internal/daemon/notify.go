// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/proto/beat"
)

// notify tells systemd about a change of state, as sd_notify(3) does: one datagram to the socket
// that NOTIFY_SOCKET names. Without that variable it does nothing.
func notify(log *slog.Logger, state string) {
	if err := send(os.Getenv("NOTIFY_SOCKET"), state); err != nil {
		log.Warn("notify systemd", "state", state, "err", err)
	}
}

func send(socket, state string) error {
	if socket == "" {
		return nil
	}
	conn, err := net.DialUnix("unixgram", nil, &net.UnixAddr{Name: socket, Net: "unixgram"})
	if err != nil {
		return err
	}
	defer conn.Close()
	_, err = conn.Write([]byte(state))
	return err
}

// askFor bounds how long systemd may take to answer.
const askFor = time.Second

// MachineStops reports whether systemd is shutting the machine down. It is false where systemd
// does not answer, as in a container.
func MachineStops(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, askFor)
	defer cancel()
	ask := exec.CommandContext(ctx, "systemctl", "is-system-running")
	ask.WaitDelay = askFor
	state, _ := ask.Output() //nolint:errcheck // it fails in all states but one, and prints the state nevertheless
	return strings.TrimSpace(string(state)) == "stopping"
}

// Watchdog is a part that tells systemd that the daemon is alive, each time that alive returns no
// error. If that stops for the unit's WatchdogSec, systemd restarts the daemon. ok is false if
// systemd did not ask for a watchdog.
func Watchdog(log *slog.Logger, alive func(context.Context) error) (part Part, ok bool) {
	micros, err := strconv.ParseUint(os.Getenv("WATCHDOG_USEC"), 10, 63)
	if err != nil || micros == 0 {
		return Part{}, false
	}
	every := time.Duration(micros) * time.Microsecond / 3
	return Part{Name: "watchdog", Run: func(ctx context.Context) error {
		tick := beat.NewTicker(every)
		defer tick.Stop()
		for {
			if err := check(ctx, every, alive); err == nil {
				notify(log, "WATCHDOG=1")
			} else if ctx.Err() == nil {
				log.Warn("watchdog: no answer from itself", "err", err)
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-tick.C:
			}
		}
	}}, true
}

func check(ctx context.Context, limit time.Duration, alive func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	if err := alive(ctx); err != nil {
		return fmt.Errorf("ask itself: %w", err)
	}
	return nil
}
