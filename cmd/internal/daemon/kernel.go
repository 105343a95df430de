// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"os"
	"strings"
)

// KernelText reads a one-line file of the kernel, such as its release.
func KernelText(path string) (string, error) {
	b, err := os.ReadFile(path)
	return strings.TrimSpace(string(b)), err
}
