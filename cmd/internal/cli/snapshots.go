// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"

	"weft.dev/weft/proto/pb"
)

// Snapshots lists the snapshots of a volume, or all of them if of is empty. A manager of an older
// version does not know what is asked and lists volumes: they are left out.
func Snapshots(ctx context.Context, api pb.ManagerClient, of string) (*pb.ListVolumesResponse, error) {
	r, err := api.ListVolumes(ctx, &pb.ListVolumesRequest{Snapshots: true, Of: of})
	if err != nil {
		return nil, err
	}
	all := &pb.ListVolumesResponse{}
	for _, v := range r.GetVolumes() {
		if v.GetSnapshot() != nil {
			all.Volumes = append(all.Volumes, v)
		}
	}
	return all, nil
}
