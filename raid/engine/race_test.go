// SPDX-License-Identifier: Apache-2.0

//go:build race

package engine

// raced: the race detector makes pools forget on purpose, and everything slow.
const raced = true
