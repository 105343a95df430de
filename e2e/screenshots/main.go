// SPDX-License-Identifier: Apache-2.0

// Command screenshots photographs the console: it runs "weft dev" with a few volumes, and
// "weft console", and has Chromium show each page, light and dark, healthy and with a lost target.
// The volumes are in use meanwhile, at a modest pace: the figures in the pictures are no measurement.
//
//	screenshots ─ logs in ─► weft console ─► weft dev
//	     ▲                        ▲
//	     └──── a proxy that adds the cookie ◄── chromium --headless --screenshot
//
// The link of the console is good once, and each run of Chromium begins without cookies; so Chromium
// asks a proxy, which holds the cookie.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"
)

func main() {
	program := flag.String("weft", "bin/weft", "the `program`")
	out := flag.String("out", "bin/screenshots", "`directory` of the pictures")
	browser := flag.String("browser", "chromium", "the `program` that shows pages")
	walk := flag.Bool("walk", false, "take the pictures of docs/walk.md: a drive fails and is replaced")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, *program, *out, *browser, *walk); err != nil {
		fmt.Fprintln(os.Stderr, "screenshots:", err)
		os.Exit(1) //nolint:gocritic // nothing is left to stop
	}
}

// shoot is the work under way.
type shoot struct {
	weft, out, browser string
	dir                string
	env                []string
}

// targets of the cluster, in racks of two.
const targets = 6

func run(ctx context.Context, weft, out, browser string, walk bool) (retErr error) {
	browser, err := exec.LookPath(browser)
	if err != nil {
		return fmt.Errorf("%w: install it, for instance with `apt-get install chromium`, or name another with -browser", err)
	}
	dir := filepath.Join(os.TempDir(), "weft") // pages show it: it says nothing about this machine
	if err := os.Mkdir(dir, 0o700); err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	s := &shoot{weft: weft, out: out, browser: browser, dir: dir}
	s.env = append(os.Environ(), "WEFT_MANAGER=unix:"+filepath.Join(dir, "dev", "manager"), "XDG_CONFIG_HOME="+dir)
	ctx, stop := context.WithCancel(ctx)
	dev, err := s.start(ctx, "try:", "dev", "--dir", filepath.Join(dir, "dev"), "--targets", fmt.Sprint(targets), "--drive-size", "8GiB", "--block-device", "none")
	if err != nil {
		stop()
		return err
	}
	defer func() { stop(); dev.wait() }()
	if err := s.fill(ctx, walk); err != nil {
		return err
	}
	console, err := s.start(ctx, "http://", "console")
	if err != nil {
		return err
	}
	defer func() { stop(); console.wait() }()
	at, err := proxy(ctx, console.said)
	if err != nil {
		return err
	}
	if err := s.load(ctx); err != nil {
		return err
	}
	time.Sleep(12 * time.Second) // as far back as figures go
	if walk {
		return s.walk(ctx, at)
	}
	if err := s.all(ctx, at, healthy); err != nil {
		return err
	}
	if err := s.weftDo(ctx, "dev", "stop-target", "t2", "--dir", filepath.Join(dir, "dev")); err != nil {
		return err
	}
	time.Sleep(15 * time.Second) // until the host has given up the legs, and the manager says that the target is offline
	return s.all(ctx, at, lost)
}

// page is what is photographed.
type page struct {
	name, path string
	height     int
}

var healthy = []page{
	{"now", "/", 1150}, {"volumes", "/volumes", 900}, {"volume", "/volumes/db1", 1500}, {"thin-volume", "/volumes/train", 1700}, {"snapshot", "/volumes/train@epoch-2", 1500}, {"drives", "/drives", 1300},
	{"hosts", "/hosts", 800}, {"what-if", "/what-if?kind=rack&name=r1", 1250}, {"events", "/events", 1000}, {"access", "/access", 1100}, {"node", "/nodes/t1", 1500},
}

var lost = []page{{"now-lost-target", "/", 1500}, {"volumes-lost-target", "/volumes", 900}, {"volume-lost-target", "/volumes/db1", 1700}}

// process is a running weft.
type process struct {
	cmd  *exec.Cmd
	said string // the line that was waited for
	done chan error
}

func (p *process) wait() { <-p.done }

// start starts weft, and waits for a line.
func (s *shoot) start(ctx context.Context, word string, args ...string) (*process, error) {
	cmd := exec.CommandContext(ctx, s.weft, args...)
	cmd.Env, cmd.Stderr = s.env, os.Stderr
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 10 * time.Second
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	p := &process{cmd: cmd, done: make(chan error, 1)}
	lines := bufio.NewScanner(stdout)
	for lines.Scan() {
		if strings.Contains(lines.Text(), word) {
			p.said = lines.Text()
			break
		}
	}
	go func() {
		for lines.Scan() { // it must not wait for a reader
		}
		p.done <- cmd.Wait()
	}()
	if p.said == "" {
		return nil, fmt.Errorf("weft %s ended: %w", strings.Join(args, " "), <-p.done)
	}
	return p, nil
}

// weftDo runs a command.
func (s *shoot) weftDo(ctx context.Context, args ...string) error {
	cmd := exec.CommandContext(ctx, s.weft, args...)
	cmd.Env = s.env
	if text, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("weft %s: %w\n%s", strings.Join(args, " "), err, text)
	}
	return nil
}

// says returns what a command prints.
func (s *shoot) says(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, s.weft, args...)
	cmd.Env = s.env
	text, err := cmd.Output()
	if err != nil {
		err = fmt.Errorf("weft %s: %w", strings.Join(args, " "), err)
	}
	return string(text), err
}

// read fills list with what a command prints as JSON.
func (s *shoot) read(ctx context.Context, list any, args ...string) error {
	text, err := s.says(ctx, append(args, "-o", "json")...)
	if err == nil {
		err = json.Unmarshal([]byte(text), list)
	}
	return err
}

// fill makes the volumes that the pictures show. In the walk each has two copies, since a drive is lost.
func (s *shoot) fill(ctx context.Context, walk bool) error {
	var commands [][]string
	for i := range targets {
		commands = append(commands, []string{"node", "label", fmt.Sprintf("t%d", i+1), fmt.Sprintf("rack=r%d", i/2+1)})
	}
	texts := []string{
		"volume create db1 --size 2GiB --stripes 3 --copies 2 --spread rack --wait", "volume create media --size 6GiB --stripes 4 --copies 2 --wait",
		"volume create vault --size 1GiB --stripes 1 --copies 3 --wait", "volume create scratch --size 1GiB --stripes 2 --copies 1 --wait",
		"volume create registry --size 3GiB --stripes 2 --copies 2 --label tier=gold --wait", "attach db1", "attach media", "attach registry",
		"volume create train --size 2GiB --copies 2 --thin --wait", "attach train", "snapshot create train@epoch-1", "snapshot create train@epoch-2", "volume create retrain --from train@epoch-2 --wait", "detach train",
	}
	if walk {
		texts = []string{"volume create db1 --size 2GiB --stripes 3 --copies 2 --spread rack --wait", "volume create registry --size 3GiB --stripes 2 --copies 2 --wait", "attach db1", "attach registry"}
	}
	for _, text := range texts {
		commands = append(commands, strings.Fields(text))
	}
	for _, command := range commands {
		if err := s.weftDo(ctx, command...); err != nil {
			return err
		}
	}
	return nil
}

// proxy logs in with a console's link, and answers for the console as the browser that did so. It
// returns its address.
func proxy(ctx context.Context, link string) (string, error) {
	at, err := url.Parse(strings.TrimSpace(link))
	if err != nil {
		return "", err
	}
	client := &http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	login, err := http.NewRequestWithContext(ctx, http.MethodPost, "http://"+at.Host+"/login", strings.NewReader(url.Values{"code": {at.Fragment}}.Encode()))
	if err != nil {
		return "", err
	}
	login.Header.Set("Content-Type", "application/x-www-form-urlencoded")
	answer, err := client.Do(login)
	if err != nil {
		return "", err
	}
	answer.Body.Close()
	if len(answer.Cookies()) != 1 {
		return "", fmt.Errorf("log in: %s", answer.Status)
	}
	cookie := answer.Cookies()[0]
	forward := &httputil.ReverseProxy{FlushInterval: -1, Rewrite: func(r *httputil.ProxyRequest) {
		r.SetURL(&url.URL{Scheme: "http", Host: at.Host})
		r.Out.Host = at.Host
		r.Out.AddCookie(cookie)
	}}
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	server := &http.Server{Handler: forward, ReadHeaderTimeout: 5 * time.Second}
	context.AfterFunc(ctx, func() { server.Close() })
	go server.Serve(listener) //nolint:errcheck // it ends with the program
	return "http://" + listener.Addr().String(), nil
}

// Chromium's numbers of the two themes.
const light, dark = "1", "0"

// all photographs pages, light and dark.
func (s *shoot) all(ctx context.Context, at string, pages []page) error {
	for _, p := range pages {
		for theme, scheme := range map[string]string{"light": light, "dark": dark} {
			file := filepath.Join(s.out, p.name+"-"+theme+".png")
			if err := s.one(ctx, at+p.path, file, scheme, p.height); err != nil {
				return err
			}
			fmt.Println(file)
		}
	}
	return nil
}

// one takes one picture. The scheme is Chromium's number for it.
func (s *shoot) one(ctx context.Context, address, file, scheme string, height int) error {
	ctx, cancel := context.WithTimeout(ctx, 90*time.Second)
	defer cancel()
	profile, err := os.MkdirTemp(s.dir, "profile")
	if err != nil {
		return err
	}
	cmd := exec.CommandContext(ctx, s.browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--user-data-dir="+profile,
		"--force-device-scale-factor=1", fmt.Sprintf("--window-size=1440,%d", height), "--blink-settings=preferredColorScheme="+scheme, "--screenshot="+file, address)
	text, err := cmd.CombinedOutput()
	if _, absent := os.Stat(file); err == nil && absent != nil {
		err = errors.New("it made no picture")
	}
	if err != nil {
		return fmt.Errorf("%s: %w\n%s", address, err, text)
	}
	return nil
}
