package agent

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/internal/term"
)

const apiTimeout = 2 * time.Second

// cluster is the API server. The agent calls it with the service account of its pod.
type cluster struct {
	address string // host:port
	dir     string // contains the token, which the kubelet renews, and the CA's certificates
}

// inCluster returns the API server of this pod's cluster. root is the pod's root directory.
func inCluster(root string) (cluster, error) {
	host, port := os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT")
	if host == "" || port == "" {
		return cluster{}, term.Usage("--events works only in a Kubernetes pod: " +
			"KUBERNETES_SERVICE_HOST or KUBERNETES_SERVICE_PORT is not set")
	}
	return cluster{
		address: net.JoinHostPort(host, port),
		dir:     filepath.Join(root, "var/run/secrets/kubernetes.io/serviceaccount"),
	}, nil
}

// client returns a client for one request, with the current token. Errors do not contain the token.
func (c cluster) client() (client *http.Client, token string, err error) {
	secret, err := os.ReadFile(filepath.Join(c.dir, "token"))
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("the pod has no service account token; set the chart value events: true: %w",
			err)
	}
	if err != nil {
		return nil, "", err
	}
	ca, err := os.ReadFile(filepath.Join(c.dir, "ca.crt"))
	if err != nil {
		return nil, "", err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, "", fmt.Errorf("%s/ca.crt contains no certificate", c.dir)
	}
	return &http.Client{
		Timeout: apiTimeout,
		Transport: &http.Transport{TLSClientConfig: &tls.Config{RootCAs: roots},
			DisableKeepAlives: true, MaxResponseHeaderBytes: 64 << 10},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, strings.TrimSpace(string(secret)), nil
}

// create posts an object to a path of the API. It returns the HTTP status, and whether the object's
// namespace is being deleted. An error means that the API server did not respond.
func (c cluster) create(ctx context.Context, path string, object any) (int, bool, error) {
	client, token, err := c.client()
	if err != nil {
		return 0, false, err
	}
	body, err := json.Marshal(object)
	if err != nil {
		return 0, false, err
	}
	to := url.URL{Scheme: "https", Host: c.address, Path: path}
	r, err := http.NewRequestWithContext(ctx, http.MethodPost, to.String(), bytes.NewReader(body))
	if err != nil {
		return 0, false, err
	}
	r.Header.Set("Authorization", "Bearer "+token)
	r.Header.Set("Content-Type", "application/json")
	answer, err := client.Do(r)
	if err != nil { // omit the path, which contains the pod's namespace
		return 0, false, fmt.Errorf("%s: %w", c.address, errors.Unwrap(err))
	}
	defer func() { _ = answer.Body.Close() }()
	type cause struct{ Reason string }
	var status struct{ Details struct{ Causes []cause } }
	_ = json.NewDecoder(io.LimitReader(answer.Body, 64<<10)).Decode(&status)
	ending := slices.Contains(status.Details.Causes, cause{"NamespaceTerminating"})
	return answer.StatusCode, ending, nil
}
