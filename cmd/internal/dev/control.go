// SPDX-License-Identifier: Apache-2.0

package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"syscall"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// serveControl serves the directory's control socket: POST /targets/NAME/stop or start, POST
// /managers/NAME/stop or start, and POST /stop for the whole process.
func serveControl(d *directory, targets *targetSet, several *managerSet, api pb.ManagerClient, stop func()) (daemon.Part, error) {
	listener, err := listenIn(d.in("control"))
	if err != nil {
		return daemon.Part{}, err
	}
	mux := http.NewServeMux()
	for verb, do := range map[string]func(block.NodeName) error{"stop": targets.stop, "start": targets.start} {
		mux.HandleFunc("POST /targets/{name}/"+verb, func(w http.ResponseWriter, r *http.Request) {
			reply(w, do(block.NodeName(r.PathValue("name"))))
		})
	}
	mux.HandleFunc("POST /managers/{name}/{verb}", func(w http.ResponseWriter, r *http.Request) {
		name, err := several.change(r.Context(), api, r.PathValue("name"), r.PathValue("verb"))
		if reply(w, err); err == nil {
			io.WriteString(w, name) //nolint:errcheck // the other end has gone
		}
	})
	mux.HandleFunc("POST /stop", func(w http.ResponseWriter, _ *http.Request) {
		reply(w, nil)
		stop()
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second}
	return daemon.Part{Name: "control", Run: func(ctx context.Context) error {
		defer context.AfterFunc(ctx, func() { server.Shutdown(context.WithoutCancel(ctx)) })() //nolint:errcheck // the process ends
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			return err
		}
		return context.Cause(ctx)
	}}, nil
}

func reply(w http.ResponseWriter, err error) {
	switch status.Code(err) {
	case codes.OK:
		return
	case codes.NotFound:
		w.WriteHeader(http.StatusNotFound)
	case codes.FailedPrecondition:
		w.WriteHeader(http.StatusConflict)
	default:
		w.WriteHeader(http.StatusInternalServerError)
	}
	io.WriteString(w, status.Convert(err).Message()) //nolint:errcheck // the other end has gone
}

// ask sends a request to the weft dev that runs in a directory, and returns what it answers.
func ask(ctx context.Context, dir, path string) (answer string, err error) {
	var dialer net.Dialer
	client := http.Client{Transport: &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return dialer.DialContext(ctx, "unix", (&directory{path: dir}).in("control"))
	}}}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://dev"+path, nil)
	if err != nil {
		return "", err
	}
	got, err := client.Do(request)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return "", cli.UnreachableError{
			Err:  fmt.Errorf("`weft dev` does not run in %s", dir),
			Hint: "set --dir to the directory of the running one, or start it there",
		}
	}
	if wrapped, ok := errors.AsType[*url.Error](err); ok {
		return "", fmt.Errorf("ask `weft dev` in %s: %w", dir, wrapped.Err)
	}
	if err != nil {
		return "", err
	}
	defer got.Body.Close()
	text, err := io.ReadAll(io.LimitReader(got.Body, 1<<16))
	switch {
	case err != nil || got.StatusCode == http.StatusOK:
		return string(text), err
	case got.StatusCode == http.StatusNotFound:
		return "", status.Error(codes.NotFound, string(text))
	case got.StatusCode == http.StatusConflict:
		return "", status.Error(codes.FailedPrecondition, string(text))
	}
	return "", errors.New(string(text))
}

func newTargetVerb(o *options, verb, short, long string) *cobra.Command {
	return &cobra.Command{
		Use:     verb + "-target TARGET",
		Short:   short,
		Long:    long,
		Example: "  weft dev " + verb + "-target t2",
		Args:    cli.Takes("TARGET"),
		RunE: func(cmd *cobra.Command, args []string) error {
			dir, err := pathOf(o.dir)
			if err != nil {
				return err
			}
			name, err := block.ParseNodeName(args[0])
			if err != nil {
				return cli.UsageError{Err: err}
			}
			_, err = ask(cmd.Context(), dir, "/targets/"+string(name)+"/"+verb)
			return err
		},
	}
}

// theLeader stands for the name of the manager that leads.
const theLeader = "leader"

func newStopManager(o *options, g *cli.Globals) *cobra.Command {
	return &cobra.Command{
		Use:   "stop-manager [MANAGER]",
		Short: "Kill a manager of weft dev, to see a failure",
		Long: `Kill a manager of the running weft dev, which must have several: the one that
leads, if none is named. Prints its name. Another one leads within two seconds;
volumes are read and written meanwhile.`,
		Example: "  weft dev stop-manager\n  weft dev stop-manager m2",
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return nil
			}
			return cli.Takes("MANAGER")(cmd, args)
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			name, err := o.changeManager(cmd.Context(), append(args, theLeader)[0], "stop")
			if err == nil {
				fmt.Fprintln(g.Stdout, name)
			}
			return err
		},
	}
}

func newStartManager(o *options) *cobra.Command {
	return &cobra.Command{
		Use:     "start-manager MANAGER",
		Short:   "Start a killed manager of weft dev",
		Long:    "Start a killed manager of the running weft dev again. It gets the records that it\nmissed, and follows.",
		Example: "  weft dev start-manager m2",
		Args:    cli.Takes("MANAGER"),
		RunE: func(cmd *cobra.Command, args []string) error {
			_, err := o.changeManager(cmd.Context(), args[0], "start")
			return err
		},
	}
}

func (o *options) changeManager(ctx context.Context, name, verb string) (string, error) {
	dir, err := pathOf(o.dir)
	if err != nil {
		return "", err
	}
	return ask(ctx, dir, "/managers/"+url.PathEscape(name)+"/"+verb)
}

func newStop(o *options) *cobra.Command {
	return &cobra.Command{
		Use:   "stop",
		Short: "Stop the running weft dev, as Ctrl-C does, and wait until it has ended",
		Example: `  weft dev stop
  weft dev stop --dir /tmp/weft`,
		Args: cli.Takes(),
		RunE: func(cmd *cobra.Command, _ []string) error {
			dir, err := pathOf(o.dir)
			if err != nil {
				return err
			}
			if _, err := ask(cmd.Context(), dir, "/stop"); err != nil {
				return err
			}
			return awaitUnlock(cmd.Context(), (&directory{path: dir}).in("lock"))
		},
	}
}

// awaitUnlock returns when the process that holds a lock has ended.
func awaitUnlock(ctx context.Context, path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	tick := time.NewTicker(cli.PollEvery)
	defer tick.Stop()
	for {
		err := syscall.Flock(int(f.Fd()), syscall.LOCK_SH|syscall.LOCK_NB)
		if !errors.Is(err, syscall.EWOULDBLOCK) {
			return err
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-tick.C:
		}
	}
}
