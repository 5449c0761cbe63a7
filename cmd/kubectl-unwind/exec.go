package main

import (
	"bufio"
	"cmp"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"cni-unwind/cmd/internal/term"
)

// gate is a kubectl proxy that allows only exec into pods. It needs one process and one login for
// all nodes, whereas kubectl exec needs one of each per node. Its socket is in a private directory.
type gate struct {
	kubectl *kubectl
	client  *http.Client
}

// openGate starts a kubectl proxy; shut stops it. The gate is nil if kubectl proxy cannot listen,
// or if the kubeconfig or the environment sets an HTTP proxy for the API server: kubectl proxy does
// not use that HTTP proxy for exec (kubernetes#120318).
func (k *kubectl) openGate(ctx context.Context) (g *gate, shut func()) {
	named, err := k.run(ctx, "config", "view", "--minify",
		"-o", "jsonpath={.clusters[*].cluster.proxy-url}")
	named = append(named, os.Getenv("HTTPS_PROXY")+os.Getenv("https_proxy")...)
	if err != nil || len(named) > 0 {
		return nil, func() {}
	}
	dir, err := os.MkdirTemp("", "kubectl-unwind-")
	if err != nil {
		return nil, func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	socket := filepath.Join(dir, "socket")
	cmd := exec.CommandContext(ctx, "kubectl", k.args("proxy", "--unix-socket="+socket,
		"--reject-paths=^$", "--accept-paths=^/api/v1/namespaces/[^/]+/pods/[^/]+/exec$")...)
	cmd.WaitDelay, cmd.SysProcAttr = time.Second, endsWithUs
	shut = func() {
		cancel()
		_ = cmd.Wait()
		_ = os.RemoveAll(dir)
	}
	late := time.AfterFunc(k.timeout, cancel)
	defer late.Stop()
	said, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err == nil { // kubectl proxy prints a line once it listens
		_, err = bufio.NewReader(said).ReadString('\n')
	}
	if err != nil {
		shut()
		return nil, func() {}
	}
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", socket)
	}
	return &gate{k, &http.Client{Transport: &http.Transport{DialContext: dial}}}, shut
}

// endsWithUs makes the kernel kill kubectl proxy if this process is killed. It is nil on operating
// systems that cannot do so.
var endsWithUs *syscall.SysProcAttr

// errClosed means that something between kubectl proxy and the API server blocks WebSockets, or
// that the user lacks the permission to get pods/exec. An exec over WebSockets needs that
// permission in addition to create.
var errClosed = errors.New("kubectl proxy cannot exec into pods")

// status is the outcome of a request, as the API server reports it.
type status struct {
	Status, Reason, Message string
	Details                 struct {
		Causes []struct{ Reason, Message string }
	}
}

// run runs a command in the agent's container with the WebSocket protocol of exec, and returns its
// output as kubectl.run does. The first byte of each message is the number of its stream: 1 for
// stdout, 2 for stderr, 3 for the final status (k8s.io/apimachinery v0.36.3,
// pkg/util/remotecommand).
func (g *gate) run(ctx context.Context, pod string, command []string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, g.kubectl.timeout)
	defer cancel()
	out := &bounded{left: mostOutput, full: cancel}
	said := &bounded{left: mostErrors, full: func() {}}
	end := &bounded{left: mostErrors, full: func() {}}
	err := g.exec(ctx, pod, command, []io.Writer{io.Discard, out, said, end})
	var ended status
	switch {
	case out.isFull:
		return nil, fmt.Errorf("unwindctl printed more than %d MiB", mostOutput>>20)
	case errors.Is(ctx.Err(), context.DeadlineExceeded):
		return nil, fmt.Errorf("no answer within %s (--timeout)", g.kubectl.timeout)
	case err != nil && end.buf.Len() == 0: // the final status has not arrived
		return nil, fmt.Errorf("exec: %w", err)
	}
	if err := json.Unmarshal(end.buf.Bytes(), &ended); err != nil {
		return out.buf.Bytes(), fmt.Errorf("exec: invalid status: %w", err)
	}
	if ended.Status == "Success" {
		return out.buf.Bytes(), nil
	}
	code := 0
	for _, c := range ended.Details.Causes {
		if c.Reason == "ExitCode" {
			code, _ = strconv.Atoi(c.Message)
		}
	}
	return out.buf.Bytes(), &refused{code, term.Printable(words(said.buf.String(),
		errors.New(cmp.Or(ended.Message, "exec failed without a reason"))))}
}

// exec runs a command in the pod and copies stream i of its output to streams[i], until the command
// ends.
func (g *gate) exec(ctx context.Context, pod string, command []string, streams []io.Writer) error {
	query := url.Values{"container": {container}, "command": command, "stdout": {"true"},
		"stderr": {"true"}}
	at := url.URL{Scheme: "http", Host: "localhost", RawQuery: query.Encode(),
		Path: "/api/v1/namespaces/" + g.kubectl.namespace + "/pods/" + pod + "/exec"}
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, at.String(), nil)
	if err != nil {
		return err
	}
	request.Header = http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"},
		"Sec-Websocket-Version":  {"13"},
		"Sec-Websocket-Key":      {"dW53aW5kdW53aW5kdW53aQ=="}, // matters only to caches
		"Sec-Websocket-Protocol": {"v5.channel.k8s.io, v4.channel.k8s.io"}}
	answer, err := g.client.Do(request)
	if err != nil {
		return err
	}
	defer func() { _ = answer.Body.Close() }()
	if answer.StatusCode != http.StatusSwitchingProtocols {
		body, err := io.ReadAll(io.LimitReader(answer.Body, mostErrors))
		if err != nil {
			return err
		}
		var s status
		if json.Unmarshal(body, &s) != nil || answer.StatusCode < 500 || s.Message == "" {
			return errClosed
		}
		return errors.New(s.Message) // such as a kubelet that does not respond
	}
	defer context.AfterFunc(ctx, func() { _ = answer.Body.Close() })()
	return frames(bufio.NewReader(answer.Body), streams)
}

// frames copies the contents of a WebSocket server's unmasked frames to streams until the closing
// frame (RFC 6455 §5.2). It does not reply to pings, because the API server sends none
// (k8s.io/apiserver v0.37.0, pkg/util/proxy/websocket.go).
func frames(in *bufio.Reader, streams []io.Writer) error {
	var stream byte
	for {
		var head [2]byte
		if _, err := io.ReadFull(in, head[:]); err != nil {
			return err
		}
		size := int64(head[1] & 0x7f)
		if size >= 126 {
			long := make([]byte, 8)
			if _, err := io.ReadFull(in, long[map[int64]int{126: 6, 127: 0}[size]:]); err != nil {
				return err
			}
			size = int64(binary.BigEndian.Uint64(long))
		}
		to, opcode := io.Discard, head[0]&0xf
		switch {
		case opcode == 8:
			return nil
		case opcode == 1 || opcode == 2: // 0 continues a message
			if size == 0 {
				continue
			}
			var err error
			if stream, err = in.ReadByte(); err != nil {
				return err
			}
			size--
		}
		if opcode < 8 && int(stream) < len(streams) {
			to = streams[stream]
		}
		if _, err := io.CopyN(to, in, size); err != nil {
			return err
		}
	}
}
