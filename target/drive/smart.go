// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
)

// dataUnit is the unit in which a SMART log counts what hosts read and wrote: 1000 blocks of 512
// bytes.
const dataUnit = 1000 * 512

// absoluteZero is in degrees Celsius, rounded as NVMe temperatures are: in whole kelvins.
const absoluteZero = -273

// decodeSmart reads a SMART / Health Information log page (NVM Express Base Specification 2.0,
// 5.16.1.3, figure 207). It refuses a page that is too short, and no other: a drive may leave any
// field 0.
func decodeSmart(page []byte) (*pb.SmartLog, error) {
	s, err := nvmetcp.ParseSmart(page)
	if err != nil {
		return nil, err
	}
	return &pb.SmartLog{
		CriticalWarning: uint32(s.Warnings), Celsius: int32(s.Temperature) + absoluteZero,
		SparePercent: uint32(s.Spare), SpareThresholdPercent: uint32(s.SpareMinimum), UsedPercent: uint32(s.Used),
		ReadBytes: bytesOf(s.UnitsRead), WrittenBytes: bytesOf(s.UnitsWritten), PowerOnHours: s.PowerOnHours,
		UnsafeShutdowns: s.UnsafeShutdowns, MediaErrors: s.MediaErrors, ErrorEntries: s.ErrorEntries,
	}, nil
}

// bytesOf is the number of bytes of so many data units, or the largest number there is.
func bytesOf(units uint64) uint64 {
	const most = ^uint64(0)
	if units > most/dataUnit {
		return most
	}
	return units * dataUnit
}
