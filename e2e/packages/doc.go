// SPDX-License-Identifier: Apache-2.0

// Package packages tests what an operator does with Weft's packages, in a virtual machine with
// Debian and systemd: installs the .deb, brings a cluster up with the commands of
// docs/operations.md, mounts volumes at boot, reboots, and removes the package again. One machine
// has all roles, so that the test fits a small one. "make packages-test" runs it.
package packages
