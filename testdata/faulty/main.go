// Faulty is a CNI plugin that fails on demand, for the tests and the demo. Each ADD creates one
// file and each DEL removes it, so a file that remains is a leak.
//
// Its network configuration:
//
//	{"type": "faulty", "dir": "/abs/dir", "instance": "p1", "address": "192.0.2.7/32", "code": 11,
//	 "delayMS": 1000, "modes": {"DEL": "<mode>"}, "ipam": {"type": "host-local", …},
//	 "rules": true, "result": "<text>", "needs": "/abs/file"}
//
// Only "dir" is required. "modes" overrides plan.json, so that faulty can fail with one
// configuration and work with another. With "ipam", faulty gets addresses from that plugin, as
// bridge does. With "rules", faulty creates a rule for each address in prevResult, like firewall.
// A rule's key is the address alone, so DEL removes the rule even if the address has a new owner.
// While the file that "needs" names is missing, each call fails and is not logged, as if the
// plugin's kubeconfig or daemon were gone. The directory "dir" contains:
//
//	taken/<containerID>.<ifname>.<instance>
//	        created by an ADD that takes effect (content: the pid), removed by a DEL that takes
//	        effect; CHECK fails without it
//	rules/<address>.<instance>
//	        created by an ADD and removed by a DEL, if the configuration has "rules"
//	held/<command>.<containerID>.<instance>
//	        created by a call in a hold mode; the call continues when the file is removed
//	plan.json
//	        {"<instance>": {"ADD": "<mode>", "DEL": "<mode>", …}}, read at each call, so that a
//	        test can repair a plugin between calls. "*" is for all other instances. Without a
//	        file or a mode, the mode is "ok". "pod:<prefix>" has precedence for pods
//	        (K8S_POD_NAME) whose names have this prefix. In mode "fail 5%", one call in twenty
//	        fails, at random. In mode "fail once", an attachment's first call of the command fails.
//	once/<command>.<containerID>.<ifname>.<instance>
//	        created by the first call in a mode with "once"
//	log
//	        a JSON line (type record) at the start of each call, and one at its end if it ends by
//	        itself. A single write appends each line. Both lines of a call have the same pid,
//	        except in mode "orphan", whose child writes the second.
//
// The modes; those that end in -effect take effect (create or remove the files) first:
//
//	ok                  take effect and print the result
//	late                sleep for delayMS (default 1000), then do the same as ok
//	hold, hold-effect   wait until the file in held is removed, then do the same as ok
//	fail, fail-effect   return a CNI error with "code" (default 999)
//	stderr              exit 1 with text on stderr only
//	hang, hang-effect   never return
//	ignore-term         never return, and ignore SIGTERM
//	crash, crash-effect send itself SIGKILL
//	kill-parent         send the parent SIGKILL, then never return
//	hold-kill-parent    wait like hold, then do the same as kill-parent
//	kill-parent-effect  take effect, send the parent SIGKILL, then print the result
//	orphan              leave a child in the process group, send the parent SIGKILL, and exit; the
//	                    child takes effect after delayMS
//	daemon              do the same as ok, but leave a child in its own session; for ten minutes,
//	                    the child keeps all inherited descriptors open, even stdout and stderr
//	empty, garbage      take effect, exit 0, and print nothing (empty) or "not json" (garbage)
//
// "Never" means ten minutes, so that a test that dies leaves no process for longer.
//
// ADD prints "result" unchanged. Without "result", it prints prevResult (or an empty result), with
// "address" and the addresses from the IPAM plugin added to "ips". CHECK, GC and STATUS create and
// remove nothing, but follow the plan. VERSION reads no configuration and is not logged.
package main

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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
	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
)

const (
	forever    = 10 * time.Minute
	daemonLife = forever

	// hangsEnv is the environment variable that names the directory in which each call that hangs
	// creates a file. testdata/unwind reads the same variable (env.Hangs).
	hangsEnv = "UNWIND_TEST_HANGS"

	// roleEnv is the environment variable with the role of a child of this program.
	roleEnv    = "CNI_FAULTY_ROLE"
	roleDaemon = "daemon"
	roleOrphan = "orphan"
)

// errHandedOver makes a process exit without finishing its call, because a child finishes it.
var errHandedOver = errors.New("the child finishes the call")

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
	Needs  string  `json:"needs"`
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

type call struct {
	record
	conf   conf
	parent int
	given  []json.RawMessage // the ips that the IPAM plugin returned
}

func main() {
	// A write to the pipe of a killed parent must not end this process.
	signal.Ignore(syscall.SIGPIPE)
	parent := os.Getppid()
	role := os.Getenv(roleEnv)
	if role == roleDaemon {
		time.Sleep(daemonLife)
		return
	}
	do := func(args *skel.CmdArgs) error { return serve(args, role, parent) }
	err := skel.PluginMainFuncsWithError(
		skel.CNIFuncs{Add: do, Del: do, Check: do, GC: do, Status: do}, version.All, "faulty, which fails on demand")
	if err != nil {
		_ = err.Print() // fails if the parent was killed
		os.Exit(1)
	}
}

// serve carries out a call, and logs its start and its end. In the child of mode orphan, it only
// takes effect and logs the end.
func serve(args *skel.CmdArgs, role string, parent int) error {
	c := &call{parent: parent, record: record{
		Command:     os.Getenv("CNI_COMMAND"),
		ContainerID: args.ContainerID,
		IfName:      args.IfName,
		NetNS:       args.Netns,
		Args:        args.Args,
		Path:        args.Path,
		PID:         os.Getpid(),
		Stdin:       args.StdinData,
	}}
	err := json.Unmarshal(c.Stdin, &c.conf)
	if err != nil {
		return err
	}
	c.conf.CNIVersion = cmp.Or(c.conf.CNIVersion, "0.1.0") // like ConfigDecoder in CNI's pkg/version
	c.Instance = c.conf.Instance
	if !filepath.IsAbs(c.conf.Dir) {
		return types.NewError(types.ErrInvalidNetworkConfig, "faulty: \"dir\" must be an absolute path", "")
	}
	if role == roleOrphan {
		c.Mode = roleOrphan
		time.Sleep(c.delay())
		return errors.Join(c.effect(), c.log("end"))
	}
	if c.Mode, err = c.plannedMode(); err != nil {
		return err
	}
	if err := c.log("start"); err != nil {
		return err
	}
	out, err := c.run()
	if errors.Is(err, errHandedOver) {
		return nil
	}
	if err == nil {
		_, _ = os.Stdout.Write(out)
	}
	err = errors.Join(err, c.log("end"))
	if c.Mode == "stderr" {
		fmt.Fprintln(os.Stderr, "faulty: this text is on stderr only")
		os.Exit(1)
	}
	return err
}

// plannedMode returns the mode that the configuration or plan.json gives for this call.
func (c *call) plannedMode() (string, error) {
	if c.conf.Needs != "" {
		if _, err := os.Stat(c.conf.Needs); err != nil {
			return "", fmt.Errorf("faulty: %s: %w", c.Instance, err)
		}
	}
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
	return c.resolved(modes[c.Command])
}

func (c *call) pod() string {
	for arg := range strings.SplitSeq(c.Args, ";") {
		if name, ok := strings.CutPrefix(arg, "K8S_POD_NAME="); ok {
			return name
		}
	}
	return ""
}

// resolved returns the mode without "5%" or "once", or "ok" if the mode doesn't apply to this call.
func (c *call) resolved(mode string) (string, error) {
	mode, when, ok := strings.Cut(mode, " ")
	switch {
	case !ok:
	case when == "once":
		first, err := c.isFirst()
		if err != nil {
			return "", err
		}
		if !first {
			mode = ""
		}
	default:
		percent, err := strconv.Atoi(strings.TrimSuffix(when, "%"))
		if err != nil {
			return "", fmt.Errorf("plan.json: %w", err)
		}
		if rand.IntN(100) >= percent {
			mode = ""
		}
	}
	return cmp.Or(mode, "ok"), nil
}

// isFirst reports whether this is its attachment's first call of the command in a mode with "once".
func (c *call) isFirst() (bool, error) {
	name := strings.Join([]string{c.Command, c.ContainerID, c.IfName, c.Instance}, ".")
	file := filepath.Join(c.conf.Dir, "once", name)
	if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
		return false, err
	}
	f, err := os.OpenFile(file, os.O_CREATE|os.O_EXCL|os.O_WRONLY, 0o644)
	if errors.Is(err, fs.ErrExist) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	return true, f.Close()
}

// run carries out the mode and returns the output for stdout.
func (c *call) run() ([]byte, error) {
	mode, effectFirst := strings.CutSuffix(c.Mode, "-effect")
	if effectFirst {
		if err := c.effect(); err != nil {
			return nil, err
		}
	}
	switch mode {
	case "ok":
		return c.succeed()
	case "hold":
		if err := c.held(); err != nil || effectFirst {
			return c.result(), err
		}
		return c.succeed()
	case "late":
		time.Sleep(c.delay())
		return c.succeed()
	case "fail":
		return nil, types.NewError(cmp.Or(c.conf.Code, types.ErrInternal),
			fmt.Sprintf("faulty: %s %s refused", c.conf.Instance, c.Command), "")
	case "stderr":
		return nil, nil // see serve
	case "hang":
		return nil, c.hang()
	case "ignore-term":
		signal.Ignore(syscall.SIGTERM)
		return nil, c.hang()
	case "crash":
		return nil, errors.Join(syscall.Kill(os.Getpid(), syscall.SIGKILL), c.hang())
	case "hold-kill-parent":
		return nil, errors.Join(c.held(), c.killParent(), c.hang())
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
	default:
		return nil, fmt.Errorf("faulty: plan.json: no such mode: %q", c.Mode)
	}
}

// held creates the call's file in the directory held, and waits until a test removes the file.
func (c *call) held() error {
	held := filepath.Join(c.conf.Dir, "held", c.Command+"."+c.ContainerID+"."+c.Instance)
	if err := errors.Join(os.MkdirAll(filepath.Dir(held), 0o755), os.WriteFile(held, nil, 0o644)); err != nil {
		return err
	}
	for end := time.Now().Add(forever); time.Now().Before(end); time.Sleep(2 * time.Millisecond) {
		if _, err := os.Lstat(held); errors.Is(err, fs.ErrNotExist) {
			return nil
		}
	}
	return fmt.Errorf("faulty: %s %s was held for %s", c.Instance, c.Command, forever)
}

// effect creates or removes the files of a call.
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

// askIPAM makes the IPAM plugin assign or release an address.
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

// rules creates or removes the rule of each address in prevResult.
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
	lists, _ := version.GreaterThanOrEqualTo(c.conf.CNIVersion, "0.3.0")
	flat, _ := version.GreaterThanOrEqualTo(c.conf.CNIVersion, "1.0.0")
	given := c.given
	if text := c.conf.Address; text != "" {
		family := "4"
		if strings.Contains(text, ":") {
			family = "6"
		}
		ip := map[string]string{"address": text}
		if !flat {
			ip["version"] = family
		}
		given = slices.Insert(given, 0, json.RawMessage(mustJSON(ip)))
		if !lists {
			result["ip"+family] = mustJSON(map[string]string{"ip": text})
		}
	}
	if lists {
		for _, list := range []string{"interfaces", "ips"} {
			if result[list] == nil {
				result[list] = json.RawMessage("[]")
			}
		}
	}
	var ips []json.RawMessage
	if err := json.Unmarshal(result["ips"], &ips); err == nil && len(given) > 0 {
		result["ips"] = mustJSON(append(ips, given...))
	}
	return append(mustJSON(result), '\n')
}

func (c *call) hang() error {
	if dir := os.Getenv(hangsEnv); dir != "" {
		name := strings.Join([]string{c.Command, c.ContainerID, c.IfName, c.Instance}, ".")
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o644); err != nil {
			return err
		}
	}
	time.Sleep(forever)
	return fmt.Errorf("faulty: %s %s hung for %s", c.conf.Instance, c.Command, forever)
}

func (c *call) delay() time.Duration {
	return time.Duration(cmp.Or(c.conf.DelayMS, 1000)) * time.Millisecond
}

// killParent kills the unwind process that started this process. If the parent is not unwind, or
// has already ended, killParent kills nothing and returns an error.
func (c *call) killParent() error {
	name, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", c.parent))
	if err != nil || strings.TrimSpace(string(name)) != "unwind" {
		return errors.New("faulty: the parent is gone")
	}
	return syscall.Kill(c.parent, syscall.SIGKILL)
}

// handOver starts a child that finishes this call later, and kills unwind, the parent of this
// process. The child stays in this process group, and inherits the descriptors from 3 on.
func (c *call) handOver() error {
	child := child(roleOrphan)
	stdin, err := child.StdinPipe()
	if err != nil {
		return err
	}
	if err := child.Start(); err != nil {
		return err
	}
	_, err = stdin.Write(c.Stdin)
	return cmp.Or(errors.Join(err, stdin.Close(), c.killParent()), errHandedOver)
}

// leaveDaemon starts the child of mode daemon, which outlives the call.
func (c *call) leaveDaemon() error {
	child := child(roleDaemon)
	child.Stdout, child.Stderr = os.Stdout, os.Stderr
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return child.Start()
}

// child returns a command for this program in another role. In the child, descriptors 3 and above
// stay open unless they are close-on-exec, because os/exec does not close them.
func child(role string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Args = []string{os.Args[0], role} // ps then shows the role
	cmd.Env = append(os.Environ(), roleEnv+"="+role)
	return cmd
}

// log appends a line about the call to the file log.
func (c *call) log(phase string) error {
	line := c.record
	line.Phase = phase
	var text bytes.Buffer
	enc := json.NewEncoder(&text)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(line); err != nil {
		return err
	}
	f, err := os.OpenFile(filepath.Join(c.conf.Dir, "log"), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(text.Bytes())
	return errors.Join(err, f.Close())
}

// mustJSON encodes a value that can always be encoded.
func mustJSON(v any) []byte {
	data, err := json.Marshal(v)
	if err != nil {
		panic(err)
	}
	return data
}
