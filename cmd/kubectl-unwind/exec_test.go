package main

import (
	"bufio"
	"bytes"
	"errors"
	"io"
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
