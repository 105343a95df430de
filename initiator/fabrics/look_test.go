// SPDX-License-Identifier: Apache-2.0

package fabrics

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"weft.dev/weft/proto/block"
)

// The kernel uses names again. A device that has got the name of an older one is read anew.
func TestADeviceThatTakesANameIsReadAnew(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, Live, map[int]block.UUID{1: legUUID})
	k := tree(t, files)
	const other = "nqn.2026-11.dev.weft:other"
	replace := func(dir, file, text string) {
		t.Helper()
		path := filepath.Join(k.sys, dir)
		if err := errors.Join(os.CopyFS(path+".new", os.DirFS(path)), os.RemoveAll(path), os.Rename(path+".new", path)); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(k.sys, file), []byte(text+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	find := func(nqn block.NQN, uuid block.UUID, there bool) {
		t.Helper()
		if n, err := k.FindNamespace(nqn, 5, uuid); (err == nil) != there {
			t.Errorf("FindNamespace of %s in %s = %+v, %v; want it there: %v", uuid, nqn, n, err, there)
		}
	}
	find(testNQN, legUUID, true)
	replace("class/nvme-subsystem/nvme-subsys0/nvme0n1", "block/nvme0n1/uuid", otherUUID.String())
	find(testNQN, legUUID, false)
	find(testNQN, otherUUID, true)
	replace("class/nvme-subsystem/nvme-subsys0", "class/nvme-subsystem/nvme-subsys0/subsysnqn", other)
	find(testNQN, otherUUID, false)
	find(other, otherUUID, true)

	for _, want := range []block.NQN{testNQN, other} {
		all, err := k.Controllers(nil)
		if err != nil || len(all) != 1 || all[0].NQN != want {
			t.Errorf("Controllers = %+v, %v; want one of %s", all, err, want)
		}
		if got, err := k.Controllers(func(n block.NQN) bool { return n != want }); len(got) != 0 || err != nil {
			t.Errorf("Controllers of others = %+v, %v", got, err)
		}
		replace("class/nvme/nvme3", "class/nvme/nvme3/subsysnqn", other)
	}
	if n := len(k.controllers.known) + len(k.subsystems.known); n > 2+1 { // the last replacement has not been seen
		t.Errorf("%d devices are kept in mind", n)
	}
}

// An entry appears before its files.
func TestADeviceThatIsHalfThereIsReadAgain(t *testing.T) {
	files := map[string]string{}
	addSubsystem(files, 0, 3, Live, nil)
	k := tree(t, files)
	for _, late := range []string{"subsysnqn", "hostnqn", "hostid", "transport", "uevent"} {
		file := filepath.Join(k.sys, "class/nvme/nvme3", late)
		text, err := os.ReadFile(file)
		hide := func() error { return os.Remove(file) }
		if late == "subsysnqn" {
			hide = func() error { return os.WriteFile(file, []byte("(efault)\n"), 0o644) } // as 6.1 has it at first
		}
		if err := errors.Join(err, hide()); err != nil {
			t.Fatal(err)
		}
		k.controllers.keep(nil)
		if all, err := k.Controllers(nil); err != nil || len(all) != 1 {
			t.Errorf("without %s: Controllers = %+v, %v", late, all, err)
		}
		if err := os.WriteFile(file, text, 0o644); err != nil {
			t.Fatal(err)
		}
		all, err := k.Controllers(nil)
		if err != nil || len(all) != 1 || all[0].NQN != testNQN || all[0].HostNQN != testHost.NQN || all[0].HostID == "" || all[0].Transport != block.TCP || all[0].Address.Traddr == "" {
			t.Errorf("after %s has appeared: Controllers = %+v, %v", late, all, err)
		}
	}
}

// What an agent reads for one volume, five times a second, on a host with many.
func BenchmarkALookAtOneVolume(b *testing.B) {
	for _, volumes := range []int{1, 10, 100} {
		const legs = 4
		files := map[string]string{}
		nqn := func(v, leg int) block.NQN {
			return block.SubsystemNQN(block.VolumeID{UUID: block.UUIDFromRandom([16]byte{byte(v), 1})}, 1, testHost, block.NodeName(fmt.Sprintf("t%d", leg)))
		}
		uuid := func(v, leg int) block.UUID { return block.UUIDFromRandom([16]byte{byte(v), byte(leg)}) }
		for i := range volumes * legs {
			addSubsystem(files, i, i, Live, map[int]block.UUID{1: uuid(i/legs, i%legs)})
			files[fmt.Sprintf("class/nvme-subsystem/nvme-subsys%d/subsysnqn", i)] = string(nqn(i/legs, i%legs))
			files[fmt.Sprintf("class/nvme/nvme%d/subsysnqn", i)] = string(nqn(i/legs, i%legs))
		}
		k := tree(b, files)
		var nqns [legs]block.NQN
		for leg := range legs {
			nqns[leg] = nqn(0, leg)
		}
		b.Run(fmt.Sprintf("of %d", volumes), func(b *testing.B) {
			for b.Loop() {
				all, err := k.Controllers(func(n block.NQN) bool { return slices.Contains(nqns[:], n) })
				if err != nil || len(all) != legs {
					b.Fatal(len(all), err)
				}
				for leg := range legs {
					n, err := k.FindNamespace(nqns[leg], 5, uuid(0, leg))
					if err != nil || !n.Live {
						b.Fatal(n, err)
					}
					if err := k.SetWriteThrough(n.Head, false); err != nil {
						b.Fatal(err)
					}
					if err := k.SetIOTimeout(n.Paths[0], 30*time.Second); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}
