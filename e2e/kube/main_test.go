// SPDX-License-Identifier: Apache-2.0

package kube

import (
	"os"
	"testing"
)

func TestMain(m *testing.M) { os.Exit(Main(m)) }
