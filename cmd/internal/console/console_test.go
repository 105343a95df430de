// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bufio"
	"bytes"
	"context"
	"encoding/xml"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/pb"
)

// everyPage has each page at least once.
var everyPage = map[string]string{
	"/": "What is wrong", "/volumes": "Create a volume", "/volumes?q=gpu1&state=degraded": "/volumes/db1", "/volumes/db1": "Map of volume db1",
	"/drives": "P4510", "/hosts": "/dev/weft/db1", "/nodes/t1": "192.0.2.11", "/nodes/h1": "no agent", "/events": "leg.stale", "/events?audit": "person ada (admin)",
	"/what-if": "Lose a node", "/what-if?kind=node&name=t1": "1 volume would lose data", "/access": "Authorities", "/access?upgrade": "column 0 of volume db1 has one copy in sync",
}

func TestEveryPageIsShown(t *testing.T) {
	w := loggedIn(t, person(access.Admin))
	for path, want := range everyPage {
		code, text := w.get(path)
		if code != http.StatusOK || !strings.Contains(text, want) || !strings.Contains(text, `aria-current="page"`) {
			t.Errorf("%s: %d, want a page with %q:\n%s", path, code, want, text)
		}
	}
	for _, p := range allPages { // and none is forgotten here
		pattern := regexp.MustCompile("^" + regexp.MustCompile(`\{[^}]*\}`).ReplaceAllString(p.path, `[^/?]*`) + `(\?|$)`)
		found := false
		for path := range everyPage {
			found = found || pattern.MatchString(path)
		}
		if !found {
			t.Errorf("page %s is not tried", p.path)
		}
	}
}

// Names and texts of the cluster come from many places. None may become part of a page's code, and a
// page has no code of its own: its policy would stop it.
func TestNothingOfTheClusterBecomesCode(t *testing.T) {
	w := loggedIn(t, person(access.Admin))
	tried := 0
	for path := range everyPage {
		_, text := w.get(path)
		withoutCode(t, path, text)
		if strings.Contains(text, "&lt;script&gt;") {
			tried++
		}
	}
	if tried < 8 {
		t.Errorf("only %d pages have a hostile text at all", tried)
	}
	for _, path := range []string{"/volumes/" + url.PathEscape(hostile), "/volumes?q=" + url.QueryEscape(hostile), "/events?object=" + url.QueryEscape(hostile), "/what-if?kind=node&name=" + url.QueryEscape(hostile)} {
		_, text := w.get(path)
		withoutCode(t, path, text)
	}
}

// withoutCode checks that a page's only script is the console's, and that nothing else of it runs.
func withoutCode(t *testing.T, path, text string) {
	t.Helper()
	d := xml.NewDecoder(strings.NewReader(text))
	d.Strict, d.AutoClose, d.Entity = false, xml.HTMLAutoClose, xml.HTMLEntity
	scripts := 0
	for {
		token, err := d.Token()
		if err == io.EOF {
			break
		} else if err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		start, ok := token.(xml.StartElement)
		if !ok {
			continue
		}
		name := strings.ToLower(start.Name.Local)
		if name == "script" {
			scripts++
		}
		for _, a := range start.Attr {
			key, value := strings.ToLower(a.Name.Local), strings.ToLower(a.Value)
			local := strings.HasPrefix(value, "/") || strings.HasPrefix(value, "#")
			if strings.HasPrefix(key, "on") || key == "style" || (key == "src" || key == "href" || key == "action") && !local {
				t.Errorf("%s: <%s %s=%q>", path, name, key, value)
			}
		}
		if name == "style" || name == "iframe" || name == "base" {
			t.Errorf("%s has <%s>", path, name)
		}
	}
	if scripts != 1 {
		t.Errorf("%s has %d scripts, want the console's alone", path, scripts)
	}
}

func TestPagesForbidCodeAndFrames(t *testing.T) {
	w := newWorld(t, person(access.Admin))
	for _, path := range []string{"/", "/login", "/static/console.js", "/nowhere"} {
		answer, err := w.browser.Get(w.url + path)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		for name, want := range map[string]string{
			"Content-Security-Policy": "default-src 'self'", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer", "Cross-Origin-Opener-Policy": "same-origin",
		} {
			if got := answer.Header.Get(name); !strings.HasPrefix(got, want) {
				t.Errorf("%s: %s is %q, want %q", path, name, got, want)
			}
		}
		if got := answer.Header.Get("Content-Security-Policy"); !strings.Contains(got, "frame-ancestors 'none'") || strings.Contains(got, "unsafe") {
			t.Errorf("%s: the policy is %q", path, got)
		}
	}
}

func TestALinkLetsOneBrowserIn(t *testing.T) {
	var log bytes.Buffer
	w := newWorld(t, person(access.Viewer))
	w.console.config.Log = slog.New(slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug}))
	if code, text := w.get("/volumes"); code != http.StatusUnauthorized || strings.Contains(text, "db1") {
		t.Errorf("without a login: %d\n%s", code, text)
	}
	if code, _ := w.post("/do/volume-delete", url.Values{"object": {"db1"}, "confirm": {"db1"}}, nil); code != http.StatusUnauthorized || w.called("DeleteVolume") != 0 {
		t.Errorf("an action without a login: %d", code)
	}
	first := w.links.make()
	link := w.links.make()
	for _, bad := range []string{"", "x", first, link + "x"} {
		if code, _ := w.post("/login", url.Values{"code": {bad}}, nil); code != http.StatusForbidden {
			t.Errorf("code %q: %d, want 403", bad, code)
		}
	}
	if code, to := w.post("/login", url.Values{"code": {link}}, nil); code != http.StatusSeeOther || to != "/" {
		t.Errorf("the link: %d, to %s", code, to)
	}
	at, _ := url.Parse(w.url)
	if cookies := w.browser.Jar.Cookies(at); len(cookies) != 1 || !strings.HasSuffix(cookies[0].Name, at.Port()) {
		t.Errorf("cookies are %v, want one with the port in its name", cookies)
	}
	if code, _ := w.get("/volumes"); code != http.StatusOK {
		t.Errorf("after the login: %d", code)
	}
	if code, _ := w.post("/login", url.Values{"code": {link}}, nil); code != http.StatusForbidden {
		t.Errorf("the link, once more: %d, want 403", code)
	}
	if code, _ := w.post("/logout", nil, nil); code != http.StatusSeeOther {
		t.Errorf("log out: %d", code)
	}
	if code, _ := w.get("/volumes"); code != http.StatusUnauthorized {
		t.Errorf("after the logout: %d", code)
	}
	if text := log.String(); strings.Contains(text, link) {
		t.Errorf("the log has the code:\n%s", text)
	}
}

func TestScriptsCannotReadTheCookie(t *testing.T) {
	w := newWorld(t, person(access.Viewer))
	answer, err := http.DefaultTransport.RoundTrip(formRequest(t, w.url+"/login", url.Values{"code": {w.links.make()}}))
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	for _, c := range answer.Cookies() {
		if !c.HttpOnly || c.SameSite != http.SameSiteStrictMode || c.Path != "/" || c.Domain != "" {
			t.Errorf("the cookie is %v", c)
		}
	}
	if len(answer.Cookies()) != 1 {
		t.Errorf("cookies are %v", answer.Cookies())
	}
}

func formRequest(t *testing.T, to string, form url.Values) *http.Request {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, to, strings.NewReader(form.Encode()))
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	return r
}

func TestLinksAndSessionsEnd(t *testing.T) {
	now := noon
	clock := func() time.Time { return now }
	tokens, s := &links{now: clock}, newSessions(clock)
	one := NewServer(Config{})
	late := tokens.make()
	now = now.Add(linkLife)
	if tokens.take(late) {
		t.Error("a link is good after its time")
	}
	code := tokens.make()
	if !tokens.take(code) || tokens.take(code) {
		t.Error("a new link is refused, or good twice")
	}
	from := func(cookie string) *http.Request {
		return &http.Request{Host: "127.0.0.1:1", Header: http.Header{"Cookie": {"weft-console-1=" + cookie}}}
	}
	r := from(s.enter(one))
	now = now.Add(sessionIdle)
	if s.of(r) != one {
		t.Error("a session ended too early")
	}
	now = now.Add(sessionIdle + time.Second)
	if s.of(r) != nil {
		t.Error("a session that nobody used goes on")
	}
	for range 2 * mostSessions {
		s.enter(one)
		now = now.Add(time.Second)
	}
	if len(s.open) != mostSessions {
		t.Errorf("%d sessions are open, want %d", len(s.open), mostSessions)
	}
}

// The clients of a browser's own person end with its session: it logged out, was idle, or its
// certificate has ended.
func TestClientsEndWithTheirSession(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ended := map[string]bool{}
		var admitted *Server
		door := NewDoor(func(_ context.Context, code string) (*Server, error) {
			admitted = NewServer(Config{Clients: Clients{Manager: noManager{}}, Close: func() error { ended[code] = true; return nil }, Until: time.Now().Add(20 * time.Hour)})
			return admitted, nil
		}, "", time.Now, slog.New(slog.DiscardHandler))
		ctx, stop := context.WithCancel(t.Context())
		running := make(chan error)
		go func() { running <- door.Run(ctx) }()
		enter := func(code string) *http.Request {
			w := httptest.NewRecorder()
			r := httptest.NewRequest(http.MethodPost, "http://127.0.0.1:1/login", strings.NewReader("code="+code))
			r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
			door.Handler().ServeHTTP(w, r)
			if w.Code != http.StatusSeeOther {
				t.Fatalf("log in: %d", w.Code)
			}
			next := httptest.NewRequest(http.MethodPost, "http://127.0.0.1:1/logout", nil)
			next.AddCookie(w.Result().Cookies()[0])
			return next
		}
		leaves, stays, idle := enter("leaves"), enter("stays"), enter("idle")
		if door.sessions.of(leaves) == nil || door.sessions.of(leaves) == door.sessions.of(stays) {
			t.Fatal("two browsers do not have a person each")
		}
		door.Handler().ServeHTTP(httptest.NewRecorder(), leaves)
		synctest.Wait()
		if !ended["leaves"] || len(ended) != 1 {
			t.Errorf("after one has logged out, the clients of %v have ended", ended)
		}
		for range 15 {
			time.Sleep(time.Hour)
			door.sessions.of(stays)
		}
		synctest.Wait()
		if !ended["idle"] || ended["stays"] || door.sessions.of(idle) != nil {
			t.Errorf("after 15 hours, the clients of %v have ended", ended)
		}
		time.Sleep(5*time.Hour + sweepEvery)
		synctest.Wait()
		if !ended["stays"] || door.sessions.of(stays) != nil {
			t.Error("a session outlasts its certificate")
		}
		enter("last")
		stop()
		<-running
		if !ended["last"] {
			t.Error("a session outlasts the program")
		}
	})
}

// noManager is a manager that does not answer.
type noManager struct{ pb.ManagerClient }

func (noManager) ListEvents(context.Context, *pb.ListEventsRequest, ...grpc.CallOption) (*pb.ListEventsResponse, error) {
	return nil, status.Error(codes.Unavailable, "no leader")
}

func TestOtherSitesCannotAct(t *testing.T) {
	w := loggedIn(t, person(access.Admin))
	form := url.Values{"object": {"db1"}, "confirm": {"db1"}}
	for _, headers := range []map[string]string{
		{"Sec-Fetch-Site": "cross-site"}, {"Sec-Fetch-Site": "same-site"}, {"Origin": "https://evil.example"}, {"Origin": "null"}, {"Origin": "http://127.0.0.1:1"},
	} {
		if code, _ := w.post("/do/volume-delete", form, headers); code != http.StatusForbidden || w.called("DeleteVolume") != 0 {
			t.Errorf("with %v: %d", headers, code)
		}
	}
	r := formRequest(t, w.url+"/", nil)
	r.Method, r.Host = http.MethodGet, "evil.example" // a name that was made to lead here
	answer, err := w.browser.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusMisdirectedRequest {
		t.Errorf("under another name: %s", answer.Status)
	}
	for _, path := range []string{"https://evil.example/", "//evil.example", `/\evil.example`, "/\t/evil.example", "/\n/evil.example", "x", ""} {
		if got := localPath(path); got != "/" {
			t.Errorf("localPath(%q) = %q", path, got)
		}
	}
}

// The manager refuses, not the console: the page shows its words, its hint and the command.
func TestAViewerIsRefusedByTheManager(t *testing.T) {
	w := loggedIn(t, person(access.Viewer))
	_, before := w.get("/volumes/db1")
	if !strings.Contains(before, "The manager will refuse this") {
		t.Error("the form does not say that the manager will refuse")
	}
	code, to := w.post("/do/volume-expand", url.Values{"object": {"db1"}, "size": {"20GiB"}, "back": {"/volumes/db1"}}, nil)
	if code != http.StatusSeeOther || to != "/volumes/db1" {
		t.Fatalf("expand: %d, to %s", code, to)
	}
	_, text := w.get(to)
	for _, want := range []string{`role="alert"`, "person ada (viewer) may not; it needs the role operator", "an admin can give another role", "weft volume expand db1 --size 20GiB"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not have %q:\n%s", want, text)
		}
	}
	if _, text := w.get(to); strings.Contains(text, `role="alert"`) {
		t.Error("the refusal is shown twice")
	}
	all := events(t, w, "/access") // its refusals are events, which must not make it ask again and again
	await(t, all, "live", "Authorities")
	time.Sleep(3 * lookEvery / 2)
	if n := w.called("ListTokens refused"); n > 1 {
		t.Errorf("the open page has asked %d times for what it may not have", n)
	}
	for path, want := range map[string]string{"/access": "ListTokens: person ada (viewer) may not", "/events?audit": "ListAudit: person ada (viewer) may not"} {
		if code, text := w.get(path); code != http.StatusOK || !strings.Contains(text, want) {
			t.Errorf("%s: %d, want %q:\n%s", path, code, want, text)
		}
	}
}

func TestActionsCallTheManagerAndShowTheCommand(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	code, to := w.post("/do/volume-create", url.Values{"name": {"db2"}, "size": {"10GiB"}, "copies": {"2"}, "pool": {"it's"}, "back": {"/volumes"}}, nil)
	if code != http.StatusSeeOther || to != "/volumes/db2" || w.called("CreateVolume db2") != 1 {
		t.Errorf("create: %d, to %s", code, to)
	}
	_, text := w.get("/volumes")
	for _, want := range []string{`role="status"`, "Volume db2 is created: 10GiB", "weft volume create db2 --size 10GiB --copies 2 --pool &#39;it&#39;\\&#39;&#39;s&#39;"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not have %q", want)
		}
	}
	w.post("/do/volume-create", url.Values{"name": {"db3"}, "size": {"ten"}, "back": {"/volumes"}}, nil)
	if _, text := w.get("/volumes"); !strings.Contains(text, "--size") || !strings.Contains(text, "such as 10GiB") || w.called("CreateVolume db3") != 0 {
		t.Errorf("a bad size is not explained:\n%s", text)
	}
	if code, _ := w.post("/do/volume-format", nil, nil); code != http.StatusNotFound {
		t.Errorf("an unknown action: %d", code)
	}
}

func TestDangerousActionsAskForTheName(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	for _, typed := range []string{"", "db", "DB1", "db2"} {
		w.post("/do/volume-delete", url.Values{"object": {"db1"}, "confirm": {typed}, "back": {"/volumes/db1"}}, nil)
		if _, text := w.get("/volumes/db1"); !strings.Contains(text, "the typed name is not that of the volume") || w.called("DeleteVolume") != 0 {
			t.Errorf("with %q typed, the volume is deleted, or it is not said why not", typed)
		}
	}
	w.change("detached", func() { w.volume.Attachment = nil })
	w.console.read.forget()
	if _, text := w.get("/volumes/db1"); !strings.Contains(text, `name="confirm"`) {
		t.Error("the form does not ask for the name")
	}
	if _, to := w.post("/do/volume-delete", url.Values{"object": {"db1"}, "confirm": {"db1"}, "back": {"/volumes/db1"}}, nil); to != "/volumes" || w.called("DeleteVolume") != 1 {
		t.Errorf("with its name typed, the volume is not deleted; the page is %s", to)
	}
}

func TestATokenIsShownOnce(t *testing.T) {
	w := loggedIn(t, person(access.Admin))
	w.post("/do/token-person", url.Values{"name": {"bob"}, "role": {"viewer"}, "for": {"1h"}, "back": {"/access"}}, nil)
	if _, text := w.get("/access"); !strings.Contains(text, "weft1.secret-of-bob") || !strings.Contains(text, "weft token create --person bob --role viewer --for 1h") {
		t.Errorf("the token is not shown:\n%s", text)
	}
	if _, text := w.get("/access"); strings.Contains(text, "weft1.secret-of-bob") {
		t.Error("the token is shown twice")
	}
}

func TestWhatIsMissingIsExplained(t *testing.T) {
	w := loggedIn(t, person(access.Viewer))
	for path, want := range map[string]string{"/volumes/db9": "weft volume list", "/nodes/t9": "weft node list"} {
		if code, text := w.get(path); code != http.StatusNotFound || !strings.Contains(text, want) {
			t.Errorf("%s: %d, want 404 and %q:\n%s", path, code, want, text)
		}
	}
	if _, text := w.get("/what-if?kind=node&name=t9"); !strings.Contains(text, "node t9: not found") {
		t.Errorf("what if an unknown node is lost:\n%s", text)
	}
	w.manager.mu.Lock()
	w.down = true
	w.manager.mu.Unlock()
	w.console.read.forget()
	if code, text := w.get("/"); code != http.StatusServiceUnavailable || !strings.Contains(text, "no leader") || !strings.Contains(text, "Volumes") {
		t.Errorf("without a manager: %d:\n%s", code, text)
	}
}

// event is a server-sent event.
type event struct{ kind, id, data string }

// events reads the events of a stream.
func events(t *testing.T, w *world, path string) <-chan event {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+path, nil)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Accept", "text/event-stream")
	answer, err := w.browser.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	if kind := answer.Header.Get("Content-Type"); kind != "text/event-stream" {
		t.Fatalf("the stream is %s, %s", answer.Status, kind)
	}
	t.Cleanup(func() { answer.Body.Close() })
	out := make(chan event, 100)
	go func() {
		var e event
		for lines := bufio.NewScanner(answer.Body); lines.Scan(); {
			name, value, _ := strings.Cut(lines.Text(), ": ")
			switch name {
			case "event":
				e.kind = value
			case "id":
				e.id = value
			case "data":
				e.data += value + "\n"
			case "":
				if e.kind != "" {
					out <- e
				}
				e = event{}
			}
		}
	}()
	return out
}

// await returns the first event with a text.
func await(t *testing.T, all <-chan event, kind, text string) event {
	t.Helper()
	for deadline := time.After(10 * time.Second); ; {
		select {
		case e := <-all:
			if e.kind == kind && strings.Contains(e.data, text) {
				return e
			}
		case <-deadline:
			t.Fatalf("no event %q with %q came", kind, text)
		}
	}
}

func TestATabIsToldWhatChanges(t *testing.T) {
	w := loggedIn(t, person(access.Viewer))
	all := events(t, w, "/volumes/db1")
	first := await(t, all, "live", "degraded")
	if strings.Contains(first.data, "<html") || strings.Contains(first.data, "<form") || first.id == "" {
		t.Errorf("the stream sends more than the live part: %+v", first)
	}
	w.change("leg 0.1 is in sync", func() {
		w.volume.Health = pb.Health_HEALTH_HEALTHY
		for _, l := range w.volume.GetLegs() {
			l.State = pb.LegState_LEG_STATE_IN_SYNC
		}
	})
	next := await(t, all, "live", `class="hero good"`)
	if strings.Contains(next.data, "1 of 2 legs") || next.id == first.id {
		t.Errorf("the change is %+v", next)
	}
	w.manager.mu.Lock()
	w.down = true
	w.manager.mu.Unlock()
	await(t, all, "trouble", "no leader")
}

func TestAStreamNeedsALogin(t *testing.T) {
	w := newWorld(t, person(access.Viewer))
	r, _ := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url+"/volumes", nil)
	r.Header.Set("Accept", "text/event-stream")
	answer, err := w.browser.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	answer.Body.Close()
	if answer.StatusCode != http.StatusUnauthorized {
		t.Errorf("without a login the stream is %s", answer.Status)
	}
}

// manyVolumes is a cluster of ten thousand volumes.
func manyVolumes(t testing.TB) *world {
	t.Helper()
	w := loggedIn(t, person(access.Viewer))
	legs := w.volume.GetLegs()
	for i := range 10_000 {
		w.more = append(w.more, &pb.Volume{
			Id: fmt.Sprintf("%08x-1c1d-4a3e-9a52-6f7c1a2b3c4d", i), Name: fmt.Sprintf("v%05d", i), SizeBytes: 1 << 30, Layout: &pb.Layout{Stripes: 2, Copies: 2},
			State: pb.VolumeState_VOLUME_STATE_READY, Health: pb.Health_HEALTH_HEALTHY, Legs: legs,
		})
	}
	return w
}

func TestManyVolumesAreShownInPages(t *testing.T) {
	w := manyVolumes(t)
	row := regexp.MustCompile(`<th scope="row">`)
	for path, want := range map[string]struct {
		rows int
		text string
	}{
		"/volumes": {100, "10001 volumes"}, "/volumes?page=1": {100, "/volumes/v00099"}, "/volumes?page=100": {1, "/volumes/v09999"}, "/volumes?page=7777": {1, "Before"},
		"/volumes?page=-1": {100, "After"}, "/volumes?page=x": {100, "/volumes/db1"}, "/volumes?q=V0123": {10, "10 of 10001 volumes"}, "/volumes?q=none": {0, "No volume is like that"},
	} {
		code, text := w.get(path)
		if got := len(row.FindAllString(text, -1)); code != http.StatusOK || got != want.rows || !strings.Contains(text, want.text) {
			t.Errorf("%s: %d, %d rows, want %d and %q", path, code, got, want.rows, want.text)
		}
	}
}

func BenchmarkTenThousandVolumes(b *testing.B) {
	w := manyVolumes(b)
	for b.Loop() {
		w.console.read.forget()
		if code, _ := w.get("/volumes"); code != http.StatusOK {
			b.Fatal(code)
		}
	}
}

// Many tabs cost the manager no more than one.
func TestAnswersAreShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newReader(Clients{}, time.Now)
		calls := 0
		get := func() (int, error) {
			return ask(t.Context(), r, "volumes", func(context.Context) (int, error) {
				calls++
				time.Sleep(time.Second)
				return calls, nil
			})
		}
		var tabs sync.WaitGroup
		for range 10 {
			tabs.Go(func() {
				if got, err := get(); got != 1 || err != nil {
					t.Errorf("a tab got %d, %v", got, err)
				}
			})
		}
		tabs.Wait()
		time.Sleep(9 * time.Second)
		if got, _ := get(); got != 1 {
			t.Error("a call that takes a second is repeated before ten are over")
		}
		time.Sleep(2 * time.Second)
		if got, _ := get(); got != 2 {
			t.Error("an old answer is shown for ever")
		}
		r.forget()
		if got, _ := get(); got != 3 {
			t.Error("an answer from before an action is shown")
		}
	})
}

func TestCommandLinesAreWrittenFromForms(t *testing.T) {
	const pattern = "weft volume create {name} --size {size} [--copies {copies}] [wait? --wait]"
	for _, test := range []struct {
		values map[string]string
		want   string
	}{
		{nil, "weft volume create NAME --size SIZE"},
		{map[string]string{"name": "db1", "size": "10GiB"}, "weft volume create db1 --size 10GiB"},
		{map[string]string{"name": "db1", "size": "10GiB", "copies": "2", "wait": "yes"}, "weft volume create db1 --size 10GiB --copies 2 --wait"},
		{map[string]string{"name": "a b", "size": "$(reboot)"}, "weft volume create 'a b' --size '$(reboot)'"},
		{map[string]string{"name": "it's", "size": "{name}"}, `weft volume create 'it'\''s' --size '{name}'`},
	} {
		if got := command(pattern, test.values); got != test.want {
			t.Errorf("command(%v) = %q, want %q", test.values, got, test.want)
		}
	}
}

func TestTheBusiestVolumesComeFirst(t *testing.T) {
	w := loggedIn(t, person(access.Viewer))
	add := func(name string, ios uint64, p99 time.Duration) {
		w.more = append(w.more, &pb.Volume{Id: name, Name: name})
		if ios > 0 {
			w.figures[pb.FiguresOf_FIGURES_OF_VOLUMES] = append(w.figures[pb.FiguresOf_FIGURES_OF_VOLUMES], doing(&pb.Figures{Id: name, Name: name}, ios, 0, p99))
		}
	}
	add("idle", 0, 0)
	add("slow", 10, time.Second)
	add("fast", 90_000, 100*time.Microsecond)
	row := regexp.MustCompile(`href="/volumes/([a-z0-9]+)"`)
	for order, want := range map[string]string{"": "db1 fast idle slow", "name": "db1 fast idle slow", "x": "db1 fast idle slow", "I/Os": "fast db1 slow idle", "bandwidth": "fast db1 slow idle", "latency": "slow db1 fast idle"} {
		_, text := w.get("/volumes?order=" + url.QueryEscape(order))
		var got []string
		for _, found := range row.FindAllStringSubmatch(text, -1) {
			got = append(got, found[1])
		}
		if strings.Join(got, " ") != want {
			t.Errorf("by %q: %v, want %s", order, got, want)
		}
	}
	if _, text := w.get("/volumes?order=latency"); !strings.Contains(text, "weft top --sort p99") {
		t.Error("the page does not show the command")
	}
}

// A cluster is shown while its managers are older than figures, too.
func TestAManagerWithoutFiguresIsShown(t *testing.T) {
	w := loggedIn(t, person(access.Viewer))
	w.figures = nil
	rate := regexp.MustCompile(`[0-9]/s( [0-9]|</text>)|class="number load">[^–]`)
	for path := range everyPage {
		if code, text := w.get(path); code != http.StatusOK || rate.MatchString(text) {
			t.Errorf("%s: %d, or it shows rates:\n%s", path, code, text)
		}
	}
	if _, text := w.get("/volumes/db1"); !strings.Contains(text, "No agent reports figures") || !strings.Contains(text, "25% 100MiB/s") {
		t.Error("the page of the volume does not say why it has no figures, or lost the progress of its copy")
	}
}

func TestAValueOfSeveralWordsIsWrittenAsSeveral(t *testing.T) {
	for labels, want := range map[string]string{"": "weft drive label 4f1c", "a=b": "weft drive label 4f1c a=b", " a=b  c=$d": "weft drive label 4f1c a=b 'c=$d'"} {
		if got := command("weft drive label {object} [{*labels}]", map[string]string{"object": "4f1c", "labels": labels}); got != want {
			t.Errorf("with %q: %q, want %q", labels, got, want)
		}
	}
}

func TestSnapshotsOfFrozenFileSystems(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	w.change("thin", func() { w.volume.Thin, w.volume.Generation = true, 5 })
	w.post("/do/snapshot-create", url.Values{"object": {"db1"}, "name": {"mon"}, "freeze": {"on"}, "back": {"/volumes/db1"}}, nil)
	if !w.taken.GetFreeze() {
		t.Errorf("asked for %v, want frozen file systems", w.taken)
	}
	form := map[string]string{"object": "db1", "name": "mon", "freeze": "on"}
	if got := command(snapshotChanges[0].command, form); got != "weft snapshot create --name mon --freeze db1" {
		t.Errorf("the command is %q", got)
	}
}

func TestSnapshotsAreShownAndTaken(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	w.change("with checksums", func() { w.volume.Layout.Integrity, w.volume.Generation = true, 4 })
	w.console.read.forget()
	if _, text := w.get("/volumes/db1"); strings.Contains(text, "Snapshots</h2>") || strings.Contains(text, "/do/snapshot-create") {
		t.Error("a volume that can have no snapshots shows some")
	}
	w.change("without checksums", func() { w.volume.Layout.Integrity, w.volume.Generation = false, 5 })
	w.console.read.forget()
	if _, text := w.get("/volumes/db1"); !strings.Contains(text, "It has none.") || !strings.Contains(text, "/do/snapshot-create") || strings.Contains(text, "/do/volume-restore") {
		t.Errorf("a volume without snapshots is shown as\n%s", text)
	}
	w.post("/do/snapshot-create", url.Values{"object": {"db1"}, "name": {"mon"}, "others": {"db2 log1"}, "back": {"/volumes/db1"}}, nil)
	if names := cli.Each(w.taken.GetSnapshots(), (*pb.NewSnapshot).GetVolume); strings.Join(names, " ") != "db1 db2 log1" {
		t.Errorf("snapshots of %q are taken", names)
	}
	if w.taken.GetFreeze() {
		t.Error("file systems are frozen although nobody asked for it")
	}
	_, text := w.get("/volumes/db1")
	for _, want := range []string{"weft snapshot create --name mon db1 db2 log1", `href="/volumes/db1@mon"`, "3GiB"} {
		if !strings.Contains(text, want) {
			t.Errorf("the volume's page does not have %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, "/do/volume-restore") {
		t.Error("a volume in use can go back")
	}
	_, text = w.get("/volumes/db1@mon")
	for _, want := range []string{"/do/snapshot-clone", "/do/snapshot-attach", "/do/snapshot-delete", "Snapshot of", `<a href="/volumes/db1">`} {
		if !strings.Contains(text, want) {
			t.Errorf("the snapshot's page does not have %q", want)
		}
	}
	for _, not := range []string{"/do/volume-expand", "/do/volume-set", "/do/leg-move", "/do/volume-restore", "/do/snapshot-create", "/do/detach"} {
		if strings.Contains(text, `"`+not+`"`) {
			t.Errorf("the snapshot's page has %q", not)
		}
	}
	w.post("/do/snapshot-clone", url.Values{"object": {"db1@mon"}, "name": {"db9"}, "back": {"/volumes/db1@mon"}}, nil)
	if w.called("CreateVolume db9") != 1 {
		t.Error("no clone is made")
	}
	w.post("/do/snapshot-delete", url.Values{"object": {"db1@mon"}, "confirm": {"db1"}, "back": {"/volumes/db1@mon"}}, nil)
	if w.called("DeleteVolume") != 0 {
		t.Error("a snapshot is deleted without its name")
	}

	w.change("detached", func() { w.volume.Attachment = nil })
	w.console.read.forget()
	if _, text = w.get("/volumes/db1"); !strings.Contains(text, "/do/volume-restore") || !strings.Contains(text, "<option>db1@mon</option>") {
		t.Errorf("it cannot go back:\n%s", text)
	}
	w.post("/do/volume-restore", url.Values{"object": {"db1"}, "to": {"db1@mon"}, "keep": {"before"}, "confirm": {"db1"}, "back": {"/volumes/db1"}}, nil)
	if w.back.GetSnapshot() != "db1@mon" || w.back.GetIfGeneration() != 5 || w.taken.GetSnapshots()[0].GetName() != "before" {
		t.Errorf("it goes back as %v, after %v", w.back, w.taken)
	}
	if _, text = w.get("/volumes/db1"); !strings.Contains(text, "Volume db1 goes back to db1@mon.") || !strings.Contains(text, "weft volume restore db1 --to db1@mon --keep before") {
		t.Errorf("the page does not say so:\n%s", text)
	}
	w.post("/do/volume-restore", url.Values{"object": {"db1"}, "to": {"db1@mon"}, "keep": {"before"}, "confirm": {"db1"}, "back": {"/volumes/db1"}}, nil)
	if _, text = w.get("/volumes/db1"); !strings.Contains(text, "give another name to --keep") {
		t.Errorf("a name that is taken is not explained:\n%s", text)
	}
}

func TestACloneIsFlattened(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	if _, text := w.get("/volumes/db1"); strings.Contains(text, "/do/volume-flatten") {
		t.Error("a volume that is no clone can be flattened")
	}
	w.change("cloned", func() { w.volume.CloneOf = "db0@mon" })
	w.console.read.forget()
	if _, text := w.get("/volumes/db1"); !strings.Contains(text, "/do/volume-flatten") {
		t.Errorf("a clone cannot be flattened:\n%s", text)
	}
	w.post("/do/volume-flatten", url.Values{"object": {"db1"}, "back": {"/volumes/db1"}}, nil)
	_, text := w.get("/volumes/db1")
	for _, want := range []string{"weft volume flatten db1", "Volume db1 is being flattened.", "not yet: 3GiB are left"} {
		if !strings.Contains(text, want) {
			t.Errorf("the page does not have %q:\n%s", want, text)
		}
	}
	if strings.Contains(text, `action="/do/volume-flatten`) {
		t.Error("it can be flattened again")
	}
}

func TestAVolumeIsSealedAndIsThenOnlyRead(t *testing.T) {
	w := loggedIn(t, person(access.Operator))
	if _, text := w.get("/volumes/db1"); strings.Contains(text, "/do/volume-seal") {
		t.Error("a volume in use can be sealed")
	}
	w.change("detached", func() { w.volume.Attachment, w.volume.Thin = nil, true })
	w.console.read.forget()
	if _, text := w.get("/volumes/db1"); !strings.Contains(text, "/do/volume-seal") {
		t.Errorf("a detached volume cannot be sealed:\n%s", text)
	}
	w.post("/do/volume-seal", url.Values{"object": {"db1"}, "confirm": {"another"}, "back": {"/volumes/db1"}}, nil)
	if w.called("SealVolume") != 0 {
		t.Error("a volume is sealed without its name")
	}
	w.post("/do/volume-seal", url.Values{"object": {"db1"}, "confirm": {"db1"}, "back": {"/volumes/db1"}}, nil)
	_, text := w.get("/volumes/db1")
	for _, want := range []string{"weft volume seal db1", "Volume db1 is sealed.", "no host writes it any more", "/do/attach", "/do/snapshot-create"} {
		if !strings.Contains(text, want) {
			t.Errorf("the sealed volume's page does not have %q:\n%s", want, text)
		}
	}
	for _, not := range []string{"/do/volume-seal", "/do/volume-expand", "/do/volume-restore"} {
		if strings.Contains(text, not) {
			t.Errorf("the sealed volume's page has %q", not)
		}
	}
}
