package plugin

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"cni-unwind/journal"
	"cni-unwind/plugin/delegate"
	"cni-unwind/plugin/netconf"
	"cni-unwind/plugin/plugintest/env"
	"cni-unwind/plugin/sweep"
	"cni-unwind/plugin/undo"
)

// plainWorld is one of the two machines that run the same sequence of steps (see TestLikePlain). It
// has a directory with plugins, conflists and state, and a network namespace of its own, so that
// both machines can use the same names and subnets.
type plainWorld struct {
	*node
	called  string // P (without unwind) or U (with unwind)
	through bool   // in U: verbs go through unwind, unless network.off is set
	unwinds bool   // in U: there is a journal to sweep
	chosen  *setup
	netns   int // a descriptor of the machine's network namespace
	past    int // a descriptor of the test's own network namespace
	net     *network
	pods    map[string]*plainPod
}

// network is the operator's configuration of the network, and the state of the plugins' programs.
// Both machines share it.
type network struct {
	name, file     string // the names of the network and of the conflist
	version        string
	main           string // bridge or ptp
	bridge, subnet int
	mtu, dataDir   int
	masq, nft      bool // nft: the main plugin and portmap use nftables
	ipam           string
	chained        []string
	revs           map[string]int // by plugin: the revision of its configuration
	unreadable     string         // "missing" or "invalid"; "" for a good conflist
	off            bool
	installed      string // the file that unwind's entry names
	before         bool   // the plugins are those of an older release
	binaries       map[string]*program
	wiped          bool
	generations    map[string]int
}

// program is the state of a plugin's program.
type program struct {
	gone    bool              // uninstalled for good
	missing bool              // uninstalled for a while
	down    bool              // its daemon is gone for good: each call fails
	old     bool              // it refuses CNI versions above 0.4.0
	needs   int               // the revision that its configuration must have, or 0
	stale   string            // what a call does if the configuration has another revision: see the step "renew"
	modes   map[string]string // by verb: fail, fail-effect, garbage, slow, hang
}

// plainPod is a container on one machine.
type plainPod struct {
	name  string
	state podState
	rt    libcni.RuntimeConf
	there bool // its network namespace exists
	gen   int
	ip    netip.Addr
	gw    netip.Addr
	links []string // its interfaces on the host
	rules bool     // its chain may create rules
	in    string   // the network in which it was added
	files bool     // host-local assigned its address, so there is a file
	port  int      // its port on the host, or 0
}

// podPort is the port on which a pod listens.
const podPort = 80

type podState string

const (
	podNone podState = ""
	podLive podState = "live"
	podDead podState = "dead" // the runtime has not deleted it yet
)

var plainTypes = []string{"bridge", "ptp", "host-local", "static", "firewall", "portmap", "bandwidth", "tuning", "mesh", "mesh2", "sidecar"}

func newPlainWorld(t *attempt, called string, s *setup, net *network) *plainWorld {
	n := newNode(t)
	n.conf["logLevel"] = "warn"
	n.outer = s.Outer
	w := &plainWorld{node: n, called: called, unwinds: called == "U", through: called == "U", chosen: s, net: net,
		pods: map[string]*plainPod{}}
	bin := n.path[0]
	n.path = []string{bin}
	n.cni = libcni.NewCNIConfigWithCacheDir(n.path, filepath.Join(n.dir, "cache"), n.execOf())
	n.mkdir(w.confDir())
	n.mkdir(n.hangsDir())
	must(t, os.WriteFile(w.hanging(), nil, 0o600))
	var err error
	w.past, err = unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(t, err)
	t.Cleanup(func() { _ = unix.Close(w.past) })
	w.netns = -1
	w.boot()
	t.Cleanup(func() { _ = unix.Close(w.netns) })
	for _, name := range plainTypes {
		w.writeBinary(name)
	}
	w.writeFile()
	if w.unwinds {
		n.mkdir(n.stateDir)
		must(t, unix.Mount("tmpfs", n.stateDir, "tmpfs", 0, "size=4m,mode=0700"))
		t.Cleanup(func() { _ = unix.Unmount(n.stateDir, unix.MNT_DETACH) })
	}
	return w
}

// fill fills the disk of the state directory.
func (w *plainWorld) fill() {
	w.Helper()
	f, err := os.OpenFile(filepath.Join(w.stateDir, "others"), os.O_WRONLY|os.O_CREATE|os.O_APPEND, 0o600)
	must(w, err)
	defer f.Close()
	for chunk := make([]byte, 4096); err == nil; {
		_, err = f.Write(chunk)
	}
	if !errors.Is(err, unix.ENOSPC) {
		w.Fatal(err)
	}
}

func (w *plainWorld) free() { _ = os.Remove(filepath.Join(w.stateDir, "others")) }

func (n *node) execOf() *nodeExec {
	e := &nodeExec{node: n}
	e.RawExec.Stderr = n.stderr()
	return e
}

func (w *plainWorld) confDir() string { return filepath.Join(w.dir, "net.d") }

// boot gives the machine a new network namespace. The caller must have locked its thread.
func (w *plainWorld) boot() {
	must(w, unix.Unshare(unix.CLONE_NEWNET))
	fd, err := unix.Open("/proc/thread-self/ns/net", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(w, err)
	lo, err := netlink.LinkByName("lo")
	must(w, err)
	must(w, netlink.LinkSetUp(lo))
	must(w, unix.Setns(w.past, unix.CLONE_NEWNET))
	if w.netns >= 0 {
		_ = unix.Close(w.netns)
	}
	w.netns = fd
}

// in runs a function in the machine's network namespace.
func (w *plainWorld) in(do func()) {
	w.Helper()
	must(w, unix.Setns(w.netns, unix.CLONE_NEWNET))
	defer func() { _ = unix.Setns(w.past, unix.CLONE_NEWNET) }()
	do()
}

// inPod runs a function in a pod's network namespace.
func (w *plainWorld) inPod(p *plainPod, do func()) {
	w.Helper()
	fd, err := unix.Open(p.rt.NetNS, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	must(w, err)
	defer func() { _ = unix.Close(fd) }()
	must(w, unix.Setns(fd, unix.CLONE_NEWNET))
	defer func() { _ = unix.Setns(w.past, unix.CLONE_NEWNET) }()
	do()
}

// writeBinary creates a plugin's program according to its state: a link to the real program, a
// script that may call it, or nothing.
func (w *plainWorld) writeBinary(name string) {
	w.Helper()
	b, path := w.net.binaries[name], filepath.Join(w.path[0], name)
	must(w, errors.Join(ignoreAbsent(os.Remove(path))))
	if b.gone || b.missing || w.net.wiped {
		return
	}
	tools := toolsDir(w)
	target := filepath.Join(tools, "cni", name)
	switch {
	case name == "mesh" || name == "mesh2" || name == "sidecar":
		target = filepath.Join(tools, "test", "faulty")
	case w.net.before:
		target = filepath.Join(tools, "e2e", "plugins-before", name)
	}
	if !b.down && !b.old && b.needs == 0 && len(b.modes) == 0 {
		must(w, os.Symlink(target, path))
		return
	}
	var s strings.Builder
	refuse := func(code, text string) string {
		return fmt.Sprintf(`{ echo '{"cniVersion": "0.4.0", "code": %s, "msg": "%s: %s"}'; exit 1; }`, code, name, text)
	}
	hang := func(how string) string {
		return fmt.Sprintf("echo $$ >>%s; echo %s >%s; exec sleep 600", w.hanging(), how, filepath.Join(w.hangsDir(), "hangs"))
	}
	fmt.Fprintf(&s, "#!/bin/sh\nin=$(cat)\nreal() { printf %%s \"$in\" | %s; }\n", target)
	fmt.Fprintf(&s, "[ \"$CNI_COMMAND\" != VERSION ] || { real; exit; }\n")
	if b.down {
		s.WriteString(refuse("999", "connect: connection refused") + "\n")
	}
	if b.old {
		fmt.Fprintf(&s, "case $in in *'\"cniVersion\":\"1.'*) %s ;; esac\n", refuse("1", "incompatible CNI versions"))
	}
	if b.needs > 0 {
		stale := refuse(b.stale, "its configuration has no key")
		if del := map[string]string{"hang": hang("stale"), "nothing": "exit 0"}[b.stale]; del != "" {
			stale = fmt.Sprintf("[ $CNI_COMMAND != DEL ] || { %s; }; %s", del, refuse("7", "its configuration has no key"))
		}
		fmt.Fprintf(&s, "case $in in *'\"rev\":\"%d\"'*) ;; *) %s ;; esac\n", b.needs, stale)
	}
	for _, verb := range []string{"ADD", "DEL"} {
		if mode := b.modes[verb]; mode != "" {
			fmt.Fprintf(&s, "if [ $CNI_COMMAND = %s ]; then %s; fi\n", verb, map[string]string{
				"fail":        refuse("999", verb+" refused"),
				"fail-effect": "real >/dev/null; " + refuse("999", verb+" refused afterwards"),
				"garbage":     "real >/dev/null; echo not json; exit 0",
				"slow":        "sleep 0.2; real; exit",
				"hang":        hang("always"),
			}[mode])
		}
	}
	s.WriteString("real\n")
	must(w, os.WriteFile(path, []byte(s.String()), 0o755))
}

func ignoreAbsent(err error) error {
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	return err
}

// The conflist.

func (w *plainWorld) pluginsOf() (all []string) {
	c := w.net
	add := func(name string, m map[string]any) {
		m["type"] = name
		if rev := c.revs[name]; rev > 0 {
			m["rev"] = fmt.Sprint(rev)
		}
		all = append(all, string(netconf.Marshal(m)))
	}
	subnet := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 200, byte(c.subnet), 0}), 26).String()
	ipam := map[string]any{"type": "static"}
	if c.ipam == "host-local" {
		ipam = map[string]any{"type": "host-local", "subnet": subnet, "dataDir": w.poolDir(c.dataDir),
			"routes": []any{map[string]any{"dst": "0.0.0.0/0"}}}
	}
	caps := func(names ...string) map[string]any {
		m := map[string]any{}
		for _, name := range names {
			m[name] = true
		}
		return m
	}
	main := map[string]any{"ipMasq": c.masq, "ipam": ipam, "capabilities": caps("ips")}
	ports := map[string]any{"capabilities": caps("portMappings")}
	if c.nft {
		main["ipMasqBackend"], ports["backend"] = "nftables", "nftables"
	}
	if c.main == "bridge" {
		main["bridge"], main["isGateway"] = fmt.Sprintf("cni%d", c.bridge), true
	}
	if c.mtu > 0 {
		main["mtu"] = c.mtu
	}
	add(c.main, main)
	for _, name := range c.chained {
		switch name {
		case "portmap":
			add(name, ports)
		case "bandwidth":
			add(name, map[string]any{"capabilities": caps("bandwidth")})
		case "tuning":
			add(name, map[string]any{"mtu": 1400, "dataDir": filepath.Join(w.dir, "tuning")})
		case "mesh", "mesh2", "sidecar": // mesh2 is mesh under another name
			add(name, map[string]any{"dir": w.faultyDir(), "instance": strings.TrimSuffix(name, "2")})
		default:
			add(name, map[string]any{})
		}
	}
	return all
}

func (w *plainWorld) poolDir(i int) string { return filepath.Join(w.dir, fmt.Sprintf("ipam%d", i)) }

// writeFile writes the operator's conflist, or half of it, or nothing: see network.unreadable.
func (w *plainWorld) writeFile() {
	w.Helper()
	for _, name := range w.names(w.confDir()) {
		must(w, os.Remove(filepath.Join(w.confDir(), name)))
	}
	text := w.plainText()
	switch w.net.unreadable {
	case "missing":
		return
	case "invalid":
		text = text[:len(text)/2]
	}
	must(w, os.WriteFile(filepath.Join(w.confDir(), w.net.file), text, 0o600))
}

func (w *plainWorld) plainText() []byte {
	return fmt.Appendf(nil, `{"cniVersion": %q, "name": %q, "plugins": [%s]}`, w.net.version, w.net.name,
		strings.Join(w.pluginsOf(), ", "))
}

var errNoNetwork = errors.New("the runtime has no network")

// list returns the conflist that the runtime uses.
func (w *plainWorld) list() (*libcni.NetworkConfigList, error) {
	w.Helper()
	w.network = w.net.name
	switch {
	case !w.through || w.net.off:
		if w.net.unreadable != "" {
			return nil, errNoNetwork
		}
		return libcni.NetworkConfFromBytes(w.plainText())
	case !w.chosen.ChainFile:
		if w.net.unreadable != "" {
			return nil, errNoNetwork
		}
		w.inner = w.net.version
		return w.unwind(w.pluginsOf()...), nil
	default:
		w.conf["chain"], w.conf["chainFile"] = nil, filepath.Join(w.confDir(), w.net.installed)
		return w.unwind(), nil
	}
}

// Verbs.

// plainCall is the outcome of one call of a verb.
type plainCall struct {
	verb string
	err  error
	took time.Duration
}

// hanging returns the path of a file with the process IDs of all plugins that have hung since the
// last boot.
func (w *plainWorld) hanging() string { return filepath.Join(w.hangsDir(), "processes") }

// call runs a verb. If a plugin hangs, the runtime kills the verb, as if the verb had timed out.
func (w *plainWorld) call(verb string, do func(ctx context.Context) error) plainCall {
	w.Helper()
	ctx, cancel := context.WithTimeout(w.Context(), time.Minute)
	defer cancel()
	if w.net.hangs() && verb != "STATUS" { // a STATUS never hangs, only the sweep that it starts
		file := filepath.Join(w.hangsDir(), "hangs")
		_ = os.Remove(file)
		done := make(chan struct{})
		defer close(done)
		go func() {
			for poll := time.Tick(5 * time.Millisecond); ; {
				select {
				case <-done:
					return
				case <-poll:
					if how, _ := os.ReadFile(file); len(how) > 0 {
						if w.called == "U" && string(how) == "stale\n" {
							select { // unwind itself ends a DEL with an old configuration
							case <-done:
								return
							case <-time.After(10 * time.Second):
							}
						}
						cancel()
						// In P, libcni waits for the children of the plugin that it killed, so kill them at once. In
						// U, leave them to unwind's next verb if this verb ends within 15 s.
						if w.called == "U" {
							select {
							case <-done:
								return
							case <-time.After(15 * time.Second):
							}
						}
						w.killHanging()
						return
					}
				}
			}
		}()
	}
	began := time.Now()
	var err error
	w.in(func() { err = do(ctx) })
	return plainCall{verb, err, time.Since(began)}
}

func (c *network) hangs() bool { return c.hangsIn("ADD") || c.hangsIn("DEL") }

// hangsIn reports whether a plugin hangs in a verb.
func (c *network) hangsIn(verb string) bool {
	for _, b := range c.binaries {
		if b.modes[verb] == "hang" || verb == "DEL" && b.stale == "hang" {
			return true
		}
	}
	return false
}

// hostLinks returns the names of the machine's interfaces, except bridges and lo.
func (w *plainWorld) hostLinks() (names []string) {
	w.Helper()
	links, err := netlink.LinkList()
	for errors.Is(err, netlink.ErrDumpInterrupted) {
		links, err = netlink.LinkList()
	}
	must(w, err)
	for _, l := range links {
		if l.Type() != "bridge" && l.Attrs().Name != "lo" {
			names = append(names, l.Attrs().Name)
		}
	}
	return names
}

// add adds a pod, in a new network namespace.
func (w *plainWorld) add(p *plainPod) plainCall {
	w.Helper()
	p.rt.NetNS, p.there, p.ip, p.gw, p.links = w.node.netns(fmt.Sprintf("%s-%d", p.rt.ContainerID, p.gen)), true, netip.Addr{}, netip.Addr{}, nil
	p.gen++
	p.in = w.net.name
	p.rules = w.net.masq || slices.Contains(w.net.chained, "firewall") || slices.Contains(w.net.chained, "portmap")
	var before []string
	w.in(func() { before = w.hostLinks() })
	c := w.call("ADD", func(ctx context.Context) error {
		list, err := w.list()
		if err != nil {
			return err
		}
		r, err := w.cni.AddNetworkList(ctx, list, &p.rt)
		if err != nil {
			return err
		}
		result, err := types100.NewResultFromResult(r)
		if err == nil && len(result.IPs) > 0 {
			p.ip, _ = netip.AddrFromSlice(result.IPs[0].Address.IP.To4())
			p.gw, _ = netip.AddrFromSlice(result.IPs[0].Gateway.To4())
			if !p.gw.IsValid() {
				p.gw = netip.PrefixFrom(p.ip, 26).Masked().Addr().Next()
			}
		}
		return err
	})
	w.in(func() {
		for _, name := range w.hostLinks() {
			if !slices.Contains(before, name) {
				p.links = append(p.links, name)
			}
		}
	})
	if c.err == nil {
		p.state, p.files = podLive, w.net.ipam == "host-local"
	} else {
		p.state = podDead
	}
	return c
}

// del runs a DEL until it succeeds, at most five times.
func (w *plainWorld) del(p *plainPod, cached bool, path string) (calls []plainCall) {
	w.Helper()
	rt := p.rt
	rt.NetNS = path
	for range 5 {
		c := w.call("DEL", func(ctx context.Context) error {
			list, err := w.list()
			use := &rt
			if cached {
				name := &libcni.NetworkConfigList{Name: w.net.name}
				if bytes, newRt, err := w.cni.GetNetworkListCachedConfig(name, &rt); err == nil && bytes != nil {
					if list, err = libcni.NetworkConfFromBytes(bytes); err != nil {
						return err
					}
					return w.cni.DelNetworkList(ctx, list, newRt)
				}
			}
			if err != nil {
				return err
			}
			return w.cni.DelNetworkList(ctx, list, use)
		})
		if calls = append(calls, c); c.err == nil {
			break
		}
	}
	return calls
}

// drop removes a pod's network namespace. It also removes the host ends of the pod's veth pairs, so
// that nothing depends on when the kernel removes them.
func (w *plainWorld) drop(p *plainPod) {
	w.Helper()
	if !p.there {
		return
	}
	w.in(func() {
		for _, name := range p.links {
			if l, err := netlink.LinkByName(name); err == nil && l.Type() == "veth" {
				_ = netlink.LinkDel(l)
			}
		}
	})
	must(w, unix.Unmount(p.rt.NetNS, unix.MNT_DETACH))
	must(w, os.Remove(p.rt.NetNS))
	p.there = false
}

// path returns the namespace's path, as a runtime sends it in a DEL, or "" if the namespace is
// gone.
func (p *plainPod) path() string {
	if p.there {
		return p.rt.NetNS
	}
	return ""
}

// delete runs the DELs with which a runtime ends a pod. It removes the namespace at the same point
// as that runtime. style names the runtime: nerdctl, crio or containerd.
func (w *plainWorld) delete(p *plainPod, style string) (calls []plainCall) {
	w.Helper()
	passed := func(more []plainCall) bool {
		calls = append(calls, more...)
		return more[len(more)-1].err == nil
	}
	switch style {
	case "nerdctl":
		w.drop(p)
		if passed(w.del(p, false, "")) {
			p.state = podNone
		} else {
			p.state = podDead
		}
	case "crio":
		if passed(w.del(p, true, p.rt.NetNS)) {
			w.drop(p)
			p.state = podNone
		} else {
			p.state = podDead
		}
	default:
		if !passed(w.del(p, false, p.path())) {
			p.state = podDead
			return calls
		}
		w.drop(p)
		if passed(w.del(p, false, "")) {
			p.state = podNone
		} else {
			p.state = podDead
		}
	}
	return calls
}

func (w *plainWorld) check(p *plainPod) plainCall {
	return w.call("CHECK", func(ctx context.Context) error {
		list, err := w.list()
		if err != nil {
			return err
		}
		return w.cni.CheckNetworkList(ctx, list, &p.rt)
	})
}

func (w *plainWorld) status() plainCall {
	c := w.call("STATUS", func(ctx context.Context) error {
		list, err := w.list()
		if err != nil {
			return err
		}
		return w.cni.GetStatusNetworkList(ctx, list)
	})
	if w.unwinds {
		w.awaitSweep()
	}
	return c
}

func (w *plainWorld) gc() plainCall {
	args := &libcni.GCArgs{ValidAttachments: []types.GCAttachment{}}
	for _, p := range w.pods {
		if p.state != podNone {
			args.ValidAttachments = append(args.ValidAttachments, types.GCAttachment{ContainerID: p.rt.ContainerID, IfName: "eth0"})
		}
	}
	return w.call("GC", func(ctx context.Context) error {
		list, err := w.list()
		if err != nil {
			return err
		}
		return w.cni.GCNetworkList(ctx, list, args)
	})
}

// sweepTimesEnv makes this program sweep a state directory as the agent does, in the network
// namespace in which it was started, and exit. The value has five parts, separated by "|": a string
// whose length is the number of sweeps, the state directory, libcni's cache, CNI_PATH, and unwind's
// entry in the present conflist, if there is one.
const sweepTimesEnv = "UNWIND_LIKEPLAIN_SWEEPS"

func init() {
	if os.Getenv(sweepTimesEnv) == "" {
		return
	}
	f := strings.SplitN(os.Getenv(sweepTimesEnv), "|", 5)
	opts := sweep.Options{Path: f[3]}
	if conf, err := netconf.ParseConf([]byte(f[4])); err == nil {
		if chain, err := conf.LoadChain(); err == nil {
			opts.Pools, opts.Networks = sweep.PoolsOf(chain, conf), []sweep.Network{{Chain: chain, Conf: conf}}
		}
	}
	if err := sweepAsAgent(len(f[0]), f[1], f[2], opts); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func sweepAsAgent(times int, stateDir, cache string, opts sweep.Options) error {
	p := &Plugin{Env: undo.Env{Stderr: os.Stderr, Budgets: env.BudgetsOf(os.Getenv(env.Budgets)), Runner: &delegate.Processes{}}, Stdout: io.Discard, CacheDir: cache}
	for range times {
		conf := netconf.DefaultConf()
		conf.StateDir, conf.LogLevel = stateDir, slog.LevelError
		o, closeLog := p.newOp(&skel.CmdArgs{}, conf)
		o.Node.Invoked = true // because process 1 is in other namespaces: see node.worker
		_, err := sweep.New(o.Worker, opts).Run(context.Background())
		if closeLog(); err != nil {
			return err
		}
	}
	return nil
}

// sweeps runs a number of sweeps, which ignore the pause after a failed DEL.
func (w *plainWorld) sweeps(times int) error {
	w.Helper()
	if !w.unwinds {
		return nil
	}
	var err error
	entry := map[string]any{}
	if list, listErr := w.list(); listErr == nil && list.Plugins[0].Network.Type == netconf.Name {
		must(w, json.Unmarshal(list.Plugins[0].Bytes, &entry))
		entry["name"], entry["cniVersion"] = list.Name, list.CNIVersion
	}
	w.in(func() {
		cmd := exec.CommandContext(w.Context(), "/proc/self/exe")
		cmd.Env = append(os.Environ(), sweepTimesEnv+"="+strings.Repeat("x", times)+"|"+w.stateDir+"|"+w.cacheDir()+"|"+
			strings.Join(w.path, ":")+"|"+string(netconf.Marshal(entry)), env.Cache+"="+w.cacheDir(), env.Budgets+"="+strings.Join(w.budgets, " "))
		var out []byte
		if out, err = cmd.CombinedOutput(); err != nil {
			err = fmt.Errorf("%w: %s", err, out)
		}
	})
	return err
}

func (w *plainWorld) killHanging() {
	w.Helper()
	for _, pid := range strings.Fields(read(w, w.hanging())) {
		n, err := strconv.Atoi(pid)
		must(w, err)
		_ = unix.Kill(n, unix.SIGKILL)
	}
}

// reboot removes what doesn't survive a reboot, and moves all records to an earlier boot. It first
// makes room on the disk, because it could not change the records on a full disk.
func (w *plainWorld) reboot() {
	w.Helper()
	w.free()
	w.killHanging()
	must(w, os.WriteFile(w.hanging(), nil, 0o600))
	for _, p := range w.pods {
		w.drop(p)
		if p.state == podLive {
			p.state = podDead
		}
	}
	w.boot()
	if _, err := os.Stat(w.stateDir); !w.unwinds || err != nil {
		return
	}
	err := w.store.Update(w.Context(), func(tx *journal.Tx) error {
		var all []*journal.Record
		err := tx.All(func(e *journal.Record, err error) error {
			all = append(all, e)
			return err
		})
		for _, e := range all {
			e.Added.Host.BootID = earlier
			err = errors.Join(err, tx.Put(e))
		}
		return err
	})
	if err != nil && !errors.Is(err, unix.ENOENT) {
		w.Fatal(err)
	}
}

// Resources.

var (
	counted     = regexp.MustCompile(`\[\d+:\d+\]`)
	anyIP       = regexp.MustCompile(`\b10\.200\.\d+\.\d+`)
	podNetwork  = regexp.MustCompile(`\b10\.200\.\d+\.\d+/26\b`)
	hostIP      = regexp.MustCompile(`\b(10\.200\.\d+\.\d+)(?:/32|:)`)
	chainID     = regexp.MustCompile(`CNI-(?:DN-)?[0-9a-f]{16,}`)
	ownerID     = regexp.MustCompile(`id: \\"([^\\]*)\\"`)
	ruleNetwork = regexp.MustCompile(`name: \\"([^\\]*)\\"`)
	ownRules    = regexp.MustCompile(`10\.200\.|CNI-(?:DN-)?[0-9a-f]{16,}|id: `)
)

// ruleLines returns the lines of iptables-save that belong to pods.
func (w *plainWorld) ruleLines() (lines []string) {
	w.Helper()
	var out []byte
	var err error
	w.in(func() { out, err = exec.Command("iptables-save").Output() })
	must(w, err)
	for line := range strings.Lines(string(out)) {
		if ownRules.MatchString(line) && !strings.HasPrefix(line, "#") {
			lines = append(lines, counted.ReplaceAllString(strings.TrimSpace(line), ""))
		}
	}
	return lines
}

// nftLines returns the rules of pods that bridge, ptp and portmap made with nftables.
func (w *plainWorld) nftLines() (lines []string) {
	w.Helper()
	for _, table := range []string{"ip cni_hostport", "inet cni_plugins_masquerade"} {
		var out []byte
		w.in(func() { // nft fails if there is no such table
			out, _ = exec.Command("nft", append([]string{"list", "table"}, strings.Fields(table)...)...).Output()
		})
		for line := range strings.Lines(string(out)) {
			if anyIP.MatchString(line) {
				lines = append(lines, "nft "+strings.TrimSpace(line))
			}
		}
	}
	return lines
}

// ofPod describes the resources of a live pod. The descriptions contain no names that differ
// between the machine with unwind and the one without.
func (w *plainWorld) ofPod(p *plainPod, rules []string, owners map[string]string, links []string) (have []string) {
	w.Helper()
	for _, pool := range w.pools() {
		for _, name := range w.names(pool) {
			if p.files && name == p.ip.String() && strings.HasPrefix(read(w, filepath.Join(pool, name)), p.rt.ContainerID+"\r\n") {
				have = append(have, "address file")
			}
		}
	}
	for _, name := range p.links {
		if slices.Contains(links, name) {
			have = append(have, "host link")
		}
	}
	networks := chainOwners(rules, ruleNetwork)
	served := map[string][]string{} // by iptables chain: the addresses in its rules and in jumps to it
	for _, line := range rules {
		for _, m := range hostIP.FindAllStringSubmatch(line, -1) {
			for _, chain := range chainID.FindAllString(line, -1) {
				served[chain] = append(served[chain], m[1])
			}
		}
	}
	for _, line := range rules {
		if all := served[chainID.FindString(line)]; len(all) > 0 && !slices.Contains(all, p.ip.String()) {
			continue // the chain belongs to an earlier ADD of the container
		}
		network := networks[chainID.FindString(line)]
		if m := ruleNetwork.FindStringSubmatch(line); m != nil {
			network = m[1]
		}
		if network != "" && network != p.in {
			continue // left by an ADD before the network was renamed
		}
		owner := ""
		if m := ownerID.FindStringSubmatch(line); m != nil {
			owner = m[1]
		} else if chain := chainID.FindString(line); chain != "" {
			if owner = owners[chain]; owner == "" {
				continue
			}
		}
		hosts := hostIP.FindAllStringSubmatch(line, -1)
		hasIP := slices.ContainsFunc(hosts, func(m []string) bool { return m[1] == p.ip.String() })
		// A rule with another address or subnet was left by an earlier ADD of the container.
		if subnet, err := netip.ParsePrefix(podNetwork.FindString(line)); err == nil && !subnet.Contains(p.ip) {
			continue
		}
		if owner == p.rt.ContainerID && (hasIP || len(hosts) == 0) || owner == "" && hasIP {
			have = append(have, "rule "+strings.ReplaceAll(line, p.ip.String(), "ADDRESS"))
		}
	}
	slices.Sort(have)
	return slices.Compact(have)
}

// chainOwners maps each iptables chain to its owner according to the rules' comments. The owner is
// a container ID if says is ownerID, or a network's name if says is ruleNetwork.
func chainOwners(rules []string, says *regexp.Regexp) map[string]string {
	owners := map[string]string{}
	for _, line := range rules {
		if m := says.FindStringSubmatch(line); m != nil {
			for _, chain := range chainID.FindAllString(line, -1) {
				owners[chain] = m[1]
			}
		}
	}
	return owners
}

// pools returns the directories of host-local's pools.
func (w *plainWorld) pools() (dirs []string) {
	dirs, _ = filepath.Glob(filepath.Join(w.dir, "ipam*", "*"))
	return dirs
}

// shares reports whether another pod has or had the same address, for example because the network
// was renamed. In that case, it is random which of the two pods the bridge reaches.
func (w *plainWorld) shares(name string) bool {
	for other, p := range w.pods {
		if other != name && p.ip == w.pods[name].ip {
			return true
		}
	}
	return false
}

// pings reports whether a pod reaches its gateway.
func (w *plainWorld) pings(p *plainPod) (answers bool) {
	w.Helper()
	if !p.gw.IsValid() || !p.there {
		return false
	}
	w.inPod(p, func() { answers = errors.Is(w.connect(p.gw, 9), unix.ECONNREFUSED) })
	return answers
}

// serves reports whether a pod's host port leads to the pod.
func (w *plainWorld) serves(p *plainPod) (answers bool) {
	w.Helper()
	if p.port == 0 || !p.gw.IsValid() || !p.there {
		return false
	}
	listener := -1
	w.inPod(p, func() {
		var err error
		listener, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		must(w, err)
		must(w, unix.SetsockoptInt(listener, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
		must(w, unix.Bind(listener, &unix.SockaddrInet4{Port: podPort}))
		must(w, unix.Listen(listener, 1))
	})
	defer func() { _ = unix.Close(listener) }()
	w.in(func() { answers = w.connect(p.gw, p.port) == nil })
	return answers
}

// connect opens a TCP connection and returns nil, its error or, after 2 s, ETIMEDOUT.
func (w *plainWorld) connect(to netip.Addr, port int) error {
	w.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, 0)
	must(w, err)
	defer func() { _ = unix.Close(fd) }()
	err = unix.Connect(fd, &unix.SockaddrInet4{Port: port, Addr: to.As4()})
	if err != unix.EINPROGRESS {
		return err
	}
	fds := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
	n, err := unix.Poll(fds, 2000)
	for errors.Is(err, unix.EINTR) {
		n, err = unix.Poll(fds, 2000)
	}
	if err == nil && n == 0 {
		return unix.ETIMEDOUT
	}
	if code, _ := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); code != 0 {
		return unix.Errno(code)
	}
	return err
}

// left returns all remaining resources, in words that are the same on both machines. At the end of
// a sequence, there should be none.
func (w *plainWorld) left() (all []string) {
	w.Helper()
	for _, pool := range w.pools() {
		for _, name := range w.names(pool) {
			if _, err := netip.ParseAddr(name); err == nil {
				owner := strings.ReplaceAll(read(w, filepath.Join(pool, name)), "\r\n", " ")
				all = append(all, fmt.Sprintf("address of %s in %s", cmp.Or(owner, "nobody"), strings.TrimPrefix(pool, w.dir)))
			}
		}
	}
	w.in(func() {
		for range w.hostLinks() {
			all = append(all, "link")
		}
	})
	for _, line := range slices.Concat(w.ruleLines(), w.nftLines()) {
		all = append(all, "rule "+anyIP.ReplaceAllString(line, "ADDRESS"))
	}
	for _, file := range w.taken() {
		all = append(all, "file of "+file)
	}
	for _, file := range w.names(w.cacheDir()) {
		all = append(all, "cache "+file)
	}
	for _, file := range w.names(filepath.Join(w.dir, "tuning")) {
		all = append(all, "tuning "+file)
	}
	slices.Sort(all)
	return all
}

// pending returns the journal's records, except those in state abandoned.
func (w *plainWorld) pending() (all []*journal.Record) {
	w.Helper()
	if !w.unwinds {
		return nil
	}
	return slices.DeleteFunc(w.records(), func(e *journal.Record) bool { return e.State == journal.Abandoned })
}

// describe returns a record's state and its pending DELs as text.
func describe(e *journal.Record) string {
	var steps []string
	for _, s := range e.Steps {
		text, _ := json.Marshal(map[string]any{"next": s.Next, "tries": s.Tries, "last": s.Last, "add": s.ADD})
		steps = append(steps, s.Type+" "+string(text))
	}
	return fmt.Sprintf("%s is %s (%s): %s", e.Key, e.State, e.Reason, strings.Join(steps, "; "))
}
