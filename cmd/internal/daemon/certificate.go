// SPDX-License-Identifier: Apache-2.0

package daemon

import (
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"weft.dev/weft/proto/metric"
	"weft.dev/weft/proto/pki"
)

// ShowCertificate adds a metric of when the certificate ends with which the daemon proves who it is;
// none if it has no certificate.
func (m *Metrics) ShowCertificate(f TLSFiles) {
	if f.Identity != "" || f.Cert != "" {
		m.MustRegister(certificate{f})
	}
}

// certificate tells when a certificate ends. It reads the file each time, as connections do.
type certificate struct{ files TLSFiles }

var expiryDesc = prometheus.NewDesc(metric.CertificateExpiry, "When the certificate ends with which this daemon proves who it is.", nil, nil)

// Describe implements [prometheus.Collector].
func (certificate) Describe(out chan<- *prometheus.Desc) { out <- expiryDesc }

// Collect implements [prometheus.Collector]. A file that cannot be read has no end: the log of the
// part that renews it says why.
func (c certificate) Collect(out chan<- prometheus.Metric) {
	if end, err := c.files.ends(); err == nil {
		out <- prometheus.MustNewConstMetric(expiryDesc, prometheus.GaugeValue, float64(end.Unix()))
	}
}

// ends returns when the certificate ends.
func (f TLSFiles) ends() (time.Time, error) {
	if f.Identity != "" {
		c, err := pki.ReadCredential(f.Identity)
		if err != nil {
			return time.Time{}, err
		}
		if c.Cert == nil {
			return time.Time{}, fmt.Errorf("%s: it has no certificate yet", f.Identity)
		}
		return c.Cert.NotAfter, nil
	}
	text, err := os.ReadFile(f.Cert)
	if err != nil {
		return time.Time{}, err
	}
	first, _ := pem.Decode(text)
	if first == nil {
		return time.Time{}, fmt.Errorf("%s: no certificate", f.Cert)
	}
	cert, err := x509.ParseCertificate(first.Bytes)
	if err != nil {
		return time.Time{}, fmt.Errorf("%s: %w", f.Cert, err)
	}
	return cert.NotAfter, nil
}
