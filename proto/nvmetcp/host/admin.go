// SPDX-License-Identifier: Apache-2.0

package host

import (
	"context"
	"errors"
	"fmt"

	"weft.dev/weft/proto/nvmetcp"
)

// errLost is the error of a command, other than an IO, whose connection is lost.
var errLost = errors.New("connection lost")

// errUnsent is the error of an IO that was not sent and must not wait.
var errUnsent = errors.New("not connected")

// maxFabricsCapsule is the capsule's room for data on the admin queue, and for a Fabrics
// command on any queue (TCP, 3.2.2.1: at least 8 KiB there).
const maxFabricsCapsule = 8 << 10

// answer is the outcome of a command that a caller waits for.
type answer struct {
	result nvmetcp.Completion
	err    error
}

// do sends a command on a queue and waits for its completion. data is what the command
// sends, or the buffer for what it reads. After an error data must not be touched: the
// connection may still be using it.
func (q *queue) do(ctx context.Context, cmd nvmetcp.Command, data []byte) (nvmetcp.Completion, error) {
	told := make(chan answer, 1)
	r := &request{cmd: cmd, data: data}
	r.out = cmd.DataDirection() == nvmetcp.ToController
	r.inCapsule = r.out && cmd.SGL().Kind == nvmetcp.SGLInCapsule
	r.done = func(r *request, err error) { told <- answer{r.result, err} }
	if !q.submit(r) {
		return nvmetcp.Completion{}, errLost
	}
	select {
	case a := <-told:
		return a.result, a.err
	case <-ctx.Done():
		return nvmetcp.Completion{}, context.Cause(ctx)
	case <-q.dead:
		return nvmetcp.Completion{}, errLost
	}
}

// do sends a command on the admin queue and waits, for at most ConnectTimeout. If the
// controller takes longer, the session ends.
func (s *session) do(ctx context.Context, cmd nvmetcp.Command, data []byte) (nvmetcp.Completion, error) {
	ctx, cancel := context.WithTimeout(ctx, s.c.cfg.ConnectTimeout)
	defer cancel()
	result, err := s.admin.do(ctx, cmd, data)
	if err != nil {
		err = fmt.Errorf("%s: %w", nvmetcp.CommandName(&cmd, true), err)
		if errors.Is(err, context.DeadlineExceeded) {
			s.fail(err) // the controller does not answer: reconnect
		}
	}
	return result, err
}

func (s *session) property(ctx context.Context, p nvmetcp.Property) (uint64, error) {
	result, err := s.do(ctx, nvmetcp.PropertyGetCommand(p), nil)
	if err != nil {
		return 0, fmt.Errorf("%v: %w", p, err)
	}
	return result.Result(), nil
}

func (s *session) setProperty(ctx context.Context, p nvmetcp.Property, v uint64) error {
	if _, err := s.do(ctx, nvmetcp.PropertySetCommand(p, v), nil); err != nil {
		return fmt.Errorf("%v: %w", p, err)
	}
	return nil
}

// identify returns an Identify data structure.
func (s *session) identify(ctx context.Context, i nvmetcp.Identify) ([]byte, error) {
	data := make([]byte, nvmetcp.IdentifySize)
	_, err := s.do(ctx, i.Command(), data)
	return data, err
}

// identified reads an Identify data structure.
func identified[T any](ctx context.Context, s *session, i nvmetcp.Identify, parse func([]byte) (T, error)) (T, error) {
	b, err := s.identify(ctx, i)
	if err != nil {
		var none T
		return none, err
	}
	return parse(b)
}

// log returns n bytes of a log page.
func (s *session) log(ctx context.Context, g nvmetcp.GetLog) ([]byte, error) {
	data := make([]byte, g.Length)
	_, err := s.do(ctx, g.Command(), data)
	return data, err
}

// setFeature sets a feature and returns the result.
func (s *session) setFeature(ctx context.Context, id nvmetcp.FeatureID, value uint32) (uint32, error) {
	result, err := s.do(ctx, nvmetcp.FeatureAccess{ID: id, Value: value}.SetCommand(), nil)
	return result.DW0(), err
}
