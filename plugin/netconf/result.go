package netconf

import (
	"cmp"
	"encoding/json"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/types/create"

	"cni-unwind/journal"
)

// Result is the part of a CNI result that unwind uses. unwind stores and passes on the whole
// result.
type Result struct {
	Interfaces []struct {
		Name    string `json:"name"`
		Mac     string `json:"mac"`
		Sandbox string `json:"sandbox"`
	} `json:"interfaces"`
	IPs []struct {
		Address string `json:"address"`
	} `json:"ips"`
	IP4, IP6 oldIP // in a result before CNI 0.3.0
}

// oldIP is an address of a result before CNI 0.3.0, with its prefix length.
type oldIP struct {
	IP string `json:"ip"`
}

// ParseResult reads a result. If raw is empty or invalid, the Result is empty.
func ParseResult(raw json.RawMessage) (*Result, error) {
	r := &Result{}
	if len(raw) == 0 {
		return r, nil
	}
	if err := json.Unmarshal(raw, r); err != nil {
		return &Result{}, jsonError(err)
	}
	return r, nil
}

// SharesLink reports whether both results name the same interface of the host, such as a bridge.
func (r *Result) SharesLink(other *Result) bool {
	for _, link := range r.Interfaces {
		for _, theirs := range other.Interfaces {
			if link.Name == theirs.Name && link.Sandbox == "" && theirs.Sandbox == "" {
				return true
			}
		}
	}
	return false
}

// SharedAddresses returns the addresses that two ADDs both got from the same node-local pool, or
// from two node-local pools for the same bridge, as after an installer has renamed the network. In
// all other cases, the same address in two networks is no error.
func SharedAddresses(e, other *journal.Record) (shared []netip.Addr) {
	own, _ := ParseResult(e.Got.Result)
	theirs, _ := ParseResult(other.Got.Result)
	bridged := own.SharesLink(theirs)
	for _, c := range e.Got.Claims {
		if c.Pool != "" && slices.ContainsFunc(other.Got.Claims, func(o journal.Claim) bool {
			return o.Address == c.Address && (o.Pool == c.Pool || o.Pool != "" && bridged)
		}) {
			shared = append(shared, c.Address)
		}
	}
	return shared
}

// Prefixes returns the addresses of a result with their prefix lengths. It skips invalid addresses.
func (r *Result) Prefixes() (all []netip.Prefix) {
	texts := []string{r.IP4.IP, r.IP6.IP}
	for _, ip := range r.IPs {
		texts = append(texts, ip.Address)
	}
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			all = append(all, netip.PrefixFrom(p.Addr().Unmap(), p.Bits()))
		}
	}
	return all
}

// Addresses returns the addresses that identify the container: the global unicast ones.
func (r *Result) Addresses() []netip.Addr {
	var all []netip.Addr
	for _, p := range r.Prefixes() {
		if a := p.Addr(); a.IsGlobalUnicast() && !slices.Contains(all, a) {
			all = append(all, a)
		}
	}
	return all
}

// ReadResult decodes a delegate's output on ADD into libcni's types and encodes it again, without
// unknown fields. libcni would pass on the same result (cni pkg/invoke, ExecPluginWithResult). An
// output without a version gets the configuration's version (cni#895).
func ReadResult(stdout []byte, cniVersion string) (json.RawMessage, error) {
	r, err := decodeResult(stdout, cniVersion)
	if err != nil {
		return nil, fmt.Errorf("%w: invalid result %q", err, Shorten(string(stdout), 200))
	}
	return json.Marshal(r)
}

// decodeResult decodes into a map[string]any, as libcni does, to reject the same numbers as libcni.
func decodeResult(stdout []byte, cniVersion string) (types.Result, error) {
	var fields map[string]any
	if err := json.Unmarshal(stdout, &fields); err != nil {
		return nil, err
	}
	says, _ := fields["cniVersion"].(string)
	if says == "" {
		if fields == nil { // null
			fields = map[string]any{}
		}
		says = cmp.Or(cniVersion, "0.1.0")
		fields["cniVersion"] = says
		stdout = Marshal(fields)
	}
	return create.Create(says, stdout)
}

// ConvertResult converts a result to another CNI version. A result that already has this version
// stays unchanged, and an empty result becomes nil. If libcni's converters panic, as they do on a
// null element, ConvertResult returns an error.
func ConvertResult(raw json.RawMessage, to string) (converted json.RawMessage, err error) {
	defer func() {
		if r := recover(); r != nil {
			converted = nil
			err = fmt.Errorf("cannot convert the result to CNI version %q, perhaps because a plugin put "+
				"null into a list: %v", to, r)
		}
	}()
	if len(raw) == 0 {
		return nil, nil
	}
	from, err := create.DecodeVersion(raw)
	if err != nil || SameVersion(from, to) {
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

// SameVersion reports whether two CNI versions are the same. An absent version means 0.1.0.
func SameVersion(a, b string) bool { return cmp.Or(a, "0.1.0") == cmp.Or(b, "0.1.0") }

func WithoutAddresses(raw json.RawMessage, drop []netip.Addr) (json.RawMessage, error) {
	var object map[string]json.RawMessage
	if err := json.Unmarshal(raw, &object); err != nil {
		return nil, jsonError(err)
	}
	dropped := func(text string) bool {
		p, err := netip.ParsePrefix(text)
		return err == nil && slices.Contains(drop, p.Addr().Unmap())
	}
	for key, value := range object { // plugins read keys in any letter case
		switch {
		case strings.EqualFold(key, "ips"):
			var ips []json.RawMessage
			if err := json.Unmarshal(value, &ips); err != nil {
				return nil, fmt.Errorf("key %q is not a list", key)
			}
			object[key] = Marshal(slices.DeleteFunc(ips, func(ip json.RawMessage) bool {
				var one struct {
					Address string `json:"address"`
				}
				return json.Unmarshal(ip, &one) == nil && dropped(one.Address)
			}))
		case strings.EqualFold(key, "ip4"), strings.EqualFold(key, "ip6"):
			var one oldIP
			if json.Unmarshal(value, &one) == nil && dropped(one.IP) {
				delete(object, key)
			}
		}
	}
	return Marshal(object), nil
}

// maxPodName limits a pod's namespace and name together, in bytes. Kubernetes allows 63 and 253.
const maxPodName = 1000

// PodOf reads the pod from CNI_ARGS, as Kubernetes runtimes set them.
func PodOf(args string) journal.Pod {
	var p journal.Pod
	fields := map[string]*string{
		"K8S_POD_NAMESPACE": &p.Namespace, "K8S_POD_NAME": &p.Name, "K8S_POD_UID": &p.UID,
	}
	for pair := range strings.SplitSeq(args, ";") {
		key, value, _ := strings.Cut(pair, "=")
		if field := fields[key]; field != nil {
			*field = value
		}
	}
	if len(p.Namespace)+len(p.Name) > maxPodName {
		return journal.Pod{}
	}
	return p
}

// AddressesOf returns the Addresses of an encoded result, or none if it cannot be decoded.
func AddressesOf(raw json.RawMessage) []netip.Addr {
	r, _ := ParseResult(raw)
	return r.Addresses()
}

// SandboxOf returns the path of the container's network namespace: the sandbox of its interface in
// a result, or "". For a virtual machine, sandbox is not a path (SPEC 1.1 §5).
func SandboxOf(raw json.RawMessage, ifname string) string {
	r, _ := ParseResult(raw)
	for _, i := range r.Interfaces {
		if i.Name == ifname && filepath.IsAbs(i.Sandbox) {
			return i.Sandbox
		}
	}
	return ""
}

// Shorten cuts a text to at most n bytes, at a rune boundary, and marks the cut with "…".
func Shorten(s string, n int) string {
	if len(s) <= n {
		return s
	}
	if n < len("…") {
		return ""
	}
	return strings.ToValidUTF8(s[:n-len("…")], "") + "…"
}
