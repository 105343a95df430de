// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/timestamppb"
	"sigs.k8s.io/yaml"

	"weft.dev/weft/proto/block"
)

// format is the value of -o.
type format string

const (
	formatTable format = "" // the default, also written "table"
	formatJSON  format = "json"
	formatYAML  format = "yaml"
)

func (f *format) String() string {
	if *f == formatTable {
		return "table"
	}
	return string(*f)
}

func (f *format) Set(s string) error {
	switch s {
	case "table":
		*f = formatTable
	case "json", "yaml":
		*f = format(s)
	default:
		return fmt.Errorf("must be table, json or yaml")
	}
	return nil
}

func (f *format) Type() string { return "format" }

// output is where a command puts what it has to say.
type output struct {
	format         format
	stdout, stderr io.Writer
	now            func() time.Time // for ages
}

// print writes m to stdout: as JSON or YAML if that was asked for, else by the
// function given, which may be nil where people need to see nothing.
func (o *output) print(m proto.Message, table func(io.Writer)) error {
	switch o.format {
	case formatJSON:
		_, err := o.stdout.Write(indented(m))
		return err
	case formatYAML:
		b, err := yaml.JSONToYAML(indented(m))
		if err != nil {
			return fmt.Errorf("print as yaml: %w", err)
		}
		_, err = o.stdout.Write(b)
		return err
	}
	if table == nil {
		return nil
	}
	w := &firstError{to: o.stdout}
	table(w)
	return w.err
}

// firstError keeps the first error of a writer, so that what prints a table need not.
type firstError struct {
	to  io.Writer
	err error
}

func (w *firstError) Write(p []byte) (int, error) {
	if w.err != nil {
		return 0, w.err
	}
	n, err := w.to.Write(p)
	if err != nil {
		w.err = fmt.Errorf("print: %w", err)
	}
	return n, w.err
}

// warn prints a warning to stderr, with JSON and YAML too: for what the result on
// stdout lacks.
func (o *output) warn(text string, args ...any) {
	fmt.Fprintf(o.stderr, "weft: warning: "+text+"\n", args...)
}

// say tells a person on stderr what was done or is going on. Programs that ask
// for JSON or YAML are told nothing but the result.
func (o *output) say(text string, args ...any) {
	if o.format == formatTable {
		fmt.Fprintf(o.stderr, "weft: "+text+"\n", args...)
	}
}

// table prints rows under headings, columns separated by two blanks.
func table(w io.Writer, headings string, rows ...[]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	columns := strings.Fields(headings)
	writeRow(t, columns)
	for _, row := range rows {
		writeRow(t, row)
	}
	t.Flush()
}

// writeRow writes one row. The last cell is not followed by a tab, so that no
// line ends in blanks.
func writeRow(w io.Writer, cells []string) {
	shown := make([]string, len(cells))
	for i, cell := range cells {
		shown[i] = cell
		if cell == "" {
			shown[i] = "-"
		}
	}
	fmt.Fprintln(w, strings.Join(shown, "\t"))
}

// short is an id for people: its first 8 digits, which commands accept too.
func short(id string) string { return id[:min(8, len(id))] }

// size prints a number of bytes for people.
func size(bytes uint64) string { return block.Size(bytes).Short() }

// age is how long ago t was, in its largest unit.
func (o *output) age(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	d := max(0, o.now().Sub(t.AsTime()))
	switch {
	case d < 2*time.Minute:
		return strconv.Itoa(int(d.Seconds())) + "s"
	case d < 2*time.Hour:
		return strconv.Itoa(int(d.Minutes())) + "m"
	case d < 48*time.Hour:
		return strconv.Itoa(int(d.Hours())) + "h"
	}
	return strconv.Itoa(int(d.Hours()/24)) + "d"
}

// pairs prints labels as k=v, sorted.
func pairs(labels map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, k+"="+labels[k])
	}
	return strings.Join(all, ",")
}

func orNone(text string) string { return cmp.Or(text, "none") }

// word is an enum's value in lower case without its type's prefix: LEG_STATE_IN_SYNC
// is "in_sync". Tables, JSON and YAML use the same words.
func word(e protoreflect.Enum) string { return enumWord(e.Descriptor(), e.Number()) }

func enumWord(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	if v == nil {
		return strconv.Itoa(int(n))
	}
	prefix := strings.TrimSuffix(string(d.Values().ByNumber(0).Name()), "UNSPECIFIED")
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix))
}

// indented is m as JSON. It is not protojson, which prints 64-bit integers as
// strings and changes its blanks at random: here keys are the field names of
// the .proto files in their order, all are always there, sizes are plain
// integers, enums are words as in tables, and unset messages are null.
func indented(m proto.Message) []byte {
	var b bytes.Buffer
	// Never fails: what appendMessage makes is JSON.
	_ = json.Indent(&b, appendMessage(nil, m.ProtoReflect()), "", "  ")
	b.WriteByte('\n')
	return b.Bytes()
}

// oneLine is m as indented makes it, in one line.
func oneLine(m proto.Message) []byte { return append(appendMessage(nil, m.ProtoReflect()), '\n') }

func appendMessage(b []byte, m protoreflect.Message) []byte {
	if !m.IsValid() {
		return append(b, "null"...)
	}
	if t, ok := m.Interface().(*timestamppb.Timestamp); ok {
		return appendString(b, t.AsTime().UTC().Format(time.RFC3339Nano))
	}
	b = append(b, '{')
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		f := fields.Get(i)
		if f.Name() == "next_page_token" { // the lists here are whole
			continue
		}
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, string(f.Name()))
		b = append(b, ':')
		b = appendField(b, f, m.Get(f))
	}
	return append(b, '}')
}

func appendField(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch {
	case f.IsMap():
		return appendMap(b, f.MapValue(), v.Map())
	case f.IsList():
		b = append(b, '[')
		for i := range v.List().Len() {
			if i > 0 {
				b = append(b, ',')
			}
			b = appendValue(b, f, v.List().Get(i))
		}
		return append(b, ']')
	}
	return appendValue(b, f, v)
}

// appendMap prints a map by sorted keys.
func appendMap(b []byte, value protoreflect.FieldDescriptor, m protoreflect.Map) []byte {
	var keys []protoreflect.MapKey
	for k := range m.Range {
		keys = append(keys, k)
	}
	slices.SortFunc(keys, func(x, y protoreflect.MapKey) int { return strings.Compare(x.String(), y.String()) })
	b = append(b, '{')
	for i, k := range keys {
		if i > 0 {
			b = append(b, ',')
		}
		b = appendString(b, k.String())
		b = append(b, ':')
		b = appendValue(b, value, m.Get(k))
	}
	return append(b, '}')
}

func appendValue(b []byte, f protoreflect.FieldDescriptor, v protoreflect.Value) []byte {
	switch f.Kind() {
	case protoreflect.MessageKind:
		return appendMessage(b, v.Message())
	case protoreflect.EnumKind:
		return appendString(b, enumWord(f.Enum(), v.Enum()))
	case protoreflect.StringKind:
		return appendString(b, v.String())
	case protoreflect.BytesKind:
		return appendString(b, string(v.Bytes()))
	}
	return fmt.Append(b, v.Interface()) // bool and integers; no message of ours has a float
}

func appendString(b []byte, s string) []byte {
	var quoted bytes.Buffer
	e := json.NewEncoder(&quoted)
	e.SetEscapeHTML(false)
	_ = e.Encode(s) // a string always can
	return append(b, bytes.TrimSuffix(quoted.Bytes(), []byte("\n"))...)
}
