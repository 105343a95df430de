// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/klauspost/compress/zstd"
)

// uncompressed returns the kernel's ELF image, which QEMU starts directly (PVH). A
// compressed kernel unpacks itself in the guest. Without hardware virtualization that takes
// more than half of the boot: 3.1 of 5.9 s of processor time for Debian's 6.1. If the ELF
// image cannot be extracted, the compressed one works as well.
func (k Kernel) uncompressed(dir string) string {
	key, err := hashOf([]string{k.Release}, k.Image)
	if err != nil {
		return k.Image
	}
	path := filepath.Join(dir, "vmlinux-"+key)
	if touch(path) {
		return path
	}
	image, err := extractKernel(k.Image)
	if err != nil {
		notice("machines boot slower: extract the kernel from %s: %v", k.Image, err)
		return k.Image
	}
	err = writeWhole(path, func(f *os.File) error {
		_, err := f.Write(image)
		return err
	})
	if err != nil {
		return k.Image
	}
	return path
}

func extractKernel(path string) ([]byte, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	payload, err := kernelPayload(b)
	if err != nil {
		return nil, err
	}
	image, err := decompress(payload)
	if err != nil {
		return nil, err
	}
	if !bytes.HasPrefix(image, []byte("\x7fELF")) {
		return nil, errors.New("its content is not ELF")
	}
	return image, nil
}

// kernelPayload finds the compressed kernel in a bzImage, at the offsets given in the
// kernel's Documentation/arch/x86/boot.rst.
func kernelPayload(b []byte) ([]byte, error) {
	const setupSects, magic, version, payload = 0x1f1, 0x202, 0x206, 0x248
	if len(b) < payload+8 || string(b[magic:magic+4]) != "HdrS" || binary.LittleEndian.Uint16(b[version:]) < 0x208 {
		return nil, errors.New("no bzImage of protocol 2.08")
	}
	sectors := int(b[setupSects])
	if sectors == 0 {
		sectors = 4
	}
	start := (sectors+1)*512 + int(binary.LittleEndian.Uint32(b[payload:]))
	size := int(binary.LittleEndian.Uint32(b[payload+4:]))
	if start+size > len(b) || size < 8 {
		return nil, fmt.Errorf("payload of %d bytes at %d in a file of %d", size, start, len(b))
	}
	return b[start : start+size], nil
}

// decompress stops at the end of the stream: the kernel's build appends the size.
func decompress(payload []byte) ([]byte, error) {
	switch {
	case bytes.HasPrefix(payload, []byte("\xfd7zXZ")):
		// The kernel's xz uses a branch filter for x86 that the Go package lacks.
		cmd := exec.Command("xz", "-dc", "--single-stream")
		cmd.Stdin = bytes.NewReader(payload)
		return cmd.Output()
	case bytes.HasPrefix(payload, []byte("\x28\xb5\x2f\xfd")):
		r, err := zstd.NewReader(nil)
		if err != nil {
			return nil, err
		}
		defer r.Close()
		return r.DecodeAll(payload[:len(payload)-4], nil)
	}
	return nil, fmt.Errorf("compressed in an unknown way: %x", payload[:6])
}
