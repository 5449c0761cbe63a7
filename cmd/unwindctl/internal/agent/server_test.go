package agent

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"cni-unwind/cmd/unwindctl/internal/install"
)

// TestServeIdle: connections that ask nothing are closed when their time is over, so they keep a probe
// out no longer.
func TestServeIdle(t *testing.T) {
	t.Parallel()
	const idle = mostConnections + 100
	var log bytes.Buffer
	a := &agent{Options: Options{Listen: "127.0.0.1:0"}, log: newDedupLogger(slog.New(slog.NewTextHandler(&log, nil)))}
	a.reconciling.beat()
	a.sweeping.beat()
	stop, err := (&server{agent: a}).serve(t.Context())
	check(t, err)
	defer stop()
	address := regexp.MustCompile(`address=(\S+)`).FindStringSubmatch(log.String())[1]
	var all []net.Conn
	for range idle {
		c, err := net.Dial("tcp", address)
		check(t, err)
		defer c.Close()
		all = append(all, c)
	}
	answer, err := http.Get("http://" + address + "/healthz") // it is accepted after some of them ended
	check(t, err)
	body, _ := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if answer.StatusCode != 200 || !answer.Close {
		t.Errorf("/healthz: %d, %s; it closes the connection: %t", answer.StatusCode, body, answer.Close)
	}
	last := all[idle-1]
	_ = last.SetReadDeadline(time.Now().Add(20 * toRead))
	if _, err := last.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the last one asks nothing and stays open: %v", err)
	}
}

// TestMetricsShared: those who ask for the metrics share collections, of which at most one begins
// each second.
func TestMetricsShared(t *testing.T) {
	t.Parallel()
	var collections atomic.Int64
	a := &agent{Options: Options{NoInstall: true}, log: newDedupLogger(slog.New(slog.DiscardHandler))}
	s := &server{agent: a, setup: install.Setup{ConfDir: t.TempDir(), StateDir: t.TempDir()}, found: func() status {
		collections.Add(1)
		return status{Reason: install.On}
	}}
	handler := s.metricsHandler()
	began := time.Now()
	for range 2 {
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() {
				w := httptest.NewRecorder()
				handler.ServeHTTP(w, httptest.NewRequest("GET", "/metrics", nil))
				if text := w.Body.String(); w.Code != 200 || !strings.Contains(text, `unwind_status{state="on"} 1`) || !strings.Contains(text, "\ngo_goroutines ") {
					t.Errorf("%d: %s", w.Code, text)
				}
			})
		}
		all.Wait()
	}
	if n := collections.Load(); float64(n) > 1+time.Since(began).Seconds() {
		t.Errorf("%d collections in %s", n, time.Since(began))
	}
}
