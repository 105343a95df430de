// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"io"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
)

func newCompletion() *cobra.Command {
	return &cobra.Command{
		Use:       "completion bash|zsh|fish",
		Short:     "Print a shell completion script",
		Example:   "  source <(weft completion bash)\n  weft completion fish > ~/.config/fish/completions/weft.fish",
		Args:      cli.Takes("SHELL"),
		ValidArgs: []string{"bash", "zsh", "fish"},
		RunE: func(cmd *cobra.Command, args []string) error {
			root, out := cmd.Root(), cmd.OutOrStdout()
			switch args[0] {
			case "bash":
				if _, err := io.WriteString(out, bashWords); err != nil {
					return err
				}
				return root.GenBashCompletionV2(out, true)
			case "zsh":
				return root.GenZshCompletion(out)
			case "fish":
				return root.GenFishCompletion(out, true)
			}
			return cli.UsageError{Err: fmt.Errorf("shell %q: must be bash, zsh or fish", args[0])}
		},
	}
}

// bashWords keeps the name of a snapshot, db1@mon, in one word, which bash splits at the "@" otherwise; npm's
// completion does the same. And it replaces the two functions of the package bash-completion that the script calls, where
// that package is not installed.
const bashWords = `COMP_WORDBREAKS=${COMP_WORDBREAKS//@/}
if ! declare -F _get_comp_words_by_ref >/dev/null; then
    _get_comp_words_by_ref() {
        words=("${COMP_WORDS[@]}") cword=$COMP_CWORD
        cur=${COMP_WORDS[COMP_CWORD]} prev=${COMP_WORDS[COMP_CWORD-1]}
    }
fi
if ! declare -F __ltrim_colon_completions >/dev/null; then
    __ltrim_colon_completions() { :; }
fi
`
