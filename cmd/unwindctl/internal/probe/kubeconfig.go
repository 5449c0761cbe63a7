package probe

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"
)

// kubeconfig contains the keys of a kubeconfig that a request needs (kubernetes.io, "kubeconfig
// (v1)").
type kubeconfig struct {
	CurrentContext string `yaml:"current-context"`
	Contexts       []struct {
		Name    string
		Context struct{ Cluster, User, Namespace string }
	}
	Clusters []struct {
		Name    string
		Cluster cluster
	}
	Users []struct {
		Name string
		User user
	}
}

type cluster struct {
	Server        string
	TLSServerName string `yaml:"tls-server-name"`
	Insecure      bool   `yaml:"insecure-skip-tls-verify"`
	CA            string `yaml:"certificate-authority"`
	CAData        string `yaml:"certificate-authority-data"`
}

type user struct {
	Token        string
	TokenFile    string `yaml:"tokenFile"`
	Cert         string `yaml:"client-certificate"`
	CertData     string `yaml:"client-certificate-data"`
	Key          string `yaml:"client-key"`
	KeyData      string `yaml:"client-key-data"`
	Exec         any
	AuthProvider any `yaml:"auth-provider"`
}

// connect returns the API in the current context of a kubeconfig. It sends nothing yet. Errors do
// not contain the file's content, which is secret.
func (p *Prober) connect(path string) (*api, error) {
	data, err := p.read(path)
	if err != nil {
		return nil, err
	}
	var k kubeconfig
	if yaml.Unmarshal(data, &k) != nil { // the error may contain a secret
		return nil, errors.New("not a kubeconfig in YAML")
	}
	cluster, user, namespace, err := k.current()
	if err != nil {
		return nil, err
	}
	files := files{p, filepath.Dir(path)}
	a := &api{namespace: namespace, timeout: cmp.Or(p.Timeout, DefaultTimeout)}
	a.server, err = url.Parse(cluster.Server)
	if err != nil || a.server.Host == "" || a.server.Scheme != "https" && a.server.Scheme != "http" {
		return nil, errors.New("the cluster's server is not an https or http URL")
	}
	if a.server.Scheme == "https" { // never send a token unencrypted
		if a.token, err = files.token(user); err != nil {
			return nil, err
		}
	}
	transport := &http.Transport{Proxy: http.ProxyFromEnvironment, MaxResponseHeaderBytes: 64 << 10}
	if transport.TLSClientConfig, err = files.tls(cluster, user); err != nil {
		return nil, err
	}
	a.client = &http.Client{
		Transport:     transport,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return a, nil
}

// current returns the cluster, the user and the namespace of the current context. If several
// objects have the same name, it uses the first one, as client-go does.
func (k *kubeconfig) current() (*cluster, *user, string, error) {
	for _, c := range k.Contexts {
		if c.Name != k.CurrentContext {
			continue
		}
		namespace := cmp.Or(c.Context.Namespace, "kube-system") // whereabouts' own default
		if !objectName.MatchString(namespace) {
			return nil, nil, "", errors.New("invalid namespace in the current context")
		}
		u := &user{}
		for i := range k.Users {
			if k.Users[i].Name == c.Context.User {
				u = &k.Users[i].User
				break
			}
		}
		if u.Exec != nil || u.AuthProvider != nil {
			return nil, nil, "", errProgram
		}
		for i := range k.Clusters {
			if k.Clusters[i].Name == c.Context.Cluster {
				return &k.Clusters[i].Cluster, u, namespace, nil
			}
		}
		return nil, nil, "", errors.New("the cluster of the current context is missing")
	}
	return nil, nil, "", errors.New("the current context is missing")
}

// errProgram means that only a program can provide the token, and this package runs no programs.
var errProgram = errors.New("the user needs exec or auth-provider, which are not supported; " +
	"use a token, a token file or a client certificate")

// files reads the files that a kubeconfig names, relative to its directory.
type files struct {
	prober *Prober
	dir    string
}

func (f files) read(path string) ([]byte, error) {
	if !filepath.IsAbs(path) {
		path = filepath.Join(f.dir, path)
	}
	data, err := f.prober.read(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, nil
}

// content returns the decoded inline value (base64), or else the file's content, or else nil.
func (f files) content(key, inline, path string) ([]byte, error) {
	if inline != "" {
		data, err := base64.StdEncoding.DecodeString(inline)
		if err != nil {
			return nil, fmt.Errorf("%s-data: %w", key, err)
		}
		return data, nil
	}
	if path == "" {
		return nil, nil
	}
	return f.read(path)
}

// token returns the user's token, or "". It prefers the token file, because only that is renewed.
func (f files) token(u *user) (string, error) {
	if u.TokenFile == "" {
		return u.Token, nil
	}
	data, err := f.read(u.TokenFile)
	if err != nil && u.Token != "" {
		return u.Token, nil
	}
	return strings.TrimSpace(string(data)), err
}

// tls returns the certificates that verify the API, and the user's client certificate.
func (f files) tls(c *cluster, u *user) (*tls.Config, error) {
	ca, err := f.content("certificate-authority", c.CAData, c.CA)
	if err != nil {
		return nil, err
	}
	config := &tls.Config{ServerName: c.TLSServerName, InsecureSkipVerify: c.Insecure}
	if ca != nil {
		if c.Insecure { // client-go also refuses this
			return nil, errors.New("certificate-authority and insecure-skip-tls-verify are mutually " +
				"exclusive")
		}
		if config.RootCAs = x509.NewCertPool(); !config.RootCAs.AppendCertsFromPEM(ca) {
			return nil, errors.New("certificate-authority contains no certificate")
		}
	}
	cert, err := f.content("client-certificate", u.CertData, u.Cert)
	if err != nil {
		return nil, err
	}
	key, err := f.content("client-key", u.KeyData, u.Key)
	if err != nil {
		return nil, err
	}
	if cert != nil || key != nil {
		pair, err := tls.X509KeyPair(cert, key)
		if err != nil {
			return nil, fmt.Errorf("client-certificate: %w", err)
		}
		config.Certificates = []tls.Certificate{pair}
	}
	return config, nil
}

// api is a connection to the Kubernetes API for one query.
type api struct {
	server    *url.URL
	namespace string // of the kubeconfig's context
	token     string
	timeout   time.Duration // of one request
	client    *http.Client
}

// get returns the status code and the body of a response. most is its maximum size in bytes.
func (a *api) get(ctx context.Context, from *url.URL, most int64) (int, []byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, a.timeout,
		fmt.Errorf("no response within %v", a.timeout))
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, from.String(), nil)
	if err != nil {
		return 0, nil, err
	}
	req.Header.Set("Accept", "application/json")
	if a.token != "" {
		req.Header.Set("Authorization", "Bearer "+a.token)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return 0, nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, most+1))
	if err == nil {
		err = context.Cause(ctx) // after a timeout, a server may end its response as if it were complete
	}
	if err != nil {
		return 0, nil, err
	}
	if int64(len(data)) > most {
		return 0, nil, fmt.Errorf("response larger than %d bytes", most)
	}
	return resp.StatusCode, data, nil
}

// reason removes the request's URL from an error. It replaces an error that contains the token,
// which a server may put into its response.
func (a *api) reason(err error) error {
	var request *url.Error
	if errors.As(err, &request) {
		err = request.Err
	}
	if a.token != "" && strings.Contains(err.Error(), a.token) {
		return errors.New("malformed response")
	}
	return err
}

// statusError returns the error for an unexpected status. It does not contain the server's text.
func statusError(code int) error { return fmt.Errorf("%d %s", code, http.StatusText(code)) }
