// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"io"
	"strconv"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
)

func newAttachment(g *cli.Globals) *cobra.Command {
	return cli.Group("attachment", "Show which node has which volume", g.Watched(newAttachmentList(g)))
}

type attachmentListOptions struct{ node string }

func newAttachmentList(g *cli.Globals) *cobra.Command {
	var o attachmentListOptions
	cmd := &cobra.Command{
		Use:     "list",
		Short:   "List attachments and what they are waiting for",
		Example: "  weft attachment list\n  weft attachment list --node gpu1",
		Args:    cli.Takes(),
		RunE: g.Call(func(ctx context.Context, api pb.ManagerClient, _ []string, out *cli.Output) error {
			return runAttachmentList(ctx, api, o, out)
		}),
	}
	cmd.Flags().StringVar(&o.node, "node", "", "only those of this `node`")
	_ = cmd.RegisterFlagCompletionFunc("node", g.CompleteNodes)
	return cmd
}

func runAttachmentList(ctx context.Context, api pb.ManagerClient, o attachmentListOptions, out *cli.Output) error {
	all, err := api.ListAttachments(ctx, &pb.ListAttachmentsRequest{Node: o.node})
	if err != nil {
		return err
	}
	return out.Print(all, func(w io.Writer) {
		var rows [][]string
		for _, a := range all.GetAttachments() {
			rows = append(rows, []string{
				a.GetVolumeName(), a.GetNode(), mode(a.GetMode()), pb.Word(a.GetState()), strconv.FormatUint(a.GetEpoch(), 10),
				a.GetDevice(), out.Age(a.GetSince()), resync(a), a.GetWaitingFor(),
			})
		}
		cli.Table(w, "VOLUME NODE MODE STATE EPOCH DEVICE SINCE COPIED WAITING", rows...)
	})
}

func resync(a *pb.Attachment) string {
	return cli.Used(a.GetResyncDoneBytes(), a.GetResyncTotalBytes())
}
