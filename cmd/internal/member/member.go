// SPDX-License-Identifier: Apache-2.0

// Package member makes a program a member of a cluster, and keeps it one.
//
//	Join      shows a token to a manager, and keeps the credential that it gets
//	JoinHeld  is Join for a browser, whose credential is in memory
//	Enter     is Join for an agent: once, and as long as no manager answers
//	Renewing  renews the credential when two thirds of its life have passed
//	Contexts  are the clusters that a person is logged in to
//
// Other secrets are in files alone: the token in one that is named, the key in one that only its owner
// reads. Neither is in an argument, in the environment or in a log.
package member

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/pki"
)

// callTimeout bounds a request for a certificate.
const callTimeout = 10 * time.Second

// Join shows a token to the managers, and writes the credential that it gets to path. The key is
// written before the token is used, so that a join whose answer was lost can be repeated.
func Join(ctx context.Context, managers string, token pki.Token, path string) (*pki.Credential, error) {
	return join(ctx, managers, token, path, shown(token))
}

// Files of a directory in which Kubernetes gives a pod what it joins with.
const (
	AccountDir    = "/var/run/secrets/weft.dev"
	accountToken  = "token"     // of the pod's service account, for the audience of --trust-kubernetes
	authorityFile = "authority" // hashes of the cluster's authorities: see --publish-authority
)

// joinAsAccount is Join with the token of a pod's service account.
func joinAsAccount(ctx context.Context, managers, dir string, role access.Role, path string) (*pki.Credential, error) {
	text, err := os.ReadFile(filepath.Join(dir, authorityFile))
	if errors.Is(err, fs.ErrNotExist) { // the cluster is being made
		return nil, status.Errorf(codes.Unavailable, "no authority of the cluster is published in %s yet", filepath.Join(dir, authorityFile))
	}
	if err != nil {
		return nil, err
	}
	pins, err := pki.ParsePins(string(text))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, authorityFile), err)
	}
	token, err := os.ReadFile(filepath.Join(dir, accountToken)) // each time: the kubelet renews it
	if err != nil {
		return nil, err
	}
	return join(ctx, managers, pins, path, &pb.JoinRequest{AccountToken: bytes.TrimSpace(token), Role: string(role)})
}

func join(ctx context.Context, managers string, to daemon.Joining, path string, request *pb.JoinRequest) (*pki.Credential, error) {
	pending := path + ".joining"
	c, err := pki.ReadCredential(pending)
	if errors.Is(err, fs.ErrNotExist) {
		if c, err = pki.NewCredential(); err == nil {
			err = c.Write(pending)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	got, err := ask(ctx, managers, daemon.TLSFiles{Joining: to}, c, joining(request))
	if err != nil {
		return nil, err
	}
	if err := got.Write(path); err != nil {
		return nil, fmt.Errorf("join: %w", err)
	}
	return got, os.Remove(pending)
}

// JoinHeld is Join with a credential that is kept in memory alone. If the answer is lost, the token is
// of no use any more.
func JoinHeld(ctx context.Context, managers string, token pki.Token) (*pki.Credential, error) {
	c, err := pki.NewCredential()
	if err != nil {
		return nil, err
	}
	return ask(ctx, managers, daemon.TLSFiles{Joining: token}, c, joining(shown(token)))
}

// joining is the call that shows what somebody joins with.
func joining(with *pb.JoinRequest) func(context.Context, pb.IdentitiesClient, []byte) (*pb.Credentials, error) {
	return func(ctx context.Context, api pb.IdentitiesClient, request []byte) (*pb.Credentials, error) {
		with.CertificateRequest = request
		return api.Join(ctx, with)
	}
}

// shown is a request to join with a token.
func shown(token pki.Token) *pb.JoinRequest {
	return &pb.JoinRequest{TokenId: token.ID, Proof: token.Proof()}
}

// Renew gets another certificate, for a new key, and replaces the credential at files.Identity.
func Renew(ctx context.Context, managers string, files daemon.TLSFiles) error {
	c, err := pki.NewCredential()
	if err != nil {
		return err
	}
	next, err := ask(ctx, managers, files, c, func(ctx context.Context, api pb.IdentitiesClient, request []byte) (*pb.Credentials, error) {
		return api.Renew(ctx, &pb.RenewRequest{CertificateRequest: request})
	})
	if err != nil {
		return err
	}
	return next.Write(files.Identity)
}

// ask asks the managers for a certificate of c's key.
func ask(ctx context.Context, managers string, files daemon.TLSFiles, c *pki.Credential, call func(context.Context, pb.IdentitiesClient, []byte) (*pb.Credentials, error)) (*pki.Credential, error) {
	request, err := c.Request()
	if err != nil {
		return nil, err
	}
	conn, err := daemon.Dial(managers, files)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	got, err := call(ctx, pb.NewIdentitiesClient(conn), request)
	if err != nil {
		return nil, err
	}
	return c.Renewed(got.GetCertificate(), got.GetAuthorities())
}

// Entry is how an agent becomes a member.
type Entry struct {
	Managers  string // addresses, separated by commas
	Path      string // of the credential
	TokenFile string // empty: none was given; or Kubernetes
	Account   string // the directory of the pod's account, with Kubernetes; empty: AccountDir
	Role      access.Role
	Node      string
	Log       *slog.Logger
}

// ErrNoIdentity is returned by Enter if there is neither a credential nor a token.
var ErrNoIdentity = errors.New("this machine has not joined a cluster")

// Enter returns the credential of an agent. If there is none, or it has ended, the agent joins with
// its token, as long as that takes. A token that is refused is an error.
func (e Entry) Enter(ctx context.Context) (files daemon.TLSFiles, err error) {
	files.Identity = e.Path
	c, err := pki.ReadCredential(e.Path)
	switch {
	case err == nil && c.Cert != nil && !c.Expired(time.Now()):
		return files, e.fits(c)
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return files, err
	case e.TokenFile == "" && err == nil:
		return files, fmt.Errorf("%s: the certificate has ended: %w", e.Path, ErrNoIdentity)
	case e.TokenFile == "":
		return files, ErrNoIdentity
	}
	with, way, err := e.way()
	if err != nil {
		return files, fmt.Errorf("--join: %w", err)
	}
	if c, err = e.join(ctx, with, way); err != nil {
		return files, err
	}
	e.Log.Info("joined the cluster", "as", c.Identity().String(), "until", c.Cert.NotAfter)
	return files, e.fits(c)
}

// Kubernetes stands for a file with a token: the agent joins as the pod that it runs in.
const Kubernetes = "kubernetes"

// way returns how the agent joins, in words and in deed.
func (e Entry) way() (with string, join func(context.Context) (*pki.Credential, error), err error) {
	if e.TokenFile == Kubernetes {
		return "the pod's service account", func(ctx context.Context) (*pki.Credential, error) {
			return joinAsAccount(ctx, e.Managers, cmp.Or(e.Account, AccountDir), e.Role, e.Path)
		}, nil
	}
	token, err := pki.ReadToken(e.TokenFile)
	return token.String(), func(ctx context.Context) (*pki.Credential, error) { return Join(ctx, e.Managers, token, e.Path) }, err
}

// join joins, as long as no manager answers.
func (e Entry) join(ctx context.Context, with string, way func(context.Context) (*pki.Credential, error)) (*pki.Credential, error) {
	for said := ""; ; {
		c, err := way(ctx)
		if err == nil {
			return c, nil
		}
		if !later(err) || ctx.Err() != nil {
			return nil, fmt.Errorf("join with %s: %w", with, err)
		}
		if err.Error() != said {
			said = err.Error()
			e.Log.Warn("join the cluster", "err", err)
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(2 * time.Second):
		}
	}
}

// later reports whether the same request may succeed later.
func later(err error) bool {
	switch status.Code(err) {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Aborted, codes.ResourceExhausted:
		return true
	}
	return false
}

// fits returns an error if a credential is another agent's: the managers would refuse its reports.
func (e Entry) fits(c *pki.Credential) error {
	if who := c.Identity(); who.Kind != access.Node || who.Role != e.Role || who.Name != e.Node {
		return fmt.Errorf("%s is of %v, and this is node %s (%s): is --node right? To join as this one, remove the file and give --join", e.Path, who, e.Node, e.Role)
	}
	return nil
}

// Times of renewals.
const (
	renewRetry = time.Minute
	renewLook  = 10 * time.Minute // the clock may be set
)

// Renewing is a part that renews a credential in time, without a restart of anything: connections
// read the file anew.
func Renewing(log *slog.Logger, managers string, files daemon.TLSFiles) daemon.Part {
	return daemon.Part{Name: "identity", Run: func(ctx context.Context) error {
		for {
			pause := renewLook
			switch c, err := pki.ReadCredential(files.Identity); {
			case err != nil:
				log.Warn("read the credential", "err", err)
			case c.Cert != nil && !time.Now().Before(c.RenewAt()):
				if err := Renew(ctx, managers, files); err != nil && ctx.Err() == nil {
					log.Warn("renew the certificate", "ends", c.Cert.NotAfter, "err", err)
					pause = renewRetry
				} else if err == nil {
					log.Info("certificate renewed", "of", c.Identity().String())
				}
			}
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(pause):
			}
		}
	}}
}
