// SPDX-License-Identifier: Apache-2.0

package operator

import (
	"errors"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
)

// FreeAddress returns a loopback address, 127.0.0.1 and a port, at which nobody listens. The kernel
// gives ports from 32768 on to whoever asks for any, so one of those could be taken before the
// caller uses it.
func FreeAddress() (string, error) {
	for {
		address := net.JoinHostPort("127.0.0.1", strconv.Itoa(10000+rand.IntN(22000)))
		listener, err := net.Listen("tcp", address)
		if errors.Is(err, syscall.EADDRINUSE) {
			continue
		}
		if err != nil {
			return "", err
		}
		return address, listener.Close()
	}
}

// PlainTCP is the setting that lets Weft's programs speak plain TCP. The test clusters do: their
// networks are in virtual machines, or are the loopback interface.
const PlainTCP = "WEFT_INSECURE_PLAIN_TCP=1"

// Environment returns this process's environment without Weft's settings.
func Environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "WEFT_") })
}
