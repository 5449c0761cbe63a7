package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promhttp"
	"golang.org/x/net/netutil"

	"cni-unwind/cmd/internal/term"
	"cni-unwind/cmd/unwindctl/internal/install"
	"cni-unwind/cmd/unwindctl/internal/metrics"
)

// DefaultListen is the address on which an agent serves its metrics by default.
const DefaultListen = "127.0.0.1:9469"

// server serves the metrics of the last sweep and the health of the loops. A request never starts a
// sweep, because any user of the node may send requests.
type server struct {
	*agent
	setup install.Setup
	found func() status
}

// Limits of the server's connections, each of which serves one request.
const (
	toRead          = 2 * time.Second
	toWrite         = 15 * time.Second
	mostHeader      = 8 << 10 // bytes
	mostConnections = 256     // open at a time
)

// serve listens until stop is called.
func (s *server) serve(ctx context.Context) (stop func(), err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", s.Listen)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	s.log.Info("serving", "address", l.Addr().String())
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.metricsHandler())
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	server := &http.Server{Handler: mux, ReadTimeout: toRead, WriteTimeout: toWrite,
		MaxHeaderBytes: mostHeader}
	server.SetKeepAlivesEnabled(false)
	go func() {
		err := server.Serve(netutil.LimitListener(l, mostConnections))
		if !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("stopped serving metrics and health", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}

func (s *server) metricsHandler() http.Handler {
	all := prometheus.Gatherers{metrics.Registry(s.source), prometheus.DefaultGatherer}
	return promhttp.HandlerFor(all, promhttp.HandlerOpts{CoalesceGather: true})
}

func (s *server) source() metrics.Source {
	source := metrics.Source{Version: s.Version}
	if seen := s.seen.Load(); seen != nil {
		source = *seen
	}
	is := s.found()
	source.Status, source.Plugin = is.Reason, is.plugin
	source.Off = install.ReadOff(s.journalDir(s.setup))
	return source
}

// readyz reports whether pods of the node go through unwind and unwind can write to its journal. A
// node on which unwind was switched off is ready, too. An agent that cannot install unwind is not
// ready, which stops a DaemonSet's rollout.
func (s *server) readyz(w http.ResponseWriter, _ *http.Request) {
	is := s.found()
	why := term.Printable(is.why)
	if seen := s.seen.Load(); seen != nil && seen.Report.Unwritable != nil {
		http.Error(w, fmt.Sprintf("not ready: journal: %v", seen.Report.Unwritable),
			http.StatusServiceUnavailable)
		return
	}
	if is.Reason.Ready() || is.Reason == "" {
		_, _ = io.WriteString(w, strings.TrimSpace("ok\n"+why)+"\n")
		return
	}
	text := strings.TrimSuffix(fmt.Sprintf("not ready: %s: %s", is.Reason, why), ": ")
	http.Error(w, text, http.StatusServiceUnavailable)
}

// heartbeat records when a loop last made progress.
type heartbeat struct{ last atomic.Int64 }

func (h *heartbeat) beat()                { h.last.Store(time.Now().UnixNano()) }
func (h *heartbeat) since() time.Duration { return time.Since(time.Unix(0, h.last.Load())) }

// patience is how long, in addition to Interval, a loop may make no progress before healthz fails.
// The DELs of one attachment may take 2 minutes, and may have to wait for other DELs.
const patience = 10 * time.Minute

func (s *server) healthz(w http.ResponseWriter, _ *http.Request) {
	loops := map[string]*heartbeat{"sweeps": &s.sweeping}
	if !s.NoInstall {
		loops["keeps unwind installed"] = &s.reconciling
	}
	for what, h := range loops {
		if since := h.since(); since > s.Interval+patience {
			text := fmt.Sprintf("the agent's loop that %s is stuck: no progress for %s",
				what, term.Roughly(since))
			http.Error(w, text, http.StatusServiceUnavailable)
			return
		}
	}
	_, _ = io.WriteString(w, "ok\n")
}
