// SPDX-License-Identifier: Apache-2.0

package drive

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/nvmetcp"
	"weft.dev/weft/proto/pb"
)

// adminCommand is struct nvme_admin_cmd (linux/nvme_ioctl.h).
type adminCommand struct {
	opcode, flags                            uint8
	_                                        uint16
	nsid, cdw2, cdw3                         uint32
	metadata, data                           uint64
	metadataLength, dataLength               uint32
	cdw10, cdw11, cdw12, cdw13, cdw14, cdw15 uint32
	timeout                                  uint32 // in milliseconds; 0: the kernel's own
	result                                   uint32
}

// ioctlAdmin is NVME_IOCTL_ADMIN_CMD, _IOWR('N', 0x41, struct nvme_admin_cmd).
const ioctlAdmin = 3<<30 | uintptr(unsafe.Sizeof(adminCommand{}))<<16 | 'N'<<8 | 0x41

// Smart reads the SMART / Health Information log of a block device below root, from the NVMe
// controller that it belongs to; nil if it belongs to none. The call lasts as long as the drive
// takes to answer: the kernel gives up after its own timeout, of a minute by default. A shorter
// one is not asked for, since the kernel resets a controller whose command has timed out.
func Smart(root, path string) (*pb.SmartLog, error) {
	s := sysfs(root)
	controller := s.controller(s.diskOf(path))
	if controller == "" {
		return nil, nil
	}
	f, err := os.OpenFile(s.path("dev", controller), os.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("read the health log of %s: %w", path, err)
	}
	defer f.Close()
	page, err := logPage(f, nvmetcp.GetLog{ID: nvmetcp.LogSmart, NSID: nvmetcp.AllNamespaces, Length: nvmetcp.SmartSize})
	if err != nil {
		return nil, fmt.Errorf("read the health log of %s from /dev/%s: %w", path, controller, err)
	}
	return decodeSmart(page)
}

// logPage sends a Get Log Page command to a controller.
func logPage(controller *os.File, get nvmetcp.GetLog) ([]byte, error) {
	page := make([]byte, get.Length)
	c := get.Command()
	command := adminCommand{
		opcode: uint8(nvmetcp.AdminGetLogPage), nsid: get.NSID, dataLength: uint32(len(page)),
		data: uint64(uintptr(unsafe.Pointer(unsafe.SliceData(page)))), cdw10: c.CDW(10), cdw11: c.CDW(11), cdw12: c.CDW(12), cdw13: c.CDW(13), cdw14: c.CDW(14),
	}
	conn, err := controller.SyscallConn()
	if err != nil {
		return nil, err
	}
	var status uintptr
	var errno unix.Errno
	err = conn.Control(func(fd uintptr) {
		status, _, errno = unix.Syscall(unix.SYS_IOCTL, fd, ioctlAdmin, uintptr(unsafe.Pointer(&command)))
	})
	runtime.KeepAlive(page) // the command holds its address as a number
	switch {
	case err != nil:
		return nil, err
	case errno == unix.ENOTTY:
		return nil, errors.New("not an NVMe controller")
	case errno != 0:
		return nil, errno
	case status != 0:
		return nil, fmt.Errorf("the drive refuses it with status %#x", status)
	}
	return page, nil
}
