// SPDX-License-Identifier: Apache-2.0

package pb

import (
	"strconv"
	"strings"

	"google.golang.org/protobuf/reflect/protoreflect"
)

// Word is an enumeration's value as tables, JSON, metrics, events and logs show it, such as
// "detached_clean". A value that this version does not know is shown as its number, and the zero
// value as "unspecified".
func Word(e protoreflect.Enum) string { return WordOf(e.Descriptor(), e.Number()) }

// WordOf is Word for a value of the enumeration d.
func WordOf(d protoreflect.EnumDescriptor, n protoreflect.EnumNumber) string {
	v := d.Values().ByNumber(n)
	if v == nil {
		return strconv.Itoa(int(n))
	}
	return strings.ToLower(strings.TrimPrefix(string(v.Name()), prefix(d)))
}

// Value is the value with a word, and the zero value if there is none.
func Value[E interface {
	~int32
	protoreflect.Enum
}](word string) E {
	var zero E
	d := zero.Descriptor()
	v := d.Values().ByName(protoreflect.Name(prefix(d) + strings.ToUpper(word)))
	if v == nil {
		return zero
	}
	return E(v.Number())
}

// prefix is the prefix that the values of an enumeration share: "ATTACHMENT_PHASE_".
func prefix(d protoreflect.EnumDescriptor) string {
	return strings.TrimSuffix(string(d.Values().ByNumber(0).Name()), "UNSPECIFIED")
}
