package probe

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"
)

const (
	token   = "s3cret.t0ken-of.whereabouts"
	poolDir = "/apis/whereabouts.cni.cncf.io/v1alpha1/namespaces/cni/ippools/"
)

// server is an API of Kubernetes over TLS, with the files on a node that lead to it.
type server struct {
	*httptest.Server
	Prober
	requests atomic.Int32
}

// newServer starts one. Its prober has time for a slow machine.
func newServer(t *testing.T, h http.HandlerFunc) *server {
	t.Helper()
	s := &server{Prober: Prober{Root: t.TempDir(), Timeout: time.Minute}}
	s.Server = httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		s.requests.Add(1)
		h(w, r)
	}))
	s.Config.ErrorLog = log.New(io.Discard, "", 0)
	s.StartTLS()
	t.Cleanup(s.Close)
	put(t, s.Root, flatFile, flatConfig)
	s.put(t, fmt.Sprintf("server: %s, certificate-authority-data: %s", s.URL, s.ca()), "token: "+token)
	return s
}

// put writes the kubeconfig.
func (s *server) put(t *testing.T, cluster, user string) {
	t.Helper()
	put(t, s.Root, kubeFile, `# Kubeconfig file for the Whereabouts CNI plugin.
apiVersion: v1
kind: Config
clusters:
- {name: other, cluster: {server: "https://other.invalid"}}
- {name: local, cluster: {`+cluster+`}}
users:
- {name: other, user: {token: other}}
- {name: whereabouts, user: {`+user+`}}
contexts:
- {name: other, context: {cluster: other, user: other, namespace: other}}
- {name: whereabouts-context, context: {cluster: local, user: whereabouts, namespace: cni}}
current-context: whereabouts-context
`)
}

func (s *server) caPEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw})
}

func (s *server) ca() string { return base64.StdEncoding.EncodeToString(s.caPEM()) }

func (s *server) host() string { return s.Listener.Addr().String() }

// held asks for container c0ffee, interface net1.
func (s *server) held(t *testing.T, keys string) (string, error) {
	t.Helper()
	held, known, err := s.Held(t.Context(), query(whereaboutsWith(keys)))
	if !known {
		t.Error("the store is not known")
	}
	return addresses(held), err
}

// fails asks, and wants an error with the API's host that ends so.
func (s *server) fails(t *testing.T, want string) {
	t.Helper()
	if _, err := s.held(t, `, "range": "10.56.0.0/16"`); err == nil || !strings.HasSuffix(err.Error(), s.host()+": "+want) {
		t.Errorf("%v, want %s: %s", err, s.host(), want)
	}
}

// notFound is the API's answer for an object that does not exist.
func notFound(kind, name string) string {
	return fmt.Sprintf(`{"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": "%[1]s.whereabouts.cni.cncf.io \"%[2]s\" not found",
		"reason": "NotFound", "details": {"name": "%[2]s", "group": "whereabouts.cni.cncf.io", "kind": "%[1]s"}, "code": 404}`, kind, name)
}

// pool is an IPPool as the API has it.
func pool(name, cidr, allocations string) string {
	return fmt.Sprintf(`{"apiVersion": "whereabouts.cni.cncf.io/v1alpha1", "kind": "IPPool",
		"metadata": {"name": %q, "namespace": "cni", "resourceVersion": "7", "managedFields": [{"manager": "whereabouts"}]},
		"spec": {"range": %q, "allocations": {%s}}}`, name, cidr, allocations)
}

// serve answers as the API does: for the right token, with the pools that exist.
func serve(t *testing.T, pools map[string]string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		name, ok := strings.CutPrefix(r.URL.Path, poolDir)
		switch {
		case r.Method != http.MethodGet || !ok || r.URL.RawQuery != "":
			t.Errorf("%s %s", r.Method, r.URL)
		case r.Header.Get("Authorization") != "Bearer "+token:
			w.WriteHeader(http.StatusUnauthorized)
		case pools[name] == "":
			w.WriteHeader(http.StatusNotFound)
			io.WriteString(w, notFound("ippools", name))
		default:
			io.WriteString(w, pools[name])
		}
	}
}

// TestHeld: the addresses of the container's interface, and of no other.
func TestHeld(t *testing.T) {
	const (
		v4 = `, "range": "10.56.0.0/16"`
		v6 = `, "range": "fd00:1::/64"`
	)
	for _, tt := range []struct{ name, keys, allocations, want string }{
		{"held", v4, `"12": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net1"}`, "10.56.0.12"},
		{"past an octet", v4, `"65534": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net1"}`, "10.56.255.254"},
		{"released", v4, ``, ""},
		{"another container", v4, `"12": {"id": "c0ffee0", "podref": "default/web-0", "ifname": "net1"}, "13": {"id": "c0ffe", "ifname": "net1"}`, ""},
		{"another interface", v4, `"12": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net2"}`, ""},
		{"from before interfaces", v4, `"12": {"id": "c0ffee", "podref": "default/web-0"}`, "10.56.0.12"},
		{"from before interfaces, another container", v4, `"12": {"id": "decaf", "podref": "default/web-0"}`, ""},
		{"several", v4, `"9": {"id": "c0ffee", "ifname": "net1"}, "10": {"id": "c0ffee"}, "11": {"id": "decaf"}, "4": {"id": "c0ffee"},
			"5": {"id": "c0ffee"}, "6": {"id": "c0ffee"}, "7": {"id": "c0ffee"}`, "10.56.0.4 10.56.0.5 10.56.0.6 10.56.0.7 10.56.0.9 10.56.0.10"},
		{"a zero in front", v4, `"010": {"id": "c0ffee", "ifname": "net1"}`, "10.56.0.10"},
		{"IPv6", v6, `"255": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net1"}`, "fd00:1::ff"},
		{"IPv6, a large offset", v6, `"18446744073709551615": {"id": "c0ffee", "ifname": "net1"}`, "fd00:1::ffff:ffff:ffff:ffff"},
		{"IPv6, a carry", `, "range": "fd00:1::/48"`, `"18446744073709551615": {"id": "c0ffee", "ifname": "net1"}`, "fd00:1:0:2::"},
		{"two ranges", `, "ipRanges": [{"range": "10.56.0.0/16"}, {"range": "fd00:1::/64"}]`,
			`"3": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net1"}`, "10.56.0.3 fd00:1::3"},
		{"the second of two ranges", `, "ipRanges": [{"range": "10.99.0.0/16"}, {"range": "fd00:1::/64"}]`,
			`"3": {"id": "c0ffee", "podref": "default/web-0", "ifname": "net1"}`, "fd00:1::3"},
		{"a named network", `, "range": "10.56.0.0/16", "network_name": "blue"`, `"12": {"id": "c0ffee"}`, "10.57.0.12"},
		{"no pool", `, "range": "10.99.0.0/16"`, `"12": {"id": "c0ffee"}`, ""},
		{"no range", ``, `"12": {"id": "c0ffee"}`, ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t, serve(t, map[string]string{
				"10.56.0.0-16":      pool("10.56.0.0-16", "10.56.0.0/16", tt.allocations),
				"blue-10.56.0.0-16": pool("blue-10.56.0.0-16", "10.57.0.0/16", tt.allocations),
				"fd00-1---64":       pool("fd00-1---64", "fd00:1::/64", tt.allocations),
				"fd00-1---48":       pool("fd00-1---48", "fd00:1:0:1::1/48", tt.allocations), // the first is as written
			}))
			got, err := s.held(t, tt.keys)
			if got != tt.want || err != nil {
				t.Errorf("%q, %v, want %q", got, err, tt.want)
			}
		})
	}
}

// TestAnswers: an answer that is not the pool is an error with the API's host, never "nothing is held".
func TestAnswers(t *testing.T) {
	const name = "10.56.0.0-16"
	whole := pool(name, "10.56.0.0/16", `"12": {"id": "c0ffee", "ifname": "net1"}`)
	say := func(code int, body string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) { w.WriteHeader(code); io.WriteString(w, body) }
	}
	held := func(offset, cidr string) http.HandlerFunc {
		return say(200, pool(name, cidr, fmt.Sprintf(`%q: {"id": "c0ffee", "ifname": "net1"}`, offset)))
	}
	// raw writes bytes that may not be HTTP, and may end before what it announced.
	raw := func(text string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			conn, _, err := w.(http.Hijacker).Hijack()
			if err != nil {
				panic(err)
			}
			io.WriteString(conn, strings.ReplaceAll(text, "TOKEN", r.Header.Get("Authorization")))
			conn.Close()
		}
	}
	for _, tt := range []struct {
		name string
		h    http.HandlerFunc
		want string
	}{
		{"401", say(401, `{"kind": "Status", "message": "`+token+`"}`), "401 Unauthorized"},
		{"403", say(403, whole), "403 Forbidden"},
		{"500", say(500, whole), "500 Internal Server Error"},
		{"503", say(503, notFound("ippools", name)), "503 Service Unavailable"},
		{"201", say(201, whole), "201 Created"},
		{"204", say(204, ""), "204 No Content"},
		{"a status text that shows the token", raw("HTTP/1.1 500 TOKEN\r\n\r\n"), "500 Internal Server Error"},
		{"404 of a server without IPPools", say(404, "404 page not found"), "404 Not Found: the API has no IPPools"},
		{"404 of another pool", say(404, notFound("ippools", "10.57.0.0-16")), "404 Not Found: the API has no IPPools"},
		{"404 of another kind", say(404, notFound("namespaces", name)), "404 Not Found: the API has no IPPools"},
		{"404, half of it", say(404, notFound("ippools", name)[:200]), "404 Not Found: the API has no IPPools"},
		{"404 for another reason", say(404, strings.Replace(notFound("ippools", name), "NotFound", "Expired", 1)), "404 Not Found: the API has no IPPools"},
		{"a web page", say(200, "<html>log in</html>"), "malformed response: invalid character '<'"},
		{"an empty object", say(200, "{}"), "the response is not that IPPool"},
		{"null", say(200, "null"), "the response is not that IPPool"},
		{"another pool", say(200, pool("10.57.0.0-16", "10.57.0.0/16", "")), "the response is not that IPPool"},
		{"another kind", say(200, strings.Replace(whole, "IPPool", "IPPoolList", 1)), "the response is not that IPPool"},
		{"no range", say(200, pool(name, "", "")), `malformed response: range ""`},
		{"half of it, whole HTTP", say(200, whole[:len(whole)-9]), "malformed response: unexpected end of JSON input"},
		{"half of it", raw(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s", len(whole)+9, whole)), "unexpected EOF"},
		{"more behind it", say(200, whole+whole), "malformed response: invalid character '{' after top-level value"},
		{"a list of allocations", say(200, strings.Replace(whole, `{"12"`, `[], "no": {"12"`, 1)), "malformed response: json: cannot unmarshal array"},
		{"an offset past the network", held("65536", "10.56.0.0/16"), `allocation "65536" is not an address of 10.56.0.0/16`},
		{"an offset past all addresses", held("18446744073709551615", "ffff:ffff:ffff:ffff::1/64"), "is not an address of"},
		{"an offset past IPv4", held("4294967296", "10.56.0.0/16"), "is not an address of"},
		{"a negative offset", held("-1", "10.56.0.0/16"), `allocation "-1" is not an address`},
		{"an offset that is no number", held("x", "10.56.0.0/16"), `allocation "x" is not an address`},
		{"no HTTP", raw("SSH-2.0-OpenSSH_9.9\r\n"), "malformed HTTP"},
		{"no HTTP, but the token", raw("TOKEN\r\n"), "malformed response"},
		{"the token in a range", func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, pool(name, r.Header.Get("Authorization"), ""))
		}, "malformed response"},
		{"nothing", raw(""), "EOF"},
		{"headers of 1 MB", raw("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 1<<20)), "server response headers exceeded"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := newServer(t, tt.h)
			got, err := s.held(t, `, "range": "10.56.0.0/16"`)
			want := "whereabouts: pool " + name + " at " + s.host() + ": "
			if err == nil || got != "" || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("%q, %v, want %s%s", got, err, want, tt.want)
			}
			if err != nil && strings.Contains(err.Error(), token) {
				t.Errorf("the token is shown: %v", err)
			}
		})
	}
}

// TestRedirect: the token goes to the server that the kubeconfig names, and to no other.
func TestRedirect(t *testing.T) {
	other := newServer(t, func(http.ResponseWriter, *http.Request) {})
	for _, code := range []int{301, 302, 303, 307, 308} {
		s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
			http.Redirect(w, r, other.URL+r.URL.Path, code)
		})
		s.fails(t, fmt.Sprintf("%d %s", code, http.StatusText(code)))
	}
	if n := other.requests.Load(); n != 0 {
		t.Errorf("%d requests went to another server", n)
	}
}

// TestEndless: the prober reads no more than its bound, packed or not.
func TestEndless(t *testing.T) {
	const size = 50 << 20
	for _, packed := range []bool{false, true} {
		t.Run(fmt.Sprint("packed ", packed), func(t *testing.T) {
			var written atomic.Int64
			body := []byte(strings.Repeat(" ", 1<<20))
			if packed {
				var b bytes.Buffer
				z := gzip.NewWriter(&b)
				for range size / len(body) {
					z.Write(body)
				}
				z.Close()
				body = b.Bytes()
			}
			s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
				if packed {
					w.Header().Set("Content-Encoding", "gzip")
					w.Write(body)
					return
				}
				for range size / len(body) {
					n, err := w.Write(body)
					written.Add(int64(n))
					if err != nil {
						return
					}
				}
			})
			s.fails(t, "response larger than 16777216 bytes")
			s.Close() // after the handler has ended
			if n := written.Load(); n >= size {
				t.Errorf("%d bytes were read", n)
			}
		})
	}
}

// TestHang: a request ends with its time, or with the caller's.
func TestHang(t *testing.T) {
	hang := func(first string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			io.WriteString(w, first)
			w.(http.Flusher).Flush()
			<-r.Context().Done()
		}
	}
	for _, tt := range []struct {
		name string
		h    http.HandlerFunc
	}{
		{"before the answer", func(w http.ResponseWriter, r *http.Request) { <-r.Context().Done() }},
		{"in the answer", hang(`{"kind": "IPPool",`)},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			s := newServer(t, tt.h)
			s.Timeout = 50 * time.Millisecond
			s.fails(t, "no response within 50ms")
			s.Timeout = 0
			s.fails(t, "no response within 2s")
			ctx, cancel := context.WithCancel(t.Context())
			s.Timeout = time.Hour
			time.AfterFunc(50*time.Millisecond, cancel)
			_, _, err := s.Held(ctx, query(whereaboutsWith(`, "range": "10.56.0.0/16"`)))
			if want := s.host() + ": context canceled"; err == nil || !strings.HasSuffix(err.Error(), want) {
				t.Errorf("%v, want %s", err, want)
			}
		})
	}
	t.Run("in the handshake", func(t *testing.T) {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		check(t, err)
		defer listener.Close() // the kernel takes the connection, and nobody else
		s := newServer(t, nil)
		s.put(t, "server: https://"+listener.Addr().String(), "token: "+token)
		s.Timeout = 50 * time.Millisecond
		want := listener.Addr().String() + ": no response within 50ms"
		if _, err := s.held(t, `, "range": "10.56.0.0/16"`); err == nil || !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%v, want %s", err, want)
		}
	})
}

// TestRefused: nobody listens, or it is somebody else.
func TestRefused(t *testing.T) {
	s := newServer(t, nil)
	s.Close()
	s.fails(t, "dial tcp "+s.host()+": connect: connection refused")
	s = newServer(t, func(http.ResponseWriter, *http.Request) { t.Error("a request without a check of the server") })
	s.put(t, "server: "+s.URL, "token: "+token)
	if _, err := s.held(t, `, "range": "10.56.0.0/16"`); err == nil || !strings.Contains(err.Error(), s.host()+": tls: failed to verify certificate") {
		t.Error(err)
	}
}

// TestSecondPool: an error of one pool is an error of the whole, whatever the others keep.
func TestSecondPool(t *testing.T) {
	mine := pool("10.56.0.0-16", "10.56.0.0/16", `"12": {"id": "c0ffee"}`)
	ok := serve(t, map[string]string{"10.56.0.0-16": mine})
	s := newServer(t, func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.URL.Path, "fd00---64") {
			w.WriteHeader(500)
			return
		}
		ok(w, r)
	})
	got, err := s.held(t, `, "ipRanges": [{"range": "10.56.0.0/16"}, {"range": "fd00::/64"}]`)
	if want := "whereabouts: pool fd00---64 at " + s.host() + ": 500 Internal Server Error"; got != "" || err == nil || err.Error() != want {
		t.Errorf("%q, %v, want %s", got, err, want)
	}
}

// TestReason: an error loses the URL, in which a password may be.
func TestReason(t *testing.T) {
	a := &api{}
	err := a.reason(fmt.Errorf("in: %w", &url.Error{Op: "Get", URL: "https://root:" + token + "@api", Err: io.EOF}))
	if err.Error() != "EOF" {
		t.Error(err)
	}
}

// FuzzAnswer: any answer gives an error, or addresses of the pool's network.
func FuzzAnswer(f *testing.F) {
	f.Add([]byte(pool("p", "10.56.0.0/16", `"12": {"id": "c0ffee", "ifname": "net1"}`)))
	f.Add([]byte(pool("p", "fd00::/64", `"18446744073709551615": {"id": "c0ffee"}, "1": {"id": "c0ffee"}`)))
	f.Add([]byte(pool("p", "::ffff:10.0.0.0/112", `"4294967296": {"id": "c0ffee"}`)))
	f.Fuzz(func(t *testing.T, data []byte) {
		var p ipPool
		if json.Unmarshal(data, &p) != nil {
			return
		}
		held, err := p.held("c0ffee", "net1")
		if err != nil {
			return
		}
		network := netip.MustParsePrefix(p.Spec.Range)
		if len(held) > len(p.Spec.Allocations) {
			t.Errorf("%v", held)
		}
		for _, address := range held {
			if !network.Contains(address) {
				t.Errorf("%v is not in %v", address, network)
			}
		}
	})
}
