package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"cni-unwind/plugin/undo"
)

// provider is a node with the stand-in for a provider's plugin: see testdata/standin.
type provider struct {
	*node
	plugin string
	extra  string // the plugin's configuration has it, too
}

func newProvider(t *testing.T, plugin string) *provider {
	t.Helper()
	v := &provider{node: newNode(t), plugin: plugin}
	v.mkdir(v.held())
	v.install()
	return v
}

func (v *provider) held() string { return filepath.Join(v.dir, "held") }

// install puts the plugin into CNI_PATH. Without it a DEL fails.
func (v *provider) install() {
	v.Helper()
	err := os.Symlink(filepath.Join(toolsDir(v), "test", "standin"), filepath.Join(v.path[0], v.plugin))
	if err != nil {
		v.Fatal(err)
	}
}

func (v *provider) uninstall() {
	v.Helper()
	if err := os.Remove(filepath.Join(v.path[0], v.plugin)); err != nil {
		v.Fatal(err)
	}
}

// chain returns the plugin, and perhaps one behind it whose ADD fails.
func (v *provider) chain(fails bool) []string {
	chain := []string{fmt.Sprintf(`{"type": %q, "dir": %q%s}`, v.plugin, v.held(), v.extra)}
	if fails {
		chain = append(chain, v.faulty("p1", `, "modes": {"ADD": "fail"}`))
	}
	return chain
}

// lister makes a conflist, plain or with unwind.
type lister = func(plugins ...string) *libcni.NetworkConfigList

// heldBy returns the attachments whose address the provider still has.
func (v *provider) heldBy() []string { return v.names(v.held()) }

// occupy makes another's eth0 in the pod's network namespace; its other end is elsewhere.
func (p *pod) occupy() {
	p.Helper()
	run(p, "nsenter", "--net="+p.NetNS, "ip", "link", "add", "eth0", "type", "veth",
		"peer", "name", "far0", "netns", p.netns("far"))
}

// TestShownToProviders: where the plain chain's DEL frees what a provider's plugin holds, so does
// unwind's, although the container's network namespace is gone or must not be shown. It also frees
// where the plain chain's DEL fails or frees nothing.
func TestShownToProviders(t *testing.T) {
	t.Parallel()
	for _, h := range []struct {
		name string
		// happens ends with the runtime's DEL, and returns its error.
		happens func(v *provider, list lister) error
	}{
		{"gone, and the runtime names it", func(v *provider, list lister) error {
			p, chain := v.pod("a"), list(v.chain(false)...)
			p.mustAdd(chain)
			p.dropNetNS()
			return p.del(chain)
		}},
		{"gone after a DEL that failed", func(v *provider, list lister) error {
			p, chain := v.pod("a"), list(v.chain(false)...)
			p.mustAdd(chain)
			v.uninstall()
			if p.del(chain) == nil {
				v.Error("a DEL without its binary passed")
			}
			p.dropNetNS()
			v.install()
			return p.del(chain)
		}},
		{"with another's interface before an ADD that fails", func(v *provider, list lister) error {
			p, chain := v.pod("a"), list(v.chain(true)...)
			p.occupy()
			if _, err := p.add(chain); err == nil {
				v.Error("the ADD passed")
			}
			return p.del(chain)
		}},
		{"with the interface of an earlier ADD", func(v *provider, list lister) error {
			p, chain := v.pod("a"), list(v.chain(false)...)
			p.mustAdd(chain)
			v.uninstall()
			if p.del(chain) == nil {
				v.Error("a DEL without its binary passed")
			}
			v.install()
			p.occupy()
			p.mustAdd(chain)
			return p.del(chain)
		}},
	} {
		for _, plugin := range []string{"terway", "kube-ovn", "sriov", "ovn-k8s-cni-overlay"} {
			t.Run(plugin+", "+h.name, func(t *testing.T) {
				t.Parallel()
				plain := newProvider(t, plugin)
				err := h.happens(plain, plain.plain)
				// terway and ovn-kubernetes need a namespace to look into.
				frees := !strings.Contains(h.name, "gone") || plugin == "kube-ovn" || plugin == "sriov"
				if held := plain.heldBy(); frees != (len(held) == 0) || frees != (err == nil) {
					t.Errorf("the plain chain leaves %q and returns %v", held, err)
				}

				v := newProvider(t, plugin)
				err = h.happens(v, v.unwind)
				if held := v.heldBy(); len(held) > 0 || err != nil {
					t.Errorf("unwind leaves %q and returns %v", held, err)
				}
				if strings.Contains(h.name, "another's") {
					links := v.links(filepath.Join(v.dir, "netns", "a"))
					if !slices.Contains(links, "eth0") {
						t.Errorf("another's interface is gone: %q", links)
					}
				}
				v.nothingLeft()
			})
		}
	}
}

// TestShownNowhere: the network namespace is gone, and its path is that of a process, whose ID
// another container's process may get any moment. Delegates are shown a path that names nothing.
func TestShownNowhere(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	list := n.unwind(n.faulty("p0", ""))
	p := n.pod("a")
	process := p.processInside()
	p.unpin()
	p.NetNS = netnsOf(process)
	p.mustAdd(list)
	_ = process.Kill()
	_, _ = process.Wait()
	n.forgetCalls()
	p.mustDel(list)
	if got := n.callLog()[0].NetNS; got != "/proc/0/ns/net" {
		t.Errorf("shown %q", got)
	}
	n.nothingLeft()
}

// TestLeftToRuntime: a sweep names no network namespace that is gone, so a DEL of kube-ovn or sriov
// would do nothing, and sriov would forget what to do. The sweep leaves it to the runtime, whose DEL
// frees what the plugin holds. If the runtime does not ask in the grace period, the DEL runs.
func TestLeftToRuntime(t *testing.T) {
	t.Parallel()
	for _, plugin := range []string{"kube-ovn", "sriov"} {
		for _, asks := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s, the runtime asks: %v", plugin, asks), func(t *testing.T) {
				t.Parallel()
				v := newProvider(t, plugin)
				if v.conf["gracePeriod"] = "1h"; !asks {
					v.conf["gracePeriod"] = "10s"
				}
				list := v.unwind(append(v.chain(false), v.faulty("p1", ""))...)
				p := v.pod("a")
				p.mustAdd(list)
				p.dropNetNS()
				v.sweep(undo.DefaultBudgets)
				e, held := p.entry(), v.heldBy()
				if e == nil || !slices.Equal(undo.PendingSteps(e), []string{plugin}) || len(held) != 1 {
					t.Fatalf("after the sweep: %+v, held %q", e, held)
				}
				if asks {
					p.mustDel(list)
					if held := v.heldBy(); len(held) > 0 {
						t.Errorf("the runtime's DEL leaves %q", held)
					}
				} else {
					eventually(t, "the entry is gone", func() bool {
						v.sweep(undo.DefaultBudgets)
						return p.entry() == nil
					})
				}
				v.nothingLeft()
			})
		}
	}
}

// TestLeftToOVN: a DEL of ovn-kubernetes with a device cannot pass once the network namespace is
// gone. It is over then, and not before.
func TestLeftToOVN(t *testing.T) {
	t.Parallel()
	for _, extra := range []string{
		`, "deviceID": "0000:00:00.1"`, `, "netAttachDefName": "default/n"`,
	} {
		t.Run(extra, func(t *testing.T) {
			t.Parallel()
			v := newProvider(t, "ovn-k8s-cni-overlay")
			v.extra = extra
			list := v.unwind(v.chain(true)...)
			p := v.pod("a")
			p.occupy()
			if _, err := p.add(list); err == nil {
				t.Error("the ADD passed")
			}
			if e := p.entry(); e == nil || e.Newest().Steps[0].LastError == "" {
				t.Errorf("before the namespace is gone: %+v", e)
			}
			p.dropNetNS()
			p.mustDel(list)
			v.nothingLeft()
		})
	}
}
