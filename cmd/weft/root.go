// SPDX-License-Identifier: Apache-2.0

package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"

	"weft.dev/weft/cmd/internal/daemon"
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
		Short: "Block storage over NVMe-oF: volumes made of many machines' drives",
		Long: `Weft makes block devices of the drives of many machines, over NVMe-oF.

Operators' commands talk to the volume manager; the daemons are
"weft volmgr", "weft target" and "weft initiator"; "weft csi" gives volumes to
Kubernetes. "weft dev" is all of Weft in one process, to try it on this machine.`,
		Example: `  weft drive add t1 /dev/nvme0n1
  weft volume create db1 --size 100GiB --copies 2
  weft attach db1
  weft status`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              cobra.ArbitraryArgs,
		RunE:              needsVerb,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return usageError{err: err, hint: helpHint(cmd)}
	})
	g.addFlags(root)
	root.AddCommand(
		newStatus(g), newExplain(g), newAttach(g), newDetach(g),
		newNode(g), newDrive(g), newPool(g), newVolume(g), newAttachment(g), newEvent(g),
		newVolmgr(g), newTarget(g), newInitiator(g), newCSI(g), newDev(g),
		newDoctor(g), newKubernetes(g), newVersion(g), newCompletion(), newExitCodes(),
	)
	return root
}

// defaultManager is where commands look for the manager, and where weft dev answers.
const defaultManager = "127.0.0.1:4480"

func (g *globals) addFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&g.manager, "manager", cmp.Or(os.Getenv("WEFT_MANAGER"), defaultManager), "`address` of the volume manager [WEFT_MANAGER]")
	f.StringVar(&g.tls.CA, "tls-ca", os.Getenv("WEFT_TLS_CA"), "`file` of the authorities that the other end must be signed by; turns TLS on [WEFT_TLS_CA]")
	f.StringVar(&g.tls.Cert, "tls-cert", os.Getenv("WEFT_TLS_CERT"), "`file` of this end's certificate [WEFT_TLS_CERT]")
	f.StringVar(&g.tls.Key, "tls-key", os.Getenv("WEFT_TLS_KEY"), "`file` of this end's private key [WEFT_TLS_KEY]")
	f.DurationVar(&g.timeout, "timeout", 0, "give up after this long; 0: 10s for each call, no limit on waiting")
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
		if g.timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, g.timeout)
			defer cancel()
		}
		conn, err := daemon.Dial(g.manager, g.tls, grpc.WithUnaryInterceptor(limitCall))
		if err != nil {
			return usageError{err: err}
		}
		defer conn.Close()
		return run(ctx, pb.NewManagerClient(conn), args, g.out())
	}
}

func limitCall(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	return unreachable(cc.Target(), invoke(ctx, method, req, reply, cc, opts...))
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
