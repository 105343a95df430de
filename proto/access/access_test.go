// SPDX-License-Identifier: Apache-2.0

package access

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/url"
	"slices"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/health/grpc_health_v1"
	"google.golang.org/grpc/peer"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

var (
	ours   = block.ClusterID{UUID: block.UUID{0xab}}
	theirs = block.ClusterID{UUID: block.UUID{2}}
)

// methods lists every method that a volume manager serves: those of weft.v1, from its
// descriptors, and those of the health service.
func methods(t *testing.T) (all []string) {
	t.Helper()
	protoregistry.GlobalFiles.RangeFilesByPackage("weft.v1", func(f protoreflect.FileDescriptor) bool {
		for s := range f.Services().Len() {
			service := f.Services().Get(s)
			for m := range service.Methods().Len() {
				all = append(all, "/"+string(service.FullName())+"/"+string(service.Methods().Get(m).Name()))
			}
		}
		return true
	})
	if len(all) < 40 {
		t.Fatalf("%d methods of weft.v1 were found", len(all))
	}
	for _, m := range grpc_health_v1.Health_ServiceDesc.Methods {
		all = append(all, "/grpc.health.v1.Health/"+m.MethodName)
	}
	for _, m := range grpc_health_v1.Health_ServiceDesc.Streams {
		all = append(all, "/grpc.health.v1.Health/"+m.StreamName)
	}
	return all
}

func TestEveryMethodIsInTheTable(t *testing.T) {
	all := methods(t)
	for _, m := range all {
		if r, known := table[m]; !known {
			t.Errorf("%s has no roles: add it to table.go", m)
		} else if len(r.needs()) == 0 && !r.open {
			t.Errorf("%s: nobody may call it", m)
		}
	}
	for m := range table {
		if !slices.Contains(all, m) {
			t.Errorf("the table has %s, which no service has", m)
		}
	}
}

// everyone is an identity of every kind and role.
func everyone() (all []Identity) {
	all = append(all, Identity{}, Identity{Kind: Anonymous}, Identity{Kind: Local}, Identity{Kind: Outside, Name: "legacy"})
	for _, role := range People {
		all = append(all, Identity{Person, ours, "ada", role})
	}
	for _, role := range Nodes {
		all = append(all, Identity{Node, ours, "n1", role})
	}
	// Roles of the wrong kind, and none.
	return append(all, Identity{Node, ours, "n1", Admin}, Identity{Person, ours, "ada", Target}, Identity{Node, ours, "n1", ""}, Identity{Person, ours, "ada", ""}, Identity{Kind: 99})
}

// expected says who may call a method, in words that share nothing with the table's code: which
// roles are in the list of the method's line in this test.
var expected = map[string]string{
	"Agents/Target": "target", "Agents/Initiator": "initiator", "Agents/RecordStale": "initiator", "Agents/RecordInSync": "initiator", "Agents/Figures": "target initiator", "Agents/Support": "target initiator",
	"Quorum/Messages": "manager", "Quorum/Snapshot": "manager",
	"Identities/Join": "everybody", "Identities/Renew": "viewer operator admin target initiator csi manager", "Identities/CreateToken": "admin", "Identities/CreateOwnToken": "viewer operator admin", "Identities/ListTokens": "admin",
	"Identities/DeleteToken": "admin", "Identities/ListAuthorities": "viewer operator admin", "Identities/RotateAuthority": "admin", "Identities/ListAudit": "admin", "Keys/GetKeys": "manager",
	"Identities/ListAccess": "admin", "Identities/RevokeAccess": "admin",
	"Manager/GetStatus": "viewer operator admin target initiator csi manager", "Manager/ListManagers": "viewer operator admin manager",
	"Manager/ListNodes": "viewer operator admin csi", "Manager/ListDevices": "viewer operator admin", "Manager/ListDrives": "viewer operator admin",
	"Manager/ListPools": "viewer operator admin csi", "Manager/GetVolume": "viewer operator admin csi", "Manager/ListVolumes": "viewer operator admin csi",
	"Manager/GetCapacity": "viewer operator admin csi", "Manager/GetSnapshotRanges": "viewer operator admin csi", "Manager/ExplainVolume": "viewer operator admin", "Manager/ListAttachments": "viewer operator admin csi",
	"Manager/ListEvents": "viewer operator admin csi", "Manager/WatchEvents": "viewer operator admin csi", "Manager/WhatIf": "viewer operator admin", "Manager/GetDependents": "viewer operator admin csi", "Manager/GetFigures": "viewer operator admin",
	"Manager/SetNodeLabels": "operator admin", "Manager/AddDrive": "operator admin", "Manager/SetDriveLabels": "operator admin",
	"Manager/ListDrivePolicies": "viewer operator admin", "Manager/CreateDrivePolicy": "operator admin", "Manager/DeleteDrivePolicy": "operator admin",
	"Manager/EvictDrive": "operator admin",
	"Manager/DrainDrive": "operator admin", "Manager/CordonNode": "operator admin", "Manager/UncordonNode": "operator admin csi", "Manager/MaintainNode": "operator admin csi",
	"Manager/MoveLeg": "operator admin", "Manager/CreatePool": "operator admin", "Manager/DeletePool": "operator admin", "Manager/RebalancePool": "operator admin",
	"Manager/CreateVolume": "operator admin csi", "Manager/DeleteVolume": "operator admin csi", "Manager/CreateSnapshots": "operator admin csi", "Manager/RestoreVolume": "operator admin", "Manager/SealVolume": "operator admin", "Manager/FlattenVolume": "operator admin", "Manager/ExpandVolume": "operator admin csi",
	"Manager/ScrubVolume": "operator admin", "Manager/UpdateVolume": "operator admin csi", "Manager/Attach": "operator admin csi", "Manager/Detach": "operator admin csi",
	"Manager/ConfirmNodeDead": "admin", "Manager/RemoveNode": "admin", "Manager/AddHost": "admin", "Manager/PromoteStaleLeg": "admin", "Manager/Backup": "admin", "Manager/SupportBundle": "admin",
	"Manager/AddManager": "admin manager", "Manager/RemoveManager": "admin", "Manager/TransferLeadership": "admin",
	"Manager/GetUpgrade": "viewer operator admin", "Manager/FinishUpgrade": "admin", "Manager/ReplaceManager": "admin",
	"Health/Check": "viewer operator admin target initiator csi manager", "Health/List": "viewer operator admin target initiator csi manager", "Health/Watch": "viewer operator admin target initiator csi manager",
}

// calledBy is the context of a call by an identity.
func calledBy(t *testing.T, who Identity) context.Context {
	return peer.NewContext(t.Context(), &peer.Peer{AuthInfo: AuthInfo{Identity: who}})
}

// Every method is called by every identity, through the interceptors. Only those that the list
// above names reach the service; the others get a reason.
func TestEveryMethodRefusesEveryWrongIdentity(t *testing.T) {
	for _, method := range methods(t) {
		short := method[strings.LastIndex(method, ".")+1:]
		roles, listed := expected[short]
		if !listed {
			t.Errorf("%s: this test does not say who may call it", short)
			continue
		}
		for _, who := range everyone() {
			right := roles == "everybody" || who.Kind == Anonymous || who.Kind == Local || who.Kind == Outside ||
				who.Check() == nil && slices.Contains(strings.Fields(roles), string(who.Role))
			var heard []Identity
			g := Guard{Refused: func(_ context.Context, who Identity, _ string) { heard = append(heard, who) }}
			ctx, reached := calledBy(t, who), 0
			_, err := g.Unary(ctx, nil, &grpc.UnaryServerInfo{FullMethod: method}, func(context.Context, any) (any, error) { reached++; return nil, nil })
			streamed := g.Stream(nil, stream{ctx: ctx}, &grpc.StreamServerInfo{FullMethod: method}, func(any, grpc.ServerStream) error { reached++; return nil })
			if right && (err != nil || streamed != nil || reached != 2 || len(heard) != 0) {
				t.Errorf("%s by %v: %v, %v; want it to be allowed", short, who, err, streamed)
			}
			want := codes.PermissionDenied
			if who.Kind == Stranger {
				want = codes.Unauthenticated
			}
			if !right && (status.Code(err) != want || status.Code(streamed) != want || reached != 0 || len(heard) != 2) {
				t.Errorf("%s by %v: %v, %v, %d reached it; want %v", short, who, err, streamed, reached, want)
			}
		}
	}
}

type stream struct {
	grpc.ServerStream
	ctx context.Context //nolint:containedctx // as gRPC's streams do
}

func (s stream) Context() context.Context { return s.ctx }

func TestAMethodThatIsNotInTheTableIsRefusedToAll(t *testing.T) {
	for _, who := range everyone() {
		if err := Decide("/weft.v1.Manager/Unheard", who); err == nil {
			t.Errorf("%v may call a method that is not in the table", who)
		}
	}
}

func TestARefusalSaysWhatIsNeeded(t *testing.T) {
	for _, c := range []struct {
		method string
		who    Identity
		want   string
	}{
		{pb.Manager_DeleteVolume_FullMethodName, Identity{}, "DeleteVolume: needs a certificate of this cluster"},
		{pb.Manager_DeleteVolume_FullMethodName, Identity{Person, ours, "ada", Viewer}, "DeleteVolume: person ada (viewer) may not; it needs the role operator or admin or csi"},
		{pb.Manager_Backup_FullMethodName, Identity{Node, ours, "t1", Target}, "Backup: node t1 (target) may not; it needs the role admin"},
		{"/weft.v1.Manager/Unheard", Identity{Kind: Local}, "Unheard: nobody may call it"},
	} {
		if got := Decide(c.method, c.who); got == nil || got.Error() != c.want {
			t.Errorf("Decide(%s, %v) = %v, want %q", c.method, c.who, got, c.want)
		}
	}
}

// A certificate of another cluster is worth nothing, also if the same authority has signed it.
func TestACertificateOfAnotherClusterIsRefused(t *testing.T) {
	g := Guard{Cluster: ours}
	for _, who := range []Identity{{Person, theirs, "ada", Admin}, {Node, theirs, "t1", Target}} {
		method := pb.Manager_GetStatus_FullMethodName
		if err := g.check(calledBy(t, who), method); status.Code(err) != codes.PermissionDenied {
			t.Errorf("%v of another cluster: %v", who, err)
		}
		who.Cluster = ours
		if err := g.check(calledBy(t, who), method); err != nil {
			t.Errorf("%v of this cluster: %v", who, err)
		}
	}
}

func TestANodeSpeaksOnlyForItself(t *testing.T) {
	for _, who := range everyone() {
		for _, role := range Nodes {
			for _, node := range []block.NodeName{"n1", "n2"} {
				right := who.Kind == Anonymous || who.Kind == Local || who.Kind == Outside || who.Kind == Node && who.Role == role && node == "n1"
				if err := Speaks(calledBy(t, who), role, node); (err == nil) != right {
					t.Errorf("%v speaks for %s as %s: %v, want it allowed: %v", who, node, role, err, right)
				}
			}
		}
	}
}

func TestNamesInCertificates(t *testing.T) {
	for _, who := range everyone() {
		if who.Check() != nil {
			continue
		}
		if got, err := ParseURI(who.URI()); err != nil || got != who {
			t.Errorf("ParseURI(%s) = %v, %v; want %v", who.URI(), got, err, who)
		}
		if got := OfCertificate(&x509.Certificate{URIs: []*url.URL{{Scheme: "spiffe", Host: "example.org", Path: "/ns/a/sa/b"}, who.URI()}}); got != who {
			t.Errorf("the certificate of %v is that of %v", who, got)
		}
	}
	cluster := ours.String()
	for _, text := range []string{
		"", "https://" + cluster + "/node/t1/target", "spiffe://example.org/node/t1/target", "spiffe://" + cluster + "/node/t1/admin",
		"spiffe://" + cluster + "/person/ada/target", "spiffe://" + cluster + "/node/t1", "spiffe://" + cluster + "/node/T1/target", "spiffe://" + cluster + "/node//target",
		"spiffe://" + cluster + "/node/t1/target/", "spiffe://" + cluster + "/node/t1/target?x", "spiffe://" + cluster + "/node/t1/target#x", "spiffe://a@" + cluster + "/node/t1/target",
		"spiffe://" + strings.ToUpper(cluster) + "/node/t1/target", "spiffe://" + cluster + ":1/node/t1/target", "spiffe://" + cluster + "/node%2ft1/t1/target", "spiffe://" + cluster + "/thing/t1/target",
	} {
		u, err := url.Parse(text)
		if err != nil {
			continue
		}
		if got, err := ParseURI(u); err == nil {
			t.Errorf("ParseURI(%s) = %v, want an error", text, got)
		}
	}
	if got := OfCertificate(&x509.Certificate{Subject: pkix.Name{CommonName: "weft-client"}}); got != (Identity{Kind: Outside, Name: "weft-client"}) {
		t.Errorf("a certificate without a name of ours is %+v", got)
	}
}
