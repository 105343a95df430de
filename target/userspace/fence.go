// SPDX-License-Identifier: Apache-2.0

//go:build !weft_unfenced

package userspace

// unfenced is true in a program built to show what happens without the fence (e2e/kube): exports
// that the agent removes keep serving.
const unfenced = false
