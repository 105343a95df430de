// SPDX-License-Identifier: Apache-2.0

package cli

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
	"weft.dev/weft/proto/pb"
)

// Format is the value of -o.
type Format string

const (
	FormatTable Format = "" // the default, also written "table"
	FormatJSON  Format = "json"
	FormatYAML  Format = "yaml"
	FormatWide  Format = "wide" // a table with more columns, where a command has any
)

// String is the format as -o spells it.
func (f *Format) String() string {
	if *f == FormatTable {
		return "table"
	}
	return string(*f)
}

// Set implements pflag.Value.
func (f *Format) Set(s string) error {
	switch s {
	case "table":
		*f = FormatTable
	case "json", "yaml", "wide":
		*f = Format(s)
	default:
		return fmt.Errorf("must be table, wide, json or yaml")
	}
	return nil
}

// Type implements pflag.Value.
func (f *Format) Type() string { return "format" }

// Output is where a command writes its results and messages.
type Output struct {
	Format         Format
	Wide           bool // a table has more columns
	Stdout, Stderr io.Writer
	Now            func() time.Time // for ages
}

// Print writes m to stdout: as JSON or YAML if the user asked for that, else with the given
// function, which may be nil if people need no output.
func (o *Output) Print(m proto.Message, table func(io.Writer)) error {
	switch o.Format {
	case FormatJSON:
		_, err := o.Stdout.Write(indented(m))
		return err
	case FormatYAML:
		b, err := yaml.JSONToYAML(indented(m))
		if err != nil {
			return fmt.Errorf("print as yaml: %w", err)
		}
		_, err = o.Stdout.Write(b)
		return err
	}
	if table == nil {
		return nil
	}
	w := &firstError{to: o.Stdout}
	table(w)
	return w.err
}

// PrintValue is Print for a value that is no message: programs get it as encoding/json writes it.
func (o *Output) PrintValue(value any, table func(io.Writer)) error {
	if o.Format == FormatTable {
		w := &firstError{to: o.Stdout}
		table(w)
		return w.err
	}
	b, err := json.MarshalIndent(value, "", "  ")
	if err == nil && o.Format == FormatYAML {
		b, err = yaml.JSONToYAML(b)
	}
	if err != nil {
		return fmt.Errorf("print as %s: %w", o.Format.String(), err)
	}
	_, err = fmt.Fprintln(o.Stdout, strings.TrimSuffix(string(b), "\n"))
	return err
}

// firstError keeps the first error of a writer, so that code that prints a table need not check
// each write.
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

// Warn prints a warning to stderr, even with JSON and YAML: it says what the result on stdout
// lacks.
func (o *Output) Warn(text string, args ...any) {
	fmt.Fprintf(o.Stderr, "weft: warning: "+text+"\n", args...)
}

// Say reports progress to a person on stderr. With JSON or YAML only the result is printed.
func (o *Output) Say(text string, args ...any) {
	if o.Format == FormatTable {
		fmt.Fprintf(o.Stderr, "weft: "+text+"\n", args...)
	}
}

// Table prints rows under headings, columns separated by two blanks.
func Table(w io.Writer, headings string, rows ...[]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	columns := strings.Fields(headings)
	writeRow(t, columns)
	for _, row := range rows {
		writeRow(t, row)
	}
	t.Flush()
}

// InLine keeps a text of several lines, such as several errors, from breaking a table or a list.
func InLine(text string) string { return strings.ReplaceAll(text, "\n", "; ") }

// writeRow writes one row. No tab follows the last cell, so that no line ends in blanks.
func writeRow(w io.Writer, cells []string) {
	shown := make([]string, len(cells))
	for i, cell := range cells {
		shown[i] = InLine(cell)
		if cell == "" {
			shown[i] = "-"
		}
	}
	fmt.Fprintln(w, strings.Join(shown, "\t"))
}

// ShortID is the form of an id for people: its first 8 digits, which commands accept too.
func ShortID(id string) string { return id[:min(8, len(id))] }

// Size prints a number of bytes for people.
func Size(bytes uint64) string { return block.Size(bytes).Short() }

// Age is how long ago t was, in its largest unit.
func (o *Output) Age(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	d := max(0, o.Now().Sub(t.AsTime()))
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

// Pairs prints labels as k=v, sorted.
func Pairs(labels map[string]string) string {
	var all []string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		all = append(all, k+"="+labels[k])
	}
	return strings.Join(all, ",")
}

// OrNone returns text, or "none" if it is empty.
func OrNone(text string) string { return cmp.Or(text, "none") }

// indented is m as JSON. It does not use protojson, which prints 64-bit integers as strings and
// varies its whitespace at random. Here keys are the field names of the .proto files in their
// order, all are always present, sizes are plain integers, enums are words as in tables, and unset
// messages are null.
func indented(m proto.Message) []byte {
	var b bytes.Buffer
	// Never fails: appendMessage returns JSON.
	_ = json.Indent(&b, appendMessage(nil, m.ProtoReflect()), "", "  ")
	b.WriteByte('\n')
	return b.Bytes()
}

// OneLine is the same JSON as indented's, in one line.
func OneLine(m proto.Message) []byte { return append(appendMessage(nil, m.ProtoReflect()), '\n') }

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
		if f.Name() == "next_page_token" || f.HasOptionalKeyword() && !m.Has(f) { // these lists are always complete
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
		return appendString(b, pb.WordOf(f.Enum(), v.Enum()))
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
	_ = e.Encode(s) // a string never fails
	return append(b, bytes.TrimSuffix(quoted.Bytes(), []byte("\n"))...)
}
