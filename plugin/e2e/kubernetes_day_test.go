//go:build e2e

package e2e_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"cni-unwind/plugin/e2e"
)

// TestKubernetesOrdinaryDays makes the same changes to the provider's chain on a worker without
// unwind and on one with unwind, while pods run. For example, a mesh is installed and uninstalled,
// a kubeconfig gets another path, and the conflist gets another cniVersion. On both workers, all
// pods start and terminate. With unwind, the pods may take three times as long to terminate as
// without unwind, plus ten seconds.
func TestKubernetesOrdinaryDays(t *testing.T) {
	c := e2e.NewCluster(t)
	d := &days{
		T:      t,
		table:  e2e.NewSteps(t, "Ordinary days: all pods terminate after", "DAY", "PLAIN", "UNWIND", "PENDING DELS"),
		plain:  c.Join("plain", func(*e2e.Node) e2e.Network { return daily("plain") }),
		unwind: c.Join("unwind", func(*e2e.Node) e2e.Network { return daily("unwind") }),
	}
	d.unwind.Unwindctl("install", "--install-dir=")
	d.unwind.Runtime.AwaitConfig(`"type":"unwind"`, true)

	const (
		istio   = "istio-cni"
		mesh    = "mesh-cni"
		old     = e2e.ConfDir + "/mesh-kubeconfig"
		rotated = e2e.ConfDir + "/mesh-kubeconfig-2"
	)
	add := func(plugin, kubeconfig string) func(w *e2e.Worker) {
		return func(w *e2e.Worker) {
			w.Run("cp", e2e.Path(d, ".tools/e2e/bin/faulty"), e2e.PluginDir+"/"+plugin)
			w.Write(kubeconfig, "")
			d.use(w, daily(w.NodeName, d.needs(w, plugin, kubeconfig)), kubeconfig, true)
		}
	}
	remove := func(w *e2e.Worker, path string) { removeFile(d.T, w.File(path)) }

	// The uninstallers of istio-cni (cni/pkg/install/install.go Cleanup) and linkerd-cni
	// (install-cni.sh cleanup) first remove the plugin from the conflist, then its kubeconfig and its
	// binary. The DEL of either plugin does nothing, so it fails only if the binary is missing.
	d.pass(day{
		name: "mesh",
		what: "a mesh is installed, and uninstalled with its binary",
		gone: istio,
		add:  add(istio, old),
		change: func(w *e2e.Worker) {
			d.use(w, daily(w.NodeName), istio, false)
			remove(w, old)
			remove(w, e2e.PluginDir+"/"+istio)
		},
		mend: add(istio, old),
	})
	// This plugin's DEL calls a daemon or the API server, as the DELs of kube-ovn and Calico do.
	d.pass(day{
		name: "daemon",
		what: "a plugin with a daemon is installed, then removed from the conflist; its daemon is gone",
		gone: mesh,
		add:  add(mesh, old),
		change: func(w *e2e.Worker) {
			d.use(w, daily(w.NodeName), mesh, false)
			remove(w, old)
		},
		mend: add(mesh, old),
	})
	d.pass(day{
		name: "path",
		what: "a plugin is installed, then its kubeconfig gets another path",
		add:  add(mesh, old),
		change: func(w *e2e.Worker) {
			w.Write(rotated, "")
			d.use(w, daily(w.NodeName, d.needs(w, mesh, rotated)), rotated, true)
			remove(w, old)
		},
		mend: func(w *e2e.Worker) { w.Write(old, "") },
	})
	// portmap 0.9.1 supports CNI only up to 0.4.0.
	d.pass(day{
		name: "version",
		what: "portmap is replaced by one that rejects the conflist's cniVersion, which is corrected",
		old:  30000, new: 30100,
		change: func(w *e2e.Worker) {
			w.Run("ln", "-sf", e2e.Path(d, ".tools/e2e/plugins-cni04/portmap"), e2e.PluginDir+"/portmap")
			corrected := daily(w.NodeName)
			corrected.Version = correct
			d.use(w, corrected, correct, true)
		},
		mend: func(w *e2e.Worker) { w.UpgradePlugins() },
	})
}

// correct is the cniVersion in the corrected conflist.
const correct = "0.4.0"

type days struct {
	*testing.T
	table         *e2e.Table
	plain, unwind *e2e.Worker
}

// day is a day on which somebody changes the provider's chain while pods run.
type day struct {
	name     string // a prefix of its pods' names
	what     string
	gone     string              // the plugin that the change removes; its DELs may stay pending
	old, new int                 // the first host ports of the old and the new pods; 0 for none
	add      func(w *e2e.Worker) // a change after the old pods have started; nil for none
	change   func(w *e2e.Worker) // the change before the new pods start
	mend     func(w *e2e.Worker) // makes the DELs of all pods succeed again
}

// daily returns the provider's network on a worker, with additional plugins.
func daily(worker string, more ...string) e2e.Network {
	subnet := map[string]string{"plain": "10.22.1.0/24", "unwind": "10.22.2.0/24"}[worker]
	return e2e.Network{Subnet: subnet, Plugins: append([]string{e2e.Portmap}, more...)}
}

// needs returns the conflist entry of a plugin that fails if its kubeconfig is missing.
func (d *days) needs(w *e2e.Worker, plugin, kubeconfig string) string {
	entry := strings.TrimSuffix(strings.Replace(w.Faulty(), `"faulty"`, fmt.Sprintf("%q", plugin), 1), "}")
	return entry + fmt.Sprintf(`, "needs": %q}`, kubeconfig)
}

// use writes the provider's conflist, as an installer does. unwind reads this file at each verb.
// The runtime without unwind reads it with a delay, so use waits until the CNI configuration of
// that runtime contains the given text or, with in=false, no longer contains it.
func (d *days) use(w *e2e.Worker, network e2e.Network, text string, in bool) {
	d.Helper()
	w.Configure(network)
	if w == d.plain {
		w.Runtime.AwaitConfig(text, in)
	}
}

// each calls do() for both workers.
func (d *days) each(do func(w *e2e.Worker)) {
	d.Helper()
	for _, w := range []*e2e.Worker{d.plain, d.unwind} {
		do(w)
	}
}

// pass starts pods before and after the change of a day, and checks that all of them terminate.
func (d *days) pass(day day) {
	d.Helper()
	began := time.Now()
	d.pods(day.name+"-old", day.old)
	if day.add != nil {
		d.each(day.add)
		d.pods(day.name+"-with", 0)
	}
	d.each(day.change)
	d.pods(day.name+"-new", day.new)
	checkAddresses(d.T, d.unwind)

	plain, unwind := d.terminate(day)
	took, pending := "not in "+allowed(plain).Round(time.Second).String(), len(d.pending())
	if unwind > 0 {
		took, pending = unwind.Round(100*time.Millisecond).String(), d.nothing(day)
	}
	d.table.Row(day.what, plain.Round(100*time.Millisecond), took, pending)
	d.mended(day)
	d.Logf("%s: %s", day.what, since(began))
}

// pods starts pods on each worker, and waits until they are ready. If first is not 0, the pods get
// consecutive host ports, starting with that port.
func (d *days) pods(app string, first int) {
	d.Helper()
	count := 3
	if e2e.Short() {
		count = 1
	}
	d.each(func(w *e2e.Worker) { w.RunPodsWithPorts(app, count, first) })
	d.each(func(w *e2e.Worker) { mustBeReady(d.T, w, app, count) })
}

// allowed returns how long the pods may take to terminate with unwind, given how long they took
// without unwind.
func allowed(plain time.Duration) time.Duration { return 3*plain + 10*time.Second }

// terminate deletes all pods of both workers at the same time, and returns how long they took to
// terminate on each worker. If the pods on the worker with unwind take too long, it fails the test
// and returns 0 for that worker.
func (d *days) terminate(day day) (plain, unwind time.Duration) {
	d.Helper()
	began := time.Now()
	d.each(func(w *e2e.Worker) { w.DeletePods("pod", "--all", "--wait=false") })
	for plain == 0 || unwind == 0 {
		if plain == 0 && len(d.plain.Pods("")) == 0 {
			plain = time.Since(began)
		}
		if unwind == 0 && len(d.unwind.Pods("")) == 0 {
			unwind = time.Since(began)
		}
		switch passed := time.Since(began); {
		case plain == 0 && passed > podTime:
			d.Fatalf("%s: without unwind, %s, so the test proves nothing\n%s", day.what, stuck(d.plain), d.plain.Events(day.name))
		case plain > 0 && unwind == 0 && passed > allowed(plain):
			d.Errorf("%s: after %s, %s; without unwind, all terminate in %s\n%s", day.what, passed.Round(time.Second),
				stuck(d.unwind), plain.Round(100*time.Millisecond), d.unwind.Events(day.name))
			return plain, 0
		}
	}
	return plain, unwind
}

// stuck describes which pods of a worker still exist.
func stuck(w *e2e.Worker) string {
	var names []string
	for _, pod := range w.Pods("") {
		names = append(names, pod.Name)
	}
	return fmt.Sprintf("%d stay Terminating: %s", len(names), strings.Join(names, ", "))
}

// nothing() sweeps until only DELs of the removed plugin are pending, and returns their number. It
// fails the test if the pods leave anything else on either worker for longer than podTime.
func (d *days) nothing(day day) (pending int) {
	d.Helper()
	other := func(plugin string) bool { return plugin != day.gone }
	e2e.Eventually(d, podTime, day.what+": with unwind, nothing is left of the pods", func() bool {
		d.sweep()
		plugins := d.pending()
		pending = len(plugins)
		return d.unwind.Left() == e2e.Left{} && !slices.ContainsFunc(plugins, other)
	})
	e2e.Eventually(d, podTime, day.what+": without unwind, nothing is left of the pods", func() bool {
		return d.plain.Left() == e2e.Left{}
	})
	return pending
}

// sweep makes unwind retry the pending DELs, and ignores an error, because the DELs may fail again.
func (d *days) sweep() { _, _, _ = d.unwind.Try(e2e.Path(d, "bin/unwindctl"), "sweep") }

// pending returns the plugin of each DEL that unwind still has to retry.
func (d *days) pending() (plugins []string) {
	d.Helper()
	for _, a := range d.unwind.Journal() {
		for _, step := range a.Steps {
			plugins = append(plugins, step.Plugin)
		}
	}
	return plugins
}

// mended makes all DELs succeed again, waits until the remaining pods have terminated, and sweeps
// until the journal is empty. Then it restores the provider's chain.
func (d *days) mended(day day) {
	d.Helper()
	d.each(day.mend)
	if err := ready(d.unwind, "", 0, podTime); err != nil {
		d.Fatalf("%s: even after the plugin was repaired, %s\n%s", day.what, stuck(d.unwind), d.unwind.Events(day.name))
	}
	e2e.Eventually(d, podTime, "unwind: a sweep empties the journal", func() bool {
		d.sweep()
		return len(d.unwind.Journal()) == 0
	})
	d.each(func(w *e2e.Worker) {
		d.use(w, daily(w.NodeName), "needs", false)
		d.use(w, daily(w.NodeName), correct, false)
	})
}
