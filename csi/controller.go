// SPDX-License-Identifier: Apache-2.0

package csi

import "github.com/container-storage-interface/spec/lib/go/csi"

// controllerServer is the controller service. It is a translation of CSI's calls
// into those of the Manager service, and waits where CSI promises an end.
type controllerServer struct {
	csi.UnimplementedControllerServer
	cfg Config
	ops *operations
}

func newController(cfg Config) *controllerServer {
	return &controllerServer{cfg: cfg, ops: newOperations()}
}
