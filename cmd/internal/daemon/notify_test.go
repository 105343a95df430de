// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"path/filepath"
	"testing"
)

func TestAMachineStopsWhenSystemdSaysSo(t *testing.T) {
	for script, want := range map[string]bool{
		"echo stopping; exit 1": true, // as systemctl answers while the machine shuts down
		"echo running":          false,
		"echo degraded; exit 1": false,
		"echo offline; exit 1":  false, // in a container
		"exec sleep 60":         false,
		"":                      false, // there is no systemctl
	} {
		dir := t.TempDir()
		if script != "" {
			if err := os.WriteFile(filepath.Join(dir, "systemctl"), []byte("#!/bin/sh\n"+script+"\n"), 0o755); err != nil {
				t.Fatal(err)
			}
			dir += ":" + os.Getenv("PATH")
		}
		t.Run(script, func(t *testing.T) {
			t.Setenv("PATH", dir)
			if got := MachineStops(t.Context()); got != want {
				t.Errorf("MachineStops() = %v, want %v", got, want)
			}
		})
	}
}
