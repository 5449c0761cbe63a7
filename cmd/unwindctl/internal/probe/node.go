package probe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/netip"
)

// PodCIDRs returns a node's pod CIDRs from the cache of the API server in a kubeconfig. An error
// names the API's host or the file, and the reason, but contains no secret.
func (p *Prober) PodCIDRs(
	ctx context.Context, kubeconfig, node string,
) (cidrs []netip.Prefix, err error) {
	if !objectName.MatchString(node) {
		return nil, fmt.Errorf("%.40q is not a valid node name", node)
	}
	api, err := p.connect(kubeconfig)
	if err != nil {
		return nil, fmt.Errorf("kubeconfig %s: %w", kubeconfig, err)
	}
	defer api.client.CloseIdleConnections()
	from := api.server.JoinPath("api/v1/nodes", node)
	from.RawQuery = "resourceVersion=0"
	code, data, err := api.get(ctx, from, maxAnswer)
	var answer struct {
		Kind string
		Spec struct{ PodCIDRs []netip.Prefix }
	}
	switch {
	case err != nil:
		err = api.reason(err)
	case code != http.StatusOK:
		err = statusError(code)
	case json.Unmarshal(data, &answer) != nil || answer.Kind != "Node":
		err = errors.New("the response is not a Node")
	default:
		return answer.Spec.PodCIDRs, nil
	}
	return nil, fmt.Errorf("cannot read node %s at %s: %w", node, api.server.Host, err)
}
