// SPDX-License-Identifier: Apache-2.0

package pb

import (
	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
)

// A volume manager refuses an agent of another cluster with this reason, and with
// its own cluster's id as metadata.
const (
	ReasonOtherCluster = "OTHER_CLUSTER"
	ClusterKey         = "cluster"
)

// OtherCluster is the cluster of a volume manager that has refused an agent since
// the agent is of another one; false if err says something else.
func OtherCluster(err error) (cluster string, refused bool) {
	for _, d := range status.Convert(err).Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetReason() == ReasonOtherCluster {
			return info.GetMetadata()[ClusterKey], true
		}
	}
	return "", false
}
