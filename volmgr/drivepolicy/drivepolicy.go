// SPDX-License-Identifier: Apache-2.0

// Package drivepolicy decides which devices of targets become drives by themselves, where an
// operator wants that.
//
// A policy selects devices by model, size and the labels of their node. It is only about
// devices that an operator could add without force: whether anything is on a device is not
// decided here but where devices are added, for operators and policies alike. What a policy
// leaves out, whatever it selects, are
//
//   - devices without a serial number or WWID, such as files and loop devices: nothing tells
//     them from others;
//   - devices that share those with another one: partitions, paths of a disk, and disks that
//     several nodes see;
//   - devices that are drives, or were: an evicted drive is blank, and its operator wanted it
//     out.
package drivepolicy

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"weft.dev/weft/proto/block"
)

// Most is how many policies a cluster may have.
const Most = 64

// mostEvicted is how many evicted devices are remembered, the latest ones.
const mostEvicted = 1000

// Policy selects devices. Empty fields select all.
type Policy struct {
	Name    string            `json:"name"`
	Model   string            `json:"model,omitempty"` // a pattern: * stands for any text
	MinSize block.Size        `json:"min_size,omitempty"`
	MaxSize block.Size        `json:"max_size,omitempty"`
	Nodes   map[string]string `json:"nodes,omitempty"`  // labels of the node
	Labels  map[string]string `json:"labels,omitempty"` // that the drives get
}

// Device is what a policy looks at.
type Device struct {
	Model    string
	Size     block.Size
	Identity Identity
}

// Identity is what tells a device from all others; "" if nothing does.
type Identity string

// IdentityOf makes the identity of a device with these names.
func IdentityOf(wwid, serial string) Identity {
	if wwid == "" && serial == "" {
		return ""
	}
	return Identity(wwid + "/" + serial)
}

// Selects reports whether a policy is about a device of a node with the given labels.
func (p *Policy) Selects(d Device, node func(label string) string) bool {
	for key, want := range p.Nodes {
		if node(key) != want {
			return false
		}
	}
	return (p.Model == "" || matches(p.Model, d.Model)) && d.Size >= p.MinSize && (p.MaxSize == 0 || d.Size <= p.MaxSize)
}

// String says what a policy selects, and what its drives get.
func (p *Policy) String() string {
	said := []string{}
	say := func(is bool, format string, args ...any) {
		if is {
			said = append(said, fmt.Sprintf(format, args...))
		}
	}
	say(p.Model != "", "model %s", p.Model)
	say(p.MinSize != 0, "at least %v", p.MinSize)
	say(p.MaxSize != 0, "at most %v", p.MaxSize)
	for _, key := range slices.Sorted(maps.Keys(p.Nodes)) {
		say(true, "on %s=%s", key, p.Nodes[key])
	}
	for _, key := range slices.Sorted(maps.Keys(p.Labels)) {
		say(true, "label %s=%s", key, p.Labels[key])
	}
	if len(said) == 0 {
		return "all"
	}
	return strings.Join(said, ", ")
}

// Check says what is wrong with a policy, and with which field.
func (p *Policy) Check() (field string, err error) {
	if _, err := block.ParseVolumeName(p.Name); err != nil {
		return "name", fmt.Errorf("policy %s", strings.TrimPrefix(err.Error(), "volume "))
	}
	switch {
	case len(p.Model) > 128:
		return "model", fmt.Errorf("the pattern has %d characters, at most 128 are allowed", len(p.Model))
	case p.MaxSize != 0 && p.MaxSize < p.MinSize:
		return "max_size_bytes", fmt.Errorf("%v is less than the smallest size, %v", p.MaxSize, p.MinSize)
	}
	return "", nil
}

// equal reports whether two policies say the same.
func (p *Policy) equal(q *Policy) bool {
	return p.Name == q.Name && p.Model == q.Model && p.MinSize == q.MinSize && p.MaxSize == q.MaxSize &&
		maps.Equal(p.Nodes, q.Nodes) && maps.Equal(p.Labels, q.Labels)
}

// matches compares a text with a pattern in which * stands for any text.
func matches(pattern, text string) bool {
	parts := strings.Split(pattern, "*")
	if len(parts) == 1 {
		return pattern == text
	}
	first, last := parts[0], parts[len(parts)-1]
	text, ok := strings.CutPrefix(text, first)
	if !ok {
		return false
	}
	text, ok = strings.CutSuffix(text, last)
	for _, part := range parts[1 : len(parts)-1] {
		if !ok {
			break
		}
		_, text, ok = strings.Cut(text, part)
	}
	return ok
}

// Set is the policies of a cluster, by name. It is never changed in place.
type Set struct {
	Policies []Policy   `json:"policies"`
	Evicted  []Identity `json:"evicted,omitempty"` // since there are policies
}

// Empty reports whether there is no policy. A nil set is empty.
func (s *Set) Empty() bool { return s == nil || len(s.Policies) == 0 }

// All are the policies. A nil set has none.
func (s *Set) All() []Policy {
	if s == nil {
		return nil
	}
	return s.Policies
}

// Get returns the policy of a name; nil if there is none.
func (s *Set) Get(name string) *Policy {
	for i, p := range s.All() {
		if p.Name == name {
			return &s.Policies[i]
		}
	}
	return nil
}

// Has reports whether the same policy is there.
func (s *Set) Has(p Policy) bool {
	q := s.Get(p.Name)
	return q != nil && q.equal(&p)
}

// With is the set with one more policy.
func (s *Set) With(p Policy) *Set {
	next := &Set{Policies: append(slices.Clone(s.All()), p)}
	if s != nil {
		next.Evicted = s.Evicted
	}
	slices.SortFunc(next.Policies, func(a, b Policy) int { return strings.Compare(a.Name, b.Name) })
	return next
}

// Without is the set without a policy. What was evicted is forgotten with the last one.
func (s *Set) Without(name string) *Set {
	next := &Set{Policies: slices.DeleteFunc(slices.Clone(s.All()), func(p Policy) bool { return p.Name == name })}
	if len(next.Policies) > 0 {
		next.Evicted = s.Evicted
	}
	return next
}

// Evict is the set that remembers that a drive was evicted, so that no policy takes its device
// again. Without policies nothing is remembered.
func (s *Set) Evict(id Identity) *Set {
	if s.Empty() || id == "" || slices.Contains(s.Evicted, id) {
		return s
	}
	next := &Set{Policies: s.Policies, Evicted: append(slices.Clone(s.Evicted), id)}
	next.Evicted = next.Evicted[max(0, len(next.Evicted)-mostEvicted):]
	return next
}

// Return is the set for which a device was never evicted: an operator has added it again.
func (s *Set) Return(id Identity) *Set {
	if s.Empty() || !slices.Contains(s.Evicted, id) {
		return s
	}
	return &Set{Policies: s.Policies, Evicted: slices.DeleteFunc(slices.Clone(s.Evicted), func(e Identity) bool { return e == id })}
}

// For returns the first policy that takes a device; nil if none does. seen is how many devices of
// all nodes have its identity, and known whether a drive has.
func (s *Set) For(d Device, node func(label string) string, seen int, known bool) *Policy {
	if s.Empty() || d.Identity == "" || seen != 1 || known || slices.Contains(s.Evicted, d.Identity) {
		return nil
	}
	for i := range s.Policies {
		if s.Policies[i].Selects(d, node) {
			return &s.Policies[i]
		}
	}
	return nil
}
