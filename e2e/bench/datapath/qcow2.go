// SPDX-License-Identifier: Apache-2.0

package datapath

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// qcow2Lab compares mapped legs of Weft's target with qcow2 images of qemu-storage-daemon.
type qcow2Lab struct {
	dir     string
	cpu     int // of the servers
	client  *process
	direct  bool // past the page cache
	missing error
	files   int
}

// image is a form of qcow2. A cluster has 32 subclusters, which are what a first write copies.
type image struct {
	name    string
	cluster string
}

// images: with clusters of 512 KiB a subcluster is as large as Weft's grain; with 1 MiB a cluster is
// as large as Weft's chunk.
var images = []image{{"qcow2, 512 KiB", "512k"}, {"qcow2, 1 MiB", "1M"}}

func (q *qcow2Lab) contests() ([]contest, error) {
	file := filepath.Join(q.dir, "raw")
	if err := fillFile(file); err != nil {
		return nil, err
	}
	s, err := ours("weft", job{Kind: "host"}, q.cpu, "file", file)
	if err != nil {
		return nil, err
	}
	weft := contest{"Weft", ofServer(q.client, s), []subject{{"mapped leg", q.leg, true}}}
	q.missing = installed("qemu-storage-daemon", "qemu-img")
	if q.missing != nil {
		return []contest{weft}, nil
	}
	theirs := contest{way: "QEMU"}
	d, err := q.daemon("--blockdev", q.fileNode("n", file))
	if err != nil {
		s.stop()
		return nil, fmt.Errorf("export a plain file: %w", err)
	}
	theirs.raw = d.measured(q.client)
	for _, i := range images {
		theirs.subjects = append(theirs.subjects, subject{i.name, func(s state) (measured, error) { return q.prepared(i, s) }, false})
	}
	return []contest{weft, theirs}, nil
}

// fillFile makes a file of which every block is there.
func fillFile(path string) error {
	d, err := newFile(path, deviceSize)
	if err != nil {
		return err
	}
	return errors.Join(fill(plainDevice{d}, int64(deviceSize)), d.Close())
}

// installed says which of the programs is not there.
func installed(programs ...string) error {
	for _, p := range programs {
		if _, err := lookUp(p); err != nil {
			return err
		}
	}
	return nil
}

// newPath is the path of a file that was not used before.
func (q *qcow2Lab) newPath() string {
	q.files++
	return filepath.Join(q.dir, strconv.Itoa(q.files))
}

// leg is a mapped leg in a state, in a target of its own.
func (q *qcow2Lab) leg(s state) (measured, error) {
	file := q.newPath()
	got, err := ours("mapped leg", job{Kind: "host"}, q.cpu, "mapped", file, string(s))
	if err != nil {
		return measured{}, err
	}
	m := ofServer(q.client, got)
	m.close = func() { got.stop(); os.Remove(file) }
	return m, nil
}

func (q *qcow2Lab) fileNode(name, file string) string {
	return fmt.Sprintf("driver=file,node-name=%s,filename=%s,cache.direct=%s", name, file, map[bool]string{true: "on", false: "off"}[q.direct])
}

// newImage is a daemon with a new image.
func (q *qcow2Lab) newImage(i image) (*storageDaemon, error) {
	file := q.newPath()
	out, err := exec.Command("qemu-img", "create", "-q", "-f", "qcow2", "-o", "extended_l2=on,cluster_size="+i.cluster, file, strconv.FormatUint(uint64(deviceSize), 10)).CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("qemu-img create: %w: %s", err, out)
	}
	d, err := q.daemon("--blockdev", q.fileNode("f", file), "--blockdev", "driver=qcow2,node-name=n,file=f")
	if err != nil {
		return nil, errors.Join(err, os.Remove(file))
	}
	d.file = file
	return d, nil
}

// prepared is an image in a state.
func (q *qcow2Lab) prepared(i image, s state) (measured, error) {
	d, err := q.newImage(i)
	if err != nil {
		return measured{}, err
	}
	if err := prepare(d, s, int64(deviceSize)); err != nil {
		d.close()
		return measured{}, err
	}
	return d.measured(q.client), nil
}

// storageDaemon is a qemu-storage-daemon that exports its node n over NBD, while it takes orders in
// QMP. It is also a client of its export, for versions.
type storageDaemon struct {
	server  *server
	control net.Conn
	answers *bufio.Reader
	writes  pipe
	buf     []byte
	file    string // deleted at the end, unless empty
}

func (q *qcow2Lab) daemon(nodes ...string) (*storageDaemon, error) {
	port, err := freePort()
	if err != nil {
		return nil, err
	}
	socket := q.newPath() + ".qmp"
	args := append(nodes, "--chardev", "socket,id=q,server=on,wait=off,path="+socket, "--monitor", "chardev=q",
		"--nbd-server", "addr.type=inet,addr.host=127.0.0.1,addr.port="+port, "--export", "type=nbd,id=e,node-name=n,name=x,writable=on")
	d := &storageDaemon{}
	d.server, err = theirs("qemu-storage-daemon", job{Kind: "nbd", Form: blocking, Address: "127.0.0.1:" + port, Export: "x"}, q.cpu, "qemu-storage-daemon", args...)
	if err != nil {
		return nil, err
	}
	if err := d.open(socket); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *storageDaemon) open(socket string) (err error) {
	if d.control, err = net.Dial("unix", socket); err != nil {
		return err
	}
	d.answers = bufio.NewReader(d.control)
	if err := d.order("qmp_capabilities", map[string]any{}); err != nil {
		return err
	}
	if d.writes, err = dial(blocking, d.server.job.Address); err != nil {
		return err
	}
	return nbd{export: "x"}.greet(d.writes)
}

// order gives the daemon an order and waits until it is carried out.
func (d *storageDaemon) order(name string, arguments map[string]any) error {
	text, err := json.Marshal(map[string]any{"execute": name, "arguments": arguments})
	if err != nil {
		return err
	}
	if err := d.control.SetDeadline(time.Now().Add(answerTime)); err != nil {
		return err
	}
	if _, err := d.control.Write(append(text, '\n')); err != nil {
		return err
	}
	for {
		line, err := d.answers.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("QMP: %s: %w", name, err)
		}
		var answer struct {
			Return *json.RawMessage
			Error  *struct{ Desc string }
		}
		if err := json.Unmarshal(line, &answer); err != nil {
			return fmt.Errorf("QMP: %s: %w", name, err)
		}
		switch {
		case answer.Error != nil:
			return fmt.Errorf("QMP: %s: %s", name, answer.Error.Desc)
		case answer.Return != nil: // others are the greeting and events
			return nil
		}
	}
}

func (d *storageDaemon) write(off, n int64) error {
	d.buf = nbd{}.request(d.buf[:0], 0, true, off, int(n))
	if _, err := d.writes.Write(d.buf); err != nil {
		return err
	}
	answer := make([]byte, 16)
	if _, err := io.ReadFull(d.writes, answer); err != nil {
		return err
	}
	_, _, err := nbd{}.reply(answer, []int{0})
	return err
}

func (d *storageDaemon) snapshot(n int) error {
	return d.order("blockdev-snapshot-internal-sync", map[string]any{"device": "n", "name": strconv.Itoa(n)})
}

func (d *storageDaemon) measured(client *process) measured {
	m := ofServer(client, d.server)
	m.close = d.close
	return m
}

func (d *storageDaemon) close() {
	if d.control != nil {
		d.control.Close()
	}
	if d.writes != nil {
		d.writes.Close()
	}
	d.server.stop()
	if d.file != "" {
		os.Remove(d.file)
	}
}

// qcow2Life is an image whose internal snapshots come and go.
type qcow2Life struct {
	lab *qcow2Lab
	*storageDaemon
}

func (q *qcow2Life) name() string { return images[0].name }

func (q *qcow2Life) begin() (err error) {
	q.storageDaemon, err = q.lab.newImage(images[0])
	return err
}

// clone cannot be done: a device that begins as an internal snapshot would be a copy.
func (*qcow2Life) clone(int) error { return errors.ErrUnsupported }

func (q *qcow2Life) remove(n int, clone bool) error {
	if clone {
		return errors.ErrUnsupported
	}
	return q.order("blockdev-snapshot-delete-internal-sync", map[string]any{"device": "n", "name": strconv.Itoa(n)})
}

// written is what the daemon's write calls have written, the few bytes of its answers among them.
func (q *qcow2Life) written() (int64, error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/io", q.server.pid))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) {
		if n, ok := strings.CutPrefix(line, "wchar: "); ok {
			return strconv.ParseInt(strings.TrimSpace(n), 10, 64)
		}
	}
	return 0, errors.New("the kernel does not count what a process writes")
}

func (q *qcow2Life) end() {
	if q.storageDaemon != nil {
		q.close()
	}
}
