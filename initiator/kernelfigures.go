// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"fmt"
	"os"
	"path/filepath"

	"weft.dev/weft/initiator/keeper"
	"weft.dev/weft/initiator/volume"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/figures"
	"weft.dev/weft/raid/dm/mirror"
)

// counted is a volume whose I/O the kernel counts, for goroutines other than the keeper's.
type counted struct {
	name  block.VolumeName
	epoch block.Epoch
	top   block.DeviceNumber
	legs  []countedLeg
}

type countedLeg struct {
	column, copy int
	leg          block.LegID
	node, device string // nvme0n1
}

// kernelKey is the key of the counts of a device: its number is used again, its epoch is not.
type kernelKey struct {
	volume block.VolumeID
	epoch  block.Epoch
	top    block.DeviceNumber
}

// publishCounted tells other goroutines which device is here, and which legs it has.
func (k *kernelKeeper) publishCounted(w *volume.Wanted, s *seen) {
	if !s.Device.Exists {
		k.counted.Store(nil)
		return
	}
	now := &counted{epoch: k.memory.Epoch, top: k.top.Number}
	if last := k.counted.Load(); last != nil {
		now.name = last.name
	}
	if w != nil {
		now.name = w.Name
	}
	for i := range k.links {
		if l := &k.links[i]; s.legs[l.Leg].device != "" {
			now.legs = append(now.legs, countedLeg{l.Column, l.Copy, l.Leg, l.Node, s.legs[l.Leg].head.Name})
		}
	}
	k.counted.Store(now)
}

// Figures implements volumeKeeper. Latencies are those of reads and writes together, if the kernel
// counts them for the volume's device, and never those of legs. The time in which I/O was held is not
// counted. Before Linux 6.4 nothing is counted of a leg that has several paths.
func (k *kernelKeeper) Figures() *keeper.Figures {
	c := k.counted.Load()
	if c == nil || c.name == "" {
		return nil
	}
	users, ok := k.kernel.stat(fmt.Sprintf("dm-%d", c.top.Minor))
	if !ok {
		return nil
	}
	if counted, ok, err := k.kernel.dm.Counted(mirror.TopName(k.volume)); ok && err == nil {
		users[figures.Any].Latency = counted[figures.Any].Latency
	}
	f := &keeper.Figures{Key: kernelKey{k.volume, c.epoch, c.top}, Volume: k.volume, Name: c.name, Users: users}
	for _, l := range c.legs {
		if sent, ok := k.kernel.stat(l.device); ok {
			f.Legs = append(f.Legs, keeper.LegFigures{Column: l.column, Copy: l.copy, Leg: l.leg, Node: l.node, Sent: sent})
		}
	}
	return f
}

// stat reads the counters of a block device.
func (k *kernel) stat(name string) (figures.Figures, bool) {
	text, err := os.ReadFile(filepath.Join(k.sysDir, "block", name, "stat"))
	return figures.ParseStat(string(text)), err == nil
}
