// SPDX-License-Identifier: Apache-2.0

package lint

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Bounds on what a reader has to hold in mind at once.
const (
	mostFiles      = 30 // of a package, without its tests
	mostLines      = 60 // of a function
	mostComplexity = 15 // of a function: its branches, and one
)

// overfull packages have more than mostFiles. The number is what they have, and only
// goes down.
var overfull = map[string]int{}

// unexplained are trees in which functions are above a bound without a reason beside
// them: others were at work there when the bounds came. The number is how many, and
// only goes down.
var unexplained = map[string]int{}

func TestPackagesAreSmall(t *testing.T) {
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		n, most := len(p.GoFiles), max(mostFiles, overfull[path])
		switch {
		case path == "proto/pb": // is generated
		case n > most:
			t.Errorf("package %s has %d files, want at most %d: what in it is a package of its own?", path, n, most)
		case n < overfull[path]:
			t.Errorf("package %s has %d files: lower its number in overfull", path, n)
		}
	}
}

// A function above a bound gives the reason in its comment, in a line that begins with
// "Long:" or "Branches:".
func TestFunctionsAreSmall(t *testing.T) {
	found := map[string][]string{} // by tree, of unexplained
	for path, files := range sources(t) {
		tree := ""
		for known := range unexplained {
			if within(path, []string{known}) {
				tree = known
			}
		}
		for _, f := range files {
			found[tree] = append(found[tree], f.large()...)
		}
	}
	for _, text := range found[""] {
		t.Error(text)
	}
	for tree, most := range unexplained {
		switch n := len(found[tree]); {
		case n > most:
			t.Errorf("%s has %d functions above the bounds, want at most %d:\n%s", tree, n, most, strings.Join(found[tree], "\n"))
		case n < most:
			t.Errorf("%s has %d functions above the bounds: lower its number in unexplained", tree, n)
		}
	}
}

// source is a file with what its positions mean.
type source struct {
	*ast.File
	fset *token.FileSet
}

// sources are the files of each package that are written by hand, without tests.
func sources(t *testing.T) map[string][]source {
	t.Helper()
	all := map[string][]source{}
	for _, p := range packages(t) {
		path := strings.TrimPrefix(p.ImportPath, module+"/")
		if path == "proto/pb" {
			continue
		}
		for _, name := range p.GoFiles {
			fset := token.NewFileSet()
			f, err := parser.ParseFile(fset, filepath.Join(p.Dir, name), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			all[path] = append(all[path], source{f, fset})
		}
	}
	return all
}

var (
	whyLong     = regexp.MustCompile(`(?m)^Long: .`)
	whyBranches = regexp.MustCompile(`(?m)^Branches: .`)
)

// large tells the functions that are above a bound without a reason.
func (s source) large() (all []string) {
	for _, d := range s.Decls {
		f, ok := d.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			continue
		}
		at := s.fset.Position(f.Pos())
		lines, branches := s.fset.Position(f.End()).Line-at.Line+1, complexity(f.Body)
		if lines > mostLines && !whyLong.MatchString(f.Doc.Text()) {
			all = append(all, fmt.Sprintf(`%v: %s has %d lines, want at most %d, or a reason after "Long:" in its comment`, at, f.Name, lines, mostLines))
		}
		if branches > mostComplexity && !whyBranches.MatchString(f.Doc.Text()) {
			all = append(all, fmt.Sprintf(`%v: %s has a cyclomatic complexity of %d, want at most %d, or a reason after "Branches:" in its comment`, at, f.Name, branches, mostComplexity))
		}
	}
	return all
}

// complexity is the cyclomatic complexity of a function: one, and one for each branch.
func complexity(body ast.Node) int {
	n := 1
	ast.Inspect(body, func(node ast.Node) bool {
		switch node := node.(type) {
		case *ast.IfStmt, *ast.ForStmt, *ast.RangeStmt:
			n++
		case *ast.CaseClause:
			if node.List != nil {
				n++
			}
		case *ast.CommClause:
			if node.Comm != nil {
				n++
			}
		case *ast.BinaryExpr:
			if node.Op == token.LAND || node.Op == token.LOR {
				n++
			}
		}
		return true
	})
	return n
}

func TestComplexityCountsBranches(t *testing.T) {
	for body, want := range map[string]int{
		"":                                       1,
		"if a && b || c { }":                     4,
		"for range a { for { } }":                3,
		"switch { case a: case b, c: default: }": 3,
		"select { case <-a: default: }":          2,
		"_ = func() { if a { } }":                2,
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "f.go", "package p\nfunc f() {"+body+"}", 0)
		if err != nil {
			t.Fatal(err)
		}
		if got := complexity(f); got != want {
			t.Errorf("complexity of %q = %d, want %d", body, got, want)
		}
	}
}

// known are methods whose meaning their interface gives.
var known = []string{"Error", "Unwrap", "Is", "String", "Read", "Write", "Close", "Len", "Less", "Swap"}

// Commands export nothing. Constants of a type, and methods of one name on lines that
// follow one another, share a comment.
func TestExportedNamesAreDocumented(t *testing.T) {
	files := sources(t)
	for _, path := range slices.Sorted(maps.Keys(files)) {
		for _, f := range files[path] {
			for i, d := range f.Decls {
				name := undocumented(d)
				if name == "" || f.Name.Name == "main" || i > 0 && f.shared(f.Decls[i-1], d) {
					continue
				}
				t.Errorf("%v: %s has no comment", f.fset.Position(d.Pos()), name)
			}
		}
	}
}

// shared reports whether a method is on the line after one of its name.
func (s source) shared(before, d ast.Decl) bool {
	f, ok := before.(*ast.FuncDecl)
	g, also := d.(*ast.FuncDecl)
	return ok && also && f.Name.Name == g.Name.Name && s.fset.Position(f.End()).Line+1 == s.fset.Position(g.Pos()).Line
}

// undocumented is an exported name without a comment that a declaration has.
func undocumented(d ast.Decl) string {
	switch d := d.(type) {
	case *ast.FuncDecl:
		if d.Doc == nil && d.Name.IsExported() && (d.Recv == nil || exportedType(d.Recv.List[0].Type) && !slices.Contains(known, d.Name.Name)) {
			return d.Name.Name
		}
	case *ast.GenDecl:
		if d.Doc != nil || d.Tok == token.IMPORT {
			return ""
		}
		for _, s := range d.Specs {
			switch s := s.(type) {
			case *ast.TypeSpec:
				if s.Name.IsExported() && s.Doc == nil && s.Comment == nil {
					return s.Name.Name
				}
			case *ast.ValueSpec:
				if s.Names[0].IsExported() && s.Doc == nil && s.Comment == nil && s.Type == nil {
					return s.Names[0].Name
				}
			}
		}
	}
	return ""
}

// exportedType reports whether a receiver's type is exported.
func exportedType(e ast.Expr) bool {
	switch e := e.(type) {
	case *ast.StarExpr:
		return exportedType(e.X)
	case *ast.IndexExpr:
		return exportedType(e.X)
	case *ast.IndexListExpr:
		return exportedType(e.X)
	case *ast.Ident:
		return e.IsExported()
	}
	return false
}
