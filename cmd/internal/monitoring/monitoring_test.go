// SPDX-License-Identifier: Apache-2.0

package monitoring

import (
	"bytes"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"sigs.k8s.io/yaml"

	"weft.dev/weft/e2e/promtool"
)

var update = flag.Bool("update", false, "write the chart's copies")

// The chart has a copy of the rules and of the dashboard, since Helm reads nothing else. With -update
// the test writes them (make generate).
func TestTheChartsCopiesAreCurrent(t *testing.T) {
	for file, render := range map[string]func() ([]byte, error){"rules.yaml": Rules, "dashboard.json": Dashboard} {
		path := filepath.Join("../../../deploy/helm/weft/monitoring", file)
		want, err := render()
		if err != nil {
			t.Fatal(err)
		}
		if *update {
			if err := os.WriteFile(path, want, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(string(want), string(got)); diff != "" {
			t.Errorf("%s is not current: run make generate (-want +got):\n%s", path, diff)
		}
	}
}

var names = regexp.MustCompile(`\b(?:weft|csi)_[a-z_]+`)

// expressions are those of alerts and panels.
func expressions() (all []string) {
	for _, a := range Alerts() {
		all = append(all, a.Expression)
	}
	for _, r := range rows() {
		for _, p := range r.panels {
			for _, q := range p.queries {
				all = append(all, strings.ReplaceAll(q.expression, "$__rate_interval", "5m"))
			}
		}
	}
	return all
}

// That daemons serve them under these names, with these labels, is what the tests in e2e/fault show:
// there each alert fires, and each panel shows something.
func TestExpressionsNameMetricsOfProtoMetric(t *testing.T) {
	text, err := os.ReadFile("../../../proto/metric/metric.go")
	if err != nil {
		t.Fatal(err)
	}
	declared := map[string]bool{}
	for _, match := range regexp.MustCompile(`= "(\w+)"`).FindAllStringSubmatch(string(text), -1) {
		declared[match[1]] = true
		declared[match[1]+"_sum"], declared[match[1]+"_count"] = true, true
	}
	for _, e := range expressions() {
		found := names.FindAllString(e, -1)
		if len(found) == 0 {
			t.Errorf("%s names no metric", e)
		}
		for _, name := range found {
			if !declared[name] {
				t.Errorf("%s names %s, which proto/metric has not", e, name)
			}
		}
	}
}

// Prometheus itself parses every expression, and every template in a text.
func TestPrometheusReadsTheRules(t *testing.T) {
	tool := promtool.Find(t)
	rules, err := Rules()
	if err != nil {
		t.Fatal(err)
	}
	type rule struct {
		Record string `json:"record"`
		Expr   string `json:"expr"`
	}
	type group struct {
		Name  string `json:"name"`
		Rules []rule `json:"rules"`
	}
	all := group{Name: "expressions"}
	for i, e := range expressions() {
		all.Rules = append(all.Rules, rule{"e" + strings.Repeat("x", i), e})
	}
	panels, err := yaml.Marshal(map[string][]group{"groups": {all}})
	if err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string][]byte{"rules.yaml": rules, "panels.yaml": panels} {
		file := filepath.Join(t.TempDir(), name)
		if err := os.WriteFile(file, text, 0o600); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.Command(tool, "check", "rules", file).CombinedOutput(); err != nil || bytes.Contains(out, []byte("FAILED")) {
			t.Errorf("promtool check rules %s: %v\n%s", name, err, out)
		}
	}
}

func TestEachAlertSaysWhatToDo(t *testing.T) {
	page, err := os.ReadFile("../../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	anchors := map[string]bool{}
	for _, match := range regexp.MustCompile(`(?m)^#+ +(.+)$`).FindAllStringSubmatch(string(page), -1) {
		spoken := regexp.MustCompile(`[^\p{L}\p{N} _-]`).ReplaceAllString(match[1], "")
		anchors[strings.ReplaceAll(strings.ToLower(spoken), " ", "-")] = true
	}
	monitoring, err := os.ReadFile("../../../docs/monitoring.md")
	if err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, a := range Alerts() {
		if seen[a.Name] || a.Summary == "" || a.Description == "" || a.Severity != Critical && a.Severity != Warning {
			t.Errorf("%+v: want a name of its own, a severity and texts", a)
		}
		seen[a.Name] = true
		if !strings.HasPrefix(a.Explain, "weft explain ") {
			t.Errorf("%s names %q; want a `weft explain`", a.Name, a.Explain)
		}
		if !anchors[a.Runbook] {
			t.Errorf("%s: docs/operations.md has no heading %q", a.Name, a.Runbook)
		}
		if !bytes.Contains(monitoring, []byte("| `"+a.Name+"` |")) {
			t.Errorf("docs/monitoring.md does not list %s", a.Name)
		}
	}
}
