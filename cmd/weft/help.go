// SPDX-License-Identifier: Apache-2.0

package main

import "github.com/spf13/cobra"

const exitCodesText = `Exit codes of weft:

    0  done
    1  failed
    2  wrong usage: the command line or a value in it
    3  not found
    4  already exists with other parameters
    5  refused in the present state
    6  no space
    7  the volume manager cannot be reached
    8  timed out waiting; the request stands
  130  interrupted

Treat any other code as a failure. With -o json the error on stderr is an object
with the keys error, hints, reason, fields and exit_code.
`

// newExitCodes is a help topic: a command that does nothing but be described.
func newExitCodes() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "List the exit codes, for scripts",
		Long:  exitCodesText,
	}
}
