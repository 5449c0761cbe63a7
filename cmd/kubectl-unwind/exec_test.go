package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
)

// TestFrames: messages come whole or in fragments, with control frames between these.
func TestFrames(t *testing.T) {
	long := strings.Repeat("x", 70_000)
	for _, tt := range []struct{ name, in, stdout, stderr, status string }{
		{"three streams", "\x82\x03\x01ab\x82\x02\x02c\x81\x02\x03d\x88\x00", "ab", "c", "d"},
		{"fragments, with a ping", "\x02\x03\x01ab\x89\x02\x02!\x00\x01c\x80\x02\x02d\x88\x00", "abc\x02d", "", ""},
		{"16 bits", "\x82\x7e\x01\x01\x01" + long[:256] + "\x88\x00", long[:256], "", ""},
		{"64 bits", "\x82\x7f\x00\x00\x00\x00\x00\x01\x11\x71\x01" + long + "\x88\x00", long, "", ""},
		{"of no stream", "\x82\x00\x82\x01\x01\x82\x02\xffx\x88\x00", "", "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			var streams [4]bytes.Buffer
			to := []io.Writer{io.Discard, &streams[1], &streams[2], &streams[3]}
			if err := frames(bufio.NewReader(strings.NewReader(tt.in)), to); err != nil {
				t.Error(err)
			}
			for i, want := range []string{"", tt.stdout, tt.stderr, tt.status} {
				if got := streams[i].String(); got != want {
					t.Errorf("stream %d: %.40q, not %.40q", i, got, want)
				}
			}
			cut := tt.in[:len(tt.in)-2]
			err := frames(bufio.NewReader(strings.NewReader(cut)), to)
			if !errors.Is(err, io.EOF) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("cut off: %v", err)
			}
		})
	}
}

// TestGate: a status ends an exec, with or without a close frame, and whatever is no success is an
// error with a text. What is not the API server's answer closes the gate: kubectl exec is tried.
func TestGate(t *testing.T) {
	t.Parallel()
	const upgraded = "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n"
	framed := func(s string) string { return string([]byte{0x82, byte(len(s))}) + s }
	success := framed("\x03" + `{"status": "Success"}`)
	for _, tt := range []struct{ name, answer, out, err string }{
		{"a close frame", upgraded + framed("\x01ab") + success + "\x88\x00", "ab", ""},
		{"no close frame", upgraded + framed("\x01ab") + success, "ab", ""},
		{"half a status", upgraded + framed("\x01ab") + success[:9], "ab", "exec: invalid status: unexpected end of JSON input"},
		{"no status", upgraded + framed("\x01ab"), "", "exec: EOF"},
		{"a status without a reason", upgraded + framed("\x03{}") + "\x88\x00", "", "exec failed without a reason"},
		{"the API server's error", "HTTP/1.1 500 X\r\nContent-Length: 22\r\n\r\n" + `{"message": "refused"}`, "", "exec: refused"},
		{"another's error", "HTTP/1.1 503 X\r\nContent-Length: 15\r\n\r\n" + `{"error": "no"}`, "", "exec: kubectl proxy cannot exec into pods"},
		{"another's JSON", "HTTP/1.1 503 X\r\nContent-Length: 2\r\n\r\n{}", "", "exec: kubectl proxy cannot exec into pods"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
				conn, _, err := w.(http.Hijacker).Hijack()
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.WriteString(conn, tt.answer)
				_ = conn.Close()
			}))
			defer server.Close()
			dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
				return (&net.Dialer{}).DialContext(ctx, "tcp", server.Listener.Addr().String())
			}
			g := &gate{&kubectl{timeout: patience},
				&http.Client{Transport: &http.Transport{DialContext: dial}}}
			out, err := g.run(t.Context(), "pod", []string{"x"})
			if err == nil {
				err = errors.New("")
			}
			if string(out) != tt.out || err.Error() != tt.err {
				t.Errorf("%q, %q", out, err)
			}
		})
	}
}
