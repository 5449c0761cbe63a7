package probe

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"time"
)

// The limits of one query for the NetworkAttachmentDefinitions of a cluster.
const (
	pageSize    = 500 // definitions
	maxPage     = 4 << 20
	maxPages    = 20
	listTimeout = 5 * time.Second
)

// Definition is a NetworkAttachmentDefinition. If Config is "", Multus uses a file on the node.
type Definition struct{ Namespace, Name, Config string }

// definitionList is a page of definitions (kubernetes.io, "Retrieving large results sets in
// chunks").
type definitionList struct {
	Kind     string
	Metadata struct{ Continue string }
	Items    []struct {
		Metadata struct{ Namespace, Name string }
		Spec     struct{ Config string }
	}
}

// Definitions calls each for every NetworkAttachmentDefinition in the API of a kubeconfig. If the
// API does not have that kind, it returns nil without a call. An error means that the list is
// incomplete. The error names the API's host or the file, and the reason, but contains no secret.
func (p *Prober) Definitions(ctx context.Context, kubeconfig string, each func(Definition)) error {
	api, err := p.connect(kubeconfig)
	if err != nil {
		return fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	defer api.client.CloseIdleConnections()
	ctx, cancel := context.WithTimeoutCause(ctx, listTimeout,
		fmt.Errorf("the query did not finish within %v", listTimeout))
	defer cancel()
	if err := api.definitions(ctx, each); err != nil {
		return fmt.Errorf("%s: %w", api.server.Host, api.reason(err))
	}
	return nil
}

func (a *api) definitions(ctx context.Context, each func(Definition)) error {
	from := a.server.JoinPath("apis/k8s.cni.cncf.io/v1/network-attachment-definitions")
	query := url.Values{"limit": {fmt.Sprint(pageSize)}}
	for range maxPages {
		from.RawQuery = query.Encode()
		code, data, err := a.get(ctx, from, maxPage)
		switch {
		case err != nil:
			return err
		case code == http.StatusNotFound:
			return nil
		case code != http.StatusOK:
			return statusError(code)
		case a.token != "" && bytes.Contains(data, []byte(a.token)):
			return errors.New("malformed response")
		}
		var page definitionList
		if err := json.Unmarshal(data, &page); err != nil {
			return fmt.Errorf("malformed response: %w", err)
		}
		if page.Kind != "NetworkAttachmentDefinitionList" {
			return errors.New("the response is not a NetworkAttachmentDefinitionList")
		}
		for _, item := range page.Items {
			each(Definition{item.Metadata.Namespace, item.Metadata.Name, item.Spec.Config})
		}
		if page.Metadata.Continue == "" {
			return nil
		}
		query.Set("continue", page.Metadata.Continue)
	}
	return fmt.Errorf("the list has more than %d pages", maxPages)
}
