package install

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"

	"cni-unwind/cmd/unwindctl/internal/term"
)

// DefaultListen is where an agent serves its metrics.
const DefaultListen = "127.0.0.1:9469"

// agentProcess is an agent that runs on the node and installs.
type agentProcess struct {
	pid    string
	listen string // where it serves its metrics; "" for nowhere
}

// findAgent returns an agent that is running, as a /proc has it, or nil.
func findAgent(proc string) *agentProcess {
	paths, _ := filepath.Glob(filepath.Join(proc, "[0-9]*", "cmdline"))
	for _, path := range paths {
		data, _ := os.ReadFile(path) // one that has ended is no agent
		args := strings.Split(strings.TrimSuffix(string(data), "\x00"), "\x00")
		if filepath.Base(args[0]) != "unwindctl" || !slices.Contains(args, "run") ||
			slices.Contains(args, "--no-install") {
			continue
		}
		a := &agentProcess{pid: filepath.Base(filepath.Dir(path)), listen: DefaultListen}
		for i, arg := range args {
			if value, is := strings.CutPrefix(arg, "--listen="); is {
				a.listen = value
			} else if arg == "--listen" && i+1 < len(args) {
				a.listen = args[i+1]
			}
		}
		return a
	}
	return nil
}

// versionTimeout bounds the question for the version of an agent, on which nothing depends.
const versionTimeout = 2 * time.Second

var buildInfo = regexp.MustCompile(`(?m)^unwind_build_info\{.*version="([^"\n]{1,64})"`)

// version asks an agent for its version, which is among its metrics; "" if it does not tell.
func (a *agentProcess) version(ctx context.Context) string {
	_, port, err := net.SplitHostPort(a.listen)
	if err != nil {
		return ""
	}
	ctx, cancel := context.WithTimeout(ctx, versionTimeout)
	defer cancel()
	url := "http://" + net.JoinHostPort("127.0.0.1", port) + "/metrics"
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return ""
	}
	answer, err := new(http.Transport).RoundTrip(request) // no proxy, no redirects
	if err != nil {
		return ""
	}
	defer func() { _ = answer.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(answer.Body, 16<<20))
	if match := buildInfo.FindSubmatch(body); match != nil {
		return term.OneLine(string(match[1]))
	}
	return ""
}

// describeAgent returns a sentence about the agent that runs on the node, and what it will do with
// the plugin that this program installs. It returns "" if there is none.
func describeAgent(ctx context.Context, proc, about string) string {
	a := findAgent(proc)
	if a == nil {
		return ""
	}
	version, ours := a.version(ctx), versionOf(about)
	name := fmt.Sprintf("An agent runs (process %s, %s)", a.pid, version)
	if version == "" {
		name = fmt.Sprintf("An agent runs (process %s, version not known)", a.pid)
	}
	switch order, known := CompareReleases(version, ours); {
	case !known:
		return name + ": it leaves this plugin as it is, unless the agent knows its own to be newer.\n"
	case order > 0:
		return name + ", which is newer: it puts its own plugin in the place of this one.\n"
	case order < 0:
		return name + ", which is older: it leaves this plugin as it is.\n"
	}
	return name + ": it keeps this plugin.\n"
}
