// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/types/known/durationpb"

	"weft.dev/weft/proto/pb"
)

func TestTheHealthOfDrivesFitsAScreen(t *testing.T) {
	drive := func(id, device string, state pb.DriveState, reason string, h *pb.DriveHealth) *pb.Drive {
		return &pb.Drive{Id: id + "000000-0000-4000-8000-000000000001", Node: "t1", Device: device, State: state, Reason: reason, Health: h}
	}
	var out strings.Builder
	printHealth(&out, []*pb.Drive{
		drive("4f", "/dev/nvme0n1", pb.DriveState_DRIVE_STATE_READY, "", &pb.DriveHealth{
			Smart: &pb.SmartLog{UsedPercent: 3, SparePercent: 100, SpareThresholdPercent: 10, Celsius: 38, UnsafeShutdowns: 17, WrittenBytes: 3 << 40},
			Ios:   9000, Latency: durationpb.New(83 * time.Microsecond),
		}),
		drive("5f", "/dev/nvme1n1", pb.DriveState_DRIVE_STATE_SUSPECT, "its reliability is degraded", &pb.DriveHealth{
			Smart: &pb.SmartLog{UsedPercent: 103, SparePercent: 9, SpareThresholdPercent: 10, Celsius: -3, MediaErrors: 12, UnsafeShutdowns: 2},
		}),
		drive("6f", "/dev/vdb", pb.DriveState_DRIVE_STATE_READY, "", &pb.DriveHealth{Smart: &pb.SmartLog{Celsius: 50}, Latency: durationpb.New(1234567 * time.Nanosecond)}),
		drive("7f", "/dev/nvme2n1", pb.DriveState_DRIVE_STATE_READY, "", &pb.DriveHealth{Unread: "it does not answer, since 12:00"}),
		drive("8f", "/dev/sda", pb.DriveState_DRIVE_STATE_OFFLINE, "its target is offline", nil),
	})
	want := `
DRIVE     NODE  DEVICE        STATE    WEAR  SPARE  TEMP  ERRORS  CUTS  WRITTEN  LATENCY  REASON
4f000000  t1    /dev/nvme0n1  ready    3%    100%   38°C  0       17    3TiB     80µs     -
5f000000  t1    /dev/nvme1n1  suspect  103%  9%     -3°C  12      2     0B       -        its reliability is degraded
6f000000  t1    /dev/vdb      ready    0%    -      50°C  0       0     0B       1.23ms   -
7f000000  t1    /dev/nvme2n1  ready    -     -      -     -       -     -        -        it does not answer, since 12:00
8f000000  t1    /dev/sda      offline  -     -      -     -       -     -        -        its target is offline
`
	if got := "\n" + out.String(); got != want {
		t.Errorf("the table is%s\nwant%s", got, want)
	}
}
