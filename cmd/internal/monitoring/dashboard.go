// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"encoding/json"
	"fmt"

	"weft.dev/weft/proto/metric"
)

// row is a heading of the dashboard, with the panels below it.
type row struct {
	title  string
	panels []panel
}

// panel is one graph, number or table.
type panel struct {
	title   string
	kind    string // of Grafana: timeseries, stat, table
	unit    string // of Grafana: bytes, Bps, s, iops, short
	help    string
	queries []query
}

// query is an expression and what its series are called.
type query struct{ expression, legend string }

// over is the time that a rate is taken over; Grafana chooses it.
const over = "[$__rate_interval]"

func rate(counter, by string) string {
	return fmt.Sprintf("sum by (%s) (rate(%s%s))", by, counter, over)
}

// quantile is a quantile of a native histogram.
func quantile(q float64, histogram, by string) string {
	return fmt.Sprintf("histogram_quantile(%v, sum by (%s) (rate(%s%s)))", q, by, histogram, over)
}

func graph(title, unit string, queries ...query) panel {
	return panel{title: title, kind: "timeseries", unit: unit, queries: queries}
}

func number(title, unit string, queries ...query) panel {
	return panel{title: title, kind: "stat", unit: unit, queries: queries}
}

func table(title, help string, queries ...query) panel {
	return panel{title: title, kind: "table", unit: "short", help: help, queries: queries}
}

// rows are the whole dashboard.
func rows() []row {
	return []row{
		{"Cluster", []panel{
			number("Volumes by health", "short", query{"max by (health) (" + metric.Volumes + ")", "{{health}}"}),
			number("Drives by state", "short", query{"max by (state) (" + metric.Drives + ")", "{{state}}"}),
			number("Agents online", "short", query{"max by (agent, online) (" + metric.Nodes + ")", "{{agent}} online={{online}}"}),
			number("Managers", "short", query{"max by (state) (" + metric.Managers + ")", "{{state}}"}, query{"max(" + metric.ManagersToSpare + ")", "may still be lost"}),
			table("Not well, by name", "`weft explain volume`, `drive` or `node` with the name says why. No rows: all is well.",
				query{worst(metric.VolumeCopiesLeft) + " or vector(0) < 0", ""}, query{worstOf(metric.DriveProblem) + " or vector(0) < 0", ""}, query{worstOf(metric.NodeOffline) + " or vector(0) < 0", ""}),
			graph("Rebuilds: bytes left", "bytes", query{worst(metric.RebuildLeftBytes) + " or vector(0)", "{{volume}}"}),
			graph("Space", "bytes", query{"max(" + metric.AllocatedBytes + ")", "taken by legs"}, query{"max(" + metric.CapacityBytes + ")", "capacity"}),
			graph("Pools: part that is taken", "percentunit", query{"max by (pool) (" + metric.PoolAllocatedBytes + " / " + metric.PoolCapacityBytes + ")", "{{pool}}"}),
		}},
		{"Volumes", []panel{
			graph("I/Os", "iops", query{rate(metric.VolumeIOs, "volume, op"), "{{volume}} {{op}}"}),
			graph("Throughput", "Bps", query{rate(metric.VolumeBytes, "volume, op"), "{{volume}} {{op}}"}),
			graph("Latency, 99th percentile", "s", query{quantile(0.99, metric.VolumeIOSeconds, "volume, op"), "{{volume}} {{op}}"}),
			graph("I/O held: part of the time", "percentunit", query{rate(metric.VolumeHeldSeconds, "volume"), "{{volume}}"}),
			graph("Errors", "iops", query{rate(metric.VolumeErrors, "volume"), "{{volume}}"}),
			graph("Latency to copies, 99th percentile", "s", query{quantile(0.99, metric.LegIOSeconds, "volume, target"), "{{volume}} on {{target}}"}),
		}},
		{"Drives", []panel{
			graph("I/Os", "iops", query{rate(metric.DriveIOs, "drive, op"), "{{drive}} {{op}}"}),
			graph("Throughput", "Bps", query{rate(metric.DriveBytes, "drive, op"), "{{drive}} {{op}}"}),
			graph("Mean latency", "s", query{rate(metric.DriveIOTimeSeconds, "drive, op") + " / " + rate(metric.DriveIOs, "drive, op"), "{{drive}} {{op}}"}),
			graph("Part that is taken", "percentunit", query{"max by (node, drive) (" + metric.DriveAllocatedBytes + " / " + metric.DriveCapacityBytes + ")", "{{node}} {{drive}}"}),
			graph("Temperature", "celsius", query{metric.DriveTemperature, "{{drive}}"}),
			graph("Life used", "percentunit", query{metric.DriveUsedRatio, "{{drive}}"}),
			graph("Media errors in an hour", "short", query{"increase(" + metric.DriveMediaErrors + "[1h])", "{{drive}}"}),
		}},
		{"Managers", []panel{
			graph("Leads", "short", query{metric.ManagerLeads, "{{instance}}"}),
			graph("Time of a commit, mean", "s", query{mean(metric.ManagerCommitSeconds, "$__rate_interval"), "{{instance}}"}),
			graph("Time of a confirmation, mean", "s", query{mean(metric.ManagerConfirmSeconds, "$__rate_interval"), "{{instance}}"}),
			graph("Time of a decision, mean", "s", query{mean(metric.ManagerStepSeconds, "$__rate_interval"), "{{instance}}"}),
			graph("Connected agents", "short", query{metric.ManagerStreams, "{{instance}} {{agent}}"}),
			graph("Levels and versions", "short", query{"max(" + metric.Level + ")", "level"}, query{"max(" + metric.NewestLevel + ")", "newest level"}, query{"max(" + metric.Versions + ")", "versions"}),
			graph("Calls answered", "reqps", query{rate(metric.GRPCCalls, "method, code"), "{{method}} {{code}}"}),
		}},
	}
}

// The parts of a dashboard, as Grafana reads it.
type (
	grafanaBoard struct {
		UID           string            `json:"uid"`
		Title         string            `json:"title"`
		Description   string            `json:"description"`
		Tags          []string          `json:"tags"`
		SchemaVersion int               `json:"schemaVersion"`
		Editable      bool              `json:"editable"`
		Refresh       string            `json:"refresh"`
		Time          map[string]string `json:"time"`
		Templating    grafanaVariables  `json:"templating"`
		Panels        []grafanaPanel    `json:"panels"`
	}
	grafanaVariables struct {
		List []grafanaVariable `json:"list"`
	}
	grafanaVariable struct {
		Name  string `json:"name"`
		Label string `json:"label"`
		Type  string `json:"type"`
		Query string `json:"query"`
	}
	grafanaPanel struct {
		ID          int             `json:"id"`
		Type        string          `json:"type"`
		Title       string          `json:"title"`
		Description string          `json:"description,omitempty"`
		GridPos     grafanaPlace    `json:"gridPos"`
		Datasource  *grafanaSource  `json:"datasource,omitempty"`
		FieldConfig *grafanaFields  `json:"fieldConfig,omitempty"`
		Targets     []grafanaTarget `json:"targets,omitempty"`
	}
	grafanaPlace struct {
		H int `json:"h"`
		W int `json:"w"`
		X int `json:"x"`
		Y int `json:"y"`
	}
	grafanaSource struct {
		Type string `json:"type"`
		UID  string `json:"uid"`
	}
	grafanaFields struct {
		Defaults map[string]string `json:"defaults"`
	}
	grafanaTarget struct {
		RefID        string `json:"refId"`
		Expr         string `json:"expr"`
		LegendFormat string `json:"legendFormat,omitempty"`
		Format       string `json:"format,omitempty"`
		Instant      bool   `json:"instant,omitempty"`
	}
)

// The places of panels: Grafana's grid is 24 wide.
const (
	perLine     = 3
	panelWidth  = 24 / perLine
	panelHeight = 8
)

// Dashboard renders the dashboard for Grafana, which asks for the source of data when it is
// imported.
func Dashboard() ([]byte, error) {
	board := grafanaBoard{
		UID: "weft", Title: "Weft", Description: "Printed by \"weft monitoring dashboard\". The metrics are explained in docs/monitoring.md.", Tags: []string{"weft"},
		SchemaVersion: 39, Refresh: "30s", Time: map[string]string{"from": "now-1h", "to": "now"},
		Templating: grafanaVariables{[]grafanaVariable{{"datasource", "Prometheus", "datasource", "prometheus"}}},
	}
	y := 0
	add := func(p grafanaPanel) {
		p.ID = len(board.Panels) + 1
		board.Panels = append(board.Panels, p)
	}
	for _, r := range rows() {
		add(grafanaPanel{Type: "row", Title: r.title, GridPos: grafanaPlace{H: 1, W: 24, Y: y}})
		y++
		for i, p := range r.panels {
			add(p.render(grafanaPlace{H: panelHeight, W: panelWidth, X: i % perLine * panelWidth, Y: y + i/perLine*panelHeight}))
		}
		y += (len(r.panels) + perLine - 1) / perLine * panelHeight
	}
	text, err := json.MarshalIndent(board, "", "  ")
	if err != nil {
		return nil, fmt.Errorf("render the dashboard: %w", err)
	}
	return append(text, '\n'), nil
}

func (p panel) render(at grafanaPlace) grafanaPanel {
	out := grafanaPanel{
		Type: p.kind, Title: p.title, Description: p.help, GridPos: at,
		Datasource:  &grafanaSource{"prometheus", "${datasource}"},
		FieldConfig: &grafanaFields{map[string]string{"unit": p.unit}},
	}
	for i, q := range p.queries {
		t := grafanaTarget{RefID: string(rune('A' + i)), Expr: q.expression, LegendFormat: q.legend}
		if p.kind == "table" {
			t.Format, t.Instant = "table", true
		}
		out.Targets = append(out.Targets, t)
	}
	return out
}
