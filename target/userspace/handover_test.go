// SPDX-License-Identifier: Apache-2.0

package userspace

import (
	"errors"
	"net"
	"os"
	"testing"
	"time"

	"weft.dev/weft/target/drive"
)

// A socket is detached again and again at the moment at which somebody begins to accept on it.
func TestASocketIsDetachedFromWhoAcceptsOnIt(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	accept := func(l net.Listener, ended chan<- struct{}) {
		defer close(ended)
		if c, err := l.Accept(); err == nil {
			c.Close()
			t.Error("nobody has connected, but somebody is accepted")
		}
	}
	for round := range 5000 {
		ended, next := make(chan struct{}), make(chan net.Listener, 1)
		go accept(l, ended)
		go func() {
			n, err := Detach(l)
			if err != nil {
				t.Error(err)
			}
			next <- n
		}()
		select {
		case l = <-next:
			<-ended
		case <-time.After(10 * time.Second):
			t.Fatalf("round %d: the socket is not detached after 10 s", round)
		}
	}
	l.Close()
}

// The next process looks at the label alone of a drive that the previous one has held until now. Later it
// looks for signatures of others, as it does on other drives.
func TestAnAdoptedDriveIsResumedOnce(t *testing.T) {
	mine, path := newFiles(t)
	must(t, mine.Format(path, cluster, driveA, ""))
	f, err := os.OpenFile(path, os.O_WRONLY, 0)
	must(t, err)
	defer f.Close()
	_, err = f.WriteAt([]byte("XFSB"), 0) // over the first copy of the label
	must(t, err)
	if _, err := mine.Open(path); !errors.Is(err, drive.ErrOverwritten) {
		t.Fatalf("a drive with a file system is opened: %v", err)
	}
	mine.Adopt(nil, []string{path})
	disk, err := mine.Open(path)
	if err != nil {
		t.Fatalf("the label is good, and was looked at until now: %v", err)
	}
	must(t, disk.Close())
	if _, err := mine.Open(path); !errors.Is(err, drive.ErrOverwritten) {
		t.Errorf("it was away since, and is opened with a file system: %v", err)
	}
}
