// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"fmt"
	"runtime"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"weft.dev/weft/cmd/internal/archive"
	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/console"
	"weft.dev/weft/cmd/internal/dev"
	"weft.dev/weft/cmd/internal/explain"
	"weft.dev/weft/cmd/internal/login"
	"weft.dev/weft/cmd/internal/manual"
	"weft.dev/weft/cmd/internal/monitoring"
	"weft.dev/weft/cmd/internal/snapshot"
	"weft.dev/weft/cmd/internal/support"
	"weft.dev/weft/cmd/internal/top"
	"weft.dev/weft/cmd/internal/upgrade"
)

func newRoot(g *cli.Globals) *cobra.Command {
	root := &cobra.Command{
		Use:   "weft",
		Short: "Block storage over NVMe-oF, from the drives of many machines",
		Long: `Weft turns the drives of many machines into block devices, over NVMe-oF.

Most commands talk to the volume manager. The daemons are "weft volmgr",
"weft target" and "weft initiator"; "weft csi" provides volumes to Kubernetes.
"weft dev" runs all of Weft in one process, to try it on this machine.`,
		Example: `  weft drive add t1 /dev/nvme0n1
  weft volume create db1 --size 100GiB --copies 2
  weft attach db1
  weft status`,
		SilenceErrors:     true,
		SilenceUsage:      true,
		Version:           version(),
		CompletionOptions: cobra.CompletionOptions{DisableDefaultCmd: true},
		Args:              cobra.ArbitraryArgs,
		RunE:              cli.NeedsVerb,
	}
	root.SetFlagErrorFunc(func(cmd *cobra.Command, err error) error {
		return cli.UsageError{Err: flagError(err), Hint: cli.HelpHint(cmd)}
	})
	root.SetVersionTemplate("weft {{.Version}} " + runtime.Version() + "\n")
	g.AddFlags(root)
	root.AddCommand(
		newStatus(g), top.New(g), explain.New(g, explain.Tools{Drive: resolveDrive, Next: cli.NextCommand}), newWhatIf(g), newAttach(g), newDetach(g),
		newNode(g), newDrive(g), newPool(g), newVolume(g), snapshot.New(g, snapshot.Tools{Describe: runVolumeDescribe, Export: archive.NewExport(g, archives)}), newLeg(g), newAttachment(g), newEvent(g),
		newVolmgr(g), upgrade.New(g), newTarget(g), newInitiator(g), newCSI(g), dev.New(g, diagnose),
		newDoctor(g), support.New(g), monitoring.New(g), newKubernetes(g), console.New(g), newVersion(g), newCompletion(), manual.New(), newExitCodes(),
	)
	root.AddCommand(login.Commands(g, defaultDataDir)...)
	g.AllowStale(root, "volume list", "volume describe", "snapshot list", "snapshot describe", "node list", "drive list", "pool list", "attachment list", "event list", "explain volume", "explain snapshot")
	g.AllowBundle(root, "status", "explain volume", "explain snapshot", "what-if lose", "volume list", "volume describe", "snapshot list", "snapshot describe", "node list", "drive list", "pool list",
		"attachment list", "event list", "upgrade status", "upgrade plan", "volmgr list")
	return root
}

// flagError says what is wrong with a flag's value, without Go's parsing details.
func flagError(err error) error {
	bad, ok := errors.AsType[*pflag.InvalidValueError](err)
	if !ok {
		return err
	}
	flag, what := bad.GetFlag(), bad.Unwrap().Error()
	switch flag.Value.Type() {
	case "uint32":
		what = "must be a whole number from 0 to 4294967295"
	case "int":
		what = "must be a whole number"
	case "duration":
		what = "must be a time, such as 30s or 5m"
	case "bool":
		what = "must be true or false"
	}
	return fmt.Errorf("--%s %q: %s", flag.Name, bad.GetValue(), what)
}

// newExitCodes is a help topic: a command that only has a description.
func newExitCodes() *cobra.Command {
	return &cobra.Command{
		Use:   "exit-codes",
		Short: "List the exit codes, for scripts",
		Long:  cli.ExitCodesText,
	}
}
