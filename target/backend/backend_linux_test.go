// SPDX-License-Identifier: Apache-2.0

package backend

import (
	"errors"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"weft.dev/weft/proto/block"
)

// allocated is how many bytes of disk space a file occupies.
func allocated(t *testing.T, f *File) int64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Fstat(f.fd, &st); err != nil {
		t.Fatal(err)
	}
	return st.Blocks * 512
}

// notDurable fails durable writes.
type notDurable struct {
	Calls
	err error
}

func (n notDurable) PwriteDurable([]byte, int64) (int, error) { return -1, n.err }

// TestAFailedDurableWriteIsRemembered: its error may belong to an earlier write, and the next flush
// would not report it again.
func TestAFailedDurableWriteIsRemembered(t *testing.T) {
	durable := func() *block.IO { return &block.IO{Op: block.OpWrite, FUA: true, Len: 4096, Data: Aligned(4096)} }
	for _, o := range []Options{{}, {Buffered: true}} {
		f := openFile(t, 1<<20, o)
		f.calls = notDurable{f.calls, unix.EIO}
		if err := block.Do(f, durable()); !errors.Is(err, unix.EIO) || !errors.Is(err, block.ErrMedium) {
			t.Errorf("a durable write that fails = %v", err)
		}
		if err := block.Flush(f); !errors.Is(err, unix.EIO) {
			t.Errorf("a flush after a durable write that failed = %v", err)
		}
		f = openFile(t, 1<<20, o)
		f.calls = notDurable{f.calls, unix.EOPNOTSUPP}
		if err := errors.Join(block.Do(f, durable()), block.Flush(f)); err != nil {
			t.Errorf("where the kernel has no durable writes: %v", err)
		}
	}
}

func TestAFileThatWasCutOffIsNotMadeLongAgain(t *testing.T) {
	find := map[string]func(*File) error{
		"a read":  func(f *File) error { return block.ReadAt(f, Aligned(4096), 512<<10) },
		"a check": func(f *File) error { return f.Check() },
	}
	for name, look := range find {
		f := openFile(t, 1<<20, Options{})
		if err := errors.Join(f.Check(), os.Truncate(f.path, 4096)); err != nil {
			t.Fatal(err)
		}
		if err := look(f); !errors.Is(err, block.ErrMedium) {
			t.Errorf("%s finds %v", name, err)
		}
		if err := block.WriteAt(f, Aligned(4096), 1<<20-4096); !errors.Is(err, block.ErrMedium) {
			t.Errorf("after %s, a write behind the end = %v", name, err)
		}
		if err := block.ReadAt(f, Aligned(4096), 4096); !errors.Is(err, block.ErrMedium) {
			t.Errorf("after %s, a read of what was cut off = %v", name, err)
		}
	}
}
