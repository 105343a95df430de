// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
)

// pack is what a package says of itself.
type pack struct {
	version, arch string
	needs         []string
	buildHost     string // of an .rpm
	files         map[string]packed
	scripts       map[string]string // by the names that nfpm gives them
}

type packed struct {
	mode    int64 // permission bits
	owner   string
	content []byte
	kept    bool // an operator's changes survive an upgrade
}

func gunzip(data []byte) ([]byte, error) {
	z, err := gzip.NewReader(bytes.NewReader(data))
	if err != nil {
		return nil, err
	}
	return io.ReadAll(z)
}

// ---- Debian: an ar archive of two tar archives (man 5 deb) ----

func readDeb(file string) (*pack, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	members, err := readAr(data)
	if err != nil {
		return nil, err
	}
	control, err := readTar(members["control.tar.gz"])
	if err != nil {
		return nil, fmt.Errorf("control.tar.gz: %w", err)
	}
	p := &pack{scripts: map[string]string{
		"postinstall": string(control["/postinst"].content),
		"preremove":   string(control["/prerm"].content),
		"postremove":  string(control["/postrm"].content),
	}}
	if p.files, err = readTar(members["data.tar.gz"]); err != nil {
		return nil, fmt.Errorf("data.tar.gz: %w", err)
	}
	for line := range strings.Lines(string(control["/control"].content)) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "Version":
			p.version = value
		case "Architecture":
			p.arch = value
		case "Depends":
			p.needs = strings.Split(value, ", ")
		}
	}
	for name := range strings.FieldsSeq(string(control["/conffiles"].content)) {
		f := p.files[name]
		f.kept = true
		p.files[name] = f
	}
	return p, nil
}

// readAr reads the members of an ar archive, each behind a header of 60 bytes.
func readAr(data []byte) (map[string][]byte, error) {
	rest, ok := bytes.CutPrefix(data, []byte("!<arch>\n"))
	if !ok {
		return nil, errors.New("not an ar archive")
	}
	members := map[string][]byte{}
	for len(rest) >= 60 {
		name := strings.TrimRight(string(rest[:16]), " /")
		size, err := strconv.Atoi(strings.TrimSpace(string(rest[48:58])))
		if err != nil || 60+size > len(rest) {
			return nil, fmt.Errorf("member %s: size %q", name, rest[48:58])
		}
		members[name] = rest[60 : 60+size]
		rest = rest[min(60+size+size%2, len(rest)):]
	}
	return members, nil
}

func readTar(compressed []byte) (map[string]packed, error) {
	data, err := gunzip(compressed)
	if err != nil {
		return nil, err
	}
	files := map[string]packed{}
	for in := tar.NewReader(bytes.NewReader(data)); ; {
		h, err := in.Next()
		if errors.Is(err, io.EOF) {
			return files, nil
		}
		if err != nil {
			return nil, err
		}
		if h.Typeflag != tar.TypeReg {
			continue
		}
		content, err := io.ReadAll(in)
		if err != nil {
			return nil, err
		}
		files[strings.TrimPrefix(h.Name, ".")] = packed{mode: h.Mode & 0o7777, owner: h.Uname, content: content}
	}
}

// ---- Red Hat: a lead, two headers of tags, and a cpio archive (rpm.org, "RPM V4 Package format") ----

const (
	tagVersion      = 1001
	tagBuildHost    = 1007
	tagArch         = 1022
	tagPostInstall  = 1024
	tagPreRemove    = 1025
	tagPostRemove   = 1026
	tagFileModes    = 1030
	tagFileFlags    = 1037
	tagFileOwners   = 1039
	tagRequireNames = 1049
	tagDirIndexes   = 1116
	tagBaseNames    = 1117
	tagDirNames     = 1118

	fileIsConfig    = 1 << 0
	fileIsNoReplace = 1 << 4
)

func readRPM(file string) (*pack, error) {
	data, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	const lead = 96
	_, n, err := readTags(data[lead:])
	if err != nil {
		return nil, fmt.Errorf("signature: %w", err)
	}
	rest := data[lead+(n+7)/8*8:]
	tags, n, err := readTags(rest)
	if err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	archive, err := gunzip(rest[n:])
	if err != nil {
		return nil, err
	}
	contents, err := readCPIO(archive)
	if err != nil {
		return nil, err
	}
	p := &pack{
		version: tags.text(tagVersion), arch: tags.text(tagArch), buildHost: tags.text(tagBuildHost),
		needs: tags.texts(tagRequireNames), files: map[string]packed{},
		scripts: map[string]string{
			"postinstall": tags.text(tagPostInstall), "preremove": tags.text(tagPreRemove), "postremove": tags.text(tagPostRemove),
		},
	}
	dirs, owners := tags.texts(tagDirNames), tags.texts(tagFileOwners)
	for i, base := range tags.texts(tagBaseNames) {
		name := dirs[tags.number(tagDirIndexes, i, 4)] + base
		mode, flags := tags.number(tagFileModes, i, 2), tags.number(tagFileFlags, i, 4)
		const regular, kind = 0o100000, 0o170000
		if mode&kind != regular {
			continue
		}
		content, ok := contents[name]
		if !ok {
			return nil, fmt.Errorf("%s is listed and not in the archive", name)
		}
		p.files[name] = packed{
			mode: int64(mode & 0o7777), owner: owners[i], content: content,
			kept: flags&fileIsConfig != 0 && flags&fileIsNoReplace != 0,
		}
	}
	return p, nil
}

// rpmTags are the values of a header, by tag, as they lie there.
type rpmTags map[uint32]rpmValue

type rpmValue struct {
	count uint32
	data  []byte // to the header's end
}

// readTags reads a header and returns its length.
func readTags(data []byte) (rpmTags, int, error) {
	const intro, entry = 16, 16
	if len(data) < intro || !bytes.HasPrefix(data, []byte{0x8e, 0xad, 0xe8, 0x01}) {
		return nil, 0, errors.New("no header")
	}
	count, size := int(binary.BigEndian.Uint32(data[8:])), int(binary.BigEndian.Uint32(data[12:]))
	end := intro + count*entry + size
	if end > len(data) {
		return nil, 0, fmt.Errorf("%d entries and %d bytes do not fit", count, size)
	}
	values := data[intro+count*entry : end]
	tags := rpmTags{}
	for i := range count {
		e := data[intro+i*entry:]
		offset := binary.BigEndian.Uint32(e[8:])
		tags[binary.BigEndian.Uint32(e)] = rpmValue{binary.BigEndian.Uint32(e[12:]), values[offset:]}
	}
	return tags, end, nil
}

func (t rpmTags) texts(tag uint32) (all []string) {
	rest := t[tag].data
	for range t[tag].count {
		text, after, _ := bytes.Cut(rest, []byte{0})
		all, rest = append(all, string(text)), after
	}
	return all
}

func (t rpmTags) text(tag uint32) string { return strings.Join(t.texts(tag), "\n") }

func (t rpmTags) number(tag uint32, i, bytes int) uint32 {
	at := t[tag].data[i*bytes:]
	if bytes == 2 {
		return uint32(binary.BigEndian.Uint16(at))
	}
	return binary.BigEndian.Uint32(at)
}

// readCPIO reads the files of a cpio archive with ASCII headers of 110 bytes.
func readCPIO(data []byte) (map[string][]byte, error) {
	files := map[string][]byte{}
	padded := func(n int) int { return (n + 3) / 4 * 4 }
	for len(data) > 110 {
		field := func(i int) int {
			n, err := strconv.ParseUint(string(data[6+8*i:14+8*i]), 16, 32)
			if err != nil {
				return -1
			}
			return int(n)
		}
		size, length := field(6), field(11)
		if size < 0 || length < 1 || padded(110+length)+size > len(data) {
			return nil, fmt.Errorf("cpio header %q", data[:110])
		}
		name := string(data[110 : 110+length-1])
		if name == "TRAILER!!!" {
			return files, nil
		}
		start := padded(110 + length)
		files[strings.TrimPrefix(name, ".")] = data[start : start+size]
		data = data[min(padded(start+size), len(data)):]
	}
	return nil, errors.New("cpio archive without an end")
}
