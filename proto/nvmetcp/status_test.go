// SPDX-License-Identifier: Apache-2.0

package nvmetcp

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"weft.dev/weft/proto/block"
)

func TestAStatusIsAnErrorOfItsKind(t *testing.T) {
	for _, c := range []struct {
		status Status
		is     error
	}{
		{LBAOutOfRange | DNR, block.ErrRange},
		{UnrecoveredReadError, block.ErrMedium},
		{GuardCheckError, block.ErrMedium},
		{GuardCheckError | DNR, block.ErrChecksum},
		{NamespaceWriteProtected | DNR | More, block.ErrReadOnly},
		{InvalidOpcode, block.ErrUnsupported},
		{InvalidField | DNR, InvalidField},
	} {
		err := fmt.Errorf("read 4KiB at 0: %w", c.status)
		if !errors.Is(err, c.is) {
			t.Errorf("%v is not %v", err, c.is)
		}
		if errors.Is(err, block.ErrGone) || errors.Is(err, InternalError) {
			t.Errorf("%v matches a wrong error", err)
		}
	}
	if Success.Err() != nil || (Success|More).Err() != nil || InvalidField.Err() == nil {
		t.Error("Err of success or failure is wrong")
	}
}

func TestAStatusSaysItsNameAndBits(t *testing.T) {
	s := InvalidField | DNR | 2<<statusDelay
	if got := s.Error(); got != "invalid field in command (0x0/0x02, do not retry)" {
		t.Error(got)
	}
	if s.SC() != 2 || s.SCT() != 0 || !s.DNR() || s.RetryDelay() != 2 || s.Code() != InvalidField {
		t.Errorf("%v has the wrong parts", s)
	}
	if !ANATransition.IsPath() || !ANATransition.Retryable() || (ANATransition | DNR).Retryable() || InvalidField.Retryable() {
		t.Error("Retryable is wrong")
	}
	if got := Status(0x7ab).Error(); !strings.HasPrefix(got, "unknown status (0x7/0xab") {
		t.Error(got)
	}
}

func TestACompletionCarriesAStatus(t *testing.T) {
	for s := range Status(1 << 15) {
		var c Completion
		c.SetStatus(s)
		if c.Status() != s {
			t.Fatalf("%#x came back as %#x", uint16(s), uint16(c.Status()))
		}
	}
}

// A delay changes nothing else of a status. This host does not wait for it, nor repeat the command by itself:
// whoever has sent the write to a full leg does, at a pace of its own.
func TestAStatusMayNameADelay(t *testing.T) {
	for n := range uint8(4) {
		s := (CapacityExceeded | DNR).Delay(3).Delay(n)
		if s.RetryDelay() != n || s.Code() != CapacityExceeded || !s.DNR() {
			t.Errorf("delay %d: %v with delay %d", n, s, s.RetryDelay())
		}
		if s = CapacityExceeded.Delay(n); s.Retryable() || !errors.Is(s, block.ErrFull) {
			t.Errorf("delay %d: retryable %v, ErrFull %v", n, s.Retryable(), errors.Is(s, block.ErrFull))
		}
	}
}
