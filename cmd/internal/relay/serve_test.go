// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"errors"
	"testing"

	"weft.dev/weft/target"
)

// An agent that could not be made says why; one that has run is waited for.
func TestServeEndsWithWhatTheAgentSays(t *testing.T) {
	want := errors.New("the drive is not there")
	for name, run := range map[string]func(r *Target) func() error{
		"before there is an agent": func(*Target) func() error { return func() error { return want } },
		"with one": func(r *Target) func() error {
			return func() error {
				r.Agent = &target.Agent{}
				return want
			}
		},
	} {
		r := &Target{}
		if err := r.Serve(t.Context(), run(r)); !errors.Is(err, want) {
			t.Errorf("%s: Serve = %v, want %v", name, err, want)
		}
	}
}
