// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"strings"
	"unicode"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/access"
)

// action is a change that a person can ask for. It makes the call that a command makes.
type action struct {
	name    string // in its address
	title   string // of its form
	about   string // one or two sentences
	button  string
	kind    string // of the object that it changes: "volume"; empty: it has none yet
	danger  bool   // the object's name has to be typed
	method  string // that it calls
	command string // see command
	fields  []field
	do      func(ctx context.Context, c Clients, v map[string]string) (said string, err error)
	then    func(v map[string]string) string // the page to show; nil: the one that the form is on
}

// field is a value that a form asks for.
type field struct {
	Name, Label, Hint, Value, Example string
	Kind                              string // "text", "choice", "tick"
	Choices                           []string
	Needed                            bool
}

// form is an action on a page.
type form struct {
	Name, Title, About, Button, Kind, Object, Pattern, Shown string
	Danger                                                   bool
	Refused                                                  string // why the manager will refuse it; empty: it may not
	Fields                                                   []field
}

// formFor makes the form of an action on an object. Choices are those of its fields, by name.
func (s *Server) formFor(name, object string, choices map[string][]string) *form {
	a := actions[name]
	f := &form{Name: a.name, Title: a.title, About: a.about, Button: a.button, Kind: a.kind, Object: object, Danger: a.danger, Pattern: a.command}
	values := map[string]string{"object": object}
	for _, field := range a.fields {
		if all := choices[field.Name]; len(all) > 0 {
			field.Choices, field.Kind = all, "choice"
		}
		if field.Value != "" && field.Kind != "tick" {
			values[field.Name] = field.Value
		}
		f.Fields = append(f.Fields, field)
	}
	f.Shown = command(a.command, values)
	if err := access.Decide(a.method, s.config.Who); err != nil && s.config.Who.Role != "" {
		f.Refused = err.Error()
	}
	return f
}

// optional parts of a command's pattern, and the values in it.
var (
	part  = regexp.MustCompile(` \[(?:(\w+)\? )?([^\]]*)\]`)
	value = regexp.MustCompile(`\{(\*?)(\w+)\}`)
	plain = regexp.MustCompile(`^[\w@%+=:,./-]+$`)
)

// command writes a command line. In its pattern {size} is a value, and {*labels} a value of several
// words; what is in brackets is left out
// if a value in it is empty, or the one before a question mark is. A value that is missing elsewhere
// is shown by its name in capitals. The console's script does the same while a form is filled in.
func command(pattern string, values map[string]string) string {
	text := part.ReplaceAllStringFunc(pattern, func(whole string) string {
		found := part.FindStringSubmatch(whole)
		if found[1] != "" && values[found[1]] == "" {
			return ""
		}
		for _, v := range value.FindAllStringSubmatch(found[2], -1) {
			if values[v[2]] == "" {
				return ""
			}
		}
		return " " + found[2]
	})
	return value.ReplaceAllStringFunc(text, func(whole string) string {
		found := value.FindStringSubmatch(whole)
		switch text := values[found[2]]; {
		case text == "":
			return strings.ToUpper(found[2])
		case found[1] != "":
			return strings.Join(cli.Each(strings.Fields(text), quoted), " ")
		default:
			return quoted(text)
		}
	})
}

// quoted is a word as a shell takes it literally.
func quoted(word string) string {
	if plain.MatchString(word) {
		return word
	}
	return "'" + strings.ReplaceAll(word, "'", `'\''`) + "'"
}

// act carries out an action, and shows the page that it belongs to.
func (s *Server) act(w http.ResponseWriter, r *http.Request) {
	a, ok := actions[r.PathValue("action")]
	if !ok {
		http.NotFound(w, r)
		return
	}
	if err := r.ParseForm(); err != nil {
		http.Error(w, "The form cannot be read.", http.StatusBadRequest)
		return
	}
	v := map[string]string{"object": r.PostForm.Get("object")}
	for _, f := range a.fields {
		v[f.Name] = strings.TrimSpace(r.PostForm.Get(f.Name))
	}
	next := localPath(r.PostForm.Get("back"))
	n := s.carryOut(r.Context(), a, v, r.PostForm.Get("confirm"))
	if !n.Bad && a.then != nil {
		next = a.then(v)
	}
	s.sessions.tell(r, n)
	http.Redirect(w, r, next, http.StatusSeeOther)
}

// carryOut makes the call of an action.
func (s *Server) carryOut(ctx context.Context, a *action, v map[string]string, confirmed string) *notice {
	shown := command(a.command, v)
	err := a.check(v, confirmed)
	said := ""
	if err == nil {
		said, err = a.do(ctx, s.config.Clients, v)
		s.read.forget()
		s.changes.tell()
	}
	if err != nil {
		return s.noticeOf(err, shown)
	}
	n := &notice{Text: said, Command: shown}
	if strings.HasPrefix(a.name, "token-") && a.kind == "" {
		n.Text, n.Secret = "The token is shown once. Pass it on in a file that only its reader can open.", said
	}
	return n
}

// check returns an error if a form was not filled in.
func (a *action) check(v map[string]string, confirmed string) error {
	for _, f := range a.fields {
		if f.Needed && v[f.Name] == "" {
			return cli.UsageError{Err: fmt.Errorf("%s: %s is missing", a.title, strings.ToLower(f.Label))}
		}
	}
	if a.kind != "" && v["object"] == "" {
		return cli.UsageError{Err: fmt.Errorf("%s: which %s is missing", a.title, a.kind)}
	}
	if a.danger && strings.TrimSpace(confirmed) != v["object"] {
		return cli.UsageError{Err: fmt.Errorf("%s: the typed name is not that of the %s", a.title, a.kind), Hint: "nothing was done; type " + v["object"] + " to confirm"}
	}
	return nil
}

// localPath is an address of this console; the first page instead of any other.
func localPath(path string) string {
	odd := func(r rune) bool { return r == '\\' || unicode.IsControl(r) } // browsers read "/\t/x" as "//x"
	if !strings.HasPrefix(path, "/") || strings.HasPrefix(path, "//") || strings.ContainsFunc(path, odd) {
		return "/"
	}
	return path
}

// driveID finds a drive by its id or the beginning of it.
func driveID[D interface{ GetId() string }](begin string, drives []D) (string, error) {
	var found []string
	for _, d := range drives {
		if begin != "" && strings.HasPrefix(d.GetId(), begin) {
			found = append(found, d.GetId())
		}
	}
	switch len(found) {
	case 0:
		return "", status.Errorf(codes.NotFound, "drive %q: not found", begin)
	case 1:
		return found[0], nil
	}
	return "", cli.UsageError{Err: fmt.Errorf("drive %q: the ids of %d drives begin with that", begin, len(found))}
}
