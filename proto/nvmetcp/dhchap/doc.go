// SPDX-License-Identifier: Apache-2.0

// Package dhchap is DH-HMAC-CHAP, the in-band authentication of NVMe over Fabrics (NVM
// Express Base 2.1, section 8.3.4.5; 8.13.5 in 2.0): the keys in their text form, the
// messages, and the two ends as pure state machines.
//
// The messages travel as data of the Fabrics commands Authentication Send and
// Authentication Receive; the caller transports them. Each end takes a message and returns
// the next one:
//
//	host                                   controller
//	Step(nil)  ── Negotiate ─────────────▶ Step
//	Step       ◀───────────── Challenge ──
//	Step       ── Reply ─────────────────▶ Step, done unless the host challenges too
//	Step, done ◀────────────── Success1 ──
//	           ── Success2, if it did ───▶ Step, done
//
// The host always proves that it knows its key. If the host has a controller key, the
// controller must prove that it knows that key, or the host refuses it.
//
// It interoperates with Linux's nvme-tcp host and nvmet, and refuses three things that they
// accept: a Success1 without the requested proof, a Challenge with a hash or group that was
// not offered, and an end's own challenge sent back to it. It also refuses secure channel
// concatenation (TLS keys from the exchange): there is no TLS yet.
//
// A secret is only as strong as its randomness: use Generate. The DH groups protect weak
// secrets from an eavesdropper; they do not encrypt the connection.
package dhchap
