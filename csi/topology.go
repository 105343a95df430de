// SPDX-License-Identifier: Apache-2.0

package csi

import (
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/proto/pb"
)

// A node's segments are its failure-domain labels under this prefix, plus the cluster, so that a
// node without labels also has one.
//
// Every node of a cluster reaches every volume of it, one network hop away. So what a CO calls a
// volume's topology has two meanings here:
//
//   - A term that names the cluster is a node's own; Kubernetes collects these from
//     all nodes that run the driver. It asks that the volume be reachable from there,
//     which holds wherever its legs are.
//   - A term without it is an administrator's, from a StorageClass: the volume's legs
//     must be there, and the volume is used there.
//
// Preferred terms of either kind say where the legs should preferably be.
const (
	topologyPrefix  = "topology.weft.dev/"
	topologyCluster = topologyPrefix + "cluster"
)

// nodeSegments returns the segments of a node with these labels, and the labels left out, with the
// reason: Kubernetes makes a label of each segment, and a single bad one would make it refuse the
// driver's registration.
func nodeSegments(clusterID string, labels map[string]string) (segments, leftOut map[string]string) {
	segments, leftOut = map[string]string{topologyCluster: clusterID}, map[string]string{}
	taken := map[string]bool{topologyCluster: true} // keys are case-insensitive (CSI, Topology)
	for _, label := range slices.Sorted(maps.Keys(labels)) {
		// The node's own name is no failure domain that volumes ask for: each node would make a
		// segment of its own, and Kubernetes an object for each.
		if label == nodeLabel {
			continue
		}
		key, value := topologyPrefix+label, labels[label]
		switch {
		case !segmentWord.MatchString(label):
			leftOut[label] = "its name is not 1 to 63 letters, digits, '-', '_' and '.'"
			continue
		case !segmentWord.MatchString(value):
			leftOut[label] = "its value is not 1 to 63 letters, digits, '-', '_' and '.'"
			continue
		case taken[strings.ToLower(key)]:
			leftOut[label] = "another label differs only in case"
			continue
		}
		taken[strings.ToLower(key)] = true
		segments[key] = value
	}
	return segments, leftOut
}

// segmentWord matches a key after its prefix, or a value: the syntax of Kubernetes' labels, but not
// empty (CSI, Topology).
var segmentWord = regexp.MustCompile(`^[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?$`)

// nodeLabel is the label with which each node names itself.
const nodeLabel = "node"

// placement is where a volume's legs must be, and where they should preferably be.
type placement struct {
	required, preferred []*pb.Segment
}

// parseTopology splits up a CO's requirements.
func parseTopology(clusterID string, r *csi.TopologyRequirement) (placement, error) {
	var p placement
	reachable := len(r.GetRequisite()) == 0
	for _, term := range r.GetRequisite() {
		segment, own, here, err := parseSegments(clusterID, term)
		if err != nil {
			return p, err
		}
		reachable = reachable || here
		if here && !own && len(segment.Labels) > 0 {
			p.required = append(p.required, segment)
		}
	}
	if !reachable {
		return p, status.Errorf(codes.ResourceExhausted, "accessibility_requirements: no term is for this cluster, %s", clusterID)
	}
	for _, term := range r.GetPreferred() {
		segment, _, here, err := parseSegments(clusterID, term)
		if err != nil {
			return p, err
		}
		if here && len(segment.Labels) > 0 {
			p.preferred = append(p.preferred, segment)
		}
	}
	return p, nil
}

// parseSegments turns a term into labels. own means that it names a cluster; here is false if that
// is another cluster.
func parseSegments(clusterID string, t *csi.Topology) (segment *pb.Segment, own, here bool, err error) {
	segment, here = &pb.Segment{Labels: map[string]string{}}, true
	for key, value := range t.GetSegments() {
		label, ours := strings.CutPrefix(key, topologyPrefix)
		switch {
		case !ours || label == "":
			return nil, false, false, status.Errorf(codes.InvalidArgument, "topology: key %q is not known, only those below %s", key, topologyPrefix)
		case key == topologyCluster:
			own, here = true, value == clusterID
		default:
			segment.Labels[label] = value
		}
	}
	return segment, own, here, nil
}

// accessible is where a volume with these requirements may be used.
func (p placement) accessible(clusterID string) []*csi.Topology {
	if len(p.required) == 0 {
		return []*csi.Topology{{Segments: map[string]string{topologyCluster: clusterID}}}
	}
	var all []*csi.Topology
	for _, s := range p.required {
		segments := map[string]string{topologyCluster: clusterID}
		for label, value := range s.Labels {
			segments[topologyPrefix+label] = value
		}
		all = append(all, &csi.Topology{Segments: segments})
	}
	return all
}

// text is the required part in one line, equal for equal terms.
func (p placement) text() string {
	var terms []string
	for _, s := range p.required {
		var labels []string
		for _, key := range slices.Sorted(maps.Keys(s.Labels)) {
			labels = append(labels, key+"="+s.Labels[key])
		}
		terms = append(terms, strings.Join(labels, "+"))
	}
	slices.Sort(terms)
	return strings.Join(slices.Compact(terms), "|")
}
