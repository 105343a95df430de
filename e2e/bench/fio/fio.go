// SPDX-License-Identifier: Apache-2.0

// Package fio runs fio in a virtual machine.
package fio

import (
	"encoding/json"
	"slices"
	"strings"

	"weft.dev/weft/e2e/vm"
)

// Run runs fio with arguments of its own, and returns the I/Os per second of each job. It fails t if
// fio fails.
func Run(t vm.TB, m *vm.Machine, arguments ...string) (reached []float64) {
	t.Helper()
	out, err := m.Run(t.Context(), append([]string{"fio", "--ioengine=libaio", "--direct=1", "--time_based", "--output-format=json"}, arguments...)...)
	if err != nil {
		t.Fatalf("fio %v: %v\n%s", arguments, err, out)
	}
	var report struct {
		Jobs []struct{ Read, Write struct{ IOPS float64 } }
	}
	if err := json.Unmarshal([]byte(out[max(0, strings.Index(out, "{")):]), &report); err != nil {
		t.Fatalf("fio %v printed: %v\n%s", arguments, err, out)
	}
	for _, job := range report.Jobs {
		reached = append(reached, job.Read.IOPS+job.Write.IOPS)
	}
	return reached
}

// Median sorts values and returns the one in the middle.
func Median(values []float64) float64 {
	slices.Sort(values)
	return values[len(values)/2]
}
