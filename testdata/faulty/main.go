// Faulty is a CNI plugin that fails on demand: the test double of the tests and of the demo. Each
// ADD makes one file and each DEL removes it, so a leak is a file that is left.
//
// Its network configuration:
//
//	{"type": "faulty", "dir": "/abs/dir", "instance": "p1", "address": "192.0.2.7/32", "code": 11,
//	 "delayMS": 1000, "modes": {"DEL": "<mode>"}, "ipam": {"type": "host-local", …},
//	 "rules": true, "result": "<text>"}
//
// Only dir is required. modes override those of plan.json, for a plugin that fails with this
// configuration and not with another one. With ipam, faulty takes its address from that plugin and
// releases it there, as bridge does. With rules, faulty does for each address of its prevResult
// what firewall does: it makes a rule that is keyed by the address alone, so that a DEL removes the
// rule of any owner. dir holds:
//
//	taken/<containerID>.<ifname>.<instance>
//	        made by an ADD that takes effect (content: the pid), removed by a DEL that takes
//	        effect; CHECK fails without it
//	rules/<address>.<instance>
//	        the same for rules
//	held/<command>.<containerID>.<instance>
//	        made by a call that is held; the call continues when the file is removed
//	plan.json
//	        {"<instance>": {"ADD": "<mode>", "DEL": "<mode>", …}}, read at each call, so that a
//	        plugin can be healed between calls. "*" stands for the instances that are not named.
//	        Without a file or a mode, the mode is "ok". "pod:<prefix>" overrides all, for calls
//	        for a pod (K8S_POD_NAME) whose name has this prefix. "fail 5%" is fail for one call
//	        in twenty, at random, and ok for the others.
//	log
//	        a JSON line (type record) at the start of each call, and one at its end if it ends by
//	        itself. Each line is one append. The lines of one call have one pid, unless the mode
//	        is "orphan", whose child writes the end.
//
// The modes; a name with -effect takes or releases first, its plain form does neither:
//
//	ok                  take effect and answer
//	late                sleep for delayMS (default 1000), then ok
//	queue               stand in line for the lock of the file queue in dir, hold it for delayMS,
//	                    then ok
//	hold, hold-effect   wait until the file under held is removed, then ok
//	fail, fail-effect   CNI error with "code" (default 999)
//	stderr              exit 1 with text on stderr only
//	hang, hang-effect   never answer
//	ignore-term         never answer, and ignore SIGTERM
//	crash, crash-effect SIGKILL to itself
//	kill-parent         SIGKILL to the parent, then never answer
//	kill-parent-effect  take effect, SIGKILL to the parent, then answer
//	orphan              leave a child in the process group, SIGKILL to the parent and exit; the
//	                    child takes effect after delayMS
//	daemon              leave a child in a session of its own that holds every inherited
//	                    descriptor, stdout and stderr too, for a minute; then ok
//	empty, garbage, huge
//	                    take effect and exit 0, having written nothing, "not json", or 100 MB of
//	                    blanks before the answer
//
// With CNI_FAULTY_LOCK=<file> in the environment each call makes that file before it reads its
// configuration, waits for as long as another one has it, and removes it at its end.
//
// "Never" is two minutes, so that a test that dies leaves nothing behind.
//
// The answer to ADD is result as it is. Without result the answer is prevResult, or else an empty
// result, with address, if there is one, among its ips. GC and STATUS have no effect; they and
// CHECK follow the plan like ADD and DEL. VERSION reads no configuration and is not logged.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

const (
	forever    = 2 * time.Minute
	daemonLife = time.Minute
	hugeBlanks = 100 << 20

	lockEnv = "CNI_FAULTY_LOCK"

	// roleEnv tells a child of this program its role.
	roleEnv    = "CNI_FAULTY_ROLE"
	roleDaemon = "daemon"
	roleOrphan = "orphan"
)

var (
	// errStderr ends a call with text on stderr instead of a CNI error.
	errStderr = errors.New("faulty: this text is on stderr only")
	// errHandedOver ends a process and leaves its call to a child.
	errHandedOver = errors.New("the child finishes the call")
)

// conf is the part of the network configuration that this plugin reads.
type conf struct {
	CNIVersion string          `json:"cniVersion"`
	Dir        string          `json:"dir"`
	Instance   string          `json:"instance"`
	Address    string          `json:"address"`
	Code       uint            `json:"code"`
	DelayMS    int             `json:"delayMS"`
	PrevResult json.RawMessage `json:"prevResult"`

	Modes map[string]string `json:"modes"`
	IPAM  struct {
		Type string `json:"type"`
	} `json:"ipam"`
	Rules  bool    `json:"rules"`
	Result *string `json:"result"`
}

// record is a line of the log.
type record struct {
	Phase       string          `json:"phase"` // "start" or "end"
	Command     string          `json:"command"`
	Mode        string          `json:"mode"`
	Instance    string          `json:"instance"`
	ContainerID string          `json:"containerID"`
	IfName      string          `json:"ifname"`
	NetNS       string          `json:"netns"`
	Args        string          `json:"args"`
	Path        string          `json:"path"`
	PID         int             `json:"pid"`
	Stdin       json.RawMessage `json:"stdin"`
}

// call is one invocation of the plugin.
type call struct {
	record
	conf   conf
	parent int
	given  []json.RawMessage // the ips of the IPAM plugin
}

func main() {
	// A parent that was killed must not end this process by a write to its pipe.
	signal.Ignore(syscall.SIGPIPE)
	parent := os.Getppid()

	role := os.Getenv(roleEnv)
	if role == roleDaemon {
		time.Sleep(daemonLife)
		return
	}
	if os.Getenv("CNI_COMMAND") == "VERSION" {
		if err := version.All.Encode(os.Stdout); err != nil {
			os.Exit(1)
		}
		return
	}

	unlock := lock(os.Getenv(lockEnv))
	c, err := readCall(os.Stdin, parent)
	switch {
	case err != nil:
		err = c.answer(nil, err)
	case role == roleOrphan:
		c.Mode = roleOrphan
		time.Sleep(c.delay())
		err = errors.Join(c.effect(), c.log("end"))
	default:
		err = c.serve()
	}
	unlock()
	if err != nil {
		os.Exit(1)
	}
}

// lock makes a file, and waits for as long as another call has it.
func lock(path string) (unlock func()) {
	if path == "" {
		return func() {}
	}
	for end := time.Now().Add(forever); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_EXCL, 0o600)
		if err == nil {
			_ = f.Close()
			break
		}
	}
	return func() { _ = os.Remove(path) }
}

// readCall reads the environment and the configuration, and checks them as pkg/skel would. With an
// error, the returned call serves only to answer.
func readCall(stdin io.Reader, parent int) (*call, error) {
	c := &call{parent: parent, record: record{
		Command:     os.Getenv("CNI_COMMAND"),
		ContainerID: os.Getenv("CNI_CONTAINERID"),
		IfName:      os.Getenv("CNI_IFNAME"),
		NetNS:       os.Getenv("CNI_NETNS"),
		Args:        os.Getenv("CNI_ARGS"),
		Path:        os.Getenv("CNI_PATH"),
		PID:         os.Getpid(),
	}}
	var err error
	if c.Stdin, err = io.ReadAll(stdin); err != nil {
		return c, types.NewError(types.ErrIOFailure, "faulty: stdin", err.Error())
	}
	if err := json.Unmarshal(c.Stdin, &c.conf); err != nil {
		return c, types.NewError(types.ErrDecodingFailure, "faulty: configuration", err.Error())
	}
	c.Instance = c.conf.Instance
	if c.conf.CNIVersion == "" {
		c.conf.CNIVersion = "0.1.0" // as pkg/version's ConfigDecoder
	}
	var reconciler version.Reconciler
	if err := reconciler.Check(c.conf.CNIVersion, version.All); err != nil {
		return c, types.NewError(types.ErrIncompatibleCNIVersion, "faulty: incompatible CNI versions", err.Details())
	}
	if !filepath.IsAbs(c.conf.Dir) {
		return c, types.NewError(types.ErrInvalidNetworkConfig, "faulty: \"dir\" must be an absolute path", "")
	}
	if missing := c.missing(); len(missing) > 0 {
		return c, types.NewError(types.ErrInvalidEnvironmentVariables, "faulty: environment",
			"missing: "+strings.Join(missing, ", "))
	}
	return c, nil
}

// missing lists the variables that the command needs and the caller did not set (SPEC 1.1 §2).
func (c *call) missing() []string {
	var required []string
	switch c.Command {
	case "ADD", "CHECK":
		required = []string{"CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME", "CNI_PATH"}
	case "DEL":
		required = []string{"CNI_CONTAINERID", "CNI_IFNAME", "CNI_PATH"}
	case "GC", "STATUS":
		required = []string{"CNI_PATH"}
	default:
		return []string{"a known CNI_COMMAND"}
	}
	return slices.DeleteFunc(required, func(name string) bool { return os.Getenv(name) != "" })
}

// serve carries out the call and logs its start and its end.
func (c *call) serve() error {
	var err error
	if c.Mode, err = c.plannedMode(); err != nil {
		return c.answer(nil, err)
	}
	if err := c.log("start"); err != nil {
		return c.answer(nil, err)
	}
	out, err := c.run()
	if errors.Is(err, errHandedOver) {
		return nil
	}
	return errors.Join(c.answer(out, err), c.log("end"))
}

// plannedMode returns the mode that the configuration or plan.json gives for this call.
func (c *call) plannedMode() (string, error) {
	if mode := c.conf.Modes[c.Command]; mode != "" {
		return mode, nil
	}
	data, err := os.ReadFile(filepath.Join(c.conf.Dir, "plan.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return "ok", nil
	}
	if err != nil {
		return "", err
	}
	var plan map[string]map[string]string
	if err := json.Unmarshal(data, &plan); err != nil {
		return "", fmt.Errorf("plan.json: %w", err)
	}
	modes, ok := plan[c.conf.Instance]
	if !ok {
		modes = plan["*"]
	}
	for key, ofPods := range plan {
		if prefix, ok := strings.CutPrefix(key, "pod:"); ok && strings.HasPrefix(c.pod(), prefix) {
			modes = ofPods
		}
	}
	return byChance(modes[c.Command])
}

// pod returns the name of the call's pod.
func (c *call) pod() string {
	for arg := range strings.SplitSeq(c.Args, ";") {
		if name, ok := strings.CutPrefix(arg, "K8S_POD_NAME="); ok {
			return name
		}
	}
	return ""
}

// byChance resolves a mode with a percentage.
func byChance(mode string) (string, error) {
	mode, chance, ok := strings.Cut(mode, " ")
	if ok {
		percent, err := strconv.Atoi(strings.TrimSuffix(chance, "%"))
		if err != nil {
			return "", fmt.Errorf("plan.json: %w", err)
		}
		if rand.IntN(100) >= percent {
			mode = ""
		}
	}
	return cmp.Or(mode, "ok"), nil
}

// run carries out the mode and returns the output for stdout.
func (c *call) run() ([]byte, error) {
	mode, effectFirst := strings.CutSuffix(c.Mode, "-effect")
	if mode == "hold" {
		return c.heldUp(effectFirst)
	}
	if effectFirst {
		if err := c.effect(); err != nil {
			return nil, err
		}
	}
	switch mode {
	case "ok":
		return c.succeed()
	case "late":
		time.Sleep(c.delay())
		return c.succeed()
	case "queue":
		return c.standInLine()
	case "fail":
		return nil, c.refusal()
	case "stderr":
		return nil, errStderr
	case "hang":
		return nil, c.hang()
	case "ignore-term":
		signal.Ignore(syscall.SIGTERM)
		return nil, c.hang()
	case "crash":
		return nil, errors.Join(syscall.Kill(os.Getpid(), syscall.SIGKILL), c.hang())
	case "kill-parent":
		if err := c.killParent(); err != nil || effectFirst {
			return c.result(), err
		}
		return nil, c.hang()
	case "orphan":
		return nil, c.handOver()
	case "daemon":
		if err := c.leaveDaemon(); err != nil {
			return nil, err
		}
		return c.succeed()
	case "empty":
		return nil, c.effect()
	case "garbage":
		return []byte("not json\n"), c.effect()
	case "huge":
		out, err := c.succeed()
		return append(bytes.Repeat([]byte(" "), hugeBlanks), out...), err
	default:
		return nil, fmt.Errorf("faulty: plan.json: no such mode: %q", c.Mode)
	}
}

// standInLine succeeds once it has held the lock that all calls share, as those of iptables share one.
func (c *call) standInLine() ([]byte, error) {
	line, err := os.OpenFile(filepath.Join(c.conf.Dir, "queue"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return nil, err
	}
	defer line.Close()
	if err := syscall.Flock(int(line.Fd()), syscall.LOCK_EX); err != nil {
		return nil, err
	}
	time.Sleep(c.delay())
	return c.succeed()
}

// heldUp waits before or after it takes effect, then succeeds.
func (c *call) heldUp(effectFirst bool) ([]byte, error) {
	var out []byte
	var err error
	if effectFirst {
		if out, err = c.succeed(); err != nil {
			return nil, err
		}
	}
	held := filepath.Join(c.conf.Dir, "held", c.Command+"."+c.ContainerID+"."+c.Instance)
	if err := os.MkdirAll(filepath.Dir(held), 0o755); err != nil {
		return nil, err
	}
	if err := os.WriteFile(held, nil, 0o644); err != nil {
		return nil, err
	}
	for end := time.Now().Add(forever); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(held); errors.Is(err, fs.ErrNotExist) {
			if effectFirst {
				return out, nil
			}
			return c.succeed()
		}
	}
	return nil, fmt.Errorf("faulty: %s %s was held for %s", c.Instance, c.Command, forever)
}

// effect takes or releases; the tests count effects.
func (c *call) effect() error {
	if err := errors.Join(c.askIPAM(), c.rules()); err != nil {
		return err
	}
	switch c.Command {
	case "ADD":
		if err := os.MkdirAll(filepath.Dir(c.takenFile()), 0o755); err != nil {
			return err
		}
		return os.WriteFile(c.takenFile(), fmt.Appendln(nil, os.Getpid()), 0o644)
	case "DEL":
		if err := os.Remove(c.takenFile()); !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

// askIPAM has the IPAM plugin give an address or release it.
func (c *call) askIPAM() error {
	if c.conf.IPAM.Type == "" {
		return nil
	}
	switch c.Command {
	case "ADD":
		result, err := invoke.DelegateAdd(context.Background(), c.conf.IPAM.Type, c.Stdin, nil)
		if err != nil {
			return err
		}
		var given struct{ IPs []json.RawMessage }
		if err := json.Unmarshal(mustJSON(result), &given); err != nil {
			return err
		}
		c.given = given.IPs
	case "DEL":
		return invoke.DelegateDel(context.Background(), c.conf.IPAM.Type, c.Stdin, nil)
	}
	return nil
}

// rules makes or removes the rule of each address in prevResult.
func (c *call) rules() error {
	var prev struct {
		IPs []struct{ Address netip.Prefix }
	}
	if !c.conf.Rules || len(c.conf.PrevResult) == 0 {
		return nil
	}
	if err := json.Unmarshal(c.conf.PrevResult, &prev); err != nil {
		return err
	}
	dir := filepath.Join(c.conf.Dir, "rules")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, ip := range prev.IPs {
		rule := filepath.Join(dir, ip.Address.Addr().String()+"."+c.Instance)
		var err error
		switch c.Command {
		case "ADD":
			err = os.WriteFile(rule, nil, 0o644)
		case "DEL":
			err = os.Remove(rule)
		}
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			return err
		}
	}
	return nil
}

func (c *call) takenFile() string {
	return filepath.Join(c.conf.Dir, "taken", c.ContainerID+"."+c.IfName+"."+c.conf.Instance)
}

// succeed carries out a call in which nothing fails.
func (c *call) succeed() ([]byte, error) {
	if c.Command == "CHECK" {
		_, err := os.Stat(c.takenFile())
		return nil, err
	}
	err := c.effect()
	return c.result(), err
}

// result returns the output of ADD; the other commands print nothing.
func (c *call) result() []byte {
	if c.Command != "ADD" {
		return nil
	}
	if c.conf.Result != nil {
		return []byte(*c.conf.Result)
	}
	result := map[string]json.RawMessage{}
	if len(c.conf.PrevResult) > 0 {
		if err := json.Unmarshal(c.conf.PrevResult, &result); err != nil {
			return c.conf.PrevResult
		}
	}
	result["cniVersion"] = mustJSON(c.conf.CNIVersion)
	lists, err := version.GreaterThanOrEqualTo(c.conf.CNIVersion, "0.3.0")
	if err == nil && lists {
		for _, list := range []string{"interfaces", "ips"} {
			if result[list] == nil {
				result[list] = json.RawMessage("[]")
			}
		}
	}
	if c.conf.Address != "" {
		c.addAddress(result)
	}
	var ips []json.RawMessage
	if err := json.Unmarshal(result["ips"], &ips); err == nil && len(c.given) > 0 {
		result["ips"] = mustJSON(append(ips, c.given...))
	}
	return append(mustJSON(result), '\n')
}

// addAddress puts the configured address into a result of the configuration's version. Before 0.3.0
// that is "ip4" or "ip6"; since then an entry of "ips", which needed "version" until 1.0.0.
func (c *call) addAddress(result map[string]json.RawMessage) {
	family := "4"
	if prefix, err := netip.ParsePrefix(c.conf.Address); err == nil && prefix.Addr().Is6() {
		family = "6"
	}
	if result["ips"] == nil {
		result["ip"+family] = mustJSON(map[string]string{"ip": c.conf.Address})
		return
	}
	ip := map[string]string{"address": c.conf.Address}
	if flat, err := version.GreaterThanOrEqualTo(c.conf.CNIVersion, "1.0.0"); err == nil && !flat {
		ip["version"] = family
	}
	var ips []json.RawMessage
	if err := json.Unmarshal(result["ips"], &ips); err == nil {
		result["ips"] = mustJSON(append(ips, mustJSON(ip)))
	}
}

func (c *call) refusal() error {
	code := c.conf.Code
	if code == 0 {
		code = types.ErrInternal
	}
	return types.NewError(code, fmt.Sprintf("faulty: %s %s refused", c.conf.Instance, c.Command), "")
}

func (c *call) hang() error {
	time.Sleep(forever)
	return fmt.Errorf("faulty: %s %s hung for %s", c.conf.Instance, c.Command, forever)
}

func (c *call) delay() time.Duration {
	if c.conf.DelayMS == 0 {
		return time.Second
	}
	return time.Duration(c.conf.DelayMS) * time.Millisecond
}

// killParent kills the unwind that started this process, but not who adopts this process if that
// one is gone already: init, or the first process of the tests.
func (c *call) killParent() error {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c.parent))
	if err != nil || strings.TrimSpace(string(name)) != "unwind" {
		return errors.New("faulty: the parent is gone")
	}
	return syscall.Kill(c.parent, syscall.SIGKILL)
}

// handOver starts the child that takes effect late, and kills the parent. The child stays in this
// process group and keeps the inherited descriptors from 3 on. Its standard input is its own copy
// of the configuration.
func (c *call) handOver() error {
	stdin, err := os.CreateTemp("", "faulty-")
	if err != nil {
		return err
	}
	defer stdin.Close()
	if err := os.Remove(stdin.Name()); err != nil {
		return err
	}
	if _, err := stdin.Write(c.Stdin); err != nil {
		return err
	}
	if _, err := stdin.Seek(0, io.SeekStart); err != nil {
		return err
	}
	child := child(roleOrphan)
	child.Stdin = stdin
	if err := child.Start(); err != nil {
		return err
	}
	if err := c.killParent(); err != nil {
		return err
	}
	return errHandedOver
}

// leaveDaemon starts the child that outlives the call.
func (c *call) leaveDaemon() error {
	child := child(roleDaemon)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return child.Start()
}

// child returns a command for this program in another role. Inherited descriptors from 3 on pass to
// it: os/exec closes none that is not close-on-exec.
func child(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{os.Args[0], role} // for people who read ps
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return cmd
}

// answer writes the outcome where the protocol wants it, and returns err.
func (c *call) answer(out []byte, err error) error {
	if errors.Is(err, errStderr) {
		fmt.Fprintln(os.Stderr, err)
		return err
	}
	if err != nil {
		var cniErr *types.Error
		if !errors.As(err, &cniErr) {
			cniErr = types.NewError(types.ErrInternal, err.Error(), "")
		}
		out = mustJSON(struct {
			CNIVersion string `json:"cniVersion"`
			*types.Error
		}{c.conf.CNIVersion, cniErr})
	}
	os.Stdout.Write(out) // a reader that has gone is not this plugin's fault
	return err
}

// log appends a line about the call.
func (c *call) log(phase string) error {
	line := c.record
	line.Phase = phase
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(line); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.conf.Dir, "log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(buf.Bytes())
	return errors.Join(err, f.Close())
}

// mustJSON encodes a value that always can be encoded.
func mustJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}
