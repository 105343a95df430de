// SPDX-License-Identifier: Apache-2.0

package vm

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
)

// qmp speaks the QEMU Machine Protocol: one command at a time, with events in between.
type qmp struct {
	conn    io.ReadWriter
	answers chan qmpMessage
	ended   chan struct{}
	events  func(name string, data json.RawMessage)
	mu      sync.Mutex // one command at a time
}

type qmpMessage struct {
	Return json.RawMessage `json:"return"`
	Error  *struct {
		Class string `json:"class"`
		Desc  string `json:"desc"`
	} `json:"error"`
	Event string          `json:"event"`
	Data  json.RawMessage `json:"data"`
}

func newQMP(conn io.ReadWriter, events func(string, json.RawMessage)) *qmp {
	return &qmp{conn: conn, events: events, answers: make(chan qmpMessage, 1), ended: make(chan struct{})}
}

func (q *qmp) receive() {
	defer close(q.ended)
	dec := json.NewDecoder(q.conn)
	for {
		var m qmpMessage
		if err := dec.Decode(&m); err != nil {
			return
		}
		switch {
		case m.Event != "":
			q.events(m.Event, m.Data)
		case m.Return != nil || m.Error != nil:
			q.answers <- m
		}
	}
}

// do runs one command. arguments may be nil.
func (q *qmp) do(ctx context.Context, command string, arguments any) (json.RawMessage, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	line, err := json.Marshal(struct {
		Execute   string `json:"execute"`
		Arguments any    `json:"arguments,omitempty"`
	}{command, arguments})
	if err != nil {
		return nil, err
	}
	if _, err := q.conn.Write(append(line, '\n')); err != nil {
		return nil, fmt.Errorf("qmp %s: %w", command, err)
	}
	select {
	case m := <-q.answers:
		if m.Error != nil {
			return nil, fmt.Errorf("qmp %s: %s: %s", command, m.Error.Class, m.Error.Desc)
		}
		return m.Return, nil
	case <-q.ended:
		return nil, fmt.Errorf("qmp %s: %w", command, errGone)
	case <-ctx.Done():
		return nil, fmt.Errorf("qmp %s: %w", command, context.Cause(ctx))
	}
}
