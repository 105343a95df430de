// SPDX-License-Identifier: Apache-2.0

// Package raid is the layout arithmetic that both data paths share: in which column a
// byte of a volume lies and where in that column's legs, and the size of the regions by
// which missed writes are tracked. Because both paths use it, a volume that was written
// on one path can be read on the other.
//
// The kernel path builds stacks of device-mapper devices from it (package
// raid/dm/mirror); the user-space path does its own I/O (package raid/engine).
package raid
