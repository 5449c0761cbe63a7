package probe

import (
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
)

// definitionPage is a page of a list as the API has it.
func definitionPage(next, items string) string {
	return fmt.Sprintf(`{"apiVersion": "k8s.cni.cncf.io/v1", "kind": "NetworkAttachmentDefinitionList",
		"metadata": {"continue": %q, "resourceVersion": "7"}, "items": [%s]}`, next, items)
}

// listed asks for the definitions, and returns them in one line.
func (s *server) listed(t *testing.T) (string, error) {
	t.Helper()
	var all []string
	err := s.Definitions(t.Context(), kubeFile, func(d Definition) {
		all = append(all, fmt.Sprintf("%s/%s %s", d.Namespace, d.Name, d.Config))
	})
	if err != nil && strings.Contains(err.Error(), token) {
		t.Errorf("the token is shown: %v", err)
	}
	return strings.Join(all, "; "), err
}

// TestDefinitions: those of all pages, with the requests that a Kubernetes client makes.
func TestDefinitions(t *testing.T) {
	pages := map[string]string{
		"limit=500": definitionPage("a&b=/", `{"metadata": {"namespace": "prod", "name": "sriov"}, "spec": {"config": "{}"}}`),
		"continue=a%26b%3D%2F&limit=500": definitionPage("", `{"metadata": {"namespace": "test", "name": "file"}},
			{"metadata": {"namespace": "test", "name": "empty"}, "spec": {}}`),
	}
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodGet || r.URL.Path != "/apis/k8s.cni.cncf.io/v1/network-attachment-definitions" ||
			r.Header.Get("Authorization") != "Bearer "+token || pages[r.URL.RawQuery] == "" {
			t.Errorf("%s %s", r.Method, r.URL)
		}
		io.WriteString(w, pages[r.URL.RawQuery])
	})
	if got, err := s.listed(t); got != "prod/sriov {}; test/file ; test/empty " || err != nil {
		t.Errorf("%q, %v", got, err)
	}
}

// TestDefinitionAnswers: an answer that is not the list is an error with the API's host, unless the
// API has no such kind.
func TestDefinitionAnswers(t *testing.T) {
	one := `{"metadata": {"namespace": "prod", "name": "sriov"}}`
	for _, tt := range []struct {
		name string
		code int
		body string
		want string
	}{
		{"no such kind", 404, "404 page not found", ""},
		{"401", 401, token, "401 Unauthorized"},
		{"403", 403, definitionPage("", one), "403 Forbidden"},
		{"503", 503, token, "503 Service Unavailable"},
		{"another list", 200, `{"kind": "PodList"}`, "the response is not a NetworkAttachmentDefinitionList"},
		{"a web page", 200, "<html>" + token, "malformed response"},
		{"the token in a name", 200, definitionPage("", strings.Replace(one, "sriov", token, 1)), "malformed response"},
		{"a number for a text", 200, definitionPage("", strings.Replace(one, `"sriov"`, "7", 1)), "malformed response: json: cannot unmarshal number"},
		{"too large", 200, definitionPage("", one+strings.Repeat(" ", 4<<20)), "response larger than 4194304 bytes"},
		{"no last page", 200, definitionPage("more", ""), "the list has more than 20 pages"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(tt.code)
				io.WriteString(w, tt.body)
			})
			got, err := s.listed(t)
			if tt.want == "" && err == nil && got == "" {
				return
			}
			if err == nil || got != "" || tt.want == "" || !strings.HasPrefix(err.Error(), s.host()+": "+tt.want) {
				t.Errorf("%q, %v, want %s", got, err, tt.want)
			}
			if n := s.requests.Load(); n > 20 {
				t.Errorf("%d requests", n)
			}
		})
	}
}
