package agent

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus/promhttp"

	"cni-unwind/cmd/unwindctl/internal/metrics"
	"cni-unwind/cmd/unwindctl/internal/term"
)

// server serves the metrics, and whether the loops make progress.
type server struct {
	log      *dedupLogger
	metrics  func() metrics.Source
	interval time.Duration
	loops    map[string]*heartbeat // by what each does
	inUse    func() metrics.InUse
}

// serve listens at an address until stop is called.
func (s *server) serve(ctx context.Context, address string) (stop func(), err error) {
	l, err := new(net.ListenConfig).Listen(ctx, "tcp", address)
	if err != nil {
		return nil, fmt.Errorf("--listen: %w", err)
	}
	s.log.Info("serving", "address", l.Addr().String())
	mux := http.NewServeMux()
	mux.HandleFunc("GET /metrics", s.serveMetrics)
	mux.HandleFunc("GET /healthz", s.healthz)
	mux.HandleFunc("GET /readyz", s.readyz)
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second,
		IdleTimeout: 2 * time.Minute}
	go func() {
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			s.log.Error("serving", "err", err)
		}
	}()
	return func() { _ = server.Close() }, nil
}

func (s *server) serveMetrics(w http.ResponseWriter, r *http.Request) {
	var failed error
	registry := s.metrics().Registry(r.Context(), func(err error) { failed = err })
	promhttp.HandlerFor(registry, promhttp.HandlerOpts{}).ServeHTTP(w, r)
	if r.Context().Err() == nil {
		s.log.warnOnce("metrics", "metrics", failed)
	}
}

// readyz reports whether pods of the node go through unwind. A version that cannot install is not
// ready, so that a DaemonSet does not roll it on. Switched off by a person is ready: that is no
// fault of the version.
func (s *server) readyz(w http.ResponseWriter, _ *http.Request) {
	switch is := s.inUse(); is {
	case metrics.On, metrics.RemovedByHand, "":
		_, _ = io.WriteString(w, "ok\n")
	default:
		http.Error(w, "unwind is not in use: "+string(is), http.StatusServiceUnavailable)
	}
}

// patience is how long a loop may work at one thing. The DELs of one attachment have 2 min, and may
// wait for others.
const patience = 10 * time.Minute

// healthz reports whether the loops make progress.
func (s *server) healthz(w http.ResponseWriter, _ *http.Request) {
	for what, h := range s.loops {
		if since := h.since(); since > s.interval+patience {
			text := fmt.Sprintf("%s has come no further for %s", what, term.Roughly(since))
			http.Error(w, text, http.StatusServiceUnavailable)
			return
		}
	}
	_, _ = io.WriteString(w, "ok\n")
}
