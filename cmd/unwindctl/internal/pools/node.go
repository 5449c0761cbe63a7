package pools

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"regexp"
	"strings"

	"cni-unwind/cmd/unwindctl/internal/probe"
	"cni-unwind/plugin/netconf"
)

// ofNode matches the keywords that calico replaces with the node's pod CIDRs, in upper or lower
// case.
var ofNode = regexp.MustCompile(`(?i)"usePodCidr(IPv6)?"`)

// OfNode returns a plugin's configuration with the ranges that the plugin actually passes to
// host-local on this node. Two plugins do not pass on the configured ranges:
//   - flannel replaces all of them with the subnets in its file (flannel-io/cni-plugin 6f13a99d,
//     flannel_linux.go, getDelegateIPAM);
//   - calico replaces two keywords with its node's pod CIDRs, which OfNode reads as calico does
//     (projectcalico/calico 0c474030, cni-plugin/internal/pkg/utils/utils.go,
//     replaceHostLocalIPAMPodCIDR; cni-plugin/pkg/k8s/k8s.go, getPodCidrs).
//
// An error means that the ranges are currently unknown.
func OfNode(ctx context.Context, config json.RawMessage) (json.RawMessage, error) {
	var conf struct {
		Type         string
		SubnetFile   string
		Nodename     string
		NodenameFile string `json:"nodename_file"`
		Kubernetes   struct {
			Kubeconfig string
			NodeName   string `json:"node_name"`
		}
	}
	_ = json.Unmarshal(config, &conf) // Ranges returns the error
	switch {
	case conf.Type == "flannel":
		return ofFlannel(cmp.Or(conf.SubnetFile, "/run/flannel/subnet.env"))
	case conf.Type != "calico" || !ofNode.Match(config):
		return config, nil
	case conf.Kubernetes.Kubeconfig == "":
		return nil, errors.New("calico's configuration sets no kubernetes.kubeconfig")
	}
	file, _ := netconf.ReadFile(cmp.Or(conf.NodenameFile, "/var/lib/calico/nodename"))
	host, _ := os.Hostname()
	cidrs, err := (&probe.Prober{}).PodCIDRs(ctx, conf.Kubernetes.Kubeconfig,
		cmp.Or(conf.Kubernetes.NodeName, conf.Nodename, strings.TrimSpace(string(file)),
			strings.ToLower(host)))
	return ofNode.ReplaceAllFunc(config, func(word []byte) []byte {
		for _, c := range cidrs {
			if c.Addr().Is6() == (len(word) > len(`"usePodCidr"`)) {
				return fmt.Appendf(nil, "%q", c)
			}
		}
		err = cmp.Or(err, fmt.Errorf("the node has no pod CIDR for %s", word))
		return word
	}), err
}

// ofFlannel returns the configuration that flannel passes to host-local with a subnet file.
func ofFlannel(path string) (json.RawMessage, error) {
	data, err := netconf.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	var sets []string
	for _, key := range []string{"FLANNEL_SUBNET=", "FLANNEL_IPV6_SUBNET="} {
		for line := range strings.Lines(string(data)) {
			value, is := strings.CutPrefix(strings.TrimSpace(line), key)
			if !is || value == "" {
				continue
			}
			subnet, err := netip.ParsePrefix(value)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", path, err)
			}
			sets = append(sets, fmt.Sprintf(`[{"subnet": %q}]`, subnet.Masked()))
		}
	}
	if sets == nil {
		return nil, fmt.Errorf("%s does not set FLANNEL_SUBNET", path)
	}
	return fmt.Appendf(nil, `{"ipam": {"type": "host-local", "ranges": [%s]}}`,
		strings.Join(sets, ",")), nil
}
