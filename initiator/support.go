// SPDX-License-Identifier: Apache-2.0

package initiator

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"weft.dev/weft/initiator/fabrics"
	"weft.dev/weft/proto/pb"
	"weft.dev/weft/proto/support"
	"weft.dev/weft/raid/dm"
	"weft.dev/weft/raid/dm/mirror"
)

// answerSupport answers questions for support bundles until ctx ends.
func (a *Agent) answerSupport(ctx context.Context) {
	s := &support.Agent{
		Manager: a.cfg.Manager, Node: string(a.cfg.Node), Source: pb.SupportSource_SUPPORT_SOURCE_INITIATOR,
		Collect: func(ctx context.Context) []support.File {
			a.mu.Lock()
			refused := a.cluster.why
			a.mu.Unlock()
			if refused != "" {
				return []support.File{{Name: "all", Missing: "the agent does not obey this manager"}}
			}
			files := a.path.told()
			if a.cfg.Support != nil {
				files = append(files, a.cfg.Support(ctx)...)
			}
			return files
		},
		Ended: func(err error) { a.log.Debug("questions of support bundles are not answered", "err", err) },
	}
	s.Run(ctx)
}

// told implements dataPath: the volumes as mapped devices, and the connections to their legs.
func (p *kernelPath) told() []support.File {
	devices, err := p.kernel.dm.Devices(mirror.UUIDPrefix)
	files := []support.File{support.Text("dm.txt", dm.Told(devices), err)}
	all, err := p.kernel.host.Controllers(nil)
	return append(files, support.Text("nvme.txt", controllersTold(all), err))
}

// controllersTold lists what is no secret of controllers: the keys of one are in files beside these.
func controllersTold(all []fabrics.Controller) string {
	var b strings.Builder
	for _, c := range all {
		fmt.Fprintf(&b, "%s %s %s traddr %s trsvcid %s host-traddr %s host-iface %s subsystem %s host %s fails-fast %v\n", c.Name, c.State, c.Transport,
			c.Address.Traddr, c.Address.Trsvcid, c.Address.HostTraddr, c.Address.HostIface, c.NQN, c.HostNQN, c.FailsFast)
	}
	return b.String()
}

// errUser is why there is nothing of the kernel to tell.
var errUser = errors.New("the data path is in user space: there are no mapped devices of volumes, and no connections of the kernel")

// told implements dataPath.
func (p *userPath) told() []support.File { return []support.File{support.Text("dm.txt", "", errUser)} }
