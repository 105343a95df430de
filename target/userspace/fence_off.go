// SPDX-License-Identifier: Apache-2.0

//go:build weft_unfenced

package userspace

const unfenced = true
