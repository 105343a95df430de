// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"path/filepath"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/e2e/promtool"
	"weft.dev/weft/proto/access"
	"weft.dev/weft/proto/block"
	"weft.dev/weft/proto/pki"
)

// Prometheus' tests begin in 1970, and so does this one: a certificate of that day is good for a
// week, and two days before its end somebody is told that it was not renewed.
func TestACertificateThatIsNotRenewedAlerts(t *testing.T) {
	begin := time.Unix(0, 0)
	authority, err := pki.NewAuthority(block.ClusterID{}, begin)
	if err != nil {
		t.Fatal(err)
	}
	c, err := pki.NewCredential()
	if err != nil {
		t.Fatal(err)
	}
	asked, err := c.Request()
	if err != nil {
		t.Fatal(err)
	}
	request, err := pki.ParseRequest(asked)
	if err != nil {
		t.Fatal(err)
	}
	cert, err := authority.Issue(access.Identity{Kind: access.Node, Name: "t1", Role: access.Target}, request, begin)
	if err != nil {
		t.Fatal(err)
	}
	if c, err = c.Renewed(cert.Raw, [][]byte{authority.Cert.Raw}); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "identity.pem")
	if err := c.Write(path); err != nil {
		t.Fatal(err)
	}
	m := NewMetrics()
	m.ShowCertificate(TLSFiles{Identity: path})
	for _, after := range []struct {
		days  int
		fires []string
	}{{4, nil}, {6, []string{"WeftCertificateEnds"}}} {
		r := promtool.Recording{Interval: time.Minute, Hold: time.Duration(after.days) * 24 * time.Hour}
		if err := r.Scrape(map[string]prometheus.Gatherer{"t1": m}); err != nil {
			t.Fatal(err)
		}
		// No manager is scraped here.
		r.Check(t, "../../../deploy/helm/weft/monitoring/rules.yaml", append(after.fires, "WeftNoLeader")...)
	}
}

func TestADaemonWithoutACertificateShowsNone(t *testing.T) {
	for _, files := range []TLSFiles{{}, {Identity: filepath.Join(t.TempDir(), "none.pem")}} {
		r := prometheus.NewRegistry()
		m := &Metrics{Registry: r}
		m.ShowCertificate(files)
		if all, err := r.Gather(); err != nil || len(all) != 0 {
			t.Errorf("with %+v there are %v, %v", files, all, err)
		}
	}
}
