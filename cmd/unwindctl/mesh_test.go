package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"cni-unwind/plugin/netconf"
)

// mesh is the installer of a mesh's plugin, as it treats the files of a directory. look is what it
// does when one of them has changed.
type mesh interface {
	start()
	look()
	stop()
}

// meshDir is the directory in which a mesh's installer works.
type meshDir struct {
	*runtimeMachine
	plugin string // its type
	on     bool
}

// patchable returns the files that the installers consider, sorted (istio
// cni/pkg/install/cniconfig.go getDefaultCNINetwork: libcni.ConfFiles with .conf and .conflist;
// linkerd2-proxy-init cni-plugin/deployment/scripts/install-cni.sh: find and sync).
func (m *meshDir) patchable() (paths []string) {
	for _, pattern := range []string{"*.conf", "*.conflist"} {
		files, _ := filepath.Glob(m.InConf(pattern))
		paths = append(paths, files...)
	}
	slices.Sort(paths)
	return paths
}

// read returns a list and its plugins without the mesh's.
func (m *meshDir) read(path string) (list map[string]any, others []any, has bool) {
	data, err := os.ReadFile(path)
	if err != nil || json.Unmarshal(data, &list) != nil {
		return nil, nil, false
	}
	plugins, _ := list["plugins"].([]any)
	for _, p := range plugins {
		if p.(map[string]any)["type"] == m.plugin {
			has = true
		} else {
			others = append(others, p)
		}
	}
	return list, others, has
}

func (m *meshDir) write(path string, list map[string]any, plugins []any) {
	list["plugins"] = plugins
	data, err := json.MarshalIndent(list, "", "  ")
	check(m, err)
	m.Rename(path, string(data))
}

func (m *meshDir) remove(path string) {
	if list, others, has := m.read(path); has {
		m.write(path, list, others)
	}
}

// patch puts the mesh's plugin at the end of a file. One of a single plugin becomes a list of
// another name (istio cniconfig.go insertCNIConfig, linkerd filter.jq).
func (m *meshDir) patch(path string) string {
	list, others, _ := m.read(path)
	if list == nil {
		return path
	}
	if list["type"] != nil && list["plugins"] == nil {
		delete(list, "cniVersion")
		others = []any{list}
		list = map[string]any{"name": "k8s-pod-network", "cniVersion": "0.3.1"}
		m.Remove(path)
		path = strings.TrimSuffix(path, ".conf") + ".conflist"
	}
	m.write(path, list, append(others, map[string]any{"type": m.plugin, "dir": m.dir, "instance": "mesh"}))
	return path
}

// istio is istio-cni without cniConfFileName (istio cni/pkg/install/install.go, 1.26.0 and
// 1.31.0-rc.0, checkValidCNIConfig). It patches the first file. Up to 1.26 a file that comes before
// its own makes it begin anew; since 1.27 it keeps to its file until it is started anew, and waits
// while that file is away. Where it stops, it takes its entry out.
type istio struct {
	meshDir
	keeps bool // 1.27 and later
	file  string
}

func (i *istio) start() { i.on, i.file = true, ""; i.look() }

func (i *istio) look() {
	paths := i.patchable()
	if !i.on || len(paths) == 0 {
		return
	}
	if i.file == "" || !i.keeps && i.file != paths[0] {
		i.file = paths[0]
	}
	if list, _, has := i.read(i.file); list != nil && !has {
		i.file = i.patch(i.file)
	}
}

func (i *istio) stop() { i.on = false; i.remove(i.file) }

// linkerd is linkerd-cni (linkerd2-proxy-init cni-plugin/v1.6.8,
// cni-plugin/deployment/scripts/install-cni.sh): it patches every file that differs from what it
// wrote itself, and takes its entry out of every list where it stops.
type linkerd struct {
	meshDir
	wrote map[string][32]byte
}

func (l *linkerd) start() { l.on, l.wrote = true, map[string][32]byte{}; l.look() }

func (l *linkerd) look() {
	for _, path := range l.patchable() {
		data, err := os.ReadFile(path)
		if err == nil && l.on && l.wrote[path] != sha256.Sum256(data) {
			path = l.patch(path)
			data, err = os.ReadFile(path)
			l.wrote[path] = sha256.Sum256(data)
		}
		check(l, err)
	}
}

func (l *linkerd) stop() {
	l.on = false
	for _, path := range l.patchable() {
		l.remove(path)
	}
}

// meshed is a node with a provider, a mesh and unwind.
type meshed struct {
	*runtimeMachine
	mesh mesh
	file string // unwind's
	adds int
}

// settle has the mesh look until no file changes any more.
func (m *meshed) settle() {
	for range 10 {
		before := m.files()
		if m.mesh.look(); maps.Equal(before, m.files()) {
			return
		}
	}
	m.Error("the mesh finds no end")
}

func (m *meshed) files() map[string]string {
	files := map[string]string{}
	paths, err := netconf.Conflists(m.ConfDir())
	check(m, err)
	for _, path := range paths {
		data, err := os.ReadFile(path)
		check(m, err)
		files[filepath.Base(path)] = string(data)
	}
	return files
}

// pod adds and deletes a pod by the first file, and returns how often the mesh's plugin had its
// ADD and its DEL, and whether unwind ran.
func (m *meshed) pod() (adds, dels int, unwind bool) {
	m.Helper()
	m.adds++
	id := fmt.Sprintf("pod%d", m.adds)
	list, err := m.attach(id)
	if err == nil {
		unwind = list.Plugins[0].Network.Type == netconf.Name
		err = m.cni.DelNetworkList(context.Background(), list, m.rt(id))
	}
	if err != nil {
		m.Fatalf("%v\n%v", err, m.files())
	}
	log, err := os.ReadFile(filepath.Join(m.dir, "log"))
	check(m, err)
	count := func(command string) int {
		return bytes.Count(log, fmt.Appendf(nil, `{"phase":"start","command":%q,"mode":"ok","instance":"mesh","containerID":%q`, command, id))
	}
	return count("ADD"), count("DEL"), unwind
}

// step is something that happens on the node.
func (m *meshed) step(what string) {
	m.Helper()
	switch what {
	case "provider":
		m.provide(fmt.Sprintf(`{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "faulty", "dir": %q, "instance": "provider"}]}`, network, m.dir))
	case "mesh":
		m.mesh.start()
	case "mesh again":
		m.mesh.stop()
		m.settle()
		m.mesh.start()
	case "mesh out":
		m.mesh.stop()
	case "unwind":
		m.file = "00-unwind.json"
		m.mustCtl("install", "--unwind-file", m.file)
	case "unwind, a list":
		m.file = "00-unwind.conflist"
		m.mustCtl("install", "--unwind-file", m.file)
	case "unwind out":
		m.mustCtl("uninstall", "--unwind-file", m.file)
	default:
		m.Fatal(what)
	}
	m.settle()
}

// TestMeshes: in whatever order a provider, a mesh and unwind come, go and write their files, the
// mesh's plugin runs once for each pod. Behind unwind in a list the meshes put their plugin: there the
// count is wrong until the next install or uninstall.
func TestMeshes(t *testing.T) {
	t.Parallel()
	for name, make := range map[string]func(*runtimeMachine) mesh{
		"istio 1.26": func(n *runtimeMachine) mesh { return &istio{meshDir: meshDir{n, "istio-cni", false}} },
		"istio 1.31": func(n *runtimeMachine) mesh { return &istio{meshDir: meshDir{n, "istio-cni", false}, keeps: true} },
		"linkerd":    func(n *runtimeMachine) mesh { return &linkerd{meshDir: meshDir{n, "linkerd-cni", false}} },
	} {
		for order, steps := range map[string][]string{
			"mesh first":      {"provider", "mesh", "unwind", "mesh again", "unwind", "provider", "unwind out", "mesh again", "mesh out"},
			"unwind first":    {"provider", "unwind", "mesh", "unwind", "mesh again", "provider", "mesh out", "provider", "unwind out"},
			"unwind in, out":  {"provider", "unwind", "mesh", "unwind out", "unwind", "provider", "mesh again", "unwind out", "provider"},
			"a list":          {"provider", "unwind, a list", "mesh", "unwind out", "unwind", "provider", "mesh again", "unwind out", "mesh out"},
			"a list after it": {"provider", "mesh", "unwind, a list", "mesh again", "unwind out", "unwind", "provider", "mesh again", "mesh out", "unwind out"},
			"a list, out":     {"provider", "unwind, a list", "mesh", "unwind out", "mesh again", "provider", "mesh out"},
		} {
			t.Run(name+", "+order, func(t *testing.T) {
				t.Parallel()
				n := newRuntimeMachine(t)
				for _, plugin := range []string{"istio-cni", "linkerd-cni"} {
					check(t, os.Symlink(filepath.Join(n.tools, "test", "faulty"), filepath.Join(n.BinDir(), plugin)))
				}
				n.shared = "pods"
				n.netns(n.shared)
				m := &meshed{runtimeMachine: n, mesh: make(n)}
				want, list, in := 0, false, false
				for _, step := range steps {
					m.step(step)
					switch step {
					case "mesh", "mesh again":
						want = 1
					case "mesh out":
						want = 0
					case "unwind", "unwind, a list":
						list, in = step != "unwind", true
					case "unwind out":
						list, in = false, false
					}
					// A file that istio kept to is away now: it patches the provider's new one when
					// it is started anew, as the install says.
					keeps, _ := m.mesh.(*istio)
					if keeps != nil && keeps.keeps && step == "provider" && strings.HasSuffix(keeps.file, "unwind.conflist") {
						m.step("mesh again")
					}
					adds, dels, unwind := m.pod()
					if unwind != in || !list && (adds != want || dels != want) {
						t.Errorf("after %q: the mesh had %d ADDs and %d DELs, not %d; unwind is in use: %t\n%v", step, adds, dels, want, unwind, m.files())
					}
				}
			})
		}
	}
}
