// SPDX-License-Identifier: Apache-2.0

package block

import (
	"fmt"
	"slices"
	"strings"
)

// Property is something that can be asked of a volume when it is created. What the
// manager, the command line and StorageClasses call it, and what they take if nothing is
// said, comes from one table.
type Property struct {
	Field     string // of the manager's request, and of its refusals; empty: the manager does not know it
	Flag      string // of `weft volume create`; empty: it has none
	Parameter string // of a StorageClass; empty: it has none
	Default   string // as a person writes it; empty: none
	// Least and Most bound a number; both 0: it is none.
	Least, Most uint64
	Choices     string // the allowed words, separated by spaces; empty: any text
	Later       string // how it is changed afterwards; empty: never
}

// The properties of a volume. The table is not changed at run time.
var (
	PropertySize    = Property{Field: "size_bytes", Flag: "size", Later: "weft volume expand"}
	PropertyCopies  = Property{Field: "copies", Flag: "copies", Parameter: "copies", Default: fmt.Sprint(DefaultCopies), Least: 1, Most: MaxCopies, Later: "weft volume set, or copies of a VolumeAttributesClass"}
	PropertyStripes = Property{Field: "stripes", Flag: "stripes", Parameter: "stripes", Default: "0", Least: 0, Most: MaxStripes}
	PropertyChunk   = Property{Field: "chunk_bytes", Flag: "chunk-size", Parameter: "chunkSize", Default: DefaultChunk.String()}
	PropertyPool    = Property{Field: "pool", Flag: "pool", Parameter: "pool", Default: DefaultPool}
	PropertySpread  = Property{Field: "spread", Flag: "spread", Parameter: "spread", Default: DefaultSpread}
	// PropertyAuthentication: whether hosts and targets prove their identities to one another.
	PropertyAuthentication = Property{Field: "authentication", Flag: "authentication", Parameter: "authentication", Default: AuthenticationPrefer, Choices: "require prefer off", Later: "weft volume set, or authentication of a VolumeAttributesClass"}
	// PropertyIntegrity: whether targets keep a checksum of each block, and check what they read.
	PropertyIntegrity = Property{Field: "integrity", Flag: "integrity", Parameter: "integrity", Default: "false", Choices: "true false"}
	// PropertyThin: it takes space only where it is written.
	PropertyThin   = Property{Field: "thin", Flag: "thin", Parameter: "thin", Default: "false", Choices: "true false"}
	PropertyLabels = Property{Field: "labels", Flag: "label", Later: "weft volume set, or labels.KEY of a VolumeAttributesClass"}
	// Those of a StorageClass alone: how the node reaches the volume, and what it makes on it.
	PropertyTransport  = Property{Parameter: "transport", Default: "auto", Choices: "tcp auto"}
	PropertyFileSystem = Property{Parameter: "fsType", Default: "ext4", Choices: "ext4 xfs"}
)

// What is taken if a request does not say.
const (
	DefaultCopies = 2
	DefaultPool   = "default"
	DefaultSpread = "node" // the label that copies differ in
)

// The values of PropertyAuthentication.
const (
	AuthenticationRequire = "require" // a target or a host that cannot do it is not used
	AuthenticationPrefer  = "prefer"  // wherever both ends can
	AuthenticationOff     = "off"
)

// Properties is the table, in the order in which people are told of it.
func Properties() []Property {
	return []Property{PropertySize, PropertyCopies, PropertyStripes, PropertyChunk, PropertyPool, PropertySpread, PropertyAuthentication, PropertyIntegrity, PropertyThin, PropertyLabels, PropertyTransport, PropertyFileSystem}
}

// ParameterOf is the StorageClass parameter that fills a field of the manager's
// request; ok is false if none does.
func ParameterOf(field string) (parameter string, ok bool) {
	all := Properties()
	i := slices.IndexFunc(all, func(p Property) bool { return p.Field == field && p.Parameter != "" })
	if i < 0 {
		return "", false
	}
	return all[i].Parameter, true
}

// FlagOf is the flag that fills a field of the manager's request; ok is false if none does.
func FlagOf(field string) (flag string, ok bool) {
	all := Properties()
	i := slices.IndexFunc(all, func(p Property) bool { return p.Field == field && p.Flag != "" })
	if i < 0 {
		return "", false
	}
	return all[i].Flag, true
}

// Words lists the allowed words; none if any text is allowed.
func (p Property) Words() []string { return strings.Fields(p.Choices) }

// Bounds says what a number must be: "1 to 3".
func (p Property) Bounds() string { return fmt.Sprintf("%d to %d", p.Least, p.Most) }

// Allows reports whether a number is within the bounds.
func (p Property) Allows(n int) bool { return n >= 0 && uint64(n) >= p.Least && uint64(n) <= p.Most }
