// SPDX-License-Identifier: Apache-2.0

package target

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"google.golang.org/protobuf/proto"

	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/target/drive"
	"weft.dev/weft/target/nvmet"
)

// prepareFor is how long the next process waits for drives before it is ready. Those that do not answer
// are left for later.
const prepareFor = 5 * time.Second

// Draft returns what the estate would be now, for the next process to prepare for. It has keys of exports.
func (a *Agent) Draft() ([]byte, error) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return proto.Marshal(&pb.TargetHandover{Wanted: a.wanted, Devices: a.report.GetDevices()})
}

// Prepare reads what the draft of an estate names, while the previous process serves it, and plans what
// it would do. It changes nothing, and keeps nothing: Run does all of that again. It fails if a drive's
// label is of a later version: the previous process goes on then, and no host has noticed. A program is
// also slow at what it does for the first time, and hosts need not wait for that. Without a draft there is
// nothing to prepare.
func (a *Agent) Prepare(ctx context.Context, draft []byte) error {
	told := &pb.TargetHandover{}
	if err := proto.Unmarshal(draft, told); err != nil {
		return fmt.Errorf("prepare to take over: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, prepareFor)
	defer cancel()
	drives, err := a.readLabels(ctx, Estate{told: told}.held())
	if err != nil {
		return fmt.Errorf("prepare to take over: %w", err)
	}
	s := seen{devices: told.GetDevices(), drives: drives, mapped: map[block.LegID]dm.State{}, exports: &nvmet.Config{}}
	makePlan(s, parseWanted(told.GetWanted()), a.config.legDir(), a.config.Portals)
	return nil
}

// readLabels reads the labels of drives until ctx ends. Those that cannot be read are left out, unless
// that is because this program is too old.
func (a *Agent) readLabels(ctx context.Context, paths []string) (map[block.DriveID]driveSeen, error) {
	type reading struct {
		path  string
		label *drive.Label
		err   error
	}
	read := make(chan reading, len(paths))
	for _, path := range paths {
		go func() { // of its own: a drive may hang
			label, err := labelAt(filepath.Join(a.config.Root, path))
			read <- reading{path, label, err}
		}()
	}
	drives := map[block.DriveID]driveSeen{}
	for range paths {
		var r reading
		select {
		case <-ctx.Done():
			return drives, nil
		case r = <-read:
		}
		switch {
		case errors.Is(r.err, drive.ErrNewer):
			return nil, fmt.Errorf("%s: %w", r.path, r.err)
		case r.err != nil:
			a.log.Warn("cannot read a drive of the previous process", "device", r.path, "err", r.err)
		default:
			drives[r.label.Drive] = driveSeen{device: r.path, label: r.label}
		}
	}
	return drives, nil
}

func labelAt(path string) (*drive.Label, error) {
	m, err := drive.OpenDevice(path, drive.ReadOnly)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	return drive.ReadLabel(m, m.Size())
}
