// SPDX-License-Identifier: Apache-2.0

// Package keeper runs one volume of this host. A goroutine observes the volume, asks package
// initiator/volume for a plan, carries out its orders, and reports. Both data paths share it;
// a [Path] observes and applies for one of them. The package also holds what surrounds that
// loop: how a keeper receives the wanted state, how probes of a leg are judged, how the
// manager is asked for records, and the report.
package keeper
