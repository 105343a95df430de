// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
)

// relay forwards connections from a TCP address to a unix socket, so that a test outside of
// the machine can reach the socket's server.
func relay(ctx context.Context, args []string) error {
	if len(args) != 2 {
		return errors.New("say relay :PORT SOCKET")
	}
	listener, err := net.Listen("tcp", args[0])
	if err != nil {
		return err
	}
	context.AfterFunc(ctx, func() { listener.Close() })
	for {
		in, err := listener.Accept()
		if ctx.Err() != nil {
			return nil
		}
		if err != nil {
			return err
		}
		go func() {
			defer in.Close()
			out, err := net.Dial("unix", args[1])
			if err != nil {
				fmt.Println("relay:", err) // the peer sees its connection close
				return
			}
			defer out.Close()
			go func() { defer out.Close(); _, _ = io.Copy(out, in) }()
			_, _ = io.Copy(in, out)
		}()
	}
}
