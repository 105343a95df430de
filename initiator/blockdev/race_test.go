// SPDX-License-Identifier: Apache-2.0

//go:build race

package blockdev

const raceDetector = true // the detector makes sync.Pool drop items at random
