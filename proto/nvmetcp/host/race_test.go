// SPDX-License-Identifier: Apache-2.0

//go:build race

package host

const raceDetector = true // it makes sync.Pool forget at random
