package plugin

import (
	"encoding/json"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types/create"

	"cni-unwind/journal"
)

// result is the part of a CNI result that unwind looks at. The result itself is kept and passed on as the bytes that the
// delegate printed.
type result struct {
	CNIVersion string `json:"cniVersion"`
	Interfaces []struct {
		Name    string `json:"name"`
		Mac     string `json:"mac"`
		Sandbox string `json:"sandbox"`
	} `json:"interfaces"`
	IPs []struct {
		Address string `json:"address"`
	} `json:"ips"`
	IP4, IP6 *struct { // before 0.3.0
		IP string `json:"ip"`
	}
}

func parseResult(raw json.RawMessage) (*result, error) {
	r := &result{}
	if len(raw) == 0 {
		return r, nil
	}
	if err := json.Unmarshal(raw, r); err != nil {
		return nil, jsonError(err)
	}
	return r, nil
}

// prefixes returns the addresses of a result with the length of their subnets. What is not an address is left out.
func (r *result) prefixes() []netip.Prefix {
	var texts []string
	for _, ip := range r.IPs {
		texts = append(texts, ip.Address)
	}
	for _, ip := range []*struct {
		IP string `json:"ip"`
	}{r.IP4, r.IP6} {
		if ip != nil {
			texts = append(texts, ip.IP)
		}
	}
	var all []netip.Prefix
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, netip.PrefixFrom(p.Addr().Unmap(), p.Bits()))
		}
	}
	return all
}

// addresses returns the addresses that say whose container it is: not loopback, link-local, multicast or unspecified ones.
func (r *result) addresses() []netip.Addr {
	var all []netip.Addr
	for _, p := range r.prefixes() {
		if a := p.Addr(); a.IsGlobalUnicast() && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// readResult returns what a delegate printed on ADD, in the chain's version.
func readResult(stdout []byte, cniVersion string) (json.RawMessage, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(stdout, &object); err != nil || object == nil {
		return nil, fmt.Errorf("its result is not a JSON object: %q", shorten(string(stdout), 200))
	}
	r, err := parseResult(stdout)
	if err != nil {
		return nil, fmt.Errorf("its result: %w", err)
	}
	if r.CNIVersion == "" { // SPEC: the same as the configuration's
		object["cniVersion"] = quote(cniVersion)
		return marshal(object), nil
	}
	return convertResult(stdout, cniVersion)
}

// convertResult returns a result in another version of the specification; the same bytes if it is in that already.
func convertResult(raw json.RawMessage, to string) (json.RawMessage, error) {
	from, err := create.DecodeVersion(raw)
	if err != nil || sameVersion(from, to) {
		return raw, err
	}
	r, err := create.Create(from, raw)
	if err != nil {
		return nil, err
	}
	if r, err = r.GetAsVersion(to); err != nil {
		return nil, err
	}
	return json.Marshal(r)
}

func sameVersion(a, b string) bool {
	return a == b || a == "" && b == "0.1.0" || a == "0.1.0" && b == ""
}

// withoutAddresses returns a result in which the given addresses are not.
func withoutAddresses(raw json.RawMessage, drop []netip.Addr) (json.RawMessage, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, jsonError(err)
	}
	dropped := func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && slices.Contains(drop, p.Addr().Unmap())
	}
	for key, value := range object { // of any case, as plugins read them
		switch {
		case strings.EqualFold(key, "ips"):
			var ips []json.RawMessage
			if err := json.Unmarshal(value, &ips); err != nil {
				return nil, fmt.Errorf("key %q is not a list", key)
			}
			object[key] = marshal(slices.DeleteFunc(ips, func(ip json.RawMessage) bool {
				var one struct {
					Address string `json:"address"`
				}
				return json.Unmarshal(ip, &one) == nil && dropped(one.Address)
			}))
		case strings.EqualFold(key, "ip4"), strings.EqualFold(key, "ip6"):
			var one struct {
				IP string `json:"ip"`
			}
			if json.Unmarshal(value, &one) == nil && dropped(one.IP) {
				delete(object, key)
			}
		}
	}
	return marshal(object), nil
}

// sameMeaning says whether two results of any version say the same, whatever their bytes.
func sameMeaning(a, b json.RawMessage) bool {
	current := func(raw json.RawMessage) string {
		raw, err := convertResult(raw, "1.1.0")
		if err != nil {
			return ""
		}
		r, err := create.Create("1.1.0", raw)
		if err != nil {
			return ""
		}
		text, err := json.Marshal(r)
		if err != nil {
			return ""
		}
		return string(text)
	}
	return current(a) == current(b)
}

// maxPodName is more than Kubernetes allows a namespace (63) and a name (253) to have together, in bytes, and less than the
// journal allows a key to have.
const maxPodName = 1000

// podOf reads the pod out of CNI_ARGS (K8S_POD_NAMESPACE=…;K8S_POD_NAME=…;K8S_POD_UID=…), as kubelet's runtimes set it.
func podOf(args string) journal.Pod {
	var p journal.Pod
	for _, pair := range strings.Split(args, ";") {
		switch key, value, _ := strings.Cut(pair, "="); key {
		case "K8S_POD_NAMESPACE":
			p.Namespace = value
		case "K8S_POD_NAME":
			p.Name = value
		case "K8S_POD_UID":
			p.UID = value
		}
	}
	if len(p.Namespace)+len(p.Name) > maxPodName {
		return journal.Pod{}
	}
	return p
}
