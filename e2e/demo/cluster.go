// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"weft.dev/weft/e2e/operator"
)

// patience is the time limit of every step.
const patience = 30 * time.Second

// cluster is a running weft dev.
type cluster struct {
	dir     string
	process *exec.Cmd
	manager string
	ended   chan error
}

// start starts the cluster; the next done stops it.
func (d *demo) start() {
	c := &cluster{dir: filepath.Join(d.dir, "cluster"), ended: make(chan error, 1)}
	args := []string{"dev", "--dir", c.dir}
	if d.device != "auto" {
		args = append(args, "--block-device", d.device)
	}
	fmt.Printf("  $ weft %s\n", strings.Join(args, " "))
	c.process = exec.Command(d.weft, args...)
	c.process.Env = operator.Environment()
	c.process.Stderr = os.Stderr
	// Ctrl-C must reach only the story, which then ends the cluster itself.
	c.process.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
	out, err := c.process.StdoutPipe()
	d.must(err)
	d.must(c.process.Start())
	ready := make(chan string, 1)
	go c.listen(out, ready)
	d.undo = append(d.undo, c.stop)
	select {
	case c.manager = <-ready:
	case err := <-c.ended:
		c.ended <- err
		d.must(fmt.Errorf("weft dev ended: %w", err))
	case <-time.After(patience):
		d.must(errors.New("weft dev is not ready"))
	case <-d.ctx.Done():
		d.must(d.ctx.Err())
	}
	d.cluster = c
}

// listen prints the cluster's output, and sends the manager's address when it is ready.
func (c *cluster) listen(out io.Reader, ready chan<- string) {
	manager := ""
	for lines := bufio.NewScanner(out); lines.Scan(); {
		line := strings.TrimPrefix(lines.Text(), "weft dev: ")
		if strings.HasPrefix(line, "try: ") {
			ready <- manager
			continue
		}
		fmt.Println("   ", line)
		if fields := strings.Fields(line); len(fields) == 2 && fields[0] == "manager" {
			manager = fields[1]
		}
	}
	c.ended <- c.process.Wait()
}

func (c *cluster) stop() error {
	if err := c.process.Process.Signal(os.Interrupt); err != nil {
		return err
	}
	select {
	case err := <-c.ended:
		return err
	case <-time.After(patience):
		return errors.Join(errors.New("weft dev does not exit"), c.process.Process.Kill())
	}
}

// call runs a weft command and returns its output.
func (d *demo) call(args ...string) (string, error) {
	return operator.Operator{Program: d.weft, Manager: d.cluster.manager}.Try(d.ctx, append(args, "--timeout", patience.String())...)
}

// typed prints a command and its output, as an operator would see them.
func (d *demo) typed(args ...string) string {
	fmt.Printf("  $ weft %s\n", strings.Join(args, " "))
	out, err := d.call(args...)
	d.must(err)
	for line := range strings.Lines(out) {
		fmt.Print("    ", line)
	}
	return strings.TrimSpace(out)
}

// state is the manager's view of the volume.
type state struct {
	Health string `json:"health"`
	Legs   []struct {
		Column int    `json:"column"`
		Copy   int    `json:"copy"`
		Node   string `json:"node"`
	} `json:"legs"`
}

func (d *demo) describe() state {
	out, err := d.call("volume", "describe", volume, "-o", "json")
	d.must(err)
	var s state
	d.must(json.Unmarshal([]byte(out), &s))
	return s
}

func (d *demo) exists() bool {
	out, err := d.call("volume", "list")
	d.must(err)
	return strings.Contains(out, "\n"+volume+" ")
}

// holder is the target that holds a leg.
func (d *demo) holder(column, copy int) string {
	for _, l := range d.describe().Legs {
		if l.Column == column && l.Copy == copy {
			return l.Node
		}
	}
	d.must(fmt.Errorf("no leg %d.%d", column, copy))
	return ""
}

func (d *demo) awaitHealthy() {
	d.eventually("the volume is healthy", func() bool { return d.describe().Health == "healthy" })
}

// eventually waits until a condition holds.
func (d *demo) eventually(what string, is func() bool) {
	for end := time.Now().Add(patience); !is(); {
		if time.Now().After(end) {
			d.must(fmt.Errorf("not in %v: %s", patience, what))
		}
		select {
		case <-d.ctx.Done():
			d.must(d.ctx.Err())
		case <-time.After(50 * time.Millisecond):
		}
	}
}

// news returns the texts of the volume's events of a kind since the last call.
func (d *demo) news(kind string) (texts []string) {
	out, err := d.call("event", "list", "--object", "volume "+volume, "-o", "json")
	d.must(err)
	var list struct {
		Events []struct {
			Seq        uint64
			Kind, Text string
		} `json:"events"`
	}
	d.must(json.Unmarshal([]byte(out), &list))
	for _, e := range list.Events {
		if e.Kind == kind && e.Seq > d.seen {
			texts = append(texts, e.Text)
		}
	}
	if n := len(list.Events); n > 0 {
		d.seen = list.Events[n-1].Seq
	}
	return texts
}
