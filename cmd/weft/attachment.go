// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/proto/pb"
)

func newAttachment(g *globals) *cobra.Command {
	return group("attachment", "Show which node has which volume", newAttachmentList(g))
}

type attachmentListOptions struct{ node string }

func newAttachmentList(g *globals) *cobra.Command {
	var o attachmentListOptions
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List attachments and what they are waiting for",
		Example: "  weft attachment list\n  weft attachment list --node gpu1",
		Args:    takes(),
		RunE: g.call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *output) error {
			return runAttachmentList(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.node, "node", "", "only those of this `node`")
	_ = cmd.RegisterFlagCompletionFunc("node", g.completeNodes)
	return cmd
}

func runAttachmentList(ctx context.Context, api pb.ManagerClient, o attachmentListOptions, out *output) error {
	all, err := api.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: o.node})
	if err != nil {
		return err
	}
	return out.print(all, func(w io.Writer) {
		var rows [][]string
		for _, a := range all.GetAttachments() {
			rows = append(rows, []string{
				a.GetVolumeName(), a.GetNode(), mode(a.GetMode()), word(a.GetState()), strconv.FormatUint(a.GetEpoch(), 10),
				a.GetDevice(), out.age(a.GetSince()), resync(a), a.GetWaitingFor(),
			})
		}
		table(w, "VOLUME NODE MODE STATE EPOCH DEVICE SINCE COPIED WAITING", rows...)
	})
}

func resync(a *pb.Attachment) string { return used(a.GetResyncDoneBytes(), a.GetResyncTotalBytes()) }
