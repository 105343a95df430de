// SPDX-License-Identifier: Apache-2.0

package dhchap

import "fmt"

// Explanation is the reason why an authentication failed (Base 2.1, section 8.3.4.4.2).
type Explanation uint8

// The explanations.
const (
	Failed           Explanation = 1
	NoProtocol       Explanation = 2
	ChannelMismatch  Explanation = 3
	NoHash           Explanation = 4
	NoGroup          Explanation = 5
	IncorrectPayload Explanation = 6
	IncorrectMessage Explanation = 7
)

func (e Explanation) String() string {
	switch e {
	case Failed:
		return "authentication failed"
	case NoProtocol:
		return "authentication protocol not usable"
	case ChannelMismatch:
		return "secure channel concatenation mismatch"
	case NoHash:
		return "hash function not usable"
	case NoGroup:
		return "DH group not usable"
	case IncorrectPayload:
		return "incorrect payload"
	case IncorrectMessage:
		return "incorrect protocol message"
	}
	return fmt.Sprintf("explanation %d", uint8(e))
}

// Error is a failed authentication. It ends the transaction at both ends; a transaction is
// not retried.
type Error struct {
	Explanation Explanation
	Peer        bool // the peer reported the failure; otherwise this end found it
	Detail      string
}

func (e *Error) Error() string {
	s := "DH-HMAC-CHAP: "
	if e.Peer {
		s += "the peer says: "
	}
	s += e.Explanation.String()
	if e.Detail != "" {
		s += ": " + e.Detail
	}
	return s
}

func fail(e Explanation, format string, args ...any) *Error {
	return &Error{Explanation: e, Detail: fmt.Sprintf(format, args...)}
}

// read parses a message with parse and checks its transaction.
func read[M any](in []byte, want Kind, transaction uint16, parse func([]byte) (M, error)) (M, *Error) {
	var none M
	kind, t, err := KindOf(in)
	switch {
	case err != nil:
		return none, fail(IncorrectPayload, "%v", err)
	case kind == KindFailure1 || kind == KindFailure2:
		f, err := ParseFailure(in)
		if err != nil {
			return none, fail(IncorrectPayload, "%v", err)
		}
		return none, &Error{Explanation: f.Explanation, Peer: true}
	case kind != want:
		return none, fail(IncorrectMessage, "%v where %v was expected", kind, want)
	case t != transaction:
		return none, fail(IncorrectMessage, "%v of transaction %d in transaction %d", kind, t, transaction)
	}
	m, err := parse(in)
	if err != nil {
		return none, fail(IncorrectPayload, "%v", err)
	}
	return m, nil
}
