// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"bufio"
	"io"
	"regexp"
	"strings"
	"sync"
	"time"
)

// kernelTrouble matches the kernel's messages about its own faults and about misuse by us.
var kernelTrouble = regexp.MustCompile(`kernel BUG at|BUG: |Oops: |Kernel panic|general protection fault|WARNING: CPU|possible recursive locking|KASAN|refcount_t: |weft-init: `)

// tailLines is how many lines of a console an error quotes.
const tailLines = 40

// console keeps a machine's output and looks for kernel faults in it.
type console struct {
	allowed []*regexp.Regexp
	trouble func(line string)

	mu   sync.Mutex
	tail []string
}

// copy reads lines until the machine ends, and writes them to log with the host's time.
func (c *console) copy(log io.Writer, r io.Reader) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		line := strings.TrimRight(lines.Text(), "\r")
		_, _ = io.WriteString(log, time.Now().Format("15:04:05.000 ")+line+"\n")
		c.add(line)
	}
	_, _ = io.Copy(io.Discard, r) // an overlong line must not block QEMU
}

func (c *console) add(line string) {
	c.mu.Lock()
	c.tail = append(c.tail, line)
	if len(c.tail) > tailLines {
		c.tail = c.tail[1:]
	}
	c.mu.Unlock()
	if kernelTrouble.MatchString(line) && !c.allows(line) {
		c.trouble(line)
	}
}

func (c *console) allows(line string) bool {
	for _, r := range c.allowed {
		if r.MatchString(line) {
			return true
		}
	}
	return false
}

// text returns the last lines, indented for an error.
func (c *console) text() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.tail) == 0 {
		return "    (the console is empty)"
	}
	return "    " + strings.Join(c.tail, "\n    ")
}
