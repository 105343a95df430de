// SPDX-License-Identifier: Apache-2.0

package login

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"time"

	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/audit"
)

// RunAuditList prints the newest entries of the audit.
func RunAuditList(ctx context.Context, api pb.IdentitiesClient, limit uint32, out *cli.Output) error {
	list, err := api.ListAudit(ctx, &pb.ListAuditRequest{Newest: true, Limit: limit})
	if err != nil {
		return err
	}
	return out.Print(list, func(w io.Writer) {
		var rows [][]string
		for _, e := range list.GetEntries() {
			events := ""
			switch {
			case e.GetFirstEvent() == 0:
			case e.GetFirstEvent() == e.GetLastEvent():
				events = strconv.FormatUint(e.GetFirstEvent(), 10)
			default:
				events = fmt.Sprintf("%d-%d", e.GetFirstEvent(), e.GetLastEvent())
			}
			rows = append(rows, []string{strconv.FormatUint(e.GetSeq(), 10), e.GetTime().AsTime().UTC().Format(time.RFC3339), e.GetWho(), e.GetFrom(), e.GetCall(), events, e.GetRequest()})
		}
		cli.Table(w, "SEQ TIME WHO FROM CALL EVENTS REQUEST", rows...)
	})
}

func newAuditVerify(g *cli.Globals) *cobra.Command {
	var noted string
	cmd := &cobra.Command{
		Use:   "verify",
		Short: "Check that no entry of the audit was changed or removed",
		Long: `Check the chain of the audit: each entry has the hash of the one before. Prints
the hash of the newest entry.

Who can write to the stores of most managers can make the whole chain anew. Note
the printed hash elsewhere, and give it with --noted the next time: it must still
be in the chain. The 10 000 newest entries are kept. The manager's log has each
entry with its hash, too.`,
		Example: "  weft audit verify --noted 5f1c0de5a2b94c11...",
		Args:    cli.Takes(),
		RunE: g.CallIdentities(func(ctx context.Context, api pb.IdentitiesClient, _ []string, out *cli.Output) error {
			return runAuditVerify(ctx, api, noted, out)
		}),
	}
	cmd.Flags().StringVar(&noted, "noted", "", "`hash` that an earlier check has printed")
	return cmd
}

func runAuditVerify(ctx context.Context, api pb.IdentitiesClient, noted string, out *cli.Output) error {
	entries, head, err := wholeAudit(ctx, api)
	if err != nil {
		return err
	}
	if err := audit.Verify(entries, head, noted); err != nil {
		return fmt.Errorf("the audit is not what was recorded: %w", err)
	}
	fmt.Fprintln(out.Stdout, head.Hash)
	if len(entries) == 0 {
		out.Say("nothing was asked yet")
		return nil
	}
	out.Say("entries %d to %d are as they were recorded", entries[0].Seq, entries[len(entries)-1].Seq)
	return nil
}

// wholeAudit gets every entry that is kept. If some are added or dropped meanwhile, it begins again.
func wholeAudit(ctx context.Context, api pb.IdentitiesClient) (entries []audit.Entry, head audit.Head, err error) {
	for after := uint64(0); ; {
		page, err := api.ListAudit(ctx, &pb.ListAuditRequest{AfterSeq: after})
		if err != nil {
			return nil, head, err
		}
		if len(entries) > 0 && (page.GetHead() != head.Hash || page.GetFirstSeq() != head.First) {
			entries, after = nil, 0
			continue
		}
		head = audit.Head{First: page.GetFirstSeq(), Hash: page.GetHead()}
		for _, e := range page.GetEntries() {
			entries = append(entries, audit.Entry{
				Seq: e.GetSeq(), Time: e.GetTime().AsTime(),
				Asked:      audit.Asked{Who: e.GetWho(), From: e.GetFrom(), Call: e.GetCall(), Request: e.GetRequest(), ID: e.GetRequestId()},
				FirstEvent: e.GetFirstEvent(), LastEvent: e.GetLastEvent(), Prev: e.GetPrev(), Hash: e.GetHash(),
			})
			after = e.GetSeq()
		}
		if len(page.GetEntries()) == 0 || page.GetEntries()[len(page.GetEntries())-1].GetHash() == page.GetHead() {
			return entries, head, nil
		}
	}
}
