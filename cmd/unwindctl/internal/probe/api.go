package probe

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"
)

// api is the API of Kubernetes for one question.
type api struct {
	server    *url.URL
	namespace string // of the kubeconfig's context
	token     string
	timeout   time.Duration // of one request
	client    *http.Client
}

// get returns the status code and the body of an answer of at most so many bytes.
func (a *api) get(ctx context.Context, from *url.URL, most int64) (int, []byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, a.timeout,
		fmt.Errorf("no answer within %v", a.timeout))
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
		err = context.Cause(ctx) // a server that sees the request end may end its answer as if whole
	}
	if err != nil {
		return 0, nil, err
	}
	if int64(len(data)) > most {
		return 0, nil, fmt.Errorf("response larger than %d bytes", most)
	}
	return resp.StatusCode, data, nil
}

// reason returns an error without the request's URL, and none that shows the token: a server may
// put that into what it answers.
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

// statusError returns the error of an answer that is none. Its words are not the server's.
func statusError(code int) error { return fmt.Errorf("%d %s", code, http.StatusText(code)) }
