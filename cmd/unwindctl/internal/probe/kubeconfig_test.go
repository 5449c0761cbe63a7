package probe

import (
	"cmp"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/pem"
	"errors"
	"io"
	"math/big"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// identity returns a certificate that a user shows, and its key, in PEM.
func identity(t *testing.T) (cert, key []byte) {
	t.Helper()
	k, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	check(t, err)
	template := &x509.Certificate{SerialNumber: big.NewInt(1), NotAfter: time.Now().Add(time.Hour)}
	der, err := x509.CreateCertificate(rand.Reader, template, template, k.Public(), k)
	check(t, err)
	raw, err := x509.MarshalPKCS8PrivateKey(k)
	check(t, err)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: raw})
}

func b64(data []byte) string { return base64.StdEncoding.EncodeToString(data) }

// TestKubeconfig: the request is the one that the kubeconfig says.
func TestKubeconfig(t *testing.T) {
	const name = "10.56.0.0-16"
	cert, key := identity(t)
	for _, tt := range []struct {
		name          string
		cluster, user string            // URL, CA: of the server
		files         map[string]string // content CA: the server's
		want          string            // the request: path, token, and whether it has a certificate
	}{
		{name: "inline", cluster: "server: URL, certificate-authority-data: CA", user: "token: inline", want: poolDir + " Bearer inline"},
		{name: "files, relative", cluster: "server: URL, certificate-authority: ca.crt", user: "tokenFile: sub/token",
			files: map[string]string{filepath.Dir(kubeFile) + "/ca.crt": "CA", filepath.Dir(kubeFile) + "/sub/token": " in-file\n"}, want: poolDir + " Bearer in-file"},
		{name: "files, absolute", cluster: "server: URL, certificate-authority: /pki/ca.crt", user: "tokenFile: /pki/token",
			files: map[string]string{"/pki/ca.crt": "CA", "/pki/token": "in-file"}, want: poolDir + " Bearer in-file"},
		{name: "the token's file first", cluster: "server: URL, certificate-authority-data: CA", user: "token: inline, tokenFile: /token",
			files: map[string]string{"/token": "in-file"}, want: poolDir + " Bearer in-file"},
		{name: "the token's file is not there", cluster: "server: URL, certificate-authority-data: CA", user: "token: inline, tokenFile: /token",
			want: poolDir + " Bearer inline"},
		{name: "inline data first", cluster: "server: URL, certificate-authority-data: CA, certificate-authority: /none", want: poolDir + " "},
		{name: "no check of the server", cluster: "server: URL, insecure-skip-tls-verify: true", user: "token: inline", want: poolDir + " Bearer inline"},
		{name: "the server's name", cluster: "server: LOCAL, certificate-authority-data: CA, tls-server-name: example.com", want: poolDir + " "},
		{name: "a path", cluster: "server: URL/k8s/clusters/c-1/, certificate-authority-data: CA", want: "/k8s/clusters/c-1" + poolDir + " "},
		{name: "a certificate", cluster: "server: URL, certificate-authority-data: CA",
			user: "client-certificate-data: " + b64(cert) + ", client-key-data: " + b64(key), want: poolDir + "  certificate"},
		{name: "a certificate in files", cluster: "server: URL, certificate-authority-data: CA",
			user: "client-certificate: /cert, client-key: key", want: poolDir + "  certificate",
			files: map[string]string{"/cert": string(cert), filepath.Dir(kubeFile) + "/key": string(key)}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var got string
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				got = strings.TrimSuffix(r.URL.Path, name) + " " + r.Header.Get("Authorization")
				if len(r.TLS.PeerCertificates) > 0 {
					got += " certificate"
				}
				io.WriteString(w, pool(name, "10.56.0.0/16", `"12": {"id": "c0ffee"}`))
			})
			s.TLS.ClientAuth = tls.RequestClientCert
			local := strings.Replace(s.URL, "127.0.0.1", "localhost", 1) // not in the certificate
			s.put(t, strings.NewReplacer("URL", s.URL, "LOCAL", local, "CA", s.ca()).Replace(tt.cluster), tt.user)
			for path, content := range tt.files {
				if content == "CA" {
					content = string(s.caPEM())
				}
				put(t, s.Root, path, content)
			}
			held, err := s.held(t, `, "range": "10.56.0.0/16"`)
			if held != "10.56.0.12" || err != nil || got != tt.want {
				t.Errorf("%q, %v; the request was %q, want %q", held, err, got, tt.want)
			}
		})
	}
}

// TestInTheClear: a token goes over TLS only.
func TestInTheClear(t *testing.T) {
	var got http.Header
	plain := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got = r.Header
		io.WriteString(w, pool("10.56.0.0-16", "10.56.0.0/16", ""))
	}))
	defer plain.Close()
	s := newServer(t, nil)
	s.put(t, "server: "+plain.URL, "token: "+token)
	if held, err := s.held(t, `, "range": "10.56.0.0/16"`); held != "" || err != nil {
		t.Errorf("%q, %v", held, err)
	}
	if got == nil || got.Get("Authorization") != "" {
		t.Errorf("the request had %v", got)
	}
}

// TestKubeconfigRefused: such a kubeconfig is an error that shows no secret, or, where a program gives
// the token, of a store that is never asked. No request is made, and no program runs.
func TestKubeconfigRefused(t *testing.T) {
	ran := filepath.Join(t.TempDir(), "ran")
	of := func(cluster, user string) func(*testing.T, *server) {
		return func(t *testing.T, s *server) {
			s.put(t, strings.NewReplacer("URL", s.URL, "CA", s.ca()).Replace(cmp.Or(cluster, "server: URL, certificate-authority-data: CA")), user)
		}
	}
	content := func(text string) func(*testing.T, *server) {
		return func(t *testing.T, s *server) { put(t, s.Root, kubeFile, text) }
	}
	for _, tt := range []struct {
		name string
		make func(*testing.T, *server)
		want string
	}{
		{"exec", of("", `token: `+token+`, exec: {apiVersion: client.authentication.k8s.io/v1, command: /usr/bin/touch, args: [`+ran+`]}`), ""},
		{"auth-provider", of("", `auth-provider: {name: gcp, config: {cmd-path: /usr/bin/touch, cmd-args: `+ran+`}}`), ""},
		{"no server", of("server: ''", ""), "the cluster's server is not an https or http URL"},
		{"no host", of("server: 'https:///path'", ""), "the cluster's server is not an https or http URL"},
		{"another scheme", of("server: 'ftp://127.0.0.1'", ""), "the cluster's server is not an https or http URL"},
		{"no URL", of("server: 'https://root:"+token+"@[::1'", ""), "the cluster's server is not an https or http URL"},
		{"a list as a token", of("", "token: ["+token+"]"), "not a kubeconfig in YAML"},
		{"a word for a truth", of("server: URL, insecure-skip-tls-verify: "+token, ""), "not a kubeconfig in YAML"},
		{"a CA and none", of("server: URL, certificate-authority-data: CA, insecure-skip-tls-verify: true", ""), "certificate-authority and insecure-skip-tls-verify are mutually exclusive"},
		{"a CA without a certificate", of("server: URL, certificate-authority-data: "+b64([]byte(token)), ""), "certificate-authority contains no certificate"},
		{"a CA not in base64", of("server: URL, certificate-authority-data: "+token, ""), "certificate-authority-data: illegal base64 data"},
		{"a CA that is not there", of("server: URL, certificate-authority: /none", ""), "/none: no such file or directory"},
		{"a token that is not there", of("", "tokenFile: /none"), "/none: no such file or directory"},
		{"a token that is a directory", of("", "tokenFile: /etc"), "/etc: not a regular file"},
		{"a certificate without a key", of("", "client-certificate-data: "+b64([]byte(token))), "client-certificate: tls: "},
		{"a key without a certificate", of("", "client-key-data: "+b64([]byte(token))), "client-certificate: tls: "},
		{"empty", content(""), "the current context is missing"},
		{"not YAML", content("\x00" + token), "not a kubeconfig in YAML"},
		{"half a list", content("clusters: [{name: " + token), "not a kubeconfig in YAML"},
		{"a text", content(token), "not a kubeconfig in YAML"},
		{"aliases of aliases", content("a: &a [x,x,x,x,x,x,x,x,x,x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n" +
			"d: &d [*c,*c,*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d,*d,*d]\n" +
			"users: [{name: u, user: {exec: [*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e,*e]}}]"), "not a kubeconfig in YAML"},
		{"no context of that name", content("current-context: x\ncontexts: [{name: y, context: {cluster: c}}]"), "the current context is missing"},
		{"no cluster of that name", content("current-context: x\ncontexts: [{name: x, context: {cluster: c}}]"), "the cluster of the current context is missing"},
		{"a namespace that is a path", content("current-context: x\ncontexts: [{name: x, context: {cluster: c, namespace: ../../../../api/v1/secrets}}]"), "invalid namespace in the current context"},
		{"too large", content(strings.Repeat("# "+token+"\n", 200_000)), "too large: more than 4194304 bytes"},
		{"a directory", func(t *testing.T, s *server) { // netconf.TestReadFile has what else is no file
			path := filepath.Join(s.Root, kubeFile)
			check(t, errors.Join(os.Remove(path), os.Mkdir(path, 0o755)))
		}, "not a regular file"},
		{"no path", func(t *testing.T, s *server) { put(t, s.Root, flatFile, "{}") }, "whereabouts: no kubeconfig set; set kubernetes.kubeconfig in the IPAM configuration or in whereabouts.conf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t, func(http.ResponseWriter, *http.Request) {})
			tt.make(t, s)
			if tt.want != "" {
				s.refused(t, tt.want)
			} else if _, known, err := s.Held(t.Context(), query(whereaboutsWith(`, "range": "10.56.0.0/16"`))); known || err != nil {
				t.Errorf("known %t, %v; want a store that is never asked", known, err)
			}
			if _, err := os.Stat(ran); err == nil {
				t.Error("the program ran")
			}
		})
	}
}

// refused asks, and wants an error of the kubeconfig, without the token and without a request.
func (s *server) refused(t *testing.T, want string) {
	t.Helper()
	held, err := s.held(t, `, "range": "10.56.0.0/16"`)
	whole := strings.HasPrefix(want, "whereabouts: ")
	if !whole {
		want = "whereabouts: kubeconfig " + kubeFile + ": " + want
	}
	if held != "" || err == nil || !strings.HasPrefix(err.Error(), want) || whole && err.Error() != want {
		t.Errorf("%q, %v, want %s", held, err, want)
	}
	if err != nil && strings.Contains(err.Error(), token[:6]) {
		t.Errorf("the token is shown: %v", err)
	}
	if n := s.requests.Load(); n != 0 {
		t.Errorf("%d requests", n)
	}
}

// TestRenewed: each question reads the kubeconfig anew, for whereabouts renews its token.
func TestRenewed(t *testing.T) {
	s := newServer(t, serve(t, map[string]string{"10.56.0.0-16": pool("10.56.0.0-16", "10.56.0.0/16", `"12": {"id": "c0ffee"}`)}))
	s.put(t, "server: "+s.URL+", certificate-authority-data: "+s.ca(), "token: stale")
	if _, err := s.held(t, `, "range": "10.56.0.0/16"`); err == nil || !strings.HasSuffix(err.Error(), "401 Unauthorized") {
		t.Error(err)
	}
	s.put(t, "server: "+s.URL+", certificate-authority-data: "+s.ca(), "token: "+token)
	if held, err := s.held(t, `, "range": "10.56.0.0/16"`); held != "10.56.0.12" || err != nil {
		t.Errorf("%q, %v", held, err)
	}
}
