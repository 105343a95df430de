// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"google.golang.org/grpc/credentials"
	"google.golang.org/grpc/credentials/insecure"

	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pki"
)

// TLSFiles names the PEM files of one end of a connection: a credential of the cluster's own
// authority, or three files of an operator's. All empty means no TLS. Only the names appear in
// arguments and logs, never the content.
type TLSFiles struct {
	CA   string // the authorities that may have signed the other end's certificate
	Cert string
	Key  string

	Identity string           // a credential of proto/pki; the others are empty then
	Joining  Joining          // of a client that has no credential yet
	Held     *pki.Credential  // of a client, in memory alone; it is shown to no socket
	Now      func() time.Time // for certificates; nil means time.Now
}

// Joining says which managers a client that has no credential yet may show a secret to.
type Joining interface {
	Client(now func() time.Time) *tls.Config
}

// Off reports whether there is no TLS.
func (f TLSFiles) Off() bool {
	return f.CA+f.Cert+f.Key+f.Identity == "" && f.Joining == nil && f.Held == nil
}

func (f TLSFiles) now() func() time.Time {
	if f.Now == nil {
		return time.Now
	}
	return f.Now
}

// client is the configuration of the dialing end. It needs a certificate only if the server asks
// for one, as the manager does.
func (f TLSFiles) client() (*tls.Config, error) {
	if f.Joining != nil {
		return f.Joining.Client(f.now()), nil
	}
	if f.Held != nil {
		return f.Held.Client(f.now()), nil
	}
	if f.Identity != "" {
		c, err := f.credential()
		if err != nil {
			return nil, err
		}
		return c.Client(f.now()), nil
	}
	roots, err := f.roots()
	if err != nil {
		return nil, err
	}
	config := &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS13}
	if f.Cert == "" && f.Key == "" {
		return config, nil
	}
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	config.Certificates = []tls.Certificate{cert}
	return config, nil
}

// server is the configuration of the listening end: the other end must show a certificate signed by
// CA.
func (f TLSFiles) server() (*tls.Config, error) {
	if f.Identity != "" {
		c, err := f.credential()
		if err != nil {
			return nil, err
		}
		return c.Server(f.now()), nil
	}
	roots, err := f.roots()
	if err != nil {
		return nil, err
	}
	cert, err := tls.LoadX509KeyPair(f.Cert, f.Key)
	if err != nil {
		return nil, fmt.Errorf("--tls-cert, --tls-key: %w", err)
	}
	return &tls.Config{
		Certificates: []tls.Certificate{cert},
		ClientCAs:    roots,
		ClientAuth:   tls.RequireAndVerifyClientCert,
		MinVersion:   tls.VersionTLS13,
	}, nil
}

// credential reads the file of a member that has joined.
func (f TLSFiles) credential() (*pki.Credential, error) {
	c, err := pki.ReadCredential(f.Identity)
	switch {
	case err != nil:
		return nil, err
	case c.Cert == nil:
		return nil, fmt.Errorf("%s: it has no certificate yet: join first", f.Identity)
	case c.Expired(f.now()()):
		return nil, fmt.Errorf("%s: the certificate of %v ended on %s: join again, with a new token", f.Identity, c.Identity(), c.Cert.NotAfter.Format(time.DateTime))
	}
	return c, nil
}

// peer is who is at the other end of a server's connection.
func (f TLSFiles) peer(state tls.ConnectionState) access.AuthInfo {
	if f.Identity != "" || len(state.PeerCertificates) == 0 {
		return pki.Peer(state)
	}
	cert := state.PeerCertificates[0]
	return access.AuthInfo{Identity: access.OfCertificate(cert), Ends: cert.NotAfter}
}

func (f TLSFiles) roots() (*x509.CertPool, error) {
	if f.CA == "" {
		return nil, errors.New("--tls-ca: needed with --tls-cert and --tls-key")
	}
	pem, err := os.ReadFile(f.CA)
	if err != nil {
		return nil, fmt.Errorf("--tls-ca: %w", err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		return nil, fmt.Errorf("--tls-ca: no certificate in %s", f.CA)
	}
	return pool, nil
}

// transport returns the credentials for a dialer or a listener. It reads the files once, so that a
// mistake in them shows at the start.
func (f TLSFiles) transport(load func(TLSFiles) (*tls.Config, error)) (credentials.TransportCredentials, error) {
	if f.Off() {
		return plain{insecure.NewCredentials()}, nil
	}
	if _, err := load(f); err != nil {
		return nil, err
	}
	return reloading{f}, nil
}

// plain is a connection without TLS. A server knows of its peer only whether it came over a socket.
type plain struct {
	credentials.TransportCredentials // gRPC's own
}

// ServerHandshake implements [credentials.TransportCredentials].
func (plain) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if onSocket(conn) {
		return conn, local, nil
	}
	return conn, authInfo(access.Identity{Kind: access.Anonymous}, credentials.NoSecurity), nil
}

// Clone implements [credentials.TransportCredentials].
func (p plain) Clone() credentials.TransportCredentials { return p }

// local is a peer on a socket, whose file says who may open it.
var local = authInfo(access.Identity{Kind: access.Local}, credentials.PrivacyAndIntegrity)

func onSocket(conn net.Conn) bool { return conn.LocalAddr().Network() == "unix" }

func authInfo(who access.Identity, level credentials.SecurityLevel) access.AuthInfo {
	return access.AuthInfo{CommonAuthInfo: credentials.CommonAuthInfo{SecurityLevel: level}, Identity: who}
}

// reloading reads the files for every handshake, so that certificates can be renewed while the
// daemon runs. Existing connections are not affected, until their certificate ends: see bounded.
type reloading struct{ files TLSFiles }

func (r reloading) ClientHandshake(ctx context.Context, authority string, conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	config, err := r.files.client()
	if err != nil {
		return nil, nil, err
	}
	return credentials.NewTLS(config).ClientHandshake(ctx, authority, conn)
}

func (r reloading) ServerHandshake(conn net.Conn) (net.Conn, credentials.AuthInfo, error) {
	if onSocket(conn) {
		return conn, local, nil
	}
	config, err := r.files.server()
	if err != nil {
		return nil, nil, err
	}
	secure, info, err := credentials.NewTLS(config).ServerHandshake(conn)
	if err != nil {
		return nil, nil, err
	}
	state := info.(credentials.TLSInfo).State
	peer := r.files.peer(state)
	peer.SecurityLevel = credentials.PrivacyAndIntegrity
	return secure, peer, nil
}

func (r reloading) Info() credentials.ProtocolInfo {
	return credentials.ProtocolInfo{SecurityProtocol: "tls"}
}

func (r reloading) Clone() credentials.TransportCredentials { return r }

func (r reloading) OverrideServerName(string) error {
	return errors.New("override server name: not supported")
}
