// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"github.com/spf13/cobra"

	"weft.dev/weft/cmd/internal/cli"
)

// New is the command that prints what Prometheus and Grafana need. It asks no manager.
func New(g *cli.Globals) *cobra.Command {
	return cli.Group("monitoring", "Print alerts for Prometheus and a dashboard for Grafana",
		printing(g, "rules", "Print the alerts as a file of rules for Prometheus",
			`Print the alerts as a file of rules for Prometheus. Each alert names the command
that says more, and docs/monitoring.md lists them. They are about the metrics of
this version.`,
			"  weft monitoring rules > /etc/prometheus/rules.d/weft.yaml", Rules),
		printing(g, "dashboard", "Print a dashboard for Grafana",
			`Print a dashboard for Grafana, to import or to provision. Its latencies need a
Prometheus that scrapes native histograms.`,
			"  weft monitoring dashboard > /var/lib/grafana/dashboards/weft.json", Dashboard),
	)
}

func printing(g *cli.Globals, use, short, long, example string, render func() ([]byte, error)) *cobra.Command {
	return &cobra.Command{
		Use: use, Short: short, Long: long, Example: example,
		Args: cli.Takes(),
		RunE: func(*cobra.Command, []string) error {
			text, err := render()
			if err == nil {
				_, err = g.Stdout.Write(text)
			}
			return err
		},
	}
}
