// SPDX-License-Identifier: Apache-2.0

// Package promtool tests alerts with Prometheus' own promtool, over what real daemons serve.
//
//	recording := promtool.Recording{}
//	recording.Scrape(…)                          // as often as Prometheus would; time may be simulated
//	recording.Check(t, rules, "WeftTargetAway")  // these alerts fire, and no others
//
// After the last scrape everything is taken to stay as it is for the time of Hold, so that an alert
// that waits for an hour needs no hour of simulation.
package promtool

import (
	"errors"
	"fmt"
	"maps"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"sigs.k8s.io/yaml"
)

// Find returns the path of promtool. If there is none, the test is skipped, but in CI it fails.
func Find(t testing.TB) string {
	t.Helper()
	path, err := Path()
	if err != nil && os.Getenv("CI") == "true" {
		t.Fatal(err)
	}
	if err != nil {
		t.Skip(err)
	}
	return path
}

// Path is where promtool is.
func Path() (string, error) {
	if path, err := exec.LookPath("promtool"); err == nil {
		return path, nil
	}
	if path := Kept("prometheus", "usr", "bin", "promtool"); path != "" {
		return path, nil
	}
	return "", errors.New("no promtool here: e2e/install.sh prometheus fetches it from the distribution")
}

// Kept is where e2e/install.sh keeps a file; empty if it is not there.
func Kept(elem ...string) string {
	cache := os.Getenv("WEFT_CACHE")
	if cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return ""
		}
		cache = filepath.Join(base, "weft")
	}
	path := filepath.Join(append([]string{cache}, elem...)...)
	if _, err := os.Stat(path); err != nil {
		return ""
	}
	return path
}

// Recording is what Prometheus has of some daemons. The zero value is one without scrapes.
type Recording struct {
	Interval time.Duration // between scrapes; 0: 15 s
	Hold     time.Duration // how long everything stays as it is after the last one; 0: 2 h

	scrapes int
	series  map[string][]string // by name and labels: a value for each scrape
}

func (r *Recording) interval() time.Duration {
	if r.Interval > 0 {
		return r.Interval
	}
	return 15 * time.Second
}

func (r *Recording) hold() time.Duration {
	if r.Hold > 0 {
		return r.Hold
	}
	return 2 * time.Hour
}

// evaluation is the time between evaluations of the rules: a minute, as Prometheus does by itself, unless everything
// stays as it is for days, of which promtool would take half a minute.
func (r *Recording) evaluation() time.Duration {
	if r.hold() > 24*time.Hour {
		return 10 * time.Minute
	}
	return time.Minute
}

// Scrape adds what the daemons serve now, by the names of their instances.
func (r *Recording) Scrape(daemons map[string]prometheus.Gatherer) error {
	if r.series == nil {
		r.series = map[string][]string{}
	}
	now := map[string]string{}
	for instance, daemon := range daemons {
		families, err := daemon.Gather()
		if err != nil {
			return fmt.Errorf("scrape %s: %w", instance, err)
		}
		for _, f := range families {
			for _, m := range f.GetMetric() {
				samples(f, m, func(suffix, label, value string, v float64) {
					now[name(f.GetName()+suffix, m, instance, label, value)] = strconv.FormatFloat(v, 'f', -1, 64)
				})
			}
		}
	}
	for series := range now {
		if r.series[series] == nil {
			r.series[series] = slices.Repeat([]string{"_"}, r.scrapes)
		}
	}
	for series, values := range r.series {
		value, ok := now[series]
		switch {
		case ok:
		case values[len(values)-1] == "stale" || values[len(values)-1] == "_":
			value = "_"
		default:
			value = "stale" // as Prometheus notes it
		}
		r.series[series] = append(values, value)
	}
	r.scrapes++
	return nil
}

// samples are the lines of a metric in a scrape.
func samples(f *dto.MetricFamily, m *dto.Metric, take func(suffix, label, value string, v float64)) {
	switch f.GetType() {
	case dto.MetricType_COUNTER:
		take("", "", "", m.GetCounter().GetValue())
	case dto.MetricType_GAUGE:
		take("", "", "", m.GetGauge().GetValue())
	case dto.MetricType_HISTOGRAM:
		h := m.GetHistogram()
		for _, b := range h.GetBucket() {
			if !math.IsInf(b.GetUpperBound(), 1) {
				take("_bucket", "le", strconv.FormatFloat(b.GetUpperBound(), 'g', -1, 64), float64(b.GetCumulativeCount()))
			}
		}
		take("_bucket", "le", "+Inf", float64(h.GetSampleCount()))
		take("_sum", "", "", h.GetSampleSum())
		take("_count", "", "", float64(h.GetSampleCount()))
	}
}

// name is a series as PromQL writes it.
func name(metric string, m *dto.Metric, instance, label, value string) string {
	labels := []string{fmt.Sprintf("instance=%q", instance)}
	for _, l := range m.GetLabel() {
		labels = append(labels, fmt.Sprintf("%s=%q", l.GetName(), l.GetValue()))
	}
	if label != "" {
		labels = append(labels, fmt.Sprintf("%s=%q", label, value))
	}
	return metric + "{" + strings.Join(labels, ",") + "}"
}

// The parts of a test, as promtool reads it.
type (
	testFile struct {
		RuleFiles []string   `json:"rule_files"`
		Every     string     `json:"evaluation_interval"`
		Tests     []ruleTest `json:"tests"`
	}
	ruleTest struct {
		Interval string           `json:"interval"`
		Series   []inputSeries    `json:"input_series"`
		Queries  []expressionTest `json:"promql_expr_test"`
	}
	inputSeries struct {
		Series string `json:"series"`
		Values string `json:"values"`
	}
	expressionTest struct {
		Expression string   `json:"expr"`
		At         string   `json:"eval_time"`
		Samples    []sample `json:"exp_samples"`
	}
	sample struct {
		Labels string  `json:"labels"`
		Value  float64 `json:"value"`
	}
)

var labelIn = regexp.MustCompile(`\$labels\.(\w+)`)

// Check fails unless exactly these alerts of a file of rules fire, at any time, and each has the
// labels that its texts name.
func (r *Recording) Check(t testing.TB, rules string, alerts ...string) {
	t.Helper()
	fired := expressionTest{Expression: `group by (alertname) (` + r.ever(`alertstate="firing"`) + `)`}
	slices.Sort(alerts)
	for _, alert := range slices.Compact(alerts) {
		fired.Samples = append(fired.Samples, sample{fmt.Sprintf(`{alertname=%q}`, alert), 1})
	}
	queries := []expressionTest{fired}
	for alert, labels := range namedLabels(t, rules) {
		for _, label := range labels {
			queries = append(queries, expressionTest{Expression: r.ever(fmt.Sprintf(`alertstate="firing",alertname=%q,%s=""`, alert, label))})
		}
	}
	r.run(t, rules, queries)
}

// Shows fails if one of the expressions has no value when the last scrape has been.
func (r *Recording) Shows(t testing.TB, rules string, expressions ...string) {
	t.Helper()
	var queries []expressionTest
	for _, e := range expressions {
		queries = append(queries, expressionTest{Expression: "absent(" + e + ")"})
	}
	held := *r
	held.Hold = r.interval()
	held.run(t, rules, queries)
}

// ever are the alerts that had a state at any time.
func (r *Recording) ever(state string) string {
	return "max_over_time(ALERTS{" + state + "}[" + seconds(r.length()) + "])"
}

func seconds(d time.Duration) string { return fmt.Sprintf("%ds", d/time.Second) }

// length is the time from the first scrape to the end.
func (r *Recording) length() time.Duration {
	return time.Duration(r.scrapes)*r.interval() + r.hold()
}

// run tests expressions at the end.
func (r *Recording) run(t testing.TB, rules string, queries []expressionTest) {
	t.Helper()
	rules, err := filepath.Abs(rules)
	if err != nil {
		t.Fatal(err)
	}
	test := ruleTest{Interval: seconds(r.interval()), Queries: queries}
	for i := range test.Queries {
		test.Queries[i].At = seconds(r.length())
	}
	more := int(r.hold() / r.interval())
	for _, series := range slices.Sorted(maps.Keys(r.series)) {
		values := slices.Clone(r.series[series])
		if last := &values[len(values)-1]; *last != "_" && *last != "stale" {
			*last = fmt.Sprintf("%s+0x%d", *last, more)
		}
		test.Series = append(test.Series, inputSeries{series, strings.Join(values, " ")})
	}
	text, err := yaml.Marshal(testFile{[]string{rules}, seconds(r.evaluation()), []ruleTest{test}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "test.yaml")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(Find(t), "test", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("promtool test rules: %v\n%s", err, out)
	}
}

// namedLabels are the labels that the texts of alerts name, by alert.
func namedLabels(t testing.TB, rules string) map[string][]string {
	t.Helper()
	text, err := os.ReadFile(rules)
	if err != nil {
		t.Fatal(err)
	}
	var file struct {
		Groups []struct {
			Rules []struct {
				Alert       string
				Annotations map[string]string
			}
		}
	}
	if err := yaml.Unmarshal(text, &file); err != nil {
		t.Fatal(err)
	}
	named := map[string][]string{}
	for _, g := range file.Groups {
		for _, rule := range g.Rules {
			labels := map[string]bool{}
			for _, annotation := range rule.Annotations {
				for _, match := range labelIn.FindAllStringSubmatch(annotation, -1) {
					labels[match[1]] = true
				}
			}
			named[rule.Alert] = slices.Sorted(maps.Keys(labels))
		}
	}
	return named
}

// Lint returns what promtool finds fault with in a scrape: names, units and texts.
func Lint(tool, scrape string) error {
	check := exec.Command(tool, "check", "metrics")
	check.Stdin = strings.NewReader(scrape)
	if out, err := check.CombinedOutput(); err != nil || len(out) > 0 {
		return fmt.Errorf("promtool check metrics: %v\n%s", err, out)
	}
	return nil
}
