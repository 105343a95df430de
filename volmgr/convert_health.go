// SPDX-License-Identifier: Apache-2.0

package volmgr

import (
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/volmgr/health"
)

func pbHealth(r *health.Reading) *pb.DriveHealth {
	if r == nil {
		return nil
	}
	out := &pb.DriveHealth{Time: pbTime(r.Time), Unread: r.Unread, Ios: r.IOs, IoBytes: r.Bytes, Latency: pbDuration(r.Latency)}
	if s := r.Smart; s != nil {
		out.Smart = &pb.SmartLog{
			CriticalWarning: uint32(s.Warning), Celsius: int32(s.Celsius), SparePercent: uint32(s.Spare), SpareThresholdPercent: uint32(s.SpareThreshold),
			UsedPercent: uint32(s.Used), ReadBytes: s.Read, WrittenBytes: s.Written, PowerOnHours: s.PowerOnHours,
			UnsafeShutdowns: s.UnsafeShutdowns, MediaErrors: s.MediaErrors, ErrorEntries: s.ErrorEntries,
		}
	}
	return out
}

func fromHealth(h *pb.DriveHealth) *health.Reading {
	if h == nil {
		return nil
	}
	out := &health.Reading{Time: fromTime(h.Time), Unread: h.Unread, IOs: h.Ios, Bytes: h.IoBytes, Latency: h.Latency.AsDuration()}
	if s := h.Smart; s != nil {
		out.Smart = &health.Smart{
			Warning: uint8(s.CriticalWarning), Celsius: int(s.Celsius), Spare: int(s.SparePercent), SpareThreshold: int(s.SpareThresholdPercent),
			Used: int(s.UsedPercent), Read: s.ReadBytes, Written: s.WrittenBytes, PowerOnHours: s.PowerOnHours,
			UnsafeShutdowns: s.UnsafeShutdowns, MediaErrors: s.MediaErrors, ErrorEntries: s.ErrorEntries,
		}
	}
	return out
}
