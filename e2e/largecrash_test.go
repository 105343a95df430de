// SPDX-License-Identifier: Apache-2.0

package e2e

import (
	"context"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"weft.dev/weft/e2e/testbed"
	"weft.dev/weft/e2e/vm"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pb"
)

// A volume of 1 TiB whose client is killed under random writes is back within seconds, whatever its size,
// on both data paths. Its drives are sparse files.
func TestScenarioCrashOfALargeVolume(t *testing.T) {
	if os.Getenv("WEFT_LONG") == "" {
		t.Skip("long: WEFT_LONG=1 make e2e RUN=CrashOfALargeVolume; TestScenarioClientKilledAndReplaced and TestScenarioCrossAttach do the same with small volumes")
	}
	b := testbed.Start(t, testbed.Options{Targets: 2, Clients: 2, TargetDisk: "1200GiB"})
	c1, c2 := b.Clients[0], b.Clients[1]
	for _, target := range b.Targets {
		loop := strings.TrimSpace(shell(t, target, "modprobe loop; truncate -s 1040G /var/lib/weft/drive; loop=$(losetup -f); losetup $loop /var/lib/weft/drive; echo $loop"))
		b.Eventually(time.Minute, "the large drive of "+target.Name()+" is added", func(context.Context) error {
			_, err := b.Try("drive", "add", target.Name(), loop)
			return err
		})
	}
	began := time.Now()
	b.Eventually(time.Minute, "there is room for db1 on the large drives", func(context.Context) error {
		_, err := b.Try("volume", "create", "db1", "--size", "1TiB", "--stripes", "4", "--copies", "2")
		return err
	})
	b.Eventually(20*time.Minute, "db1 is ready", func(ctx context.Context) error {
		v, err := b.API.GetVolume(ctx, &pb.GetVolumeRequest{Volume: "db1"})
		if err == nil && v.State != pb.VolumeState_VOLUME_STATE_READY {
			err = fmt.Errorf("it is %v", v.State)
		}
		return err
	})
	t.Logf("1 TiB was zeroed twice in %v", time.Since(began).Round(time.Second))

	acks := testbed.Acks{}
	first := crashWriting(t, b, c1, acks, 1)
	device := attachedSoon(t, b, c2)
	comparedWhatTargetsList(t, b, c2)
	b.Verify(c2, device, large, acks)

	b.Detach("db1")
	crashWriting(t, b, c2, acks, first.Next()+1000)
	b.Up(c1)
	b.Datapath(c1, "user")
	device = attachedSoon(t, b, c1)
	comparedWhatTargetsList(t, b, c1)
	b.Verify(c1, device, large, acks)
}

// large is the size of the volume in MiB.
const large = 1 << 20

// crashWriting attaches db1 and kills its client while that writes to random places.
func crashWriting(t *testing.T, b *testbed.Bed, client *vm.Machine, acks testbed.Acks, next uint64) *testbed.Writer {
	t.Helper()
	device := b.Attach("db1", client)
	began := time.Now()
	w := b.Write(client, device, large, 0, next)
	w.AwaitProgress(2000, 3*time.Minute)
	t.Logf("%s wrote %.0f times a second", client.Name(), 2000/time.Since(began).Seconds())
	client.Kill()
	w.Abandon()
	acks.Add(w)
	b.Weft("detach", "db1", "--force")
	return w
}

// attachedSoon attaches db1 after a crash, and checks how long that took after the fence and how much was
// compared.
func attachedSoon(t *testing.T, b *testbed.Bed, client *vm.Machine) string {
	t.Helper()
	device := b.Attach("db1", client)
	granted, attached := b.LastEvent("volume db1", "volume.granted"), b.LastEvent("volume db1", "volume.attached")
	if granted == nil || attached == nil {
		t.Fatalf("the events lack %v or %v", granted, attached)
	}
	took := attached.Time.AsTime().Sub(granted.Time.AsTime())
	compared := int64(0)
	for _, m := range regexp.MustCompile(`msg="(?:copies compared|making the copies equal)".* read=(\d+) `).FindAllStringSubmatch(b.Daemon(client).Log(), -1) {
		n, err := strconv.ParseInt(m[1], 10, 64)
		if err != nil {
			t.Fatal(err)
		}
		compared += n
	}
	t.Logf("on %s: served %v after the fence, %v of each copy compared", client.Name(), took.Round(time.Millisecond), block.Size(compared))
	if took > 10*time.Second {
		t.Errorf("on %s: served %v after the fence, want 10 s at most", client.Name(), took)
	}
	if block.Size(compared) > 5*block.GiB {
		t.Errorf("on %s: %v of each copy were compared, want 5 GiB at most", client.Name(), block.Size(compared))
	}
	return device
}
