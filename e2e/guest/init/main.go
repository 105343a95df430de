// SPDX-License-Identifier: Apache-2.0

// Init is the first program of the scenarios' virtual machines: process 1 and, with the
// argument "serve", the server that process 1 starts.
package main

import (
	"fmt"
	"os"

	"weft.dev/weft/e2e/guest"
)

func main() {
	if len(os.Args) < 2 || os.Args[1] != "serve" {
		guest.Init()
	}
	if err := guest.ServePort(); err != nil {
		fmt.Fprintln(os.Stderr, "weft-init:", err)
		os.Exit(1)
	}
}
