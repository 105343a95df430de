// SPDX-License-Identifier: Apache-2.0

// Package manual makes the manual pages of the commands from the commands' own help, as
// docs/cli.md is made: one page for each command, as git has them (weft-volume-create.1).
package manual

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"weft.dev/weft/cmd/internal/cli"
)

// New returns the hidden command that packages are made with.
func New() *cobra.Command {
	return &cobra.Command{
		Use:     "manual DIRECTORY",
		Short:   "Write the manual pages of all commands",
		Example: "  weft manual man",
		Args:    cli.Takes("DIRECTORY"),
		Hidden:  true,
		RunE: func(cmd *cobra.Command, args []string) error {
			var errs error
			for name, page := range Pages(cmd.Root()) {
				errs = errors.Join(errs, os.WriteFile(filepath.Join(args[0], name), []byte(page), 0o644))
			}
			return errs
		},
	}
}

// Pages are the manual pages of a command and of those below it, by the names of their files.
func Pages(root *cobra.Command) map[string]string {
	all := map[string]string{name(root) + ".1": page(root)}
	for _, c := range root.Commands() {
		if !c.Hidden && c.Name() != "help" {
			for file, text := range Pages(c) {
				all[file] = text
			}
		}
	}
	return all
}

// name is the name of a command's page: weft-volume-create.
func name(c *cobra.Command) string { return strings.ReplaceAll(c.CommandPath(), " ", "-") }

func page(c *cobra.Command) string {
	var p strings.Builder
	// Of the dates that a page may have, none is the same for the same sources.
	fmt.Fprintf(&p, ".TH %s 1 \"\" Weft \"Weft manual\"\n", strings.ToUpper(quoted(name(c))))
	fmt.Fprintf(&p, ".SH NAME\n%s \\- %s\n", quoted(name(c)), quoted(c.Short))
	if c.Runnable() {
		p.WriteString(".SH SYNOPSIS\n" + verbatim(c.UseLine()))
	}
	if c.Long != "" {
		p.WriteString(".SH DESCRIPTION\n" + verbatim(c.Long))
	}
	p.WriteString(options("OPTIONS", c.LocalNonPersistentFlags()))
	p.WriteString(options("OPTIONS OF ALL COMMANDS", c.Root().PersistentFlags()))
	if c.Example != "" {
		p.WriteString(".SH EXAMPLES\n" + verbatim(c.Example))
	}
	p.WriteString(seeAlso(c))
	return p.String()
}

func options(title string, flags *pflag.FlagSet) string {
	var p strings.Builder
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		word := "--" + f.Name
		if f.Shorthand != "" {
			word = "-" + f.Shorthand + ", " + word
		}
		fmt.Fprintf(&p, ".TP\n\\fB%s\\fR", quoted(word))
		if value != "" {
			fmt.Fprintf(&p, " \\fI%s\\fR", quoted(value))
		}
		p.WriteString("\n" + lines(usage))
	})
	if p.Len() == 0 {
		return ""
	}
	return ".SH " + title + "\n" + p.String()
}

// seeAlso names the pages of the commands above and below.
func seeAlso(c *cobra.Command) string {
	var pages []string
	if c.HasParent() {
		pages = append(pages, name(c.Parent()))
	}
	for _, sub := range c.Commands() {
		if !sub.Hidden && sub.Name() != "help" {
			pages = append(pages, name(sub))
		}
	}
	if len(pages) == 0 {
		return ""
	}
	for i, p := range pages {
		pages[i] = ".BR " + quoted(p) + " (1)"
	}
	return ".SH SEE ALSO\n" + strings.Join(pages, " ,\n") + "\n"
}

// verbatim keeps the lines as they are: the help has its own breaks and tables.
func verbatim(text string) string {
	return ".nf\n" + lines(strings.Trim(text, "\n")) + ".fi\n"
}

// lines quotes a text of several lines. A dot or quotation mark that begins a line would be a
// command of the formatter.
func lines(text string) string {
	var p strings.Builder
	for line := range strings.SplitSeq(text, "\n") {
		if strings.HasPrefix(line, ".") || strings.HasPrefix(line, "'") {
			p.WriteString(`\&`)
		}
		p.WriteString(quoted(line) + "\n")
	}
	return p.String()
}

// quoted keeps the formatter from changing characters of a text: a dash stays a dash that can
// be copied, and marks that it would make typographic stay as they are typed.
func quoted(text string) string {
	return strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", `\(ga`, "^", `\(ha`, "~", `\(ti`).Replace(text)
}
