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

// TestServeIdle: connections that ask nothing keep no probe out. Of those that are too many the
// oldest are closed, and the rest when their time is over.
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
	answer, err := http.Get("http://" + address + "/healthz") // it is accepted after the others
	check(t, err)
	body, _ := io.ReadAll(answer.Body)
	_ = answer.Body.Close()
	if answer.StatusCode != 200 || !answer.Close {
		t.Errorf("/healthz: %d, %s; it closes the connection: %t", answer.StatusCode, body, answer.Close)
	}
	for i, c := range all[:idle-mostConnections] {
		_ = c.SetReadDeadline(time.Now().Add(toRead / 2))
		if _, err := c.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatalf("connection %d of %d is open: %v", i, idle, err)
		}
	}
	last := all[idle-1]
	_ = last.SetReadDeadline(time.Now().Add(6 * toRead))
	if _, err := last.Read(make([]byte, 1)); err == nil || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the last one asks nothing and stays open: %v", err)
	}
}
