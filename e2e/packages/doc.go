// SPDX-License-Identifier: Apache-2.0

// Package packages tests what an operator does with Weft's packages, in virtual machines with
// Debian and systemd.
//
// "make packages-test" installs the .deb, brings a cluster up with the commands of
// docs/operations.md, mounts volumes at boot, reboots, and removes the package again. One machine
// has all roles, so that the test fits a small one.
//
// "make install-test" types the same commands, word for word, for three nodes and a client. Then a
// stranger scans their ports, and a node is lost.
package packages
