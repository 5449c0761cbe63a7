package plugin

import (
	"testing"

	"github.com/containernetworking/cni/libcni"
)

// podman is a statement: podman POD: adds it as podman does. That is no pod of Kubernetes. If it has static
// addresses and the first plugin of the list does not declare "ips", the plugin gets that capability in
// place of its own.
var podman = acts{"podman": func(s *story, w []string) {
	p := s.who(w[0])
	p.Args = [][2]string{{"IgnoreUnknown", "1"}, {"K8S_POD_NAME", w[0]}}
	list := s.list(p, false)
	if first := list.Plugins[0]; p.CapabilityArgs["ips"] != nil && !first.Network.Capabilities["ips"] {
		var err error
		list.Plugins[0], err = libcni.InjectConf(first, map[string]any{"capabilities": map[string]bool{"ips": true}})
		s.must(err)
	}
	s.vars[w[0]] = address(s, p.mustAdd(list))
}}

// TestStaticAddressOfPodman: bridge, which declares no capability, gets the static addresses of podman's
// container, and the host port works. After its rules were flushed, podman reloads the network by a DEL and
// an ADD. The same list gives a pod of Kubernetes any address, as without unwind.
func TestStaticAddressOfPodman(t *testing.T) {
	stories(t, `
	either as unwindctl writes the entry: conf capabilities {"ips": true, "portMappings": true}
	or none are declared: conf capabilities
	chain masquerading bridge IPv4 | portmap
	capabilities a {"ips": ["$ip9"], "portMappings": [{"hostPort": 20999, "containerPort": 80, "protocol": "tcp"}]}
	podman a; given a $ip9
	if unwindctl: port $ip9; flush $ip9
	del a; podman a; given a $ip9
	if unwindctl: port $ip9
	del a; capabilities pod {"ips": ["$ip9"]}; add pod; shell 'test $pod != $ip9'; del pod`, hostPorts, podman)
}
