// SPDX-License-Identifier: Apache-2.0

// Package interop is the interoperability suite: Linux's NVMe/TCP host on our
// target, our host on Linux's target, and the same cases on other pairs.
//
//	make interop KERNEL=6.12      boots a machine and runs the tests below in it
//	go test ./e2e/interop         our host on our target, anywhere
package interop
