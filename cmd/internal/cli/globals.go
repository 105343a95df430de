// SPDX-License-Identifier: Apache-2.0

// Package cli holds what the commands of weft share: common flags, the call to the manager,
// waiting, output, errors with their hints and exit codes.
package cli

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/cmd/internal/member"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/managers"
	"weft.dev/weft/proto/pages"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
)

// Globals are the flags that every command has.
type Globals struct {
	Manager string
	TLS     daemon.TLSFiles
	Plain   bool   // plain TCP is allowed
	Context string // of member.Contexts; empty: the current one
	Timeout time.Duration
	Format  Format

	stale bool // a manager that does not lead may answer

	Bundle string    // file of a support bundle that answers in place of the managers; empty: none
	made   time.Time // when the bundle was made, once it is read

	Stdout, Stderr io.Writer
	Version        string                           // of this program
	Local          func() (address string, ok bool) // finds the user's weft dev; may be nil
}

// DefaultManager is where agents and commands look for the manager.
const DefaultManager = "127.0.0.1:4480"

// AddFlags adds the flags to the command and all commands below it.
func (g *Globals) AddFlags(root *cobra.Command) {
	f := root.PersistentFlags()
	f.StringVar(&g.Manager, "manager", cmp.Or(os.Getenv("WEFT_MANAGER"), DefaultManager), "`address` of the volume manager, HOST:PORT or unix:PATH; of several, separated by commas, the one that leads is used [WEFT_MANAGER]")
	f.StringVar(&g.TLS.CA, "tls-ca", os.Getenv("WEFT_TLS_CA"), "`file` of the certificate authorities to trust; enables TLS [WEFT_TLS_CA]")
	f.StringVar(&g.TLS.Cert, "tls-cert", os.Getenv("WEFT_TLS_CERT"), "`file` of this program's certificate [WEFT_TLS_CERT]")
	f.StringVar(&g.TLS.Key, "tls-key", os.Getenv("WEFT_TLS_KEY"), "`file` of this program's private key [WEFT_TLS_KEY]")
	f.BoolVar(&g.Plain, "insecure-plain-tcp", asksForPlain(os.Getenv("WEFT_INSECURE_PLAIN_TCP")), "speak plain TCP: whoever reaches the manager may do everything [WEFT_INSECURE_PLAIN_TCP]")
	f.StringVar(&g.Context, "context", os.Getenv("WEFT_CONTEXT"), "`name` of the cluster to talk to, of \"weft context list\" [WEFT_CONTEXT]")
	f.StringVar(&g.Bundle, "bundle", "", "answer from this `file` of \"weft support bundle\", for commands that only read")
	f.DurationVar(&g.Timeout, "timeout", 0, "give up after this long; with 0, each call has 10s and waiting has no limit")
	f.VarP(&g.Format, "output", "o", "`table`, wide, json or yaml")
	_ = root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions([]string{"table", "wide", "json", "yaml"}, cobra.ShellCompDirectiveNoFileComp))
}

// asksForPlain reports whether a variable's text asks for plain TCP: "0" and "false" do not, and what
// is not clear does not either.
func asksForPlain(text string) bool {
	yes, err := strconv.ParseBool(text)
	return err == nil && yes
}

// CallTimeout limits one call, so that a manager that does not answer is not mistaken for a busy
// one.
const CallTimeout = 10 * time.Second

// Call turns a function that talks to the manager into a RunE.
func (g *Globals) Call(run func(ctx context.Context, api pb.ManagerClient, args []string, out *Output) error) func(*cobra.Command, []string) error {
	return g.connected(func(ctx context.Context, conn *managers.Conn, args []string) error {
		return run(ctx, pages.Client(conn), args, g.Out())
	})
}

// CallIdentities is Call for what is about tokens and certificates.
func (g *Globals) CallIdentities(run func(ctx context.Context, api pb.IdentitiesClient, args []string, out *Output) error) func(*cobra.Command, []string) error {
	return g.connected(func(ctx context.Context, conn *managers.Conn, args []string) error {
		return run(ctx, pb.NewIdentitiesClient(conn), args, g.Out())
	})
}

// connected turns a function that uses a connection to the managers into a RunE.
func (g *Globals) connected(run func(ctx context.Context, conn *managers.Conn, args []string) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, args []string) error {
		ctx := cmd.Context()
		if g.Timeout < 0 {
			return UsageError{Err: fmt.Errorf("--timeout %v: must not be negative", g.Timeout), Hint: "0 is no limit on waiting"}
		}
		if g.Timeout > 0 {
			var cancel context.CancelFunc
			ctx, cancel = context.WithTimeout(ctx, g.Timeout)
			defer cancel()
		}
		call := LimitCall
		if g.stale {
			call = staleCall(g.Out())
		}
		conn, err := g.dial(cmd, grpc.WithUnaryInterceptor(call))
		if err != nil {
			return err
		}
		defer conn.Close()
		return run(ctx, conn, args)
	}
}

// Caller is a connection to the managers that lasts as long as a command runs, and as whom it calls.
type Caller struct {
	Conn     *managers.Conn
	Managers string // their addresses
	Who      access.Identity
	Refresh  func(context.Context) // renews the credential if that is due
}

// CallForLong turns a function that uses the managers until it is interrupted into a RunE. Each call
// has a limit; the whole has none.
func (g *Globals) CallForLong(run func(ctx context.Context, caller Caller) error) func(*cobra.Command, []string) error {
	return func(cmd *cobra.Command, _ []string) error {
		if g.Timeout != 0 {
			return UsageError{Err: fmt.Errorf("--timeout %v: %s runs until it is ended", g.Timeout, cmd.CommandPath()), Hint: "leave it out"}
		}
		addresses, files, err := g.asked(cmd)
		if err != nil {
			return UsageError{Err: err}
		}
		conn, err := g.dial(cmd, grpc.WithUnaryInterceptor(LimitCall))
		if err != nil {
			return err
		}
		defer conn.Close()
		return run(cmd.Context(), Caller{Conn: conn, Managers: addresses, Who: whoCalls(addresses, files), Refresh: func(ctx context.Context) {
			if files.Identity != "" {
				member.Refresh(ctx, addresses, files)
			}
		}})
	}
}

// whoCalls is the identity that managers find in a credential. They decide by what they find, not by
// this.
func whoCalls(addresses string, files daemon.TLSFiles) access.Identity {
	if files.Identity != "" {
		if c, err := pki.ReadCredential(files.Identity); err == nil && c.Cert != nil {
			return c.Identity()
		}
	}
	if files.Cert != "" {
		if pair, err := tls.LoadX509KeyPair(files.Cert, files.Key); err == nil {
			return access.OfCertificate(pair.Leaf)
		}
	}
	if strings.HasPrefix(addresses, daemon.Unix) {
		return access.Identity{Kind: access.Local}
	}
	return access.Identity{Kind: access.Anonymous}
}

// dial connects to the managers that an operator's command calls.
func (g *Globals) dial(cmd *cobra.Command, options ...grpc.DialOption) (*managers.Conn, error) {
	if g.Bundle != "" {
		return g.dialBundle(options...)
	}
	addresses, files, err := g.asked(cmd)
	if err != nil {
		return nil, UsageError{Err: err}
	}
	if err := g.Closed(addresses, files); err != nil {
		return nil, err
	}
	if ctx := cmd.Context(); files.Identity != "" && ctx != nil {
		member.Refresh(ctx, addresses, files)
	}
	conn, err := daemon.Dial(addresses, files, options...)
	if err != nil {
		return nil, UsageError{Err: err}
	}
	return conn, nil
}

// Closed refuses plain TCP that was not asked for. A socket of this machine needs nothing: its file
// says who may open it.
func (g *Globals) Closed(managers string, files daemon.TLSFiles) error {
	if g.Plain || !files.Off() {
		return nil
	}
	for address := range strings.SplitSeq(managers, ",") {
		if !strings.HasPrefix(strings.TrimSpace(address), daemon.Unix) {
			return RefusedError{Err: fmt.Errorf("manager %s: you are not logged in to its cluster", strings.TrimSpace(address)), Hints: []string{
				"log in with a token from an admin: `weft login --manager " + managers + " --token-file FILE`",
				"on the manager's machine, as root: `weft token create --person NAME --role ROLE` prints one",
				"a manager that was started with --insecure-plain-tcp needs that flag here, too",
			}}
		}
	}
	return nil
}

// asked returns the managers that an operator's command calls, and the credential for them. They
// are those that are given, else those of the context in use, else of the weft dev that this user
// runs or of the manager on this machine, else the default address. A manager that is given without
// TLS files is shown the credential of the context in use.
func (g *Globals) asked(cmd *cobra.Command) (managers string, files daemon.TLSFiles, err error) {
	given := os.Getenv("WEFT_MANAGER") != "" || cmd.Flags().Changed("manager")
	if !g.TLS.Off() || g.Plain || given && strings.HasPrefix(g.Manager, daemon.Unix) {
		return g.orLocal(given), g.TLS, nil
	}
	contexts, err := member.ReadContexts()
	if err != nil {
		return "", files, err
	}
	context, files, ok, err := contexts.Find(g.Context)
	switch {
	case err != nil:
		return "", files, err
	case ok && given:
		return g.Manager, files, nil
	case ok:
		return context.Managers, files, nil
	}
	return g.orLocal(given), g.TLS, nil
}

// orLocal is the manager that was given, else one on this machine.
func (g *Globals) orLocal(given bool) string {
	if !given && g.Local != nil {
		if address, ok := g.Local(); ok {
			return address
		}
	}
	return g.Manager
}

// LimitCall is a gRPC interceptor that applies CallTimeout, and names the manager that did not
// answer.
func LimitCall(ctx context.Context, method string, req, reply any, cc *grpc.ClientConn, invoke grpc.UnaryInvoker, opts ...grpc.CallOption) error {
	limited, cancel := context.WithTimeout(ctx, CallTimeout)
	defer cancel()
	err := invoke(limited, method, req, reply, cc, opts...)
	if whole, ok := ctx.Deadline(); ok && status.Code(err) == codes.DeadlineExceeded {
		if this, _ := limited.Deadline(); this.Equal(whole) {
			<-ctx.Done() // --timeout has ended the command; the manager is not at fault
			return ctx.Err()
		}
	}
	return unreachable(cc.Target(), err)
}

// Out is the output selected by the flags.
func (g *Globals) Out() *Output {
	o := &Output{Format: g.Format, Stdout: g.Stdout, Stderr: g.Stderr, Now: time.Now}
	if g.Bundle != "" { // ages are those of its time
		o.Now = func() time.Time { return g.made }
	}
	if o.Format == FormatWide {
		o.Format, o.Wide = FormatTable, true
	}
	return o
}

// Group is a noun: a command that only groups its verbs.
func Group(noun, short string, verbs ...*cobra.Command) *cobra.Command {
	cmd := &cobra.Command{
		Use:     noun,
		Short:   short,
		Example: firstExamples(verbs),
		Args:    cobra.ArbitraryArgs,
		RunE:    NeedsVerb,
	}
	cmd.AddCommand(verbs...)
	return cmd
}

// firstExamples lists one example of each verb.
func firstExamples(verbs []*cobra.Command) string {
	var lines []string
	for _, verb := range verbs {
		line, _, _ := strings.Cut(verb.Example, "\n")
		lines = append(lines, line)
	}
	return strings.Join(lines, "\n")
}

// NeedsVerb refuses a command line that ends at a noun or names an unknown verb.
func NeedsVerb(cmd *cobra.Command, args []string) error {
	if len(args) == 0 {
		return UsageError{Err: fmt.Errorf("%q needs a command: %s", cmd.CommandPath(), strings.Join(verbsOf(cmd), ", ")), Hint: HelpHint(cmd)}
	}
	return UsageError{Err: fmt.Errorf("unknown command %q", cmd.CommandPath()+" "+args[0]), Hint: likeliest(cmd, args)}
}

func verbsOf(cmd *cobra.Command) []string {
	var names []string
	for _, sub := range cmd.Commands() {
		if sub.IsAvailableCommand() && sub.Name() != "help" {
			names = append(names, sub.Name())
		}
	}
	slices.Sort(names)
	return names
}

// likeliest suggests the command that an unknown one was meant to be: one with a similar spelling,
// one with noun and verb swapped, or else an existing one.
func likeliest(cmd *cobra.Command, args []string) string {
	cmd.SuggestionsMinimumDistance = 2 // this many letters may be wrong
	if like := cmd.SuggestionsFor(args[0]); len(like) > 0 {
		return fmt.Sprintf("did you mean %q?", cmd.CommandPath()+" "+like[0])
	}
	if len(args) > 1 {
		if found, rest, err := cmd.Find([]string{args[1], args[0]}); err == nil && len(rest) == 0 && found.Name() == args[0] {
			return fmt.Sprintf("did you mean %q?", found.CommandPath())
		}
	}
	if cmd.HasParent() {
		return fmt.Sprintf("%q has: %s", cmd.CommandPath(), strings.Join(verbsOf(cmd), ", "))
	}
	return HelpHint(cmd)
}

// HelpHint says how to show a command's help.
func HelpHint(cmd *cobra.Command) string { return fmt.Sprintf("run %q", cmd.CommandPath()+" --help") }

// TakesMore checks that a command was given at least these arguments.
func TakesMore(what ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		return Takes(what...)(cmd, args[:min(len(args), len(what))])
	}
}

// Takes checks that a command was given exactly these arguments.
func Takes(what ...string) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		switch {
		case len(args) < len(what):
			return UsageError{Err: fmt.Errorf("%s: missing", what[len(args)]), Hint: "usage: " + cmd.UseLine()}
		case len(args) > len(what):
			return UsageError{Err: fmt.Errorf("unexpected argument %q", args[len(what)]), Hint: "usage: " + cmd.UseLine()}
		}
		return nil
	}
}

// ClusterID asks the volume manager for the id of its cluster.
func ClusterID(ctx context.Context, api pb.ManagerClient) (id block.ClusterID, err error) {
	now, err := api.GetStatus(ctx, &pb.GetStatusRequest{})
	if err != nil {
		return id, err
	}
	return block.ParseClusterID(now.GetClusterId())
}

// NodeOrThis returns the given node, or this machine under the name that its agents use.
func NodeOrThis(node string) (string, error) {
	if node != "" {
		return node, nil
	}
	host, err := os.Hostname()
	if err != nil {
		return "", UsageError{Err: fmt.Errorf("find this host's name: %w", err), Hint: "give --node"}
	}
	return strings.ToLower(host), nil
}
