// SPDX-License-Identifier: Apache-2.0

package keeper

import (
	"errors"
	"testing"
)

func TestAPortalThatAnswersIsTriedAgainBeforeAnother(t *testing.T) {
	for answered, turns := range map[bool][]int{true: {0, 0, 1, 2}, false: {1, 2, 3, 4}} {
		var a Attempts
		for i, want := range turns {
			a.Fail(errors.New("it is not exported"), answered)
			if a.Turns != want {
				t.Errorf("answered %v: after attempt %d another portal was to be tried first %d times, want %d", answered, i+1, a.Turns, want)
			}
		}
	}
}
