// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"fmt"
	"syscall"
	"testing"

	"weft.dev/weft/proto/nvmetcp"
)

func TestAPortalThatAnswersIsTriedAgainBeforeAnother(t *testing.T) {
	for _, c := range []struct {
		err  error
		want []int // turns after each attempt
	}{
		{syscall.ECONNREFUSED, []int{0, 0, 1, 2}},
		{syscall.EIO, []int{0, 0, 1, 2}},
		{nvmetcp.ConnectInvalidParameters, []int{0, 0, 1, 2}},
		{syscall.ETIMEDOUT, []int{1, 2, 3, 4}},
		{syscall.EHOSTUNREACH, []int{1, 2, 3, 4}},
		{errors.New("a digest is wrong"), []int{1, 2, 3, 4}},
	} {
		var a Attempts
		for i, want := range c.want {
			a.Fail(fmt.Errorf("connect t1: %w", c.err))
			if a.Turns != want {
				t.Errorf("%v: after attempt %d another portal was to be tried first %d times, want %d", c.err, i+1, a.Turns, want)
			}
		}
	}
}
