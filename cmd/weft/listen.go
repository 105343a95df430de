// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"syscall"

	"weft.dev/weft/cmd/internal/cli"
)

// openAddress listens on the address given by a flag.
func openAddress(flag, address string) (net.Listener, error) {
	listener, err := net.Listen("tcp", address)
	if err == nil {
		return listener, nil
	}
	if op, ok := errors.AsType[*net.OpError](err); ok { // its text repeats the address
		err = op.Err
	}
	if call, ok := errors.AsType[*os.SyscallError](err); ok {
		err = call.Err
	}
	hint := "--" + flag + " must be HOST:PORT or :PORT, with an address of this machine"
	if errors.Is(err, syscall.EADDRINUSE) {
		hint = "is it running already? else another program has the address: give another --" + flag
	}
	return nil, cli.AdvisedError{Err: fmt.Errorf("listen on %s: %w", address, err), Hints: []string{hint}}
}
