// SPDX-License-Identifier: Apache-2.0

package pb

// RequestKey is the key of gRPC metadata by which a caller tells the volume manager
// which request of its own a call is made for. It goes into the logs of both, and
// nothing else is made of it.
const RequestKey = "weft-request"
