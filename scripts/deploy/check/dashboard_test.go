package check

import (
	"encoding/json"
	"go/ast"
	goparser "go/parser"
	"go/token"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/prometheus/promql/parser"
)

// panel contains the fields of a dashboard's panel that the tests read.
type panel struct {
	Title       string
	GridPos     struct{ X, Y, W, H int }
	FieldConfig struct {
		Defaults struct {
			Unit     string
			Decimals *int
		}
	}
	Targets []struct{ Expr, LegendFormat string }
}

// panels returns the dashboard's panels for all nodes of a cluster, with the variables replaced.
// cluster is "" for a Prometheus whose series have no label cluster.
func panels(t *testing.T, cluster string) []panel {
	t.Helper()
	variables := strings.NewReplacer("$__rate_interval", "6m", "$__range", "2h", "$node", ".*", "$cluster", cluster)
	var dashboard struct{ Panels []panel }
	text := variables.Replace(string(readFile(t, chartDir+"/dashboard.json")))
	must(t, json.Unmarshal([]byte(text), &dashboard))
	return dashboard.Panels
}

var legendLabel = regexp.MustCompile(`\{\{(\w+)\}\}`)

// twoNodes contains made-up series for node-a, which has no problem, and for node-b, which has every
// problem.
var twoNodes = []string{
	`unwind_build_info{instance="node-a", version="v1", goversion="go1"} 1x120`,
	`unwind_build_info{instance="node-b", version="v1", goversion="go1"} 1x120`,
	`unwind_journal_readable{instance="node-a"} 1x120`,
	`unwind_journal_readable{instance="node-b"} 1x110 0x10`,
	`unwind_journal_writable{instance="node-a"} 1x120`,
	`unwind_journal_writable{instance="node-b"} 1x100 0x20`,
	`unwind_runtime_up{instance="node-a"} 1x120`,
	`unwind_runtime_up{instance="node-b"} 1x100 0x20`,
	`unwind_status{instance="node-a", state="on"} 1x120`,
	`unwind_status{instance="node-b", state="on"} 1x60 0x59`,
	`unwind_status{instance="node-b", state="no-provider"} 0x60 1x19 0x39`,
	`unwind_status{instance="node-b", state="off"} 0x80 1x39`,
	`unwind_off_timestamp_seconds{instance="node-b", by="ann"} _x80 4800x40`,
	`unwind_plugin_info{instance="node-a", version="v1"} 1x120`,
	`unwind_plugin_info{instance="node-b", version="v0"} 1x120`,
	`unwind_attachments{instance="node-a", network="podnet", state="live"} 20x50 22x70`,
	`unwind_attachments{instance="node-b", network="podnet", state="live"} 30x40 24x80`,
	`unwind_attachments{instance="node-b", network="podnet", state="rolling-back"} _x20 1+1x20 21x80`,
	`unwind_pending_deletes{instance="node-a", network="podnet", plugin="portmap"} _x30 1x5 stale`,
	`unwind_pending_deletes{instance="node-b", network="podnet", plugin="portmap"} _x20 1+1x20 21x80`,
	`unwind_pending_deletes{instance="node-b", network="podnet", plugin="bridge"} _x60 2x60`,
	`unwind_waiting_deletes{instance="node-b", network="podnet", plugin="bridge", for="rules"} _x60 2x20 1x40`,
	`unwind_oldest_pending_delete_timestamp_seconds{instance="node-a"} _x30 1800x5 stale`,
	`unwind_oldest_pending_delete_timestamp_seconds{instance="node-b"} _x20 1200x100`,
	`unwind_ipam_addresses{instance="node-a", network="podnet", pool="/p", set="0", family="IPv4", state="live"} 20x50 22x70`,
	`unwind_ipam_addresses{instance="node-a", network="podnet", pool="/p", set="0", family="IPv4", state="leaked"} 0x120`,
	`unwind_ipam_addresses{instance="node-a", network="podnet", pool="/p", set="0", family="IPv4", state="free"} 233x50 231x70`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="0", family="IPv4", state="live"} 30x40 24x80`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="0", family="IPv4", state="leaked"} 0x20 0+1x20 20x80`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="0", family="IPv4", state="empty"} 0x60 3x60`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="0", family="IPv4", state="free"} 24x20 24-1x20 6x80`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="1", family="IPv6", state="live"} 30x40 24x80`,
	`unwind_ipam_addresses{instance="node-b", network="podnet", pool="/p", set="none", family="IPv4", state="unknown"} 1x120`,
	`unwind_rollbacks_total{instance="node-a", plugin="portmap", result="complete"} 4x120`,
	`unwind_rollbacks_total{instance="node-b", plugin="portmap", result="pending"} _x20 1+1x20 21x80`,
	`unwind_rollbacks_total{instance="node-b", plugin="bandwidth", result="complete"} _x70 1x50`,
	`unwind_swept_attachments_total{instance="node-a", reason="netns-gone"} 0x30 1x40 2x50`,
	`unwind_swept_attachments_total{instance="node-b", reason="failed-add"} 7x20 7+1x20 27x80`,
	`unwind_dropped_deletes_total{instance="node-b", plugin="bridge"} 1x70 2x50`,
	`unwind_sweep_last_success_timestamp_seconds{instance="node-a"} 0+60x120`,
	`unwind_sweep_last_success_timestamp_seconds{instance="node-b"} 0+60x90 5400x30`,
	`unwind_duplicate_addresses_total{instance="node-a"} 0x120`,
	`unwind_duplicate_addresses_total{instance="node-b"} 0x45 1x75`,
	`unwind_degraded_operations_total{instance="node-b", verb="ADD", reason="busy"} _x110 1+1x10`,
	`unwind_degraded_operations_total{instance="node-b", verb="DEL", reason="busy"} 2x115 3x5`,
}

// TestMadeUp: twoNodes contains each metric of the agent, with exactly the labels that the agent
// serves.
func TestMadeUp(t *testing.T) {
	t.Parallel()
	known := metrics(t)
	missing := maps.Clone(known)
	for _, series := range scrape(t, twoNodes...) {
		lset := series.Labels()
		name := lset.Get("__name__")
		delete(missing, name)
		want := append([]string{"__name__", "instance"}, known[name]...)
		slices.Sort(want)
		if got := slices.Sorted(maps.Keys(lset.Map())); known[name] == nil || !slices.Equal(want, got) {
			t.Errorf("%s, want the labels %v", lset, want)
		}
	}
	if len(missing) > 0 {
		t.Errorf("metrics without a series: %v", missing)
	}
}

// TestDashboard: each query of the dashboard parses, uses only existing metrics and labels, finds
// something on the two nodes, and returns the labels of its legend. Each metric is in a panel, and
// no two panels overlap.
func TestDashboard(t *testing.T) {
	t.Parallel()
	store := scrape(t, twoNodes...)
	asked := map[string]bool{}
	all := panels(t, "")
	for _, p := range all {
		if len(p.Targets) == 0 || p.Title == "" {
			t.Errorf("%+v is empty", p)
		}
		for _, target := range p.Targets {
			for _, metric := range checkQuery(t, target.Expr) {
				asked[metric] = true
			}
			found := store.query(t, target.Expr, 0, 120)
			if len(found) == 0 {
				t.Errorf("%s: nothing found: %s", p.Title, target.Expr)
			}
			for _, series := range found {
				for _, label := range legendLabel.FindAllStringSubmatch(target.LegendFormat, -1) {
					if !series.Metric.Has(label[1]) {
						t.Errorf("%s: the legend uses the label %s, which the series %s lacks", p.Title, label[1], series.Metric)
					}
				}
			}
		}
	}
	for metric := range metrics(t) {
		if !asked[metric] {
			t.Errorf("%s is in no panel", metric)
		}
	}
	for i, a := range all {
		for _, b := range all[:i] {
			if a, b := a.GridPos, b.GridPos; a.X < b.X+b.W && b.X < a.X+a.W && a.Y < b.Y+b.H && b.Y < a.Y+a.H {
				t.Errorf("panels overlap at %+v and %+v", a, b)
			}
		}
	}
}

// TestDashboardOfOneCluster: each panel shows only the nodes of the selected cluster. A second
// cluster has nodes of the same names, but node-a has the series of node-b, and vice versa. So a
// panel that mixed the clusters would change.
func TestDashboardOfOneCluster(t *testing.T) {
	t.Parallel()
	of := func(cluster string, names ...string) (series []string) {
		for _, one := range twoNodes {
			one = strings.NewReplacer(names...).Replace(one)
			series = append(series, strings.Replace(one, "{", `{cluster="`+cluster+`", `, 1))
		}
		return series
	}
	alone := scrape(t, twoNodes...)
	both := scrape(t, slices.Concat(of("one"), of("two", "node-a", "node-b", "node-b", "node-a"))...)
	one := panels(t, "one")
	for i, p := range panels(t, "") {
		for j, target := range p.Targets {
			want, got := alone.query(t, target.Expr, 0, 120), both.query(t, one[i].Targets[j].Expr, 0, 120)
			if want.String() != got.String() {
				t.Errorf("%s: another cluster changes what %s finds", p.Title, target.Expr)
			}
		}
	}
}

// TestWholeNumbers: panels show counts in full, such as 1,499 and not 1 K.
func TestWholeNumbers(t *testing.T) {
	t.Parallel()
	for _, p := range panels(t, "") {
		of := p.FieldConfig.Defaults
		counted := of.Unit != "s" && of.Unit != "percentunit"
		if counted && (of.Unit != "none" || of.Decimals == nil || *of.Decimals != 0) {
			t.Errorf("%s: the unit is %q, want \"none\" without decimals", p.Title, of.Unit)
		}
	}
}

// TestAlertsAsk: the rules use only existing metrics and labels. Each has a severity, a summary, a
// description and a runbook.
func TestAlertsAsk(t *testing.T) {
	t.Parallel()
	for name, rule := range alerts(t) {
		checkQuery(t, rule.Expr)
		for _, key := range []string{"summary", "description", "runbook"} {
			if rule.Annotations[key] == "" {
				t.Errorf("%s: no %s", name, key)
			}
		}
		if severity := rule.Labels["severity"]; severity != "warning" && severity != "critical" {
			t.Errorf("%s: severity %q", name, severity)
		}
	}
}

// checkQuery returns the metrics that an expression uses. It fails the test if the expression uses
// a metric that does not exist, or a label that its metrics lack.
func checkQuery(t *testing.T, text string) []string {
	t.Helper()
	expr, err := promQL.ParseExpr(text)
	if err != nil {
		t.Fatalf("%s: %v", text, err)
	}
	known := metrics(t)
	known["up"] = []string{"job"} // Prometheus itself serves it
	var names []string
	labels := []string{"instance", "cluster"}
	var used []string
	parser.Inspect(expr, func(node parser.Node, _ []parser.Node) error {
		switch n := node.(type) {
		case *parser.VectorSelector:
			names = append(names, n.Name)
			own, ok := known[n.Name]
			if !ok {
				t.Errorf("%s: no metric is called %s", text, n.Name)
			}
			labels = append(labels, own...)
			for _, m := range n.LabelMatchers {
				if m.Name != "__name__" && !slices.Contains(labels[:2], m.Name) && !slices.Contains(own, m.Name) {
					t.Errorf("%s: %s has no label %s", text, n.Name, m.Name)
				}
			}
		case *parser.AggregateExpr:
			used = append(used, n.Grouping...)
		case *parser.BinaryExpr:
			if n.VectorMatching != nil {
				used = append(used, n.VectorMatching.MatchingLabels...)
			}
		}
		return nil
	})
	for _, label := range used {
		if !slices.Contains(labels, label) {
			t.Errorf("%s: none of %v has the label %s", text, names, label)
		}
	}
	return names
}

// metrics returns the labels of each metric, from the variable "helps" in the agent's source code.
func metrics(t *testing.T) map[string][]string {
	t.Helper()
	source := "../../../cmd/unwindctl/internal/metrics/metrics.go"
	file, err := goparser.ParseFile(token.NewFileSet(), source, nil, 0)
	must(t, err)
	known := map[string][]string{}
	ast.Inspect(file, func(node ast.Node) bool {
		helps, ok := node.(*ast.ValueSpec)
		if !ok || helps.Names[0].Name != "helps" {
			return true
		}
		for _, row := range helps.Values[0].(*ast.CompositeLit).Elts {
			row := row.(*ast.KeyValueExpr)
			labels := []string{}
			for _, label := range row.Value.(*ast.CompositeLit).Elts[1:] {
				labels = append(labels, unquote(t, label))
			}
			known["unwind_"+unquote(t, row.Key)] = labels
		}
		return false
	})
	if len(known) < 10 {
		t.Fatalf("metrics: %v", known)
	}
	return known
}

func unquote(t *testing.T, expr ast.Expr) string {
	t.Helper()
	literal, ok := expr.(*ast.BasicLit)
	if !ok {
		t.Fatalf("%v is not a literal", expr)
	}
	text, err := strconv.Unquote(literal.Value)
	must(t, err)
	return text
}
