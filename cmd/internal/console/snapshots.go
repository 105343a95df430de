// SPDX-License-Identifier: Apache-2.0

package console

import (
	"context"
	"fmt"
	"strings"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/snapshot"
	"weft.dev/weft/proto/pb"
)

// snapshotChanges are about what volumes held at a moment.
var snapshotChanges = []*action{{
	name: "snapshot-create", title: "Take a snapshot", button: "Take", kind: "volume", method: pb.Manager_CreateSnapshots_FullMethodName,
	about:   "It keeps what the volume holds now. Writes wait for some milliseconds meanwhile.",
	command: "weft snapshot create --name {name} [freeze? --freeze] {object} [{*others}]",
	fields: []field{
		{Name: "name", Label: "Name", Kind: "text", Example: "monday", Needed: true},
		{Name: "others", Label: "Other volumes", Kind: "text", Example: "db2 log1", Hint: "Of which snapshots of this name are taken at the same moment, with spaces between"},
		tick("freeze", "Freeze file systems", "Hosts freeze what they have mounted from the volumes, so that it is complete"),
	},
	do: takeSnapshots,
}, {
	name: "volume-restore", title: "Go back to a snapshot", button: "Go back", kind: "volume", danger: true, method: pb.Manager_RestoreVolume_FullMethodName,
	about:   "The volume becomes what the snapshot holds. Another snapshot keeps what was written since, and the volume can go back to that, too.",
	command: "weft volume restore {object} --to {to} --keep {keep}",
	fields: []field{
		{Name: "to", Label: "Snapshot", Kind: "text", Example: "db1@monday", Needed: true},
		{Name: "keep", Label: "Keep what it holds now as", Kind: "text", Example: "before", Needed: true},
	},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		err := snapshot.Restore(ctx, c.Manager, v["object"], v["to"], v["keep"])
		return fmt.Sprintf("Volume %s goes back to %s.", v["object"], v["to"]), err
	},
}, {
	name: "snapshot-clone", title: "Make a volume of it", button: "Create", kind: "snapshot", method: pb.Manager_CreateVolume_FullMethodName,
	about:   "A volume that begins as the snapshot, and shares its space.",
	command: "weft volume create {name} --from {object}",
	fields:  []field{{Name: "name", Label: "Name", Kind: "text", Example: "db2", Needed: true}},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		made, err := c.Manager.CreateVolume(ctx, &pb.CreateVolumeRequest{Name: v["name"], From: v["object"]})
		return fmt.Sprintf("Volume %s is created: %s, a clone of %s.", v["name"], cli.Size(made.GetSizeBytes()), v["object"]), err
	},
	then: toVolume,
}, attachTo("snapshot-attach", "snapshot", "Attach for reading", "Any number of hosts can read a snapshot at once."), {
	name: "snapshot-detach", title: "Detach", button: "Detach", kind: "snapshot", method: pb.Manager_Detach_FullMethodName,
	about:   "Each host removes the device as soon as nothing has it open.",
	command: "weft detach {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.Detach(ctx, &pb.DetachRequest{Volume: v["object"]})
		return fmt.Sprintf("Snapshot %s is being detached.", v["object"]), err
	},
}, deletion("snapshot", "Delete the snapshot", "What only it holds is gone for good. Volumes that began as it stay.")}

func takeSnapshots(ctx context.Context, c Clients, v map[string]string) (string, error) {
	r := &pb.CreateSnapshotsRequest{Freeze: v["freeze"] != ""}
	for _, volume := range append([]string{v["object"]}, strings.Fields(v["others"])...) {
		r.Snapshots = append(r.Snapshots, &pb.NewSnapshot{Volume: volume, Name: v["name"]})
	}
	made, err := c.Manager.CreateSnapshots(ctx, r)
	if err == nil && r.Freeze {
		err = snapshot.Understood(made)
	}
	return fmt.Sprintf("Snapshot %s@%s is being taken.", v["object"], v["name"]), err
}

// snapshotRow is a snapshot in the list of a volume's.
type snapshotRow struct {
	*pb.Volume
	Tone, Word string
}

// snapshotsOf are the snapshots of a volume. A manager that is older than they are has none.
func (s *Server) snapshotsOf(ctx context.Context, v *pb.Volume) (rows []snapshotRow, err error) {
	if v.GetLayout().GetIntegrity() || v.GetSnapshot() != nil {
		return nil, nil
	}
	all, err := s.read.snapshots(ctx, v.GetName())
	for _, x := range all {
		if x.GetSnapshot() == nil {
			continue
		}
		rows = append(rows, snapshotRow{x, volumeTone(x), volumeWord(x)})
	}
	return rows, err
}

// snapshotForms are the forms about snapshots that make sense for a volume, or a snapshot, now.
func (s *Server) snapshotForms(v *pb.Volume, snapshots []snapshotRow, hosts []string) (forms []*form) {
	attached := len(cli.AttachmentsOf(v)) > 0
	switch {
	case v.GetState() != pb.VolumeState_VOLUME_STATE_READY || v.GetLayout().GetIntegrity() || v.GetRestoringTo() != "":
	case v.GetSnapshot() != nil:
		forms = append(forms, s.formFor("snapshot-clone", v.GetName(), nil), s.formFor("snapshot-attach", v.GetName(), map[string][]string{"node": hosts}))
		if attached {
			forms = append(forms, s.formFor("snapshot-detach", v.GetName(), nil))
		} else {
			forms = append(forms, s.formFor("snapshot-delete", v.GetName(), nil))
		}
	default:
		forms = append(forms, s.formFor("snapshot-create", v.GetName(), nil))
		var names []string
		for _, x := range snapshots {
			if x.GetState() == pb.VolumeState_VOLUME_STATE_READY {
				names = append(names, x.GetName())
			}
		}
		if !attached && len(names) > 0 && v.GetSealed() == nil {
			forms = append(forms, s.formFor("volume-restore", v.GetName(), map[string][]string{"to": names}))
		}
	}
	return forms
}

// originFacts say where a volume or a snapshot comes from, where it goes, and since when it is sealed.
func originFacts(v *pb.Volume) (all []fact) {
	if at := v.GetSealed(); at != nil {
		all = append(all, fact{"Sealed", when(at) + ": no host writes it any more"})
	}
	if of := v.GetSnapshot(); of != nil {
		all = append(all, fact{"Snapshot of", of.GetVolumeName()}, fact{"Taken", when(of.GetTaken())})
	}
	return append(all, fact{"Clone of", v.GetCloneOf()}, fact{"Flattened", flattened(v.GetFlattening())}, fact{"Goes back to", v.GetRestoringTo()})
}

// flattened says how far a clone is from being independent of what it began as; empty if that was not asked for.
func flattened(x *pb.Flattening) string {
	switch {
	case x == nil:
		return ""
	case x.GetEnded() != nil:
		return when(x.GetEnded())
	case len(x.GetWaitsFor()) > 0:
		return "not yet; it waits: " + strings.Join(x.GetWaitsFor(), "; ")
	case x.GetLeftBytes() > 0:
		return "not yet: " + cli.Size(x.GetLeftBytes()) + " are left"
	}
	return "not yet"
}
