package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/sandbox"
)

// conf is the content of a conflist or .conf file, decoded from JSON.
type conf map[string]any

func (c conf) plugins() []any { list, _ := c["plugins"].([]any); return list }

// confs returns the names of the files with these extensions, sorted.
func (n *runtimeMachine) confs(extensions ...string) (names []string) {
	files, err := os.ReadDir(n.ConfDir())
	check(n, err)
	for _, f := range files {
		if slices.Contains(extensions, filepath.Ext(f.Name())) {
			names = append(names, f.Name())
		}
	}
	return names
}

func (n *runtimeMachine) readConf(name string) (c conf) {
	data, err := os.ReadFile(n.InConf(name))
	check(n, err)
	check(n, json.Unmarshal(data, &c))
	return c
}

func (n *runtimeMachine) writeConf(name string, c conf) {
	data, err := json.MarshalIndent(c, "", "  ")
	check(n, err)
	n.Rename(n.InConf(name), string(data))
}

// appended appends a plugin to a list, unless the list already contains the plugin.
func (n *runtimeMachine) appended(c conf, plugin string) conf {
	for _, p := range c.plugins() {
		if p.(map[string]any)["type"] == plugin {
			return c
		}
	}
	c["plugins"] = append(c.plugins(), map[string]any{"type": plugin, "dir": n.dir})
	return c
}

// asList turns the configuration of a single plugin into a list with another network name, as istio
// and linkerd do.
func asList(c conf) conf {
	if c["type"] == nil {
		return c
	}
	delete(c, "cniVersion")
	return conf{"name": "k8s-pod-network", "cniVersion": "0.3.1", "plugins": []any{map[string]any(c)}}
}

// installers contains stand-ins for programs that edit conflists when they start. Some imitate real
// programs, such as istio: see scripts/providers.
var installers = []struct {
	name     string
	provider string // the provider's file
	want     string // the chain after the program has run
	run      func(n *runtimeMachine)
}{
	{"antrea", "10-aws.conflist", "faulty antrea", func(n *runtimeMachine) {
		files := slices.DeleteFunc(n.confs(".conflist", ".conf", ".json"),
			func(name string) bool { return strings.Contains(name, "antrea") })
		n.writeConf("05-antrea.conflist", n.appended(n.readConf(files[0]), "antrea"))
	}},
	{"cilium's chaining", "10-aws.conflist", "faulty cilium-cni", func(n *runtimeMachine) {
		for _, name := range n.confs(".conflist", ".conf", ".json", ".cilium_bak") {
			if c := n.readConf(name); c["name"] == network && !strings.Contains(name, "cilium.") {
				n.writeConf("05-cilium.conflist", n.appended(c, "cilium-cni"))
				return
			}
		}
	}},
	{"istio", "10-net.conflist", "faulty istio-cni", func(n *runtimeMachine) {
		name := n.confs(".conf", ".conflist")[0]
		n.writeConf(name, n.appended(n.readConf(name), "istio-cni"))
	}},
	{"linkerd", "10-net.conf", "faulty linkerd-cni", func(n *runtimeMachine) {
		for _, name := range n.confs(".conf", ".conflist") {
			list := strings.TrimSuffix(name, filepath.Ext(name)) + ".conflist"
			n.writeConf(list, n.appended(asList(n.readConf(name)), "linkerd-cni"))
			if list != name {
				n.Remove(n.InConf(name))
			}
		}
	}},
	{"one that appends to every file", "10-net.conflist", "faulty next", func(n *runtimeMachine) {
		for _, name := range n.confs(".conf", ".conflist", ".json") {
			n.writeConf(name, n.appended(n.readConf(name), "next"))
		}
	}},
	{"one that copies the last file", "10-net.conflist", "faulty next", func(n *runtimeMachine) {
		files := n.confs(".conf", ".conflist", ".json")
		n.writeConf("01-next.conflist", n.appended(n.readConf(files[len(files)-1]), "next"))
	}},
	{"one that renames all others", "10-net.conflist", "faulty next", func(n *runtimeMachine) {
		for _, name := range n.confs(".conf", ".conflist", ".json") {
			check(n, os.Rename(n.InConf(name), n.InConf(name+".bak")))
		}
		n.writeConf("50-next.conflist", n.appended(n.provided(), "next"))
	}},
	{"one that changes the type", "10-net.conflist", "next", func(n *runtimeMachine) {
		c := n.readConf("10-net.conflist")
		c.plugins()[0].(map[string]any)["type"] = "next"
		n.writeConf("10-net.conflist", c)
	}},
}

func (n *runtimeMachine) provided() conf {
	return conf{"cniVersion": "1.0.0", "name": network, "plugins": []any{map[string]any{"type": "faulty", "dir": n.dir}}}
}

// runs returns the plugins that run for a pod, and whether unwind runs them. It returns an error if
// a file other than the first contains unwind, or if the first contains unwind and other plugins.
func (n *runtimeMachine) runs() (plugins string, unwind bool, err error) {
	paths, err := netconf.Conflists(n.ConfDir())
	for i, path := range paths {
		c, readErr := netconf.ReadConflist(path)
		switch {
		case readErr != nil:
			return "", false, readErr
		case i == 0 && c.Unwind != nil && len(c.Types) == 1:
			chain, chainErr := netconf.ReadConflist(c.Unwind.ChainFile)
			if chainErr != nil {
				return "", true, chainErr
			}
			plugins, unwind = strings.Join(chain.Types, " "), true
		case c.Unwind != nil:
			return "", false, fmt.Errorf("%s: %v", path, c.Types)
		case i == 0:
			plugins = strings.Join(c.Types, " ")
		}
	}
	return plugins, unwind, err
}

// pod adds and deletes a pod with the first conflist. It returns how many plugins got the ADD, and
// whether the first plugin of the conflist is unwind.
func (n *runtimeMachine) pod() (plugins int, unwind bool, err error) {
	n.Helper()
	n.pods++
	id := fmt.Sprintf("pod%d", n.pods)
	list, err := n.attach(id)
	if err != nil {
		return 0, false, err
	}
	err = n.cni.DelNetworkList(context.Background(), list, n.rt(id))
	log, readErr := os.ReadFile(filepath.Join(n.dir, "log"))
	check(n, readErr)
	count := func(command string) (calls int) {
		for line := range bytes.Lines(log) {
			if bytes.Contains(line, fmt.Appendf(nil, `"phase":"start","command":%q`, command)) && bytes.Contains(line, fmt.Appendf(nil, "%q", id)) {
				calls++
			}
		}
		return calls
	}
	if adds, dels := count("ADD"), count("DEL"); err == nil && adds != dels {
		err = fmt.Errorf("%d ADDs, %d DELs", adds, dels)
	}
	return count("ADD"), list.Plugins[0].Network.Type == netconf.Name, err
}

// TestInstallers: an installer runs before unwind's install, or after it. Pods still start, except
// with linkerd, which renames the network. After the next "install", "off" or "uninstall", or once
// an agent has reconciled, only unwind's own file may contain unwind, and each plugin runs once.
func TestInstallers(t *testing.T) {
	t.Parallel()
	for i, inst := range installers {
		for j, way := range []string{"00-unwind.json", "00-unwind.conflist", "00-unwind.json, agent"} {
			for k, first := range []string{"unwind", "installer"} {
				if !sandbox.Sampled(sandbox.Rounds(4, 2, 1), i, j, k) {
					continue
				}
				t.Run(fmt.Sprintf("%s/%s/%s first", inst.name, way, first), func(t *testing.T) {
					t.Parallel()
					n := newRuntimeMachine(t)
					n.shared = "pods"
					n.netns(n.shared)
					for _, plugin := range []string{"antrea", "cilium-cni", "istio-cni", "linkerd-cni", "next"} {
						check(t, os.Symlink(filepath.Join(n.tools, "test", "faulty"), filepath.Join(n.BinDir(), plugin)))
					}
					provider := n.provided()
					if filepath.Ext(inst.provider) == ".conf" {
						provider = provider.plugins()[0].(map[string]any)
						provider["name"], provider["cniVersion"] = network, "1.0.0"
					}
					n.writeConf(inst.provider, provider)
					file, agent := strings.CutSuffix(way, ", agent")
					flag := "--unwind-file=" + file
					install := func() { n.mustCtl("install", flag) }
					if agent {
						install = func() {
							if n.pods == 0 {
								n.agent(home, flag, "--binary", filepath.Join(n.bin, "unwind"))
							}
						}
					}
					works := func(after string, unwind bool) {
						t.Helper()
						var plugins string
						var in bool
						var err error
						settled := func() bool {
							plugins, in, err = n.runs()
							return err == nil && plugins == inst.want && in == unwind
						}
						if agent {
							eventually(t, after, settled)
						}
						if !settled() {
							t.Errorf("after %s: %q, unwind in use: %t, %v", after, plugins, in, err)
						}
						if ran, in, err := n.pod(); err != nil || in != unwind || ran != len(strings.Fields(inst.want)) {
							t.Errorf("after %s: a pod had %d plugins, unwind ran: %t, %v", after, ran, in, err)
						}
					}
					starts := func(after string) {
						t.Helper()
						if _, _, err := n.pod(); err != nil && inst.name != "linkerd" { // linkerd renames the network: see istio.md
							t.Errorf("after %s: %v", after, err)
						}
					}
					if first == "unwind" {
						install()
						if agent {
							eventually(t, "the agent's install", func() bool { _, in, err := n.runs(); return in && err == nil })
						}
					}
					inst.run(n)
					if first == "unwind" {
						starts("the installer")
					}
					install()
					works("the install", true)
					inst.run(n)
					starts("the installer, again")
					n.mustCtl("off", flag)
					works("off", false)
					inst.run(n)
					works("the installer while unwind is off", false)
					n.mustCtl("on", flag)
					works("on", true)
					n.mustCtl("off", flag)
					n.mustCtl("uninstall", flag)
					works("uninstall", false)
				})
			}
		}
	}
}
