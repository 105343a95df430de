// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/sha256"
	"embed"
	"encoding/hex"
	"errors"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"time"

	"weft.dev/weft/cmd/internal/cli"
)

// Admit returns the console of the person who has a code, which is good once.
type Admit func(ctx context.Context, code string) (*Server, error)

// errNoLink is returned by an Admit for a code that is not good.
var errNoLink = errors.New("that link was used, or is too old")

// Door lets browsers in, and shows each the console of its person.
type Door struct {
	admit    Admit
	hint     string // how to get a code, on the page that asks for one
	log      *slog.Logger
	sessions *sessions
	knocking chan struct{} // bounds the codes that are looked at
	entered  chan *Server  // those with clients of their own
}

// knockingMost is how many codes are looked at at once: each may be a call to the managers.
const knockingMost = 4

// NewDoor makes a door. Its Run has to run.
func NewDoor(admit Admit, hint string, now func() time.Time, log *slog.Logger) *Door {
	return &Door{admit: admit, hint: hint, log: log, sessions: newSessions(now), knocking: make(chan struct{}, knockingMost), entered: make(chan *Server)}
}

// sweepEvery is how often sessions that have ended are looked for.
const sweepEvery = time.Minute

// Run follows the cluster for the persons who were let in with clients of their own, and ends the
// sessions that nobody uses, until ctx ends.
func (d *Door) Run(ctx context.Context) error {
	var running sync.WaitGroup
	defer running.Wait()
	tick := time.NewTicker(sweepEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
			d.sessions.sweep()
		case s := <-d.entered:
			running.Go(func() { s.runOwn(ctx) })
		}
	}
}

// Handler answers the requests of browsers.
func (d *Door) Handler() http.Handler {
	mux := http.NewServeMux()
	for _, p := range allPages {
		mux.Handle("GET "+p.path, d.member(func(s *Server, w http.ResponseWriter, r *http.Request) { s.show(w, r, p) }))
	}
	mux.Handle("POST /do/{action}", d.member((*Server).act))
	mux.HandleFunc("POST /logout", d.logOut)
	mux.HandleFunc("GET /login", func(w http.ResponseWriter, _ *http.Request) { d.ask(w, http.StatusOK, "") })
	mux.HandleFunc("POST /login", d.logIn)
	mux.HandleFunc("GET /static/{file}", sendAsset)
	cross := http.NewCrossOriginProtection()
	cross.SetDenyHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "This request comes from another site. Open the console itself.", http.StatusForbidden)
	}))
	return secured(cross.Handler(mux), bodyWithin)
}

// member serves only browsers that have logged in, as their persons.
func (d *Door) member(next func(*Server, http.ResponseWriter, *http.Request)) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s := d.sessions.of(r); s != nil {
			next(s, w, r)
			return
		}
		d.ask(w, http.StatusUnauthorized, "This browser is not logged in.")
	})
}

// askPage is the page that asks for a code.
type askPage struct{ Refused, Hint string }

// ask shows the form that a link fills in and sends.
func (d *Door) ask(w http.ResponseWriter, code int, refused string) {
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.WriteHeader(code)
	render(d.log, w, "login", &view{Title: "Log in", Asset: assetPath, Content: askPage{refused, d.hint}})
}

// logIn exchanges the code of a link for a cookie.
func (d *Door) logIn(w http.ResponseWriter, r *http.Request) {
	select {
	case d.knocking <- struct{}{}:
		defer func() { <-d.knocking }()
	default:
		d.ask(w, http.StatusServiceUnavailable, "Too many browsers log in at once. Try again.")
		return
	}
	s, err := d.admit(r.Context(), strings.TrimSpace(r.PostFormValue("code")))
	switch {
	case errors.Is(err, errNoLink):
		d.ask(w, http.StatusForbidden, "That link was used, or is too old.")
		return
	case err != nil:
		d.ask(w, statusOf(err), cli.NewReport(err).Error)
		return
	}
	s.sessions = d.sessions
	if s.config.Close != nil {
		select {
		case d.entered <- s:
		case <-r.Context().Done():
			s.config.Close() //nolint:errcheck // nobody waits for it
			return
		}
	}
	setCookie(w, r, d.sessions.enter(s))
	http.Redirect(w, r, "/", http.StatusSeeOther)
}

func (d *Door) logOut(w http.ResponseWriter, r *http.Request) {
	d.sessions.leave(r)
	setCookie(w, r, "")
	http.Redirect(w, r, "/login", http.StatusSeeOther)
}

//go:embed static
var static embed.FS

// asset is a file that pages refer to.
type asset struct {
	kind    string
	content []byte
	version string // changes with the content
}

var assetKinds = map[string]string{".css": "text/css; charset=utf-8", ".js": "text/javascript; charset=utf-8", ".svg": "image/svg+xml"}

// allAssets are the embedded files, by name.
var allAssets = readAssets()

func readAssets() map[string]asset {
	all := map[string]asset{}
	names, _ := fs.Glob(static, "static/*") // the pattern is good
	for _, name := range names {
		content, _ := static.ReadFile(name) // it is embedded
		sum := sha256.Sum256(content)
		all[strings.TrimPrefix(name, "static/")] = asset{
			kind: assetKinds[name[strings.LastIndex(name, "."):]], content: content, version: hex.EncodeToString(sum[:6]),
		}
	}
	return all
}

// policy lets a page use what this server sends, and nothing written into a page.
const policy = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"

// secured sets the headers of every answer. Without TLS it answers only requests for a name of this
// machine: another site's name that was made to lead here is refused. With TLS the browser has checked
// the name.
func secured(next http.Handler, within time.Duration) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", policy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "no-referrer")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		h.Set("Cache-Control", "no-store")
		if r.TLS == nil && !loopback(r.Host) {
			http.Error(w, "The console answers at a loopback address or localhost only.", http.StatusMisdirectedRequest)
			return
		}
		r.Body = http.MaxBytesReader(w, r.Body, bodyMost)
		if r.Body != http.NoBody && r.ContentLength != 0 { // a page that waits for news has none
			_ = http.NewResponseController(w).SetReadDeadline(time.Now().Add(within)) // not of a test's recorder
		}
		next.ServeHTTP(w, r)
	})
}

// bodyMost is more than any form has, and bodyWithin how long one may take to arrive.
const (
	bodyMost   = 64 << 10
	bodyWithin = 10 * time.Second
)

// loopback reports whether a Host header names this machine.
func loopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	ip, err := netip.ParseAddr(strings.Trim(host, "[]"))
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// sendAsset sends an embedded file. Its address has its version, so browsers may keep it.
func sendAsset(w http.ResponseWriter, r *http.Request) {
	a, ok := allAssets[r.PathValue("file")]
	if !ok {
		http.NotFound(w, r)
		return
	}
	w.Header().Set("Content-Type", a.kind)
	w.Header().Set("Cache-Control", "private, max-age=31536000, immutable")
	w.Write(a.content) //nolint:errcheck // the other end has gone
}

// assetPath is the address of an asset.
func assetPath(name string) string {
	return "/static/" + name + "?v=" + allAssets[name].version
}
