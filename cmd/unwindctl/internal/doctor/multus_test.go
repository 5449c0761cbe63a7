package doctor

import (
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/cmd/unwindctl/internal/node"
	"cni-unwind/testdata/nodetest"
)

const token = "s3cret.t0ken-of.multus"

// multusNode is a node with Multus, and the API server of its kubeconfig.
type multusNode struct {
	confDir, server, kubeconfig string
}

func newMultusNode(t *testing.T, h http.HandlerFunc) *multusNode {
	t.Helper()
	s := httptest.NewUnstartedServer(h)
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	n := &multusNode{confDir: t.TempDir(), server: s.Listener.Addr().String()}
	n.kubeconfig = filepath.Join(n.confDir, "multus.d", "multus.kubeconfig")
	ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
	n.put(t, "multus.d/multus.kubeconfig", fmt.Sprintf(`
clusters: [{name: local, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: multus, user: {token: %s}}]
contexts: [{name: multus-context, context: {cluster: local, user: multus}}]
current-context: multus-context`, s.URL, base64.StdEncoding.EncodeToString(ca), token))
	n.put(t, "00-multus.conf", fmt.Sprintf(`{"cniVersion": "1.0.0", "name": "multus-cni-network", "type": "multus",
		"confDir": %q, "delegates": [{"type": "bridge"}]}`, filepath.Join(n.confDir, "multus/net.d")))
	return n
}

func (n *multusNode) put(t *testing.T, name, text string) {
	t.Helper()
	path := filepath.Join(n.confDir, name)
	nodetest.Check(t, os.MkdirAll(filepath.Dir(path), 0o755))
	nodetest.Check(t, os.WriteFile(path, []byte(text), 0o600))
}

// says returns what doctor says of Multus.
func (n *multusNode) says(t *testing.T) string {
	t.Helper()
	var e examination
	e.multus(t.Context(), node.Runtime{ConfDir: n.confDir})
	var lines []string
	for _, c := range e.checks {
		if c.What != "multus" || strings.Contains(fmt.Sprint(c), token) {
			t.Errorf("%+v", c)
		}
		text := strings.NewReplacer(n.server, "API", n.confDir, "DIR").Replace(c.Text)
		lines = append(lines, c.Severity.String()+": "+text)
	}
	return strings.Join(lines, "\n")
}

// TestMultus: doctor names the definitions of which wrap would say that they are not wrapped.
func TestMultus(t *testing.T) {
	const (
		bare    = `{"cniVersion": "1.0.0", "type": "macvlan", "master": "eth1"}`
		wrapped = `{"cniVersion": "1.0.0", "cniVersions": ["1.0.0", "1.1.0"], "name": "n", "loadOnlyInlinedPlugins": true,
			"plugins": [{"type": "unwind", "chain": {"cniVersion": "1.0.0", "type": "macvlan", "name": "n"}}]}`
		single = `{"cniVersion": "1.0.0", "type": "unwind", "chain": {"cniVersion": "1.0.0", "plugins": [{"type": "macvlan"}]}}`
		ovn    = `{"cniVersion": "1.0.0", "name": "n", "type": "ovn-k8s-cni-overlay", "netAttachDefName": "prod/n"}`
	)
	for _, tt := range []struct {
		name    string
		configs []string // of prod/a, prod/b, ...
		want    string
	}{
		{"none", nil, ""},
		{"all wrapped", []string{wrapped, single}, "ok: 2 NetworkAttachmentDefinitions are wrapped"},
		{"one is not", []string{wrapped, bare}, "warning: 1 NetworkAttachmentDefinition is not wrapped, so pods on such a network bypass unwind: prod/b\n" +
			"ok: 1 NetworkAttachmentDefinition is wrapped"},
		{"seven are not", []string{bare, bare, bare, bare, bare, bare, bare},
			"warning: 7 NetworkAttachmentDefinitions are not wrapped, so pods on such a network bypass unwind: prod/a, prod/b, prod/c, prod/d, prod/e and 2 more"},
		{"no JSON", []string{`{"type": "SECRET`}, "warning: 1 NetworkAttachmentDefinition is refused by unwindctl wrap: " +
			"prod/a (not valid JSON: unexpected end of JSON input)"},
		{"no version", []string{`{"type": "macvlan"}`}, `warning: 1 NetworkAttachmentDefinition is refused by unwindctl wrap: ` +
			`prod/a (key "cniVersion" is missing; set it to a CNI version that the plugins support: without the key, a ` +
			`runtime uses 0.1.0, but unwind ano…`},
		{"a chain that is none", []string{`{"cniVersion": "1.0.0", "type": "unwind", "chain": {"plugins": []}}`},
			`warning: 1 NetworkAttachmentDefinition is refused by unwindctl wrap: ` +
				`prod/a (key "chain": key "plugins" is empty; put the plugins to run there)`},
		{"of another program", []string{ovn}, ""},
		{"a file, none there", []string{"", "", ""}, "warning: 1 NetworkAttachmentDefinition is in a file that does not use unwind: " +
			"prod/b: DIR/multus/net.d/10-b.conf\nok: 1 NetworkAttachmentDefinition is wrapped"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var items []map[string]any
			for i, config := range tt.configs {
				items = append(items, map[string]any{"metadata": map[string]string{"namespace": "prod", "name": string(rune('a' + i))},
					"spec": map[string]string{"config": config}})
			}
			n := newMultusNode(t, func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(map[string]any{"kind": "NetworkAttachmentDefinitionList", "items": items})
			})
			n.put(t, "multus/net.d/10-b.conf", strings.Replace(bare, `"type"`, `"name": "b", "type"`, 1))
			n.put(t, "multus/net.d/20-c.conflist", strings.ReplaceAll(wrapped, `"name": "n"`, `"name": "c"`))
			if got := n.says(t); got != tt.want {
				t.Errorf("%s\nwant\n%s", got, tt.want)
			}
		})
	}
}

// TestMultusAway: what cannot be looked at is no error of the node.
func TestMultusAway(t *testing.T) {
	code := 0
	n := newMultusNode(t, func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(code) })
	for _, tt := range []struct {
		code int
		want string
	}{
		{404, ""},
		{403, "warning: not all NetworkAttachmentDefinitions were examined: API: 403 Forbidden"},
	} {
		if code = tt.code; n.says(t) != tt.want {
			t.Errorf("%d: %s", code, n.says(t))
		}
	}
	n.put(t, "multus.d/multus.kubeconfig", token)
	if got := n.says(t); got != "warning: not all NetworkAttachmentDefinitions were examined: "+
		"kubeconfig DIR/multus.d/multus.kubeconfig: not a kubeconfig in YAML" {
		t.Error(got)
	}
	nodetest.Check(t, os.Remove(n.kubeconfig))
	if got := n.says(t); got != "ok: NetworkAttachmentDefinitions were not examined: there is no DIR/multus.d/multus.kubeconfig" {
		t.Error(got)
	}
	n.put(t, "00-multus.conf", `{"cniVersion": "1.0.0", "name": "podnet", "type": "bridge"}`)
	if got := n.says(t); got != "" {
		t.Errorf("without Multus: %s", got)
	}
}

// TestFindMultus: it is found in whatever form its conflist has, and by its kubeconfig alone.
func TestFindMultus(t *testing.T) {
	const conf = `"type": "multus", "kubeconfig": "/etc/multus.kubeconfig"`
	for _, tt := range []struct{ name, file, text, want string }{
		{"thin", "00-multus.conf", `{"name": "n", ` + conf + `}`, "/etc/multus.kubeconfig"},
		{"thick", "00-multus.conf", `{"name": "n", "type": "multus-shim", "daemonSocketDir": "/run/multus"}`, "multus.d/multus.kubeconfig"},
		{"a list", "00-multus.conflist", `{"name": "n", "plugins": [{"type": "tuning", "kubeconfig": {}}, {` + conf + `}]}`, "/etc/multus.kubeconfig"},
		{"wrapped", "00-multus.conflist", `{"name": "n", "plugins": [{"type": "unwind", "chain": {"name": "n", ` + conf + `}}]}`, "/etc/multus.kubeconfig"},
		{"its kubeconfig", "multus.d/multus.kubeconfig", "", "multus.d/multus.kubeconfig"},
		{"not there", "10-podnet.conflist", `{"name": "n", "plugins": [{"type": "bridge"}]}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := &multusNode{confDir: t.TempDir()}
			n.put(t, tt.file, tt.text)
			got := ""
			if m := findMultus(n.confDir); m != nil {
				got = strings.TrimPrefix(m.Kubeconfig, n.confDir+"/")
			}
			if got != tt.want {
				t.Errorf("%q, want %q", got, tt.want)
			}
		})
	}
}
