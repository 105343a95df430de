// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"fmt"
	"io"
	"log/slog"

	"github.com/spf13/cobra"
)

// Options are the flags that every daemon has.
type Options struct {
	LogFormat     string
	LogLevel      string
	MetricsListen string

	Recent *Recent // the newest lines of the log; set by Logger
}

// AddFlags declares the flags of o on a daemon's command.
func (o *Options) AddFlags(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&o.LogFormat, "log-format", "text", "`format` of the log on stderr: text or json")
	f.StringVar(&o.LogLevel, "log-level", "info", "lowest `level` that is logged: debug, info, warn or error")
	f.StringVar(&o.MetricsListen, "metrics-listen", "", "`address` to serve /metrics and /healthz on: 9480 for this machine alone, :9480 over TLS for people of the cluster; off if not given")
}

// Logger returns a logger to w as the flags say.
func (o *Options) Logger(w io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(o.LogLevel)); err != nil {
		return nil, fmt.Errorf("--log-level %q: must be debug, info, warn or error", o.LogLevel)
	}
	o.Recent = &Recent{}
	w = io.MultiWriter(w, o.Recent)
	options := &slog.HandlerOptions{Level: level}
	switch o.LogFormat {
	case "text":
		return slog.New(slog.NewTextHandler(w, options)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(w, options)), nil
	}
	return nil, fmt.Errorf("--log-format %q: must be text or json", o.LogFormat)
}
