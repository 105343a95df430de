// SPDX-License-Identifier: Apache-2.0

// Package dhchap is DH-HMAC-CHAP, the in-band authentication of NVMe over
// Fabrics (NVM Express Base 2.1, section 8.3.4.5; 8.13.5 in 2.0): the keys as
// operators write them, the messages, and the two ends as pure state machines.
//
// The messages travel as data of the Fabrics commands Authentication Send and
// Authentication Receive; moving them is the caller's. Each end takes a message
// in and gives a message out:
//
//	host                                   controller
//	Step(nil)  ── Negotiate ─────────────▶ Step
//	Step       ◀───────────── Challenge ──
//	Step       ── Reply ─────────────────▶ Step, done unless the host challenges too
//	Step, done ◀────────────── Success1 ──
//	           ── Success2, if it did ───▶ Step, done
//
// The host always proves that it knows its key. With a controller key at the
// host, the controller must prove that it knows that one, else the host refuses.
//
// It interoperates with Linux's nvme-tcp host and nvmet, which leave three
// things open that are closed here: a Success1 without the proof that was asked
// for, a hash or group in the Challenge that was not offered, and a challenge
// sent back as one's own. Secure channel concatenation (keys for TLS from the
// exchange) is refused: there is no TLS yet.
//
// A secret is only as good as its randomness: use Generate. The DH groups
// protect weak secrets from an eavesdropper; they give the connection no secrecy.
package dhchap
