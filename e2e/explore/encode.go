// SPDX-License-Identifier: Apache-2.0

package explore

import (
	"encoding/binary"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"time"
)

// encoder writes values as text that is equal for equal values. Two states with one text are
// taken for one state, so it leaves out only what no decision depends on: skip lists that.
//
// Times are written as ages at now, in steps of a tick, up to the oldest that matters.
type encoder struct {
	now time.Time
	buf []byte
}

// skip lists the fields that no decision of the explored protocol depends on, by type and name.
// A type that is listed alone is left out whole.
var skip = map[string]bool{
	"cluster.State.by": true, "cluster.clock": true, "cluster.derived": true, "cluster.Policy": true,
	"event.Log": true, "cluster.meta.FirstEvent": true, "cluster.meta.NextEvent": true,
	"cluster.target.by": true, "cluster.initiator.by": true, "cow.Writer": true,
	// What a comparison of labels with the records has found: it follows from both.
	"cluster.target.compared": true, "cluster.target.relabelled": true,
	// For people.
	"cluster.Leg.Reason": true, "cluster.Leg.StaleSince": true, "cluster.Leg.Rebuilt": true, "cluster.Leg.Loss": true,
	"cluster.Volume.Rebuilds": true, "cluster.Volume.Created": true, "cluster.Attachment.Since": true,
	"cluster.reported.served": true, "cluster.reported.unserved": true,
	// Legs are not made again elsewhere: no drive is free.
	"cluster.reported.away": true, "cluster.reported.crowded": true,
}

// ticks bounds the ages of some times: older is as good as that. A rebuilt leg counts as fresh for a
// minute, so a configuration never sees it otherwise; a lost one may pause for 2 s after three failures
// in a row, which is as many as there are.
var ticks = map[string]int64{"backoff.trial.lost": 1, "backoff.trial.good": 0, "cluster.AgentStatus.Seen": 2}

func (e *encoder) number(n uint64) { e.buf = binary.AppendUvarint(e.buf, n) }

func (e *encoder) text(s string) {
	e.number(uint64(len(s)))
	e.buf = append(e.buf, s...)
}

// value writes v, which may have unexported fields.
//
// Branches: one for each kind of value.
func (e *encoder) value(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		if v.Bool() {
			e.number(1)
		} else {
			e.number(0)
		}
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		e.buf = binary.AppendVarint(e.buf, v.Int())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		e.number(v.Uint())
	case reflect.String:
		e.text(v.String())
	case reflect.Pointer, reflect.Interface:
		if v.IsNil() {
			e.number(0)
			return
		}
		e.number(1)
		e.value(v.Elem())
	case reflect.Slice, reflect.Array:
		e.number(uint64(v.Len()))
		for i := range v.Len() {
			e.value(v.Index(i))
		}
	case reflect.Map:
		e.entries(mapEntries(v))
	case reflect.Struct:
		e.fields(v)
	default:
		panic(fmt.Sprintf("explore: no encoding of %v", v.Type()))
	}
}

func (e *encoder) fields(v reflect.Value) {
	t := v.Type()
	switch {
	case skip[t.String()]:
		return
	case t == reflect.TypeFor[time.Time]():
		e.time(v, int64(oldest/tick))
		return
	case strings.HasPrefix(t.String(), "cow.Map["):
		e.entries(cowEntries(v.FieldByName("root")))
		return
	}
	for i := range t.NumField() {
		name := t.String() + "." + t.Field(i).Name
		if most, bounded := ticks[name]; bounded {
			e.time(v.Field(i), most)
		} else if !skip[name] {
			e.value(v.Field(i))
		}
	}
}

// time writes a time as its age in ticks, or as most if it is older. Times here have no monotonic
// reading, so their fields are nanoseconds and seconds since the year 1.
func (e *encoder) time(v reflect.Value, most int64) {
	if v.Field(0).Uint() == 0 && v.Field(1).Int() == 0 {
		e.number(0)
		return
	}
	at := time.Time{}.Unix() + v.Field(1).Int()
	age := e.now.Sub(time.Unix(at, 0))
	e.number(1 + uint64(min(max(int64(age/tick), 0), most)))
}

type keyValue struct{ key, value reflect.Value }

func mapEntries(v reflect.Value) (all []keyValue) {
	for i := v.MapRange(); i.Next(); {
		all = append(all, keyValue{i.Key(), i.Value()})
	}
	return all
}

// cowEntries lists the entries of a cow.Map from a node of it.
func cowEntries(node reflect.Value) (all []keyValue) {
	if node.IsNil() {
		return nil
	}
	node = node.Elem()
	entries, kids := node.FieldByName("entries"), node.FieldByName("kids")
	for i := range entries.Len() {
		all = append(all, keyValue{entries.Index(i).FieldByName("key"), entries.Index(i).FieldByName("value")})
	}
	if !kids.IsNil() {
		for i := range kids.Elem().Len() {
			all = append(all, cowEntries(kids.Elem().Index(i))...)
		}
	}
	return all
}

// entries writes a map in an order that does not depend on how it was made.
func (e *encoder) entries(all []keyValue) {
	texts := make([]string, len(all))
	for i, x := range all {
		own := encoder{now: e.now}
		own.value(x.key)
		own.value(x.value)
		texts[i] = string(own.buf)
	}
	slices.Sort(texts)
	e.number(uint64(len(texts)))
	for _, s := range texts {
		e.buf = append(e.buf, s...)
	}
}

// encode writes x, in which times are ages at now.
func encode(now time.Time, x any) string {
	e := encoder{now: now}
	e.value(reflect.ValueOf(x))
	return string(e.buf)
}
