// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bytes"
	"context"
	"embed"
	"fmt"
	"html/template"
	"io/fs"
	"log/slog"
	"net/http"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/access"
)

// page is one page of the console.
type page struct {
	name  string // of its template
	path  string // as in http.ServeMux
	title string // in the menu; empty: it is not there
	load  func(ctx context.Context, s *Server, r *http.Request) (heading string, content any, err error)
}

var allPages = []page{
	{name: "now", path: "/{$}", title: "Now", load: loadNow},
	{name: "volumes", path: "/volumes", title: "Volumes", load: loadVolumes},
	{name: "volume", path: "/volumes/{name}", load: loadVolume},
	{name: "drives", path: "/drives", title: "Targets and drives", load: loadDrives},
	{name: "hosts", path: "/hosts", title: "Hosts", load: loadHosts},
	{name: "node", path: "/nodes/{name}", load: loadNode},
	{name: "events", path: "/events", title: "Events", load: loadEvents},
	{name: "whatif", path: "/what-if", title: "What if", load: loadWhatIf},
	{name: "access", path: "/access", title: "Access", load: loadAccess},
}

// parents are the pages of the menu to which other pages belong.
var parents = map[string]string{"volume": "volumes", "node": "drives"}

// view is what the templates get.
type view struct {
	Title string
	Path  string // of this page, with its query
	Menu  []menuItem
	Who   string
	Managers,
	Version string
	Notice  *notice // of an action
	Trouble *notice // instead of the content
	Content any
	Asset   func(string) string
}

type menuItem struct {
	Title, Path string
	Here        bool
}

// notice says what came of a request.
type notice struct {
	Bad     bool
	Text    string
	Hints   []string
	Command string // that does the same
	Secret  string // shown once
}

// noticeOf says what went wrong, with the words and hints of the command line.
func (s *Server) noticeOf(err error, command string) *notice {
	report := cli.NewReport(err)
	return &notice{Bad: true, Text: report.Error, Hints: report.Hints, Command: command}
}

//go:embed templates
var templateFiles embed.FS

// templates are the pages' templates, by name; each has the layout, and what pages share.
var templates = parseTemplates()

func parseTemplates() map[string]*template.Template {
	shared := template.Must(template.New("").Funcs(functions).ParseFS(templateFiles, "templates/layout.html", "templates/parts.html"))
	all := map[string]*template.Template{}
	files, err := fs.Glob(templateFiles, "templates/*.html")
	if err != nil {
		panic(err) // the pattern is good
	}
	for _, file := range files {
		name := strings.TrimSuffix(strings.TrimPrefix(file, "templates/"), ".html")
		if name != "layout" && name != "parts" {
			all[name] = template.Must(template.Must(shared.Clone()).ParseFS(templateFiles, file))
		}
	}
	return all
}

// load asks for what a page shows.
func (s *Server) load(r *http.Request, p page) (*view, error) {
	heading, content, err := p.load(r.Context(), s, r)
	if err != nil {
		return nil, err
	}
	return s.viewOf(r, p, heading, content), nil
}

// viewOf is a page with its content.
func (s *Server) viewOf(r *http.Request, p page, heading string, content any) *view {
	v := &view{Title: heading, Path: r.URL.RequestURI(), Who: s.whoText(), Managers: s.config.Managers, Version: s.config.Version, Content: content, Asset: assetPath}
	for _, m := range allPages {
		if m.title != "" {
			v.Menu = append(v.Menu, menuItem{m.title, strings.TrimSuffix(m.path, "{$}"), m.name == p.name || m.name == parents[p.name]})
		}
	}
	return v
}

// show sends a page, or the stream of its changes.
func (s *Server) show(w http.ResponseWriter, r *http.Request, p page) {
	if r.Header.Get("Accept") == "text/event-stream" {
		s.stream(w, r, p)
		return
	}
	v, err := s.load(r, p)
	if err != nil {
		v = s.viewOf(r, p, "Not shown", nil)
		v.Trouble = s.noticeOf(err, "")
		w.WriteHeader(statusOf(err))
	}
	v.Notice = s.sessions.told(r)
	render(s.config.Log, w, p.name, v)
}

// statusOf is the HTTP status of an error.
func statusOf(err error) int {
	switch cli.ExitCode(err) {
	case cli.ExitNotFound:
		return http.StatusNotFound
	case cli.ExitUsage:
		return http.StatusBadRequest
	case cli.ExitRefused:
		return http.StatusForbidden
	case cli.ExitUnreachable:
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}

// render writes a whole page.
func render(log *slog.Logger, w http.ResponseWriter, name string, v *view) {
	var b bytes.Buffer
	if err := templates[name].ExecuteTemplate(&b, "layout", v); err != nil {
		log.Error("render", "page", name, "err", err)
		http.Error(w, "This page cannot be shown: see the console's log.", http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	w.Write(b.Bytes()) //nolint:errcheck // the other end has gone
}

// whoText says as whom the console calls.
func (s *Server) whoText() string {
	switch who := s.config.Who; who.Kind {
	case access.Person, access.Node:
		return fmt.Sprintf("%s (%s)", who.Name, who.Role)
	case access.Local:
		return "a user of the manager's socket"
	case access.Outside:
		return "certificate " + who.Name
	}
	return "anybody (plain TCP)"
}
