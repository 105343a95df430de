// SPDX-License-Identifier: Apache-2.0

package member

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	"weft.dev/weft/cmd/internal/daemon"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/durable"
	"weft.dev/weft/proto/pki"
)

// Contexts are the clusters that a person is logged in to, in one directory that only its owner
// reads:
//
//	contexts.json  Contexts
//	NAME.pem       the credential of a context
type Contexts struct {
	Current  string             `json:"current,omitempty"`
	Contexts map[string]Context `json:"contexts"`

	dir string
}

// Context is one cluster that a person is logged in to.
type Context struct {
	Managers string `json:"managers"` // addresses, separated by commas
}

// contextsDir is the directory of this user; empty if there is none.
func contextsDir() string {
	if dir := os.Getenv("XDG_CONFIG_HOME"); dir != "" {
		return filepath.Join(dir, "weft")
	}
	home, err := os.UserHomeDir()
	if err != nil {
		return ""
	}
	return filepath.Join(home, ".config/weft")
}

// ReadContexts reads the contexts of this user; there may be none.
func ReadContexts() (*Contexts, error) {
	c := &Contexts{dir: contextsDir(), Contexts: map[string]Context{}}
	if c.dir == "" {
		return c, nil
	}
	text, err := os.ReadFile(c.file())
	if errors.Is(err, fs.ErrNotExist) {
		return c, nil
	}
	if err != nil {
		return nil, err
	}
	d := json.NewDecoder(bytes.NewReader(text))
	d.DisallowUnknownFields()
	if err := d.Decode(c); err != nil {
		return nil, fmt.Errorf("%s: %w", c.file(), err)
	}
	return c, nil
}

func (c *Contexts) file() string { return filepath.Join(c.dir, "contexts.json") }

// write replaces the file.
func (c *Contexts) write() error {
	if c.dir == "" {
		return errors.New("this user has no home, and XDG_CONFIG_HOME is not set")
	}
	if err := os.MkdirAll(c.dir, 0o700); err != nil {
		return err
	}
	text, err := json.MarshalIndent(c, "", "  ")
	if err != nil {
		return err
	}
	return durable.Write(c.file(), string(text)+"\n", 0o600)
}

// Names lists the contexts.
func (c *Contexts) Names() []string { return slices.Sorted(maps.Keys(c.Contexts)) }

// Files is the credential of a context.
func (c *Contexts) Files(name string) daemon.TLSFiles {
	return daemon.TLSFiles{Identity: filepath.Join(c.dir, name+".pem")}
}

// Find returns a context by its name, or the current one if name is empty. ok is false if there is
// no current one.
func (c *Contexts) Find(name string) (found Context, files daemon.TLSFiles, ok bool, err error) {
	if name == "" {
		name = c.Current
	}
	if name == "" {
		return found, files, false, nil
	}
	found, ok = c.Contexts[name]
	if !ok {
		return found, files, false, fmt.Errorf("context %q: there is none; `weft context list` lists them", name)
	}
	return found, c.Files(name), true, nil
}

// Use makes a context the current one.
func (c *Contexts) Use(name string) error {
	if _, _, _, err := c.Find(name); err != nil {
		return err
	}
	c.Current = name
	return c.write()
}

// LogIn joins a cluster as a person, and makes that the current context.
func (c *Contexts) LogIn(ctx context.Context, name, managers string, token pki.Token) (*pki.Credential, error) {
	if _, err := block.ParseNodeName(name); err != nil {
		return nil, fmt.Errorf("context %q: %w", name, errors.Unwrap(err))
	}
	if c.dir == "" {
		return nil, c.write()
	}
	got, err := Join(ctx, managers, token, c.Files(name).Identity)
	if err != nil {
		return nil, err
	}
	c.Contexts[name], c.Current = Context{Managers: managers}, name
	return got, c.write()
}

// LogOut removes a context and its key.
func (c *Contexts) LogOut(name string) error {
	if _, _, _, err := c.Find(name); err != nil {
		return err
	}
	delete(c.Contexts, name)
	if c.Current == name {
		c.Current = ""
	}
	if err := os.Remove(c.Files(name).Identity); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return c.write()
}

// Refresh renews the credential of a person if that is due. It takes a moment of a command now and
// then; a person who gives none for a week logs in again.
func Refresh(ctx context.Context, managers string, files daemon.TLSFiles) {
	c, err := pki.ReadCredential(files.Identity)
	if err != nil || c.Cert == nil || c.Expired(time.Now()) || time.Now().Before(c.RenewAt()) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, 3*time.Second)
	defer cancel()
	_ = Renew(ctx, managers, files) // it is good for some more days, and the next command tries again
}
