package agent

import (
	"bytes"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"regexp"
	"testing"
	"time"
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
