// SPDX-License-Identifier: Apache-2.0

package pb

import "testing"

func TestAValueAndItsWordAreInverse(t *testing.T) {
	for number := range AttachmentPhase_name {
		phase := AttachmentPhase(number)
		if got := Value[AttachmentPhase](Word(phase)); got != phase {
			t.Errorf("Value(%q) = %v, want %v", Word(phase), got, phase)
		}
	}
	if word := Word(AttachmentPhase_ATTACHMENT_PHASE_DETACHED_CLEAN); word != "detached_clean" {
		t.Errorf("the word is %q, want detached_clean", word)
	}
}

// A newer program may send a value that this one does not know, and a word may have none.
func TestWhatIsNotKnownIsANumberOrUnspecified(t *testing.T) {
	if word := Word(LinkState(77)); word != "77" {
		t.Errorf("Word(77) = %q, want its number", word)
	}
	if state := Value[LinkState]("sideways"); state != LinkState_LINK_STATE_UNSPECIFIED {
		t.Errorf("Value(sideways) = %v, want unspecified", state)
	}
}
