package pools

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"regexp"
	"strings"

	"cni-unwind/plugin/netconf"
)

// podCIDR matches the keywords that calico replaces with the node's pod CIDRs, in upper or lower
// case.
var podCIDR = regexp.MustCompile(`(?i)"usePodCidr(IPv6)?"`)

// OfNode returns a plugin's configuration with the ranges that the plugin actually passes to
// host-local on this node. Two plugins do not pass on the configured ranges:
//   - flannel replaces all of them with the subnets in its file (flannel-io/cni-plugin 6f13a99d,
//     flannel_linux.go, getDelegateIPAM);
//   - calico replaces two keywords with its node's pod CIDRs, which only the Kubernetes API
//     provides (projectcalico/calico 0c474030, cni-plugin/internal/pkg/utils/utils.go,
//     replaceHostLocalIPAMPodCIDR).
//
// An error means that the ranges are unknown.
func OfNode(config json.RawMessage) (json.RawMessage, error) {
	var conf struct{ Type, SubnetFile string }
	_ = json.Unmarshal(config, &conf) // Ranges returns the error
	switch {
	case conf.Type == "flannel":
		return ofFlannel(cmp.Or(conf.SubnetFile, "/run/flannel/subnet.env"))
	case conf.Type == "calico" && podCIDR.Match(config):
		return nil, errors.New("calico's usePodCidr stands for the node's pod CIDR, which only the " +
			"Kubernetes API provides")
	}
	return config, nil
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
