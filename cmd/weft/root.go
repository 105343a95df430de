// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
)

// globals are the flags that every command has.
type globals struct {
	manager string
	tls     daemon.TLSFiles
	timeout time.Duration
	format  format

	stdout, stderr io.Writer
}

func newRoot(g *globals) *cobra.Command {
	root := &cobra.Command{
		Use:   "weft",
		Short: "Block storage over NVMe-oF, from the drives of many machines",
		Long: `Weft turns the drives of many machines into block devices, over NVMe-oF.

Most commands talk to the volume manager. The daemons are "weft volmgr",
"weft target" and "weft initiator"; "weft csi" provides volumes to Kubernetes.
"weft dev" runs all of Weft in one process, to try it on this machine.`,
		Example: `  weft drive add t1 /dev/nvme0n1
  weft volume create db1 --size 100GiB --copies 2
  weft attach db1
  weft status`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Version:           version(),
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              cobra.ArbitraryArgs,
		RunE:              needsVerb,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{err: flagError(err), hint: helpHint(cmd)}
	})
	root.SetVersionTemplate("weft {{.Version}} " + runtime.Version() + "\n")
	g.addFlags(root)
	root.AddCommand(
		newStatus(g), newExplain(g), newAttach(g), newDetach(g),
		newNode(g), newDrive(g), newPool(g), newVolume(g), newAttachment(g), newEvent(g),
		newVolmgr(g), newTarget(g), newInitiator(g), newCSI(g), newDev(g),
		newDoctor(g), newKubernetes(g), newVersion(g), newCompletion(), newExitCodes(),
	)
	return root
}

// flagError says what is wrong with a flag's value, without how Go found out.
func flagError(err error) error {
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag, what := bad.GetFlag(), bad.Unwrap().Error()
	switch flag.Value.Type() {
	case "uint32", "int":
		what = "must be a whole number"
	case "duration":
		what = "must be a time, such as 30s or 5m"
	case "bool":
		what = "must be true or false"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, bad.GetValue(), what)
}

// defaultManager is where agents and commands look for the manager.
const defaultManager = "127.0.0.1:4480"

func (g *globals) addFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&g.manager, "manager", cmp.Or(os.Getenv("WEFT_MANAGER"), defaultManager), "`address` of the volume manager, HOST:PORT or unix:PATH [WEFT_MANAGER]")
	f.StringVar(&g.tls.CA, "tls-ca", os.Getenv("WEFT_TLS_CA"), "`file` of the certificate authorities to trust; enables TLS [WEFT_TLS_CA]")
	f.StringVar(&g.tls.Cert, "tls-cert", os.Getenv("WEFT_TLS_CERT"), "`file` of this program's certificate [WEFT_TLS_CERT]")
	f.StringVar(&g.tls.Key, "tls-key", os.Getenv("WEFT_TLS_KEY"), "`file` of this program's private key [WEFT_TLS_KEY]")
	f.DurationVar(&g.timeout, "timeout", 0, "give up after this long; with 0, each call has 10s and waiting has no limit")
	f.VarP(&g.format, "output", "o", "`table`, json or yaml")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

// callTimeout limits one call, so that a manager that does not answer is told
// from one that has much to do.
const callTimeout = 10 * time.Second

// call makes a RunE of a function that talks to the manager.
func (g *globals) call(run func(ctx context.Context, api pb.ManagerClient, args []string, out *output) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		if g.timeout < 0 {
			return usageError{err: fmt.Errorf("--timeout %v: must not be negative", g.timeout), hint: "0 is no limit on waiting"}
		}
		if g.timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, g.timeout)
			defer cancel()
		}
		conn, err := daemon.Dial(g.askedManager(cmd), g.tls, grpc.WithUnaryInterceptor(limitCall))
		if err != nil {
			return usageError{err: err}
		}
		defer conn.Close()
		return run(ctx, pages.Client(conn), args, g.out())
	}
}

// askedManager is where an operator's command goes: to the manager that it is told,
// else to the weft dev that this user has running, else to the default address.
func (g *globals) askedManager(cmd *cobra.Command) string {
	if os.Getenv("WEFT_MANAGER") != "" || cmd.Flags().Changed("manager") {
		return g.manager
	}
	if dir := defaultDevDir(); dir != "" && answers(devSocket(dir)) {
		return daemon.Unix + devSocket(dir)
	}
	return g.manager
}

func limitCall(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	limited, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := invoke(limited, method, req, reply, cc, opts...)
	if whole, ok := ctx.Deadline(); ok && status.Code(err) == codes.DeadlineExceeded {
		if this, _ := limited.Deadline(); this.Equal(whole) {
			<-ctx.Done() // --timeout has ended the command, not the manager this call
			return ctx.Err()
		}
	}
	return unreachable(cc.Target(), err)
}

func (g *globals) out() *output {
	return &output{format: g.format, stdout: g.stdout, stderr: g.stderr, now: time.Now}
}

// group is a noun: a command that only holds its verbs.
func group(noun, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     noun,
		Short:   short,
		Example: "  weft " + noun + " " + verbs[0].Name() + " --help",
		Args:    cobra.ArbitraryArgs,
		RunE:    needsVerb,
	}
	cmd.AddCommand(verbs...)
	return cmd
}

// needsVerb is what a command does that only holds others.
func needsVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		var names []string
		for _, sub := range cmd.Commands() {
			if sub.IsAvailableCommand() && sub.Name() != "help" {
				names = append(names, sub.Name())
			}
		}
		slices.Sort(names)
		return usageError{err: fmt.Errorf("%q needs a command: %s", cmd.CommandPath(), strings.Join(names, ", ")), hint: helpHint(cmd)}
	}
	hint := helpHint(cmd)
	cmd.SuggestionsMinimumDistance = 2 // letters that may be wrong
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		hint = fmt.Sprintf("did you mean %q?", cmd.CommandPath()+" "+like[0])
	}
	return usageError{err: fmt.Errorf("unknown command %q", cmd.CommandPath()+" "+args[0]), hint: hint}
}

func helpHint(cmd *cobra.Command) string { return fmt.Sprintf("run %q", cmd.CommandPath()+" --help") }

// takesMore checks that a command was given at least these arguments.
func takesMore(what ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		return takes(what...)(cmd, args[:min(len(args), len(what))])
	}
}

// takes checks that a command was given exactly these arguments.
func takes(what ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(what):
			return usageError{err: fmt.Errorf("%s: missing", what[len(args)]), hint: "usage: " + cmd.UseLine()}
		case len(args) > len(what):
			return usageError{err: fmt.Errorf("unexpected argument %q", args[len(what)]), hint: "usage: " + cmd.UseLine()}
		}
		return nil
	}
}
