// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
)

// ListenUnix listens on a socket at this path. It replaces the socket of a process that was killed,
// but not one on which a process still answers.
func ListenUnix(path string) (net.Listener, error) {
	listener, err := net.Listen("unix", path)
	if err == nil {
		return listener, nil
	}
	info, statErr := os.Lstat(path)
	if statErr != nil || info.Mode()&fs.ModeSocket == 0 {
		return nil, err
	}
	if conn, dialErr := net.Dial("unix", path); dialErr == nil {
		conn.Close()
		return nil, fmt.Errorf("listen on %s: another process answers there", path)
	}
	if removeErr := os.Remove(path); removeErr != nil {
		return nil, errors.Join(err, removeErr)
	}
	return net.Listen("unix", path)
}
