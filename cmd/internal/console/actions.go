// SPDX-License-Identifier: Apache-2.0

package console

import (
	"cmp"
	"context"
	"fmt"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// actions are all changes that the console offers, by name.
var actions = byActionName(volumeChanges, snapshotChanges, legChanges, nodeChanges, lostChanges, driveChanges, poolChanges, tokenChanges, clusterChanges)

func byActionName(groups ...[]*action) map[string]*action {
	all := map[string]*action{}
	for _, a := range slices.Concat(groups...) {
		all[a.name] = a
	}
	return all
}

// Commands returns the command lines that the console shows for its actions, with every option.
func Commands() (all []string) {
	for _, a := range actions {
		v := map[string]string{"object": "db1"}
		for _, f := range a.fields {
			v[f.Name] = cmp.Or(f.Value, "1")
		}
		all = append(all, command(a.command, v))
	}
	return all
}

// sizeOf parses the size in a field.
func sizeOf(v map[string]string, name string) (uint64, error) {
	size, err := block.ParseSize(v[name])
	if err != nil {
		return 0, cli.UsageError{Err: fmt.Errorf("--%s: %w", name, err), Hint: "such as 10GiB"}
	}
	return uint64(size), nil
}

// countOf parses the number in a field; empty is 0.
func countOf(v map[string]string, name string) (uint32, error) {
	if v[name] == "" {
		return 0, nil
	}
	n, err := strconv.ParseUint(v[name], 10, 32)
	if err != nil {
		return 0, cli.UsageError{Err: fmt.Errorf("--%s %q: must be a whole number", name, v[name])}
	}
	return uint32(n), nil
}

func toVolume(v map[string]string) string { return "/volumes/" + url.PathEscape(v["name"]) }
func toVolumes(map[string]string) string  { return "/volumes" }
func nodeField(label string) field {
	return field{Name: "node", Label: label, Kind: "text", Needed: true}
}
func tick(name, label, hint string) field {
	return field{Name: name, Label: label, Hint: hint, Kind: "tick", Value: "yes"}
}
func sizeField(value, example string) field {
	return field{Name: "size", Label: "Size", Kind: "text", Value: value, Example: example, Needed: true, Hint: "A number and a unit: MiB, GiB, TiB"}
}

var volumeChanges = []*action{{
	name: "volume-create", title: "Create a volume", button: "Create", method: pb.Manager_CreateVolume_FullMethodName,
	about:   "Striped over columns, with copies of each column on different drives.",
	command: "weft volume create {name} --size {size} [--copies {copies}] [--stripes {stripes}] [--pool {pool}] [--spread {spread}] [thin? --thin]",
	fields: []field{
		{Name: "name", Label: "Name", Kind: "text", Example: "db1", Needed: true}, sizeField("", "10GiB"),
		{Name: "copies", Label: "Copies", Kind: "choice", Value: "2", Choices: []string{"1", "2", "3"}, Hint: "1 means no mirror"},
		{Name: "stripes", Label: "Columns", Kind: "text", Example: "the manager chooses"},
		{Name: "pool", Label: "Pool", Kind: "text", Value: block.DefaultPool},
		{Name: "spread", Label: "Copies differ in", Kind: "text", Value: block.DefaultSpread, Hint: "A label of nodes, such as rack"},
		tick("thin", "Thin", "It takes space only where it is written"),
	},
	do: createVolume, then: toVolume,
}, {
	name: "volume-expand", title: "Expand", button: "Expand", kind: "volume", method: pb.Manager_ExpandVolume_FullMethodName,
	about:   "Grow the volume and the devices of its hosts, without stopping I/O. It cannot be made smaller.",
	command: "weft volume expand {object} --size {size}", fields: []field{sizeField("", "20GiB")},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		size, err := sizeOf(v, "size")
		if err != nil {
			return "", err
		}
		_, err = c.Manager.ExpandVolume(ctx, &pb.ExpandVolumeRequest{Volume: v["object"], SizeBytes: size})
		return fmt.Sprintf("Volume %s grows to %s.", v["object"], cli.Size(size)), err
	},
}, {
	name: "volume-scrub", title: "Compare the copies", button: "Compare", kind: "volume", method: pb.Manager_ScrubVolume_FullMethodName,
	about:   "Read all copies while the volume is in use, and report what differs.",
	command: "weft volume scrub {object} [repair? --repair]",
	fields:  []field{tick("repair", "Repair what differs", "Where it is known which copy is right")},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.ScrubVolume(ctx, &pb.ScrubVolumeRequest{Volume: v["object"], Repair: v["repair"] != ""})
		return fmt.Sprintf("The copies of volume %s are compared.", v["object"]), err
	},
}, attachTo("attach", "volume", "Attach", "Give the volume to a host as a block device."), {
	name: "detach", title: "Detach", button: "Detach", kind: "volume", method: pb.Manager_Detach_FullMethodName,
	about:   "The host removes the device as soon as nothing has it open. Unmount it before.",
	command: "weft detach {object} [cancel? --cancel]", fields: []field{tick("cancel", "Withdraw a detach that waits", "")},
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.Detach(ctx, &pb.DetachRequest{Volume: v["object"], Cancel: v["cancel"] != ""})
		if v["cancel"] != "" {
			return fmt.Sprintf("Volume %s stays attached.", v["object"]), err
		}
		return fmt.Sprintf("Volume %s is being detached.", v["object"]), err
	},
}, {
	name: "detach-force", title: "Detach by force", button: "Detach by force", kind: "volume", danger: true, method: pb.Manager_Detach_FullMethodName,
	about:   "For a host that is lost: the targets stop accepting its writes. Its device fails, and data that it has not written yet is lost.",
	command: "weft detach {object} --force",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.Detach(ctx, &pb.DetachRequest{Volume: v["object"], Force: true})
		return fmt.Sprintf("Volume %s is detached by force.", v["object"]), err
	},
}, {
	name: "volume-flatten", title: "Flatten", button: "Flatten", kind: "volume", method: pb.Manager_FlattenVolume_FullMethodName,
	about:   "What the volume shares with the snapshot that it began as is copied while it is used. Then it needs that no longer.",
	command: "weft volume flatten {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.FlattenVolume(ctx, &pb.FlattenVolumeRequest{Volume: v["object"]})
		return fmt.Sprintf("Volume %s is being flattened.", v["object"]), err
	},
}, {
	name: "volume-seal", title: "Seal", button: "Seal", kind: "volume", danger: true, method: pb.Manager_SealVolume_FullMethodName,
	about:   "No host ever writes the volume again, and any number of hosts can read it. A seal cannot be taken back.",
	command: "weft volume seal {object}",
	do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
		_, err := c.Manager.SealVolume(ctx, &pb.SealVolumeRequest{Volume: v["object"]})
		return fmt.Sprintf("Volume %s is sealed.", v["object"]), err
	},
}, deletion("volume", "Delete the volume and its data", "Its data is gone for good.")}

// attachTo attaches an object of a kind, a volume or a snapshot.
func attachTo(name, kind, title, about string) *action {
	return &action{
		name: name, title: title, button: "Attach", kind: kind, method: pb.Manager_Attach_FullMethodName, about: about,
		command: "weft attach {object} --node {node}", fields: []field{nodeField("Host")},
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			_, err := c.Manager.Attach(ctx, &pb.AttachRequest{Volume: v["object"], Node: v["node"]})
			return fmt.Sprintf("%s %s is being attached to %s.", capital(kind), v["object"], v["node"]), err
		},
	}
}

// deletion deletes an object of a kind, a volume or a snapshot.
func deletion(kind, button, about string) *action {
	return &action{
		name: kind + "-delete", title: "Delete", button: button, kind: kind, danger: true, method: pb.Manager_DeleteVolume_FullMethodName, about: about,
		command: "weft " + kind + " delete {object}",
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			_, err := c.Manager.DeleteVolume(ctx, &pb.DeleteVolumeRequest{Volume: v["object"]})
			return fmt.Sprintf("%s %s is being deleted.", capital(kind), v["object"]), err
		},
		then: toVolumes,
	}
}

// capital begins a sentence with a word.
func capital(word string) string { return strings.ToUpper(word[:1]) + word[1:] }

func createVolume(ctx context.Context, c Clients, v map[string]string) (string, error) {
	size, err := sizeOf(v, "size")
	if err != nil {
		return "", err
	}
	copies, err := countOf(v, "copies")
	if err != nil {
		return "", err
	}
	stripes, err := countOf(v, "stripes")
	if err != nil {
		return "", err
	}
	made, err := c.Manager.CreateVolume(ctx, &pb.CreateVolumeRequest{
		Name: v["name"], SizeBytes: size, Copies: copies, Stripes: stripes, Pool: v["pool"], Spread: v["spread"], Thin: v["thin"] != "",
	})
	return fmt.Sprintf("Volume %s is created: %s, %s (columns × copies).", v["name"], cli.Size(made.GetSizeBytes()), cli.Layout(made.GetLayout())), err
}

// nodeChange is an action with a node for its only value.
func nodeChange(verb, title, about, said, method string, call func(context.Context, pb.ManagerClient, string) error) *action {
	return &action{
		name: "node-" + verb, title: title, button: title, kind: "node", method: method, about: about, command: "weft node " + verb + " {object}",
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			return fmt.Sprintf(said, v["object"]), call(ctx, c.Manager, v["object"])
		},
	}
}

var nodeChanges = []*action{
	nodeChange("cordon", "Cordon", "Keep new legs away. The legs that are there stay.", "Node %s takes no new legs.", pb.Manager_CordonNode_FullMethodName,
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.CordonNode(ctx, &pb.CordonNodeRequest{Node: node})
			return err
		}),
	nodeChange("drain", "Drain", "Move all legs elsewhere, and keep new ones away. Each is copied before it is given up.", "Node %s is being drained.", pb.Manager_CordonNode_FullMethodName,
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.CordonNode(ctx, &pb.CordonNodeRequest{Node: node, Drain: true})
			return err
		}),
	nodeChange("uncordon", "Take legs again", "End a cordon, a drain or a maintenance.", "Node %s takes legs again.", pb.Manager_UncordonNode_FullMethodName,
		func(ctx context.Context, api pb.ManagerClient, node string) error {
			_, err := api.UncordonNode(ctx, &pb.UncordonNodeRequest{Node: node})
			return err
		}),
	{
		name: "node-maintain", title: "Maintenance", button: "Announce", kind: "node", method: pb.Manager_MaintainNode_FullMethodName,
		about:   "Announce that the node is switched off for a while. Hosts leave its legs out; nothing is made again elsewhere meanwhile. This page says when it can be stopped.",
		command: "weft node maintain {object} --for {for} --no-wait",
		fields:  []field{{Name: "for", Label: "For how long", Kind: "text", Value: "15m", Needed: true, Hint: "Such as 15m or 2h"}},
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			length, err := time.ParseDuration(v["for"])
			if err != nil || length < time.Second {
				return "", cli.UsageError{Err: fmt.Errorf("--for %q: must be a time, of a second at least", v["for"]), Hint: "such as 15m or 2h"}
			}
			_, err = c.Manager.MaintainNode(ctx, &pb.MaintainNodeRequest{Node: v["object"], Seconds: uint32(length / time.Second)})
			return fmt.Sprintf("Node %s is under maintenance for %v.", v["object"], length), err
		},
	},
}

// driveChange is an action with a drive for its only value, by the beginning of its id.
func driveChange(name, title, about, said, pattern, method string, danger bool, call func(context.Context, pb.ManagerClient, string) error) *action {
	return &action{
		name: name, title: title, button: title, kind: "drive", method: method, about: about, danger: danger, command: pattern,
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			list, err := c.Manager.ListDrives(ctx, &pb.ListDrivesRequest{})
			if err != nil {
				return "", err
			}
			id, err := driveID(v["object"], list.GetDrives())
			if err != nil {
				return "", err
			}
			return fmt.Sprintf(said, v["object"]), call(ctx, c.Manager, id)
		},
	}
}

var driveChanges = []*action{
	{
		name: "drive-add", title: "Add a drive", button: "Add", kind: "node", method: pb.Manager_AddDrive_FullMethodName,
		about:   "The target writes Weft's label on the device. A device that holds anything is refused, and the refusal names what is there.",
		command: "weft drive add {object} {device} [--force-erase {erase}]",
		fields: []field{
			{Name: "device", Label: "Device", Kind: "text", Example: "/dev/nvme0n1", Needed: true},
			{Name: "erase", Label: "Erase what is there", Kind: "text", Hint: "Empty, or exactly the text that the refusal names"},
		},
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			_, err := c.Manager.AddDrive(ctx, &pb.AddDriveRequest{Node: v["object"], Device: v["device"], ForceErase: v["erase"]})
			return fmt.Sprintf("Device %s of node %s is being added.", v["device"], v["object"]), err
		},
	},
	{
		name: "drive-label", title: "Labels", button: "Replace the labels", kind: "drive", method: pb.Manager_SetDriveLabels_FullMethodName,
		about:   "Pools select drives by them. Volumes on the drive stay there.",
		command: "weft drive label {object} [{*labels}]",
		fields:  []field{{Name: "labels", Label: "All labels", Kind: "text", Example: "class=fast shelf=2", Hint: "KEY=VALUE, with spaces between; empty: none"}},
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			labels, err := cli.ParsePairs(strings.Fields(v["labels"]))
			if err != nil {
				return "", err
			}
			list, err := c.Manager.ListDrives(ctx, &pb.ListDrivesRequest{})
			if err != nil {
				return "", err
			}
			id, err := driveID(v["object"], list.GetDrives())
			if err == nil {
				_, err = c.Manager.SetDriveLabels(ctx, &pb.SetDriveLabelsRequest{DriveId: id, Labels: labels})
			}
			return fmt.Sprintf("Drive %s has the labels %s.", v["object"], cli.OrNone(cli.Pairs(labels))), err
		},
	},
	driveChange("drive-drain", "Drain", "Move its legs elsewhere, and keep new ones away.", "Drive %s is being drained.", "weft drive drain {object}", pb.Manager_DrainDrive_FullMethodName, false,
		func(ctx context.Context, api pb.ManagerClient, id string) error {
			_, err := api.DrainDrive(ctx, &pb.DrainDriveRequest{DriveId: id})
			return err
		}),
	driveChange("drive-keep", "Keep", "End a drain or an eviction: the legs that it still has stay.", "Drive %s keeps its legs.", "weft drive drain {object} --cancel", pb.Manager_DrainDrive_FullMethodName, false,
		func(ctx context.Context, api pb.ManagerClient, id string) error {
			_, err := api.DrainDrive(ctx, &pb.DrainDriveRequest{DriveId: id, Cancel: true})
			return err
		}),
	driveChange("drive-evict", "Evict", "Remove it after its legs were made again elsewhere, and erase Weft's label.", "Drive %s is being removed.", "weft drive evict {object}", pb.Manager_EvictDrive_FullMethodName, true,
		func(ctx context.Context, api pb.ManagerClient, id string) error {
			_, err := api.EvictDrive(ctx, &pb.EvictDriveRequest{DriveId: id})
			return err
		}),
}

// tokenFor is an action that makes a token.
func tokenFor(kind, title, about string, roles []string) *action {
	return &action{
		name: "token-" + kind, title: title, button: "Make a token", method: pb.Identities_CreateToken_FullMethodName, about: about,
		command: "weft token create --" + kind + " {name} --role {role} [--for {for}]",
		fields: []field{
			{Name: "name", Label: "Name", Kind: "text", Needed: true}, {Name: "role", Label: "Role", Kind: "choice", Value: roles[0], Choices: roles, Needed: true},
			{Name: "for", Label: "Good for", Kind: "text", Value: "15m", Hint: "168h at most"},
		},
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			life, err := time.ParseDuration(v["for"])
			if v["for"] != "" && (err != nil || life < time.Second) {
				return "", cli.UsageError{Err: fmt.Errorf("--for %q: must be a time, of a second at least", v["for"]), Hint: "such as 15m or 24h"}
			}
			made, err := c.Identities.CreateToken(ctx, &pb.CreateTokenRequest{
				Subject: &pb.Subject{Name: v["name"], Person: kind == "person", Role: v["role"]}, Seconds: uint64(life / time.Second),
			})
			return made.GetToken(), err
		},
	}
}

var tokenChanges = []*action{
	tokenFor("person", "Let a person in", "A token lets one person log in, once.", []string{"viewer", "operator", "admin"}),
	tokenFor("node", "Let a node join", "A token lets one agent of one node join, once.", []string{"target", "initiator", "csi", "manager"}),
	{
		name: "token-delete", title: "Withdraw a token", button: "Withdraw", kind: "token", method: pb.Identities_DeleteToken_FullMethodName,
		about: "Whoever has joined with it stays a member.", command: "weft token delete {object}",
		do: func(ctx context.Context, c Clients, v map[string]string) (string, error) {
			_, err := c.Identities.DeleteToken(ctx, &pb.DeleteTokenRequest{Id: v["object"]})
			return fmt.Sprintf("Token %s can no longer be used.", v["object"]), err
		},
	},
}
