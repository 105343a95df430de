// SPDX-License-Identifier: Apache-2.0

package access

import (
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/health/grpc_health_v1"

	"weft.dev/weft/proto/pb"
)

// rule says who may call a method.
type rule struct {
	person Role   // the least role of a person; empty: no person
	nodes  []Role // the roles of nodes
	open   bool   // everybody, also who has no certificate
}

func people(least Role, nodes ...Role) rule { return rule{person: least, nodes: nodes} }
func nodes(roles ...Role) rule              { return rule{nodes: roles} }
func everybody() rule                       { return rule{open: true} }

// table lists every method of the volume manager's server. A method that is not in it is refused
// to everyone.
var table = map[string]rule{
	// The streams and records of agents. What each may say is in Speaks.
	pb.Agents_Target_FullMethodName:       nodes(Target),
	pb.Agents_Initiator_FullMethodName:    nodes(Initiator),
	pb.Agents_RecordStale_FullMethodName:  nodes(Initiator),
	pb.Agents_RecordInSync_FullMethodName: nodes(Initiator),
	pb.Agents_Figures_FullMethodName:      nodes(Target, Initiator),
	pb.Agents_Support_FullMethodName:      nodes(Target, Initiator),

	// The managers among themselves.
	pb.Quorum_Messages_FullMethodName: nodes(Manager),
	pb.Quorum_Snapshot_FullMethodName: nodes(Manager),

	// Certificates. Who joins has none, and shows a token.
	pb.Identities_Join_FullMethodName:            everybody(),
	pb.Identities_Renew_FullMethodName:           people(Viewer, Nodes...),
	pb.Identities_CreateToken_FullMethodName:     people(Admin),
	pb.Identities_CreateOwnToken_FullMethodName:  people(Viewer),
	pb.Identities_ListTokens_FullMethodName:      people(Admin),
	pb.Identities_DeleteToken_FullMethodName:     people(Admin),
	pb.Identities_ListAccess_FullMethodName:      people(Admin),
	pb.Identities_RevokeAccess_FullMethodName:    people(Admin),
	pb.Identities_ListAuthorities_FullMethodName: people(Viewer),
	pb.Identities_RotateAuthority_FullMethodName: people(Admin),
	pb.Identities_ListAudit_FullMethodName:       people(Admin),
	pb.Keys_GetKeys_FullMethodName:               nodes(Manager),

	// What reads.
	pb.Manager_GetStatus_FullMethodName:         people(Viewer, Target, Initiator, CSI, Manager),
	pb.Manager_ListManagers_FullMethodName:      people(Viewer, Manager),
	pb.Manager_GetUpgrade_FullMethodName:        people(Viewer),
	pb.Manager_ListNodes_FullMethodName:         people(Viewer, CSI),
	pb.Manager_ListDevices_FullMethodName:       people(Viewer),
	pb.Manager_ListDrives_FullMethodName:        people(Viewer),
	pb.Manager_ListPools_FullMethodName:         people(Viewer, CSI),
	pb.Manager_GetVolume_FullMethodName:         people(Viewer, CSI),
	pb.Manager_ListVolumes_FullMethodName:       people(Viewer, CSI),
	pb.Manager_GetCapacity_FullMethodName:       people(Viewer, CSI),
	pb.Manager_GetSnapshotRanges_FullMethodName: people(Viewer, CSI),
	pb.Manager_ExplainVolume_FullMethodName:     people(Viewer),
	pb.Manager_ListAttachments_FullMethodName:   people(Viewer, CSI),
	pb.Manager_ListEvents_FullMethodName:        people(Viewer, CSI),
	pb.Manager_WatchEvents_FullMethodName:       people(Viewer, CSI),
	pb.Manager_WhatIf_FullMethodName:            people(Viewer),
	pb.Manager_GetDependents_FullMethodName:     people(Viewer, CSI),
	pb.Manager_GetFigures_FullMethodName:        people(Viewer),

	// Daily work.
	pb.Manager_SetNodeLabels_FullMethodName:   people(Operator),
	pb.Manager_AddDrive_FullMethodName:        people(Operator),
	pb.Manager_SetDriveLabels_FullMethodName:  people(Operator),
	pb.Manager_EvictDrive_FullMethodName:      people(Operator),
	pb.Manager_DrainDrive_FullMethodName:      people(Operator),
	pb.Manager_CordonNode_FullMethodName:      people(Operator),
	pb.Manager_UncordonNode_FullMethodName:    people(Operator, CSI),
	pb.Manager_MaintainNode_FullMethodName:    people(Operator, CSI),
	pb.Manager_MoveLeg_FullMethodName:         people(Operator),
	pb.Manager_CreatePool_FullMethodName:      people(Operator),
	pb.Manager_DeletePool_FullMethodName:      people(Operator),
	pb.Manager_RebalancePool_FullMethodName:   people(Operator),
	pb.Manager_CreateVolume_FullMethodName:    people(Operator, CSI),
	pb.Manager_DeleteVolume_FullMethodName:    people(Operator, CSI),
	pb.Manager_CreateSnapshots_FullMethodName: people(Operator, CSI),
	pb.Manager_RestoreVolume_FullMethodName:   people(Operator),
	pb.Manager_SealVolume_FullMethodName:      people(Operator),
	pb.Manager_FlattenVolume_FullMethodName:   people(Operator),
	pb.Manager_ExpandVolume_FullMethodName:    people(Operator, CSI),
	pb.Manager_ScrubVolume_FullMethodName:     people(Operator),
	pb.Manager_UpdateVolume_FullMethodName:    people(Operator, CSI),
	pb.Manager_Attach_FullMethodName:          people(Operator, CSI),
	pb.Manager_Detach_FullMethodName:          people(Operator, CSI),

	// What becomes a drive by itself.
	pb.Manager_ListDrivePolicies_FullMethodName: people(Viewer),
	pb.Manager_CreateDrivePolicy_FullMethodName: people(Operator),
	pb.Manager_DeleteDrivePolicy_FullMethodName: people(Operator),

	// What may lose data, or shows all of it, or changes who decides.
	pb.Manager_ConfirmNodeDead_FullMethodName:    people(Admin),
	pb.Manager_RemoveNode_FullMethodName:         people(Admin),
	pb.Manager_AddHost_FullMethodName:            people(Admin),
	pb.Manager_PromoteStaleLeg_FullMethodName:    people(Admin),
	pb.Manager_Backup_FullMethodName:             people(Admin),
	pb.Manager_SupportBundle_FullMethodName:      people(Admin),
	pb.Manager_AddManager_FullMethodName:         people(Admin, Manager),
	pb.Manager_RemoveManager_FullMethodName:      people(Admin),
	pb.Manager_ReplaceManager_FullMethodName:     people(Admin),
	pb.Manager_TransferLeadership_FullMethodName: people(Admin),
	pb.Manager_FinishUpgrade_FullMethodName:      people(Admin),

	grpc_health_v1.Health_Check_FullMethodName: people(Viewer, Nodes...),
	grpc_health_v1.Health_List_FullMethodName:  people(Viewer, Nodes...),
	grpc_health_v1.Health_Watch_FullMethodName: people(Viewer, Nodes...),
}

// Refusal says why a call was refused.
type Refusal struct {
	Who    Identity
	Method string // "/weft.v1.Manager/Backup"
	needs  []string
}

// Call is the method without its service.
func (r *Refusal) Call() string { return r.Method[strings.LastIndex(r.Method, "/")+1:] }

// Error implements error.
func (r *Refusal) Error() string {
	switch {
	case r.needs == nil:
		return fmt.Sprintf("%s: nobody may call it", r.Call())
	case r.Who.Kind == Stranger:
		return fmt.Sprintf("%s: needs a certificate of this cluster", r.Call())
	}
	return fmt.Sprintf("%s: %v may not; it needs the role %s", r.Call(), r.Who, strings.Join(r.needs, " or "))
}

// Decide returns nil if an identity may call a method, else a [*Refusal].
func Decide(method string, who Identity) error {
	r, known := table[method]
	if !known {
		return &Refusal{Who: who, Method: method}
	}
	if r.allows(who) {
		return nil
	}
	return &Refusal{Who: who, Method: method, needs: r.needs()}
}

func (r rule) allows(who Identity) bool {
	if r.open {
		return true
	}
	switch who.Kind {
	case Anonymous, Local, Outside:
		return true
	case Person:
		return r.person != "" && slices.Index(People, who.Role) >= slices.Index(People, r.person)
	case Node:
		return slices.Contains(r.nodes, who.Role)
	}
	return false
}

// needs lists the roles that a rule allows.
func (r rule) needs() (all []string) {
	if r.person != "" {
		for _, role := range People[slices.Index(People, r.person):] {
			all = append(all, string(role))
		}
	}
	for _, role := range r.nodes {
		all = append(all, string(role))
	}
	return all
}
