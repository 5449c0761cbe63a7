package check

import (
	"bytes"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"helm.sh/helm/v3/pkg/chart"
	"helm.sh/helm/v3/pkg/chart/loader"
	"helm.sh/helm/v3/pkg/chartutil"
	"helm.sh/helm/v3/pkg/engine"
	"helm.sh/helm/v3/pkg/lint"
	"helm.sh/helm/v3/pkg/lint/support"
	apps "k8s.io/api/apps/v1"
	core "k8s.io/api/core/v1"
	meta "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/json"
	"sigs.k8s.io/yaml"
)

const chartDir = "../helm/unwind"

// kinds maps each kind of object in the deployment files to its Go type.
var kinds = map[string]func() any{
	"v1/ServiceAccount":                       func() any { return new(core.ServiceAccount) },
	"v1/ConfigMap":                            func() any { return new(core.ConfigMap) },
	"apps/v1/DaemonSet":                       func() any { return new(apps.DaemonSet) },
	"monitoring.coreos.com/v1/PodMonitor":     func() any { return new(monitoring.PodMonitor) },
	"monitoring.coreos.com/v1/PrometheusRule": func() any { return new(monitoring.PrometheusRule) },
}

// objects decodes the documents of a YAML file, and returns them by kind. A key that the type
// lacks, or that occurs twice, fails the test.
func objects(t *testing.T, text []byte) map[string]any {
	t.Helper()
	all := map[string]any{}
	for _, doc := range bytes.Split(text, []byte("\n---\n")) {
		var head struct{ APIVersion, Kind string }
		must(t, yaml.Unmarshal(doc, &head))
		name := head.APIVersion + "/" + head.Kind
		if head.Kind == "" {
			continue // the document has only comments
		}
		if kinds[name] == nil || all[name] != nil {
			t.Fatalf("%s: an unexpected kind, or the second object of this kind", name)
		}
		object := kinds[name]()
		data, err := yaml.YAMLToJSONStrict(doc)
		if err != nil {
			t.Fatalf("%s: %v\n%s", name, err, doc)
		}
		// json.UnmarshalStrict rejects hostPid for hostPID, like the API server. yaml.UnmarshalStrict
		// would accept it.
		if strict, err := json.UnmarshalStrict(data, object); err != nil || len(strict) > 0 {
			t.Errorf("%s: %v, %v\n%s", name, err, strict, doc)
		}
		all[name] = object
	}
	return all
}

func load(t *testing.T) *chart.Chart {
	t.Helper()
	chart, err := loader.Load(chartDir)
	must(t, err)
	return chart
}

// render returns the rendered files of a release, by name.
func render(chart *chart.Chart, release, namespace string, values map[string]any) (map[string]string, error) {
	options := chartutil.ReleaseOptions{Name: release, Namespace: namespace, IsInstall: true}
	all, err := chartutil.ToRenderValues(chart, values, options, nil)
	if err != nil {
		return nil, err
	}
	return engine.Render(chart, all)
}

// manifests returns the output of `helm template` for a release "unwind" in kube-system.
func manifests(t *testing.T, chart *chart.Chart, values map[string]any) []byte {
	t.Helper()
	return manifestsAs(t, chart, "unwind", "kube-system", values)
}

func manifestsAs(t *testing.T, chart *chart.Chart, release, namespace string, values map[string]any) (text []byte) {
	t.Helper()
	files, err := render(chart, release, namespace, values)
	must(t, err)
	for _, name := range slices.Sorted(maps.Keys(files)) {
		if !strings.HasSuffix(name, "NOTES.txt") {
			text = append(append(text, files[name]...), "\n---\n"...)
		}
	}
	return text
}

// installed returns the objects of a release with these values.
func installed(t *testing.T, values map[string]any) map[string]any {
	t.Helper()
	return objects(t, manifests(t, load(t), values))
}

// the[T] returns the object whose type is T.
func the[T any](all map[string]any) (found T) {
	for _, object := range all {
		if one, is := object.(T); is {
			found = one
		}
	}
	return found
}

func agent(all map[string]any) core.Container {
	return the[*apps.DaemonSet](all).Spec.Template.Spec.Containers[0]
}

// must fails the test at once if err is not nil.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal(t *testing.T, what string, want, got any) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("%s, -want +got:\n%s", what, diff)
	}
}

func readFile(t *testing.T, name string) []byte {
	t.Helper()
	data, err := os.ReadFile(name)
	must(t, err)
	return data
}

// readValues reads the values in a file. Each call returns a new map.
func readValues(t *testing.T, name string) map[string]any {
	t.Helper()
	var values map[string]any
	must(t, yaml.UnmarshalStrict(readFile(t, name), &values))
	return values
}

func everything(t *testing.T) map[string]any { return readValues(t, "testdata/everything.yaml") }

// TestChartDefaults: with its default values, the chart renders the objects of daemonset.yaml.
func TestChartDefaults(t *testing.T) {
	t.Parallel()
	want := objects(t, readFile(t, "../daemonset.yaml"))
	if len(want) != 2 {
		t.Fatalf("daemonset.yaml: %v", want)
	}
	for _, object := range want { // add the labels that only Helm sets
		labels := object.(meta.Object).GetLabels()
		helms := map[string]string{"app.kubernetes.io/managed-by": "Helm", "app.kubernetes.io/version": "dev", "helm.sh/chart": "unwind-0.1.0"}
		maps.Copy(labels, helms)
		if set, is := object.(*apps.DaemonSet); is {
			maps.Copy(set.Spec.Template.Labels, helms)
		}
	}
	equal(t, "daemonset.yaml", want, installed(t, nil))
}

// TestChartEverything: with everything switched on, the chart renders one valid object of each
// kind. The rules and the dashboard are those of alerts.yaml and dashboard.json.
func TestChartEverything(t *testing.T) {
	t.Parallel()
	values := everything(t)
	values["observe"] = false
	got := installed(t, values)
	equal(t, "kinds", slices.Sorted(maps.Keys(kinds)), slices.Sorted(maps.Keys(got)))
	var rules monitoring.PrometheusRuleSpec
	must(t, yaml.UnmarshalStrict(readFile(t, chartDir+"/alerts.yaml"), &rules))
	operations := string(readFile(t, "../../../cmd/unwindctl/OPERATIONS.md"))
	for i := range rules.Groups[0].Rules {
		r := &rules.Groups[0].Rules[i]
		anchor := strings.ToLower(r.Alert)
		r.Annotations["runbook_url"] = "https://docs/operations#" + anchor
		if !strings.Contains(operations, `<a id="`+anchor+`">`) {
			t.Errorf("OPERATIONS.md has no anchor %s", anchor)
		}
	}
	equal(t, "alerts.yaml", rules, the[*monitoring.PrometheusRule](got).Spec)
	dashboard := map[string]string{"unwind.json": string(readFile(t, chartDir+"/dashboard.json"))}
	equal(t, "dashboard.json", dashboard, the[*core.ConfigMap](got).Data)
	container := agent(got)
	equal(t, "image", "an-image:v1@sha256:"+strings.Repeat("00112233445566778899aabbccddeeff", 2), container.Image)
	equal(t, "command", []string{"/unwindctl", "--host", "run", "--listen=10.0.0.1:9470",
		"--off", "--interval=5m"}, container.Command)
	env := map[string]string{}
	for _, e := range container.Env {
		env[e.Name] = e.Value
	}
	equal(t, "env", map[string]string{"UNWIND_CONF_DIR": "/conf", "UNWIND_BIN_DIR": "/bin",
		"UNWIND_STATE_DIR": "/state", "UNWIND_INSTALL_DIR": "/programs", "UNWIND_X": "y"}, env)
	for _, probe := range []*core.Probe{container.LivenessProbe, container.ReadinessProbe} {
		if probe == nil || probe.HTTPGet.Port.IntValue() != 9470 || probe.HTTPGet.Host != "10.0.0.1" {
			t.Errorf("probe: %v", probe)
		}
	}
	monitor := the[*monitoring.PodMonitor](got).Spec
	equal(t, "the PodMonitor's pods", the[*apps.DaemonSet](got).Spec.Selector.MatchLabels, monitor.Selector.MatchLabels)
	equal(t, "the PodMonitor's port", container.Ports[0].Name, *monitor.PodMetricsEndpoints[0].Port)
}

// TestChartNames: two releases share no object, and "kubectl unwind" finds the agents of both by
// their labels. The image's tag is the chart's version of unwind, unless image.tag is set. By default,
// nodes never pull an image with a bare name, such as "unwind".
func TestChartNames(t *testing.T) {
	t.Parallel()
	seen := map[string]bool{}
	for _, at := range [][3]string{{"unwind", "kube-system", "unwind"}, {"unwind", "net", "unwind"},
		{"my-unwind", "net", "my-unwind"}, {"prod", "kube-system", "prod-unwind"}, {"unwind", "a-unwind", "unwind"},
		{"unwind-a", "unwind", "unwind-a"}} {
		release, namespace, name := at[0], at[1], at[2]
		values := everything(t)
		delete(values, "fullnameOverride")
		delete(values, "serviceAccount")
		for kind, object := range objects(t, manifestsAs(t, load(t), release, namespace, values)) {
			o := object.(meta.Object)
			labels := o.GetLabels()
			unique := strings.Join([]string{kind, o.GetNamespace(), o.GetName()}, " ")
			if seen[unique] {
				t.Errorf("%s in %s: another release also has %s", release, namespace, unique)
			}
			seen[unique] = true
			if o.GetName() != name || o.GetNamespace() != namespace || labels["app.kubernetes.io/name"] != "unwind" || labels["app.kubernetes.io/instance"] != release {
				t.Errorf("%s in %s: %s: %s, %v", release, namespace, kind, o.GetName(), labels)
			}
			if set, is := object.(*apps.DaemonSet); is {
				selector := map[string]string{"app.kubernetes.io/name": "unwind", "app.kubernetes.io/instance": release}
				equal(t, release+": selector", selector, set.Spec.Selector.MatchLabels)
				equal(t, release+": service account", name, set.Spec.Template.Spec.ServiceAccountName)
			}
		}
	}
	for name, object := range installed(t, map[string]any{"fullnameOverride": "other"}) {
		equal(t, name, "other", object.(meta.Object).GetName())
	}
	for tag, want := range map[string]string{"": "unwind:v9", "v8": "unwind:v8"} {
		chart := load(t)
		chart.Metadata.AppVersion = "v9"
		values := map[string]any{"image": map[string]any{"tag": tag}}
		equal(t, "tag "+tag, want, agent(objects(t, manifests(t, chart, values))).Image)
		files, err := render(chart, "unwind", "net", values)
		must(t, err)
		if notes := files["unwind/templates/NOTES.txt"]; !strings.Contains(notes, "agents of "+want+" start") {
			t.Errorf("tag %s: the notes lack %s:\n%s", tag, want, notes)
		}
	}
	for repository, want := range map[string]core.PullPolicy{"unwind": "Never", "docker.io/library/unwind": "Never", "a/unwind": "", "reg:5000/unwind": ""} {
		all := installed(t, map[string]any{"image": map[string]any{"repository": repository}})
		equal(t, repository, want, agent(all).ImagePullPolicy)
	}
}

// TestChartAccount: if the chart creates no service account, the agent uses the one that the
// values name, or the namespace's default.
func TestChartAccount(t *testing.T) {
	t.Parallel()
	for _, tt := range [][3]string{{"true", "", "unwind"}, {"true", "a", "a"}, {"false", "a", "a"}, {"false", "", "default"}} {
		account := map[string]any{"create": tt[0] == "true", "name": tt[1]}
		got := installed(t, map[string]any{"serviceAccount": account})
		equal(t, "the pod's", tt[2], the[*apps.DaemonSet](got).Spec.Template.Spec.ServiceAccountName)
		if made, is := got["v1/ServiceAccount"]; is != (tt[0] == "true") || is && made.(meta.Object).GetName() != tt[2] {
			t.Errorf("%v: %v", tt, made)
		}
	}
}

// TestChartListen: if the agent listens on $(HOST_IP), it gets the node's address from Kubernetes.
// The kubelet probes that address by default.
func TestChartListen(t *testing.T) {
	t.Parallel()
	for listen, want := range map[string]string{"$(HOST_IP)": "--listen=$(HOST_IP):9469", "[$(HOST_IP)]": "--listen=[$(HOST_IP)]:9469"} {
		got := agent(installed(t, map[string]any{"listen": listen}))
		if !slices.Contains(got.Command, want) || len(got.Env) != 1 || got.Env[0].Name != "HOST_IP" ||
			got.Env[0].ValueFrom.FieldRef.FieldPath != "status.hostIP" || got.ReadinessProbe.HTTPGet.Host != "" || got.LivenessProbe.HTTPGet.Host != "" {
			t.Errorf("%s: %+v", listen, got)
		}
	}
}

// TestChartNotes: the notes explain what stays after `helm uninstall`, with commands that name the
// release and its namespace, and what stops a rollout. With unwindOff or observe, they say more.
func TestChartNotes(t *testing.T) {
	t.Parallel()
	always := []string{"rollout status ds/prod-unwind", "kubectl unwind exec -n net -- uninstall  ", "stays in /state"}
	const down, join, off = "can stop the rollout", "set unwindOff: true", "(unwindOff: true)"
	const sweeps, none = "Then only the runtime triggers sweeps", "set observe to false"
	for _, tt := range []struct {
		off, observe bool
		want, not    []string
	}{
		{false, false, []string{down, join, sweeps}, []string{off, none}},
		{true, false, []string{off, "kubectl unwind exec -n net --keep-going -- off", sweeps}, []string{down, join, none}},
		{false, true, []string{down, join, none}, []string{off, sweeps}},
	} {
		text, err := render(load(t), "prod", "net", map[string]any{"paths": map[string]any{"stateDir": "/state"},
			"unwindOff": tt.off, "observe": tt.observe})
		must(t, err)
		notes := text["unwind/templates/NOTES.txt"]
		for _, want := range append(tt.want, always...) {
			if !strings.Contains(notes, want) {
				t.Errorf("the notes lack %q:\n%s", want, notes)
			}
		}
		for _, not := range tt.not {
			if strings.Contains(notes, not) {
				t.Errorf("the notes contain %q:\n%s", not, notes)
			}
		}
	}
}

// TestChartOff: with unwindOff, a rollout replaces all agents at the same time, so that a node that
// is down cannot stop it. A strategy other than RollingUpdate stays.
func TestChartOff(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct{ values, want string }{
		{"{}", "{type: RollingUpdate, rollingUpdate: {maxUnavailable: 1%}}"},
		{"{unwindOff: true}", "{type: RollingUpdate, rollingUpdate: {maxUnavailable: 100%}}"},
		{"{unwindOff: true, updateStrategy: {rollingUpdate: {maxUnavailable: 0, maxSurge: 1}}}",
			"{type: RollingUpdate, rollingUpdate: {maxUnavailable: 100%}}"},
		{"{unwindOff: true, updateStrategy: {type: OnDelete, rollingUpdate: null}}", "{type: OnDelete}"},
	} {
		var values map[string]any
		var want apps.DaemonSetUpdateStrategy
		must(t, yaml.Unmarshal([]byte(tt.values), &values))
		must(t, yaml.Unmarshal([]byte(tt.want), &want))
		equal(t, tt.values, want, the[*apps.DaemonSet](installed(t, values)).Spec.UpdateStrategy)
	}
}

// TestChartObserves: for agents that only observe, the chart omits the alert UnwindSweepStale.
func TestChartObserves(t *testing.T) {
	t.Parallel()
	got := installed(t, everything(t))
	if command := agent(got).Command; !slices.Contains(command, "--observe") {
		t.Errorf("command: %v", command)
	}
	rules := the[*monitoring.PrometheusRule](got).Spec.Groups[0].Rules
	stale := func(r monitoring.Rule) bool { return r.Alert == "UnwindSweepStale" }
	if len(rules) != len(alerts(t))-1 || slices.ContainsFunc(rules, stale) {
		t.Errorf("rules: %v", rules)
	}
}

// TestChartValues: everything.yaml sets each value. All but serviceAccount.create have an effect.
func TestChartValues(t *testing.T) {
	t.Parallel()
	defaults := readValues(t, chartDir+"/values.yaml")
	text := manifests(t, load(t), everything(t))
	for _, name := range leaves(defaults, "") {
		values := everything(t)
		if !reset(values, defaults, strings.Split(name, ".")) {
			t.Errorf("%s is not in everything.yaml", name)
		} else if got := manifests(t, load(t), values); bytes.Equal(got, text) && name != "serviceAccount.create" {
			t.Errorf("%s has no effect", name)
		}
	}
}

// leaves returns the names of the values, such as image.tag. A list counts as one value, and so
// does an object that the chart passes on to Kubernetes.
func leaves(values map[string]any, prefix string) []string {
	var names []string
	for key, value := range values {
		switch key {
		case "image", "serviceAccount", "paths", "probes", "podMonitor", "prometheusRule", "dashboard":
			names = append(names, leaves(value.(map[string]any), prefix+key+".")...)
		default:
			names = append(names, prefix+key)
		}
	}
	return names
}

// reset sets one value to its default, and reports whether values contains it.
func reset(values, defaults map[string]any, name []string) bool {
	if _, ok := values[name[0]]; !ok {
		return false
	}
	if len(name) == 1 {
		values[name[0]] = defaults[name[0]]
		return true
	}
	return reset(values[name[0]].(map[string]any), defaults[name[0]].(map[string]any), name[1:])
}

// TestChartRefuses: the chart's schema refuses values that would have no effect or make an invalid
// DaemonSet.
func TestChartRefuses(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"observed: true", "observe: 1", "paths: {confdir: /conf}",
		"paths: {confDir: conf}", "image: {digest: 00}", "port: 0", "listen: host", "listen: $(HOST)", "minReadySeconds: -1", "fullnameOverride: A", "serviceAccount: {names: x}", "extraEnv: [A=b]", "podLabels: {a: 1}", "unwindOff: 1", "dashboard: {label: x}"} {
		var values map[string]any
		must(t, yaml.Unmarshal([]byte(text), &values))
		if _, err := render(load(t), "unwind", "kube-system", values); err == nil {
			t.Errorf("the chart accepts %s", text)
		}
	}
}

// TestChartLint: helm lint reports no warning and no error.
func TestChartLint(t *testing.T) {
	t.Parallel()
	for _, values := range []map[string]any{nil, everything(t)} {
		for _, message := range lint.All(chartDir, values, "kube-system", true).Messages {
			if message.Severity > support.InfoSev {
				t.Error(message)
			}
		}
	}
}
