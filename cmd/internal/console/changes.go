// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// legPlace finds a leg of a volume by its place, such as 0.1.
func legPlace(ctx context.Context, c Clients, volume, place string) (*pb.Leg, error) {
	v, err := c.Manager.GetVolume(ctx, &pb.GetVolumeRequest{Volume: volume})
	if err != nil {
		return nil, err
	}
	for _, l := range v.GetLegs() {
		if placeOf(l) == place {
			return l, nil
		}
	}
	return nil, status.Errorf(codes.NotFound, "volume %s: it has no leg %s", volume, place)
}

func placeOf(l *pb.Leg) string { return fmt.Sprintf("%d.%d", l.GetColumn(), l.GetCopy()) }

func legField(hint string) field {
	return field{Name: "leg", Label: "Leg", Kind: "text", Example: "0.1", Needed: true, Hint: hint}
}

// legChanges are changes of what a volume consists of.
var legChanges = []*action{{
	name: "volume-set", title: "Change properties", button: "Change", kind: "volume", method: pb.Manager_UpdateVolume_FullMethodName,
	about:   "What is left empty stays as it is. New copies are made while the volume is in use; authentication changes at the next attach.",
	command: "weft volume set {object} [--copies {copies}] [--authentication {authentication}] [--rebuild-rate {rate}] [--label {label}]",
	fields: []field{
		{Name: "copies", Label: "Copies", Kind: "choice", Choices: []string{"", "1", "2", "3"}},
		{Name: "authentication", Label: "Authentication", Kind: "choice", Choices: []string{"", "prefer", "require", "off"}, Hint: "Whether hosts and targets prove their identities"},
		{Name: "rate", Label: "Copy legs at most at", Kind: "text", Example: "500MiB", Hint: "A second, from 1MiB; off for no limit"},
		{Name: "label", Label: "Label", Kind: "text", Example: "tier=gold", Hint: "KEY=VALUE, or KEY- to remove it"},
	},
	do: setVolume,
}, {
	name: "leg-move", title: "Move a leg", button: "Move", kind: "volume", method: pb.Manager_MoveLeg_FullMethodName,
	about:   "A new leg is copied first; the old one is given up when the new one is in sync.",
	command: "weft leg move {object} {leg} [--to {to}]",
	fields:  []field{legField(""), {Name: "to", Label: "To node", Kind: "text", Hint: "Empty: any"}},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		l, err := legPlace(ctx, c, v["object"], v["leg"])
		if err == nil {
			_, err = c.Manager.MoveLeg(ctx, &pb.MoveLegRequest{Volume: v["object"], Column: l.GetColumn(), Copy: l.GetCopy(), To: v["to"]})
		}
		return fmt.Sprintf("Leg %s of volume %s is being moved.", v["leg"], v["object"]), err
	},
}, {
	name: "leg-promote", title: "Promote a stale leg", button: "Promote, and lose the writes that it missed", kind: "volume", danger: true, method: pb.Manager_PromoteStaleLeg_FullMethodName,
	about:   "Make it the only good leg of its column. The writes that it missed are lost, and files may be damaged in their middle. Only when every good leg of the column is gone for good.",
	command: "weft volume promote-stale {object} {leg} --accept-data-loss",
	fields:  []field{legField("What next, above, has the evidence for each")},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		l, err := legPlace(ctx, c, v["object"], v["leg"])
		if err == nil {
			_, err = c.Manager.PromoteStaleLeg(ctx, &pb.PromoteStaleLegRequest{Volume: v["object"], LegId: l.GetId(), AcceptDataLoss: true})
		}
		return fmt.Sprintf("Leg %s of volume %s is the only good leg of its column.", v["leg"], v["object"]), err
	},
}}

func setVolume(ctx context.Context, c Clients, v map[string]string) (string, error) {
	r := &pb.UpdateVolumeRequest{Volume: v["object"], Authentication: v["authentication"]}
	var err error
	if r.Copies, err = countOf(v, "copies"); err != nil {
		return "", err
	}
	if v["rate"] != "" {
		rate := block.Size(0)
		if v["rate"] != "off" {
			if rate, err = block.ParseSize(v["rate"]); err != nil {
				return "", cli.UsageError{Err: fmt.Errorf("--rebuild-rate: %w", err), Hint: "such as 500MiB, or off"}
			}
		}
		r.RebuildBytesPerSecond = new(uint64(rate))
	}
	if key, remove := strings.CutSuffix(v["label"], "-"); remove && !strings.Contains(v["label"], "=") {
		r.RemoveLabels = []string{key}
	} else if v["label"] != "" {
		if r.SetLabels, err = cli.ParsePairs([]string{v["label"]}); err != nil {
			return "", err
		}
	}
	if v["copies"]+v["authentication"]+v["rate"]+v["label"] == "" {
		return "", cli.UsageError{Err: errors.New("nothing to change: every field is empty")}
	}
	_, err = c.Manager.UpdateVolume(ctx, r)
	return fmt.Sprintf("Volume %s is changed.", v["object"]), err
}

// legForms are the forms about the legs of a volume that make sense now.
func (s *Server) legForms(v *pb.Volume, nodes []*pb.Node) (forms []*form) {
	if v.GetState() == pb.VolumeState_VOLUME_STATE_DELETING {
		return nil
	}
	var all, stale []string
	for _, l := range v.GetLegs() {
		all = append(all, placeOf(l))
		if l.GetState() == pb.LegState_LEG_STATE_STALE {
			stale = append(stale, placeOf(l))
		}
	}
	targets := append([]string{""}, sortedNames(nodes, func(n *pb.Node) bool { return n.GetTarget().GetOnline() })...)
	forms = append(forms, s.formFor("volume-set", v.GetName(), nil))
	if len(all) > 0 {
		forms = append(forms, s.formFor("leg-move", v.GetName(), map[string][]string{"leg": all, "to": targets}))
	}
	if len(stale) > 0 {
		forms = append(forms, s.formFor("leg-promote", v.GetName(), map[string][]string{"leg": stale}))
	}
	return forms
}

// poolChanges are about pools.
var poolChanges = []*action{{
	name: "pool-create", title: "Create a pool", button: "Create", method: pb.Manager_CreatePool_FullMethodName,
	about:   "Of all drives that have a label, themselves or through their node; without, of all drives.",
	command: "weft pool create {name} [--select {select}]",
	fields: []field{
		{Name: "name", Label: "Name", Kind: "text", Example: "fast", Needed: true},
		{Name: "select", Label: "Drives with the label", Kind: "text", Example: "class=fast", Hint: "KEY=VALUE"},
	},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		labels, err := cli.ParsePairs(slices.DeleteFunc([]string{v["select"]}, func(s string) bool { return s == "" }))
		if err == nil {
			_, err = c.Manager.CreatePool(ctx, &pb.CreatePoolRequest{Name: v["name"], Selector: labels})
		}
		return fmt.Sprintf("Pool %s is created.", v["name"]), err
	},
}, {
	name: "pool-rebalance", title: "Rebalance", button: "Rebalance", kind: "pool", method: pb.Manager_RebalancePool_FullMethodName,
	about:   "Move legs from its fullest drives to its emptiest ones, two at a time at most. No volume has fewer copies meanwhile.",
	command: "weft pool rebalance {object} [--max-moves {moves}] [stop? --stop]",
	fields:  []field{{Name: "moves", Label: "Moves at most", Kind: "text", Hint: "Empty: as many as it takes"}, tick("stop", "Begin no more moves", "")},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		moves, err := countOf(v, "moves")
		if err == nil {
			_, err = c.Manager.RebalancePool(ctx, &pb.RebalancePoolRequest{Pool: v["object"], MaxMoves: moves, Stop: v["stop"] != ""})
		}
		if v["stop"] != "" {
			return fmt.Sprintf("No more legs of pool %s are moved.", v["object"]), err
		}
		return fmt.Sprintf("Pool %s is being rebalanced.", v["object"]), err
	},
}, {
	name: "pool-delete", title: "Delete", button: "Delete the pool", kind: "pool", danger: true, method: pb.Manager_DeletePool_FullMethodName,
	about: "Refused while it has volumes. Its drives stay.", command: "weft pool delete {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.DeletePool(ctx, &pb.DeletePoolRequest{Name: v["object"]})
		return fmt.Sprintf("Pool %s is deleted.", v["object"]), err
	},
}}

// poolRow is a pool with its forms.
type poolRow struct {
	*pb.Pool
	Forms []*form
}

func (s *Server) poolRows(pools []*pb.Pool) (rows []poolRow) {
	for _, p := range pools {
		row := poolRow{p, []*form{s.formFor("pool-rebalance", p.GetName(), nil)}}
		if p.GetName() != block.DefaultPool {
			row.Forms = append(row.Forms, s.formFor("pool-delete", p.GetName(), nil))
		}
		rows = append(rows, row)
	}
	return rows
}

// lostChanges are about nodes that do not come back.
var lostChanges = []*action{{
	name: "node-confirm-dead", title: "Confirm that it is off", button: "It is powered off", kind: "node", danger: true, method: pb.Manager_ConfirmNodeDead_FullMethodName,
	about:   "A promise that the machine is powered off and has lost its memory. No volume waits for it any more. If it is only cut off, it may still write, and writes may be lost.",
	command: "weft node confirm-dead {object} --powered-off",
	fields:  []field{{Name: "off", Label: "I have checked the machine or its power", Kind: "tick", Value: "yes", Needed: true}},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.ConfirmNodeDead(ctx, &pb.ConfirmNodeDeadRequest{Node: v["object"]})
		return fmt.Sprintf("Node %s is recorded as off.", v["object"]), err
	},
}, {
	name: "node-remove", title: "Remove", button: "Remove the node", kind: "node", danger: true, method: pb.Manager_RemoveNode_FullMethodName,
	about: "The cluster forgets it. Refused while it has drives or volumes, or an agent of it runs.", command: "weft node remove {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.RemoveNode(ctx, &pb.RemoveNodeRequest{Node: v["object"]})
		return fmt.Sprintf("Node %s is removed.", v["object"]), err
	},
	then: func(map[string]string) string { return "/drives" },
}}

// clusterChanges are about the managers, the authority and the level.
var clusterChanges = []*action{{
	name: "manager-transfer", title: "Let it lead", button: "Let it lead", kind: "manager", method: pb.Manager_TransferLeadership_FullMethodName,
	about: "Agents and commands go to the new leader by themselves.", command: "weft volmgr transfer {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.TransferLeadership(ctx, &pb.TransferLeadershipRequest{Manager: v["object"]})
		return fmt.Sprintf("Manager %s leads.", v["object"]), err
	},
}, {
	name: "manager-remove", title: "Remove", button: "Remove the manager", kind: "manager", danger: true, method: pb.Manager_RemoveManager_FullMethodName,
	about: "Its process ends. Refused if those that are left and follow would be no majority.", command: "weft volmgr remove {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.RemoveManager(ctx, &pb.RemoveManagerRequest{Manager: v["object"]})
		return fmt.Sprintf("Manager %s is removed.", v["object"]), err
	},
}, {
	name: "ca-rotate", title: "Rotate the authority", button: "Rotate", method: pb.Identities_RotateAuthority_FullMethodName,
	about:   "A new authority takes the place of the present one within some days, without a break. It does not shut out who holds the old key.",
	command: "weft ca rotate",
	do: func(ctx context.Context, c Clients, _ map[string]string) (string, error) {
		_, err := c.Identities.RotateAuthority(ctx, &pb.RotateAuthorityRequest{})
		return "The authority is being replaced.", err
	},
}, {
	name: "upgrade-finish", title: "Finish the upgrade", button: "Raise the level", kind: "level", danger: true, method: pb.Manager_FinishUpgrade_FullMethodName,
	about:   "Raise the cluster's level to the newest that the manager which leads knows. There is no way back: managers of earlier versions refuse the cluster from then on.",
	command: "weft upgrade finish",
	do: func(ctx context.Context, c Clients, _ map[string]string) (string, error) {
		now, err := c.Manager.FinishUpgrade(ctx, &pb.FinishUpgradeRequest{})
		return fmt.Sprintf("The cluster's level is %d.", now.GetLevel()), err
	},
}}

// managerRow is a manager with its forms.
type managerRow struct {
	*pb.ManagerMember
	Forms []*form
}

func (s *Server) managerRows(all []*pb.ManagerMember) (rows []managerRow) {
	for _, m := range all {
		row := managerRow{ManagerMember: m}
		if len(all) > 1 && m.GetVoter() && !m.GetLeader() {
			row.Forms = append(row.Forms, s.formFor("manager-transfer", m.GetAddress(), nil))
		}
		if len(all) > 1 {
			row.Forms = append(row.Forms, s.formFor("manager-remove", m.GetAddress(), nil))
		}
		rows = append(rows, row)
	}
	return rows
}
