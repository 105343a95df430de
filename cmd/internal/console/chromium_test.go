// SPDX-License-Identifier: Apache-2.0

package console

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// browsers are the names under which distributions have Chromium.
var browsers = []string{"chromium", "chromium-browser", "google-chrome", "google-chrome-stable"}

// chromium is a browser without a window. It is told what to do through a pipe, in the DevTools
// protocol: JSON messages, each ended by a zero byte.
type chromium struct {
	t       testing.TB
	in      io.Writer
	session string // of a tab; empty: the browser itself

	mu    *sync.Mutex
	count *int
	calls map[int]chan reply
}

// reply is what the browser answers to a call.
type reply struct {
	ID     int             `json:"id"`
	Result json.RawMessage `json:"result"`
	Error  *struct{ Message string }
}

// answerWithin is more than a page needs on a busy machine.
const answerWithin = 30 * time.Second

// startChromium starts a browser, which ends with the test.
func startChromium(t testing.TB) *chromium {
	t.Helper()
	program := ""
	for _, name := range browsers {
		if found, err := exec.LookPath(name); err == nil && program == "" {
			program = found
		}
	}
	if program == "" {
		t.Skip("no Chromium on this machine: e2e/install.sh browser")
	}
	theirs, ours, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	answers, answering, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(program, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-pipe", "--user-data-dir="+t.TempDir(), "about:blank")
	cmd.ExtraFiles = []*os.File{theirs, answering} // 3 and 4, as the protocol has it
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	theirs.Close()
	answering.Close()
	b := &chromium{t: t, in: ours, mu: new(sync.Mutex), count: new(int), calls: map[int]chan reply{}}
	read := make(chan struct{})
	go func() {
		defer close(read)
		b.read(answers)
	}()
	t.Cleanup(func() {
		b.tell("Browser.close", nil) //nolint:errcheck // it is killed if it does not end
		stop := time.AfterFunc(5*time.Second, func() { cmd.Process.Kill() })
		<-read
		cmd.Wait() //nolint:errcheck // how it ends does not matter
		stop.Stop()
		ours.Close()
		answers.Close()
	})
	return b
}

// read hands the browser's answers to those who wait for them, until it ends.
func (b *chromium) read(from io.Reader) {
	for r := bufio.NewReader(from); ; {
		text, err := r.ReadBytes(0)
		if err != nil {
			break
		}
		var one reply
		if json.Unmarshal(text[:len(text)-1], &one) != nil || one.ID == 0 {
			continue // an event
		}
		b.mu.Lock()
		if ch := b.calls[one.ID]; ch != nil {
			ch <- one
			delete(b.calls, one.ID)
		}
		b.mu.Unlock()
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	for id, ch := range b.calls {
		close(ch)
		delete(b.calls, id)
	}
}

// tell makes a call.
func (b *chromium) tell(method string, params map[string]any) (json.RawMessage, error) {
	ch := make(chan reply, 1)
	b.mu.Lock()
	*b.count++
	id := *b.count
	b.calls[id] = ch
	message := map[string]any{"id": id, "method": method, "params": params}
	if params == nil {
		message["params"] = map[string]any{}
	}
	if b.session != "" {
		message["sessionId"] = b.session
	}
	text, err := json.Marshal(message)
	if err == nil {
		_, err = b.in.Write(append(text, 0))
	}
	b.mu.Unlock()
	if err != nil {
		return nil, err
	}
	select {
	case got, ok := <-ch:
		switch {
		case !ok:
			return nil, errors.New("the browser has ended")
		case got.Error != nil:
			return nil, errors.New(got.Error.Message)
		}
		return got.Result, nil
	case <-time.After(answerWithin):
		return nil, errors.New("no answer")
	}
}

// call is tell, and what it returns in out unless that is nil.
func (b *chromium) call(method string, params map[string]any, out any) {
	b.t.Helper()
	text, err := b.tell(method, params)
	for tries := 0; err != nil && strings.Contains(err.Error(), "navigated or closed") && tries < 50; tries++ {
		time.Sleep(100 * time.Millisecond) // the page gives way to the next one
		text, err = b.tell(method, params)
	}
	if err == nil && out != nil {
		err = json.Unmarshal(text, out)
	}
	if err != nil {
		b.t.Fatalf("chromium: %s: %v", method, err)
	}
}

// tab opens a tab, which ends with the test. All share their cookies.
func (b *chromium) tab(t testing.TB) *chromium {
	b.t.Helper()
	var made struct{ TargetID string }
	b.call("Target.createTarget", map[string]any{"url": "about:blank"}, &made)
	var attached struct{ SessionID string }
	b.call("Target.attachToTarget", map[string]any{"targetId": made.TargetID, "flatten": true}, &attached)
	tab := *b
	tab.t, tab.session = t, attached.SessionID
	tab.call("Page.enable", nil, nil)
	t.Cleanup(func() { b.call("Target.closeTarget", map[string]any{"targetId": made.TargetID}, nil) })
	return &tab
}

// activate brings a tab to the front: one that is not seen has no stream.
func (b *chromium) activate() {
	b.t.Helper()
	b.call("Page.bringToFront", nil, nil)
}

// open shows a page, and waits until it is there.
func (b *chromium) open(address string) {
	b.t.Helper()
	b.eval(`window.left = true`)
	var went struct{ ErrorText string }
	b.call("Page.navigate", map[string]any{"url": address}, &went)
	if went.ErrorText != "" {
		b.t.Fatalf("open %s: %s", address, went.ErrorText)
	}
	b.until(`!window.left && document.readyState === "complete" && location.href !== "about:blank"`)
}

// eval returns the value of an expression.
func (b *chromium) eval(expression string) any {
	b.t.Helper()
	var got struct {
		Result           struct{ Value any }
		ExceptionDetails *struct {
			Text      string
			Exception struct{ Description string }
		}
	}
	b.call("Runtime.evaluate", map[string]any{"expression": expression, "returnByValue": true, "awaitPromise": true}, &got)
	if e := got.ExceptionDetails; e != nil {
		b.t.Fatalf("%s: %s %s", expression, e.Text, e.Exception.Description)
	}
	return got.Result.Value
}

// text is the value of an expression that is a string.
func (b *chromium) text(expression string) string {
	b.t.Helper()
	return fmt.Sprint(b.eval(expression))
}

// until waits until an expression is true.
func (b *chromium) until(expression string) {
	b.t.Helper()
	deadline := time.Now().Add(answerWithin)
	for b.eval("Boolean("+expression+")") != true {
		if time.Now().After(deadline) {
			b.t.Fatalf("%s does not become true; the page is\n%s", expression, b.text(`document.body.innerText`))
		}
		time.Sleep(50 * time.Millisecond)
	}
}

// keyCodes are the codes of keys, as the protocol wants them beside their names.
var keyCodes = map[string]int{"Tab": 9, "Enter": 13, "Space": 32, "ArrowDown": 40}

// press presses a key, once or more often.
func (b *chromium) press(key string, times int) {
	b.t.Helper()
	event := map[string]any{"type": "keyDown", "key": key, "code": key, "windowsVirtualKeyCode": keyCodes[key]}
	switch key {
	case "Enter":
		event["text"] = "\r"
	case "Space":
		event["key"], event["text"] = " ", " "
	}
	for range times {
		event["type"] = "keyDown"
		b.call("Input.dispatchKeyEvent", event, nil)
		event["type"] = "keyUp"
		b.call("Input.dispatchKeyEvent", event, nil)
	}
}

// typed types a text.
func (b *chromium) typed(text string) {
	b.t.Helper()
	b.call("Input.insertText", map[string]any{"text": text}, nil)
}

// texts are the texts of places of a page, one a line.
func (b *chromium) texts(selector string) string {
	b.t.Helper()
	return b.text(`[...document.querySelectorAll(` + quotedJS(selector) + `)].map((e) => e.textContent).join("\n")`)
}

func quotedJS(text string) string {
	out, _ := json.Marshal(text) // a string can always be written
	return string(out)
}

// enter logs a tab in with the console's link.
func (b *chromium) enter(w *world) {
	b.t.Helper()
	b.open(w.url + "/login#" + w.links.make())
	b.until(`location.pathname === "/" && document.querySelector("h1")?.textContent === "Now"`)
}

// shown waits until a place of a page has a text.
func (b *chromium) shown(selector, text string) {
	b.t.Helper()
	b.until(`[...document.querySelectorAll(` + quotedJS(selector) + `)].some((e) => e.textContent.includes(` + quotedJS(text) + `))`)
}
