// SPDX-License-Identifier: Apache-2.0

package main

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sync/errgroup"

	"weft.dev/weft/deploy/binary"
)

// Media types of the OCI image format, 1.1.
const (
	typeIndex    = "application/vnd.oci.image.index.v1+json"
	typeManifest = "application/vnd.oci.image.manifest.v1+json"
	typeConfig   = "application/vnd.oci.image.config.v1+json"
	typeLayer    = "application/vnd.oci.image.layer.v1.tar+gzip"
)

// descriptor refers to a blob.
type descriptor struct {
	MediaType   string            `json:"mediaType"`
	Digest      string            `json:"digest"`
	Size        int               `json:"size"`
	Platform    *platform         `json:"platform,omitempty"`
	Annotations map[string]string `json:"annotations,omitempty"`
}

type platform struct {
	Architecture string `json:"architecture"`
	OS           string `json:"os"`
}

type manifest struct {
	SchemaVersion int               `json:"schemaVersion"`
	MediaType     string            `json:"mediaType"`
	Config        descriptor        `json:"config"`
	Layers        []descriptor      `json:"layers"`
	Annotations   map[string]string `json:"annotations,omitempty"`
}

type index struct {
	SchemaVersion int          `json:"schemaVersion"`
	MediaType     string       `json:"mediaType"`
	Manifests     []descriptor `json:"manifests"`
}

type config struct {
	Created      string        `json:"created"`
	Architecture string        `json:"architecture"`
	OS           string        `json:"os"`
	Config       runtimeConfig `json:"config"`
	RootFS       rootFS        `json:"rootfs"`
	History      []history     `json:"history"`
}

type runtimeConfig struct {
	Env        []string
	Entrypoint []string
	WorkingDir string
	Labels     map[string]string
}

type rootFS struct {
	Type    string   `json:"type"`
	DiffIDs []string `json:"diff_ids"`
}

type history struct {
	Created   string `json:"created"`
	CreatedBy string `json:"created_by"`
}

// image is an image as a set of blobs, by digest.
type image struct {
	reference string // NAME:TAG
	tag       string
	manifest  descriptor
	config    descriptor
	layers    []descriptor
	blobs     map[string][]byte
}

func digestOf(content []byte) string { return fmt.Sprintf("sha256:%x", sha256.Sum256(content)) }

// newImage makes an image of two layers: one that rarely changes, and one with our program.
func newImage(o options, from binary.Source, base, ours tree) (*image, error) {
	created := from.Created.Format(time.RFC3339)
	labels := labelsOf(o, from)
	i := &image{reference: o.name + ":" + o.version, tag: o.version, blobs: map[string][]byte{}}
	c := config{
		Created: created, Architecture: architecture, OS: "linux",
		Config: runtimeConfig{
			Env:        []string{"PATH=/usr/bin:/usr/sbin"},
			Entrypoint: []string{"/usr/bin/weft"},
			WorkingDir: "/",
			Labels:     labels,
		},
		RootFS: rootFS{Type: "layers"},
	}
	parts := []tree{base, ours}
	packed := make([]layer, len(parts))
	var all errgroup.Group
	for n, part := range parts {
		all.Go(func() (err error) {
			packed[n], err = pack(part)
			return err
		})
	}
	err := all.Wait()
	if err != nil {
		return nil, err
	}
	for n, what := range []string{"packages of the distribution", "weft"} {
		i.layers = append(i.layers, i.put(typeLayer, packed[n].compressed))
		c.RootFS.DiffIDs = append(c.RootFS.DiffIDs, packed[n].diff)
		c.History = append(c.History, history{Created: created, CreatedBy: what})
	}
	if i.config, err = i.putJSON(typeConfig, c); err != nil {
		return nil, err
	}
	i.manifest, err = i.putJSON(typeManifest, manifest{
		SchemaVersion: 2, MediaType: typeManifest, Config: i.config, Layers: i.layers, Annotations: labels,
	})
	return i, err
}

// labelsOf are the annotations that OCI defines (image-spec, annotations.md).
func labelsOf(o options, from binary.Source) map[string]string {
	labels := map[string]string{
		"org.opencontainers.image.title":       "weft",
		"org.opencontainers.image.description": "Block storage over NVMe-oF: volume manager, agents, CSI driver",
		"org.opencontainers.image.vendor":      "Weft",
		"org.opencontainers.image.licenses":    "Apache-2.0",
		"org.opencontainers.image.url":         "https://weft.dev",
		"org.opencontainers.image.version":     o.version,
		"org.opencontainers.image.created":     from.Created.Format(time.RFC3339),
	}
	if from.Revision != "" {
		labels["org.opencontainers.image.revision"] = from.Revision
	}
	return labels
}

func (i *image) put(mediaType string, content []byte) descriptor {
	d := descriptor{MediaType: mediaType, Digest: digestOf(content), Size: len(content)}
	i.blobs[d.Digest] = content
	return d
}

func (i *image) putJSON(mediaType string, v any) (descriptor, error) {
	content, err := json.Marshal(v)
	if err != nil {
		return descriptor{}, err
	}
	return i.put(mediaType, content), nil
}

// files are the files of the image's layout (image-spec, image-layout.md).
func (i *image) files() (map[string][]byte, error) {
	entry := i.manifest
	entry.Platform = &platform{Architecture: architecture, OS: "linux"}
	entry.Annotations = map[string]string{
		"org.opencontainers.image.ref.name": i.tag,
		"io.containerd.image.name":          i.reference,
	}
	list, err := json.Marshal(index{SchemaVersion: 2, MediaType: typeIndex, Manifests: []descriptor{entry}})
	if err != nil {
		return nil, err
	}
	files := map[string][]byte{
		"oci-layout": []byte(`{"imageLayoutVersion":"1.0.0"}`),
		"index.json": list,
	}
	for digest, content := range i.blobs {
		files[blobPath(digest)] = content
	}
	return files, nil
}

func blobPath(digest string) string { return "blobs/sha256/" + digest[len("sha256:"):] }

// writeLayout writes the image as a directory, and replaces an existing one.
func (i *image) writeLayout(dir string) error {
	files, err := i.files()
	if err != nil {
		return err
	}
	if err := os.RemoveAll(dir); err != nil {
		return err
	}
	for name, content := range files {
		file := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(file, content, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// writeArchive writes the layout as one file. It adds a manifest.json for tools that know
// only Docker's archives.
func (i *image) writeArchive(path string) error {
	files, err := i.files()
	if err != nil {
		return err
	}
	var layers []string
	for _, l := range i.layers {
		layers = append(layers, blobPath(l.Digest))
	}
	files["manifest.json"], err = json.Marshal([]map[string]any{{
		"Config": blobPath(i.config.Digest), "RepoTags": []string{i.reference}, "Layers": layers,
	}})
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	out := tar.NewWriter(&archive)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if err := add(out, name, file{mode: 0o644, content: files[name]}); err != nil {
			return err
		}
	}
	if err := out.Close(); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return errors.Join(os.WriteFile(path+".new", archive.Bytes(), 0o644), os.Rename(path+".new", path))
}
