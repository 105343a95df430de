// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"context"
	"io"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"golang.org/x/sys/unix"
)

// RefreshEvery is how often a view is shown anew.
const RefreshEvery = 2 * time.Second

// Screen shows a text again and again: on a terminal in place, elsewhere one after another.
type Screen struct {
	to    io.Writer
	lines int // of the terminal; 0: it is none
	shown bool
}

// NewScreen makes a Screen. It does not touch the terminal yet.
func NewScreen(to io.Writer) *Screen {
	s := &Screen{to: to}
	if f, ok := to.(*os.File); ok {
		if size, err := unix.IoctlGetWinsize(int(f.Fd()), unix.TIOCGWINSZ); err == nil {
			s.lines = int(size.Row)
		}
	}
	return s
}

// IsTerminal reports whether people watch.
func (s *Screen) IsTerminal() bool { return s.lines > 0 }

// Show shows a text, on a terminal as much of it as fits.
func (s *Screen) Show(text string) error {
	if s.lines > 0 {
		text = inPlace(text, s.lines, !s.shown)
	} else if s.shown {
		text = "\n" + text
	}
	s.shown = true
	_, err := io.WriteString(s.to, text)
	return err
}

// inPlace makes a text replace what is on the terminal, without flicker: each line is cleared as
// it is written, and what is below the last one at the end.
func inPlace(text string, lines int, first bool) string {
	var b strings.Builder
	if first {
		b.WriteString("\x1b[2J")
	}
	b.WriteString("\x1b[H")
	all := strings.SplitAfter(text, "\n")
	for _, line := range all[:min(len(all), max(1, lines-1))] {
		body, end := strings.CutSuffix(line, "\n")
		b.WriteString(body + "\x1b[K")
		if end {
			b.WriteString("\n")
		}
	}
	b.WriteString("\x1b[J")
	return b.String()
}

// Repeat calls show every two seconds until ctx ends. An error of the first call ends it; a later
// one is shown, and the next call may succeed again.
func Repeat(ctx context.Context, show func(context.Context) error, failed func(error)) error {
	ticker := time.NewTicker(RefreshEvery)
	defer ticker.Stop()
	for first := true; ; first = false {
		err := show(ctx)
		switch {
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case err != nil && first:
			return err
		case err != nil:
			failed(err)
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-ticker.C:
		}
	}
}

// Watched gives a command that prints a list the flag --watch.
func (g *Globals) Watched(cmd *cobra.Command) *cobra.Command {
	watch := cmd.Flags().BoolP("watch", "w", false, "print the list again every 2s, on a terminal in place, until interrupted")
	once := cmd.RunE
	cmd.RunE = func(cmd *cobra.Command, args []string) error {
		if !*watch {
			return once(cmd, args)
		}
		out := g.Stdout
		defer func() { g.Stdout = out }()
		screen := NewScreen(out)
		return Repeat(cmd.Context(), func(context.Context) error {
			var page bytes.Buffer
			g.Stdout = &page
			if err := once(cmd, args); err != nil {
				return err
			}
			return screen.Show(page.String())
		}, func(err error) { g.Out().Warn("%v", err) })
	}
	return cmd
}
