// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"net"
	"net/http"
	"sync"
	"time"
)

// How long a link and a session are good.
const (
	linkLife     = 15 * time.Minute
	sessionIdle  = 12 * time.Hour
	mostSessions = 64
)

// secret is what a session or a link is remembered by: not what opens it.
type secret [sha256.Size]byte

// newSecret returns a random text and what to remember of it.
func newSecret() (text string, kept secret) {
	b := make([]byte, 32)
	rand.Read(b) //nolint:errcheck // it never fails: see crypto/rand
	text = base64.RawURLEncoding.EncodeToString(b)
	return text, sha256.Sum256([]byte(text))
}

// links are codes that let a browser in, each once. There is one at a time.
type links struct {
	now func() time.Time

	mu    sync.Mutex
	link  secret
	until time.Time // the link is good; zero: there is none, or it was used
}

// make makes the code of a link, which takes the place of the one before.
func (l *links) make() (code string) {
	code, kept := newSecret()
	l.mu.Lock()
	defer l.mu.Unlock()
	l.link, l.until = kept, l.now().Add(linkLife)
	return code
}

// take reports whether a code is good, which it is not any more then.
func (l *links) take(code string) bool {
	given := sha256.Sum256([]byte(code))
	l.mu.Lock()
	defer l.mu.Unlock()
	if !l.now().Before(l.until) || subtle.ConstantTimeCompare(given[:], l.link[:]) != 1 {
		return false
	}
	l.until = time.Time{}
	return true
}

// admit lets those in who have the code of a link, as a server's person.
func (l *links) admit(s *Server) Admit {
	return func(_ context.Context, code string) (*Server, error) {
		if !l.take(code) {
			return nil, errNoLink
		}
		return s, nil
	}
}

// session is one browser that has logged in.
type session struct {
	server *Server
	seen   time.Time
	notice *notice // shown with the next page
}

// sessions are the browsers that have logged in.
type sessions struct {
	now func() time.Time

	mu   sync.Mutex
	open map[secret]*session
}

func newSessions(now func() time.Time) *sessions {
	return &sessions{now: now, open: map[secret]*session{}}
}

// enter opens a session, and returns what its cookie has.
func (s *sessions) enter(server *Server) (cookie string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropOldLocked()
	if len(s.open) >= mostSessions {
		s.dropLocked(s.oldestLocked())
	}
	cookie, kept := newSecret()
	s.open[kept] = &session{server: server, seen: s.now()}
	return cookie
}

// ended reports whether a session is good no more.
func (s *sessions) ended(one *session) bool {
	until := one.server.config.Until
	return s.now().Sub(one.seen) > sessionIdle || !until.IsZero() && !s.now().Before(until)
}

// sweep forgets the sessions that have ended.
func (s *sessions) sweep() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.dropOldLocked()
}

func (s *sessions) dropOldLocked() {
	for id, one := range s.open {
		if s.ended(one) {
			s.dropLocked(id)
		}
	}
}

func (s *sessions) oldestLocked() (oldest secret) {
	for id, one := range s.open {
		if first := s.open[oldest]; first == nil || one.seen.Before(first.seen) {
			oldest = id
		}
	}
	return oldest
}

// dropLocked ends a session, and its server if that was its alone.
func (s *sessions) dropLocked(id secret) {
	if one := s.open[id]; one != nil && one.server.config.Close != nil {
		one.server.left()
	}
	delete(s.open, id)
}

// cookieName is the name of a console's cookie. Consoles of one machine differ in their port alone,
// and cookies do not know ports.
func cookieName(r *http.Request) string {
	name := "weft-console"
	if r.TLS != nil {
		name = "__Host-" + name // browsers take it from this host alone, over TLS
	}
	if _, port, err := net.SplitHostPort(r.Host); err == nil {
		return name + "-" + port
	}
	return name
}

// setCookie gives a session's cookie to the browser. An empty one takes it away.
func setCookie(w http.ResponseWriter, r *http.Request, value string) {
	c := &http.Cookie{Name: cookieName(r), Value: value, Path: "/", HttpOnly: true, Secure: r.TLS != nil, SameSite: http.SameSiteStrictMode}
	if value == "" {
		c.MaxAge = -1
	}
	http.SetCookie(w, c)
}

// id is the session that a request names.
func id(r *http.Request) (id secret, ok bool) {
	c, err := r.Cookie(cookieName(r))
	if err != nil {
		return id, false
	}
	return sha256.Sum256([]byte(c.Value)), true
}

// of returns the server of the person whose browser sends a request; nil: it has not logged in.
func (s *sessions) of(r *http.Request) *Server {
	id, ok := id(r)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.open[id]
	if one == nil || s.ended(one) {
		return nil
	}
	one.seen = s.now()
	return one.server
}

// leave ends the session of a request.
func (s *sessions) leave(r *http.Request) {
	if id, ok := id(r); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.dropLocked(id)
	}
}

// tell keeps a notice for the next page of a session.
func (s *sessions) tell(r *http.Request, n *notice) {
	if id, ok := id(r); ok {
		s.mu.Lock()
		defer s.mu.Unlock()
		if one := s.open[id]; one != nil {
			one.notice = n
		}
	}
}

// told takes the notice for the next page of a session; nil: there is none.
func (s *sessions) told(r *http.Request) *notice {
	id, ok := id(r)
	if !ok {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	one := s.open[id]
	if one == nil {
		return nil
	}
	n := one.notice
	one.notice = nil
	return n
}
