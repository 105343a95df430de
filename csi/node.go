// SPDX-License-Identifier: Apache-2.0

package csi

import "github.com/container-storage-interface/spec/lib/go/csi"

// nodeServer is the node service.
type nodeServer struct {
	csi.UnimplementedNodeServer
	cfg Config
	ops *operations
}

func newNode(cfg Config) *nodeServer {
	return &nodeServer{cfg: cfg, ops: newOperations()}
}
