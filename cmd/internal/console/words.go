// SPDX-License-Identifier: Apache-2.0

package console

import (
	"fmt"
	"html"
	"html/template"
	"net/url"
	"slices"
	"strings"
	"time"

	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/types/known/durationpb"
	"google.golang.org/protobuf/types/known/timestamppb"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/upgrade"
	"weft.dev/weft/proto/pb"
)

// functions are what templates call.
var functions = template.FuncMap{
	"size": cli.Size, "short": cli.ShortID, "used": cli.Used, "pairs": cli.Pairs, "layoutOf": cli.Layout, "nouns": func(n any, noun string) string { return cli.Nouns(int(number(n)), noun) },
	"when": when, "stamp": stamp, "word": wordOf, "join": func(all []string) string { return strings.Join(all, ", ") },
	"volumeTone": volumeTone, "volumeWord": volumeWord, "driveTone": driveTone, "upgradeTone": upgradeTone, "severityTone": severityTone, "agentTone": agentTone, "agentWord": agentWord, "shunned": cli.Shunned,
	"meter": meter, "prose": prose, "next": cli.NextCommand, "attachments": cli.AttachmentsOf, "objectPath": objectPath, "path": url.PathEscape, "duration": durationText,
	"attachmentTone": attachmentTone, "on": on,
}

// number is an integer of any kind that a message has.
func number(n any) int64 {
	switch n := n.(type) {
	case int:
		return int64(n)
	case uint32:
		return int64(n)
	case uint64:
		return int64(n)
	}
	return 0
}

// when is a time as a person reads it; exact to the second, and in UTC.
func when(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().UTC().Format("2006-01-02 15:04:05")
}

// stamp is a time as the attribute datetime has it.
func stamp(t *timestamppb.Timestamp) string {
	if t == nil {
		return ""
	}
	return t.AsTime().UTC().Format(time.RFC3339)
}

func durationText(d *durationpb.Duration) string {
	if d == nil {
		return ""
	}
	return d.AsDuration().Round(10 * time.Microsecond).String()
}

// wordOf is the word of an enumeration's value, without underlines.
func wordOf(e protoreflect.Enum) string {
	if e == pb.AttachMode_ATTACH_MODE_UNSPECIFIED {
		return wordOf(pb.AttachMode_ATTACH_MODE_EXCLUSIVE)
	}
	return spaced(pb.Word(e))
}

func spaced(word string) string { return strings.ReplaceAll(word, "_", " ") }

// The tones of states: how a page colors them. The word is always beside.
const (
	good  = "good"
	busy  = "busy" // at work, by itself
	warn  = "warn"
	bad   = "bad"
	quiet = "quiet"
)

// volumeTone is the tone of a volume's health.
func volumeTone(v *pb.Volume) string {
	switch v.GetHealth() {
	case pb.Health_HEALTH_HEALTHY:
		return good
	case pb.Health_HEALTH_REBUILDING:
		return busy
	case pb.Health_HEALTH_DEGRADED:
		return warn
	case pb.Health_HEALTH_UNAVAILABLE:
		return bad
	}
	return quiet
}

// volumeWord is a volume's health, or its state while it has none.
func volumeWord(v *pb.Volume) string {
	if v.GetHealth() == pb.Health_HEALTH_UNSPECIFIED {
		return wordOf(v.GetState())
	}
	return wordOf(v.GetHealth())
}

// reach tells which targets answer.
type reach map[string]bool

func reachOf(nodes []*pb.Node) reach {
	all := reach{}
	for _, n := range nodes {
		all[n.GetName()] = n.GetTarget().GetOnline()
	}
	return all
}

// has reports whether a leg can be used now: it is in sync, and its target answers.
func (r reach) has(l *pb.Leg) bool {
	return l.GetState() == pb.LegState_LEG_STATE_IN_SYNC && r[l.GetNode()]
}

// tone is the tone of a leg.
func (r reach) tone(l *pb.Leg) string {
	switch l.GetState() {
	case pb.LegState_LEG_STATE_IN_SYNC:
		if !r[l.GetNode()] {
			return warn
		}
		return good
	case pb.LegState_LEG_STATE_REBUILDING, pb.LegState_LEG_STATE_CREATING:
		return busy
	case pb.LegState_LEG_STATE_STALE:
		return bad
	}
	return quiet
}

// word is the state of a leg.
func (r reach) word(l *pb.Leg) string {
	if l.GetState() == pb.LegState_LEG_STATE_IN_SYNC && !r[l.GetNode()] {
		return "not reached"
	}
	return wordOf(l.GetState())
}

// present counts the legs of a volume that can be used now, and all of them.
func (r reach) present(v *pb.Volume) string {
	n := 0
	for _, l := range v.GetLegs() {
		if r.has(l) {
			n++
		}
	}
	return fmt.Sprintf("%d of %d", n, len(v.GetLegs()))
}

func driveTone(s pb.DriveState) string {
	switch s {
	case pb.DriveState_DRIVE_STATE_READY:
		return good
	case pb.DriveState_DRIVE_STATE_ADDING, pb.DriveState_DRIVE_STATE_REMOVING:
		return busy
	case pb.DriveState_DRIVE_STATE_SUSPECT, pb.DriveState_DRIVE_STATE_OFFLINE:
		return warn
	case pb.DriveState_DRIVE_STATE_MISSING, pb.DriveState_DRIVE_STATE_FAILED:
		return bad
	}
	return quiet
}

// upgradeTone is as bad as what stands in the way of a step that could be taken now.
func upgradeTone(s upgrade.Step) string {
	switch {
	case s.State == upgrade.Done:
		return good
	case s.State == upgrade.Later:
		return quiet
	case len(s.Blocks) > 0:
		return warn
	}
	return busy
}

func severityTone(s pb.Severity) string {
	switch s {
	case pb.Severity_SEVERITY_WARNING:
		return warn
	case pb.Severity_SEVERITY_ERROR:
		return bad
	}
	return quiet
}

func attachmentTone(s pb.AttachmentState) string {
	if s == pb.AttachmentState_ATTACHMENT_STATE_ATTACHED {
		return good
	}
	return busy
}

// agentTone is the tone of one of a node's agents.
func agentTone(n *pb.Node, a *pb.AgentStatus) string {
	switch {
	case !a.GetKnown() && a.GetRefused() == "":
		return quiet
	case !a.GetOnline() && n.GetMaintainedUntil() != nil:
		return busy
	case !a.GetOnline() || a.GetRefused() != "":
		return bad
	case len(a.GetProblems()) > 0:
		return warn
	}
	return good
}

// agentWord is the state of one of a node's agents.
func agentWord(n *pb.Node, a *pb.AgentStatus) string {
	switch {
	case a.GetRefused() != "":
		return "refused"
	case !a.GetKnown():
		return "none"
	case n.GetConfirmedDead():
		return "dead"
	case a.GetOnline():
		return "online"
	case n.GetMaintainedUntil() != nil:
		return "maintenance"
	}
	return "offline"
}

// percent is a part of a whole, 0 to 100.
func percent(part, whole uint64) int {
	if whole == 0 {
		return 0
	}
	return min(100, int(float64(part)/float64(whole)*100+0.5))
}

// objectPath is the page of what an event or a sentence is about; empty if it has none.
func objectPath(object string) string {
	kind, name, _ := strings.Cut(object, " ")
	name, _, _ = strings.Cut(strings.Trim(name, `"`), " ")
	name = strings.TrimRight(strings.Trim(name, `"`), `:",`)
	switch {
	case name == "":
		return ""
	case kind == "volume":
		return "/volumes/" + url.PathEscape(name)
	case kind == "node":
		return "/nodes/" + url.PathEscape(name)
	case kind == "drive":
		return "/drives#drive-" + url.PathEscape(cli.ShortID(name))
	}
	return ""
}

// prose is a sentence of a manager; what it has in backquotes is a command.
func prose(text string) template.HTML {
	var b strings.Builder
	parts := strings.Split(text, "`")
	for i, part := range parts {
		part = html.EscapeString(part)
		switch {
		case i%2 == 0:
			b.WriteString(part)
		case i == len(parts)-1: // it is not closed
			b.WriteString("`" + part)
		default:
			b.WriteString("<code>" + part + "</code>")
		}
	}
	return template.HTML(b.String()) //nolint:gosec // every part was escaped
}

// claimOf is the Kubernetes claim of a volume; empty if it has none.
func claimOf(v *pb.Volume) string {
	const prefix = "csi.storage.k8s.io/pvc/"
	return strings.Trim(v.GetLabels()[prefix+"namespace"]+"/"+v.GetLabels()[prefix+"name"], "/")
}

// rackOf is the largest failure domain that a node's labels name.
func rackOf(n *pb.Node) (kind, name string) {
	for _, kind := range []string{"rack", "zone"} {
		if name := n.GetLabels()[kind]; name != "" {
			return kind, name
		}
	}
	return "", ""
}

// byName finds nodes.
func byName(nodes []*pb.Node) map[string]*pb.Node {
	all := map[string]*pb.Node{}
	for _, n := range nodes {
		all[n.GetName()] = n
	}
	return all
}

// sortedNames returns the names of nodes for which keep says so, in order.
func sortedNames(nodes []*pb.Node, keep func(*pb.Node) bool) (names []string) {
	for _, n := range nodes {
		if keep(n) {
			names = append(names, n.GetName())
		}
	}
	slices.Sort(names)
	return names
}

// formOn is a form and the page that it is on.
type formOn struct {
	*form
	Back string
}

func on(f *form, path string) formOn { return formOn{f, path} }
