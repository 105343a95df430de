// SPDX-License-Identifier: Apache-2.0

// Package monitoring has the alerts and the dashboard for Weft's metrics, as Go values, and renders
// them for Prometheus and Grafana.
//
//	Alerts     ──Rules──────►  a file of rules for Prometheus, or for a PrometheusRule
//	dashboard  ──Dashboard──►  a dashboard for Grafana
//
// Their expressions are made of the names in proto/metric, by which the daemons register what they
// serve. "weft monitoring" prints both files, and the Helm chart has a copy of them (make generate).
// The tests in e2e/fault put a cluster into each of the states that an alert is meant for, and see
// with Prometheus' promtool that the alert fires then, and that none does in a healthy cluster.
package monitoring

import (
	"fmt"
	"time"

	"sigs.k8s.io/yaml"
)

// The parts of a file of rules, as Prometheus reads it.
type (
	ruleFile struct {
		Groups []ruleGroup `json:"groups"`
	}
	ruleGroup struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	}
	rule struct {
		Alert       string            `json:"alert"`
		Expr        string            `json:"expr"`
		For         string            `json:"for,omitempty"`
		Labels      map[string]string `json:"labels"`
		Annotations map[string]string `json:"annotations"`
	}
)

// Rules renders the alerts as a file of rules.
func Rules() ([]byte, error) {
	group := ruleGroup{Name: "weft"}
	for _, a := range Alerts() {
		r := rule{Alert: a.Name, Expr: a.Expression, Labels: map[string]string{"severity": string(a.Severity)}, Annotations: map[string]string{
			"summary":     a.Summary,
			"description": a.Description + " To see more: `" + a.Explain + "`.",
			"runbook":     "docs/operations.md#" + a.Runbook,
		}}
		if a.For > 0 {
			r.For = duration(a.For)
		}
		group.Rules = append(group.Rules, r)
	}
	text, err := yaml.Marshal(ruleFile{[]ruleGroup{group}})
	if err != nil {
		return nil, fmt.Errorf("render the rules: %w", err)
	}
	return append([]byte("# Printed by \"weft monitoring rules\". Do not edit.\n"), text...), nil
}

// duration is a duration as Prometheus writes it.
func duration(d time.Duration) string {
	if d%time.Hour == 0 {
		return fmt.Sprintf("%dh", d/time.Hour)
	}
	return fmt.Sprintf("%dm", d/time.Minute)
}
