// SPDX-License-Identifier: Apache-2.0

// Package crash measures how long a volume is away after its client was killed, on the
// user-space data path: a manager and two targets on sparse files in this process, and two
// clients in processes of their own. The first writes to random places and is killed. The
// volume is then forced to detach and attached to the second.
//
//	go test ./e2e/crash -v                                      a small volume
//	go test ./e2e/crash -v -size 1024 -write 20s -behind 0s     1 TiB (in GiB), after 20 s of writes
//
// So that the copies differ when the client is killed, one target gets its writes later than
// the other. A small volume's copies are compared whole afterwards.
package crash
