// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"weft.dev/weft/cmd/internal/cli"
	"weft.dev/weft/cmd/internal/kmod"
	"weft.dev/weft/initiator/blockdev"
)

// The values of --datapath. Labels, exports and the manager's records are the same on both: a
// volume written through one can be read through the other.
const (
	datapathAuto   = "auto"
	datapathKernel = "kernel"
	datapathUser   = "user"
)

// chooseDatapath resolves auto: the kernel, if everything needed is there or can be loaded, else
// user space. user says why only user space supports the request; empty if the kernel supports it
// too.
func chooseDatapath(ctx context.Context, wish, user string, log *slog.Logger, l kmod.Loader, need ...kmod.Module) (string, error) {
	choice, because := wish, "chosen by --datapath"
	switch wish {
	case datapathUser:
	case datapathKernel:
		if user != "" {
			return "", cli.UsageError{Err: fmt.Errorf("--datapath kernel: %s", user)}
		}
		if err := l.Need(ctx, need...); err != nil {
			return "", cli.AdvisedError{Err: err, Hints: []string{"`weft doctor` says what this machine lacks; --datapath user needs no kernel module"}}
		}
	case datapathAuto:
		choice, because = datapathKernel, "the kernel supports it"
		if user != "" {
			choice, because = datapathUser, user
		} else if err := l.Usable(ctx, need...); err != nil {
			choice, because = datapathUser, "the kernel cannot: "+err.Error()
		}
	default:
		return "", cli.UsageError{Err: fmt.Errorf("--datapath %q: must be auto, kernel or user", wish)}
	}
	log.Info("data path chosen", "datapath", choice, "because", because)
	return choice, nil
}

// needDevice makes sure that this process can show volumes as block devices of a kind: if no kind
// works yet, it loads the modules that can be loaded. Its error says what each kind lacks, and what
// to do.
func needDevice(ctx context.Context, kind blockdev.Kind, l kmod.Loader, probe func() []blockdev.Ability) error {
	var failed error
	for range 3 { // a kind can need two modules, and reports the second only when the first is loaded
		abilities := slices.DeleteFunc(probe(), func(a blockdev.Ability) bool { return kind != blockdev.Auto && a.Kind != kind })
		if _, ok := blockdev.Choose(abilities); ok {
			return nil
		}
		var errs []error
		var modules []kmod.Module
		for _, a := range abilities {
			text := fmt.Sprintf("%s: %s", a.Kind, a.Reason)
			if a.Fix != "" {
				text += " (" + a.Fix + ")"
			}
			errs = append(errs, errors.New(text))
			for _, m := range a.Modules {
				modules = append(modules, kmod.Module{Name: m, Sign: "sys/module/" + m})
			}
		}
		failed = fmt.Errorf("no way to make block devices here, see weft doctor: %w", errors.Join(errs...))
		if len(modules) == 0 || !slices.ContainsFunc(modules, func(m kmod.Module) bool { return l.Need(ctx, m) == nil }) {
			break
		}
	}
	return failed
}
