// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"log/slog"

	"weft.dev/weft/cmd/internal/kmod"
)

// The data paths that --datapath names. Labels, exports and the manager's records
// are the same on both: a volume that was written through one is there on the other.
const (
	datapathAuto   = "auto"
	datapathKernel = "kernel"
	datapathUser   = "user"
)

// chooseDatapath settles auto: the kernel, if it has all that is needed or can
// load it, else user space. user says why user space alone can do what was asked
// for; empty if the kernel can do it too.
func chooseDatapath(ctx context.Context, wish, user string, log *slog.Logger, l kmod.Loader, need ...kmod.Module) (string, error) {
	choice, because := wish, "--datapath says so"
	switch wish {
	case datapathUser:
	case datapathKernel:
		if user != "" {
			return "", usageError{err: fmt.Errorf("--datapath kernel: %s", user)}
		}
		if err := l.Need(ctx, need...); err != nil {
			return "", err
		}
	case datapathAuto:
		choice, because = datapathKernel, "the kernel has what it takes"
		if user != "" {
			choice, because = datapathUser, user
		} else if err := l.Usable(ctx, need...); err != nil {
			choice, because = datapathUser, "the kernel can not: "+err.Error()
		}
	default:
		return "", usageError{err: fmt.Errorf("--datapath %q: must be auto, kernel or user", wish)}
	}
	log.Info("data path chosen", "datapath", choice, "because", because)
	return choice, nil
}
