// SPDX-License-Identifier: Apache-2.0

// Init is the first program of the scenarios' virtual machines: process 1 and, with the
// argument "serve", the server that process 1 starts. With "userland" it is that server as a
// service of a distribution's userland.
package main

import (
	"fmt"
	"os"

	"weft.dev/weft/e2e/guest"
)

func main() {
	serve := guest.ServePort
	switch {
	case len(os.Args) == 2 && os.Args[1] == "userland":
		serve = guest.ServeUserland
	case len(os.Args) < 2 || os.Args[1] != "serve":
		guest.Init()
	}
	if err := serve(); err != nil {
		fmt.Fprintln(os.Stderr, "weft-init:", err)
		os.Exit(1)
	}
}
