// SPDX-License-Identifier: Apache-2.0

package block

// Level numbers what may be recorded and said in a cluster. The cluster has a level, which an
// operator raises once every manager and every agent knows the next one; nothing of a higher level
// is recorded or said before. So programs of different versions work together during an upgrade,
// and what a program does not know never reaches it.
//
//	1  all that there was before levels; no record says so
//	2  the level is a record; so are tokens, authorities, who has joined and is shut out, who asked
//	   for what, policies for drives, and the secret from which the keys of exports follow
//	3  volumes may be thin; hosts may be without an agent
//	4  thin volumes may have snapshots and clones
//	5  so may volumes that are not thin, and hosts copy to the legs of detached volumes
//	6  volumes that are not thin go back to a snapshot, and volumes may be sealed
//	7  clones are flattened
//	8  targets copy snapshots to drives that lack them
//	9  targets in the kernel serve from a process beside it what the kernel cannot
//	10 and their kernels serve snapshots and sealed volumes
//	11 legs that are in use change from the one to the other, so that volumes that are not thin may have
//	   snapshots there
//	12 hosts use several paths to a leg at a time, for volumes for which that is accepted
//	13 an attachment says through which network its host reaches the volume, if it can choose
type Level uint32

const (
	// FirstLevel is that of versions before levels.
	FirstLevel Level = 1
	// KnownLevel is the newest that this program knows.
	KnownLevel Level = 13
)

// SaidLevel is the level that a peer says it knows. One that says none is from before levels.
func SaidLevel(said uint32) Level { return max(Level(said), FirstLevel) }
