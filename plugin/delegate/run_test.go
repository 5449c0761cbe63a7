package delegate

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"testing"
	"time"

	"cni-unwind/plugin/plugintest/sandbox"
)

// TestLargeInAndOut: a delegate prints more than a pipe holds before it reads its configuration,
// which is also larger than a pipe. Run and the delegate do not block each other.
func TestLargeInAndOut(t *testing.T) {
	t.Parallel()
	c := script(t, `head -c 1000000 /dev/zero; cat`)
	c.Stdin = bytes.Repeat([]byte("x"), 1<<20)
	stdout, f := new(Processes).Run(context.Background(), c, io.Discard)
	if f != nil || len(stdout) != 1000000+1<<20 {
		t.Errorf("%d bytes, %v", len(stdout), f)
	}
}

// TestDeadlineWhileItIsFed: when the context ends, Run kills a delegate that has not read its large
// configuration, even if a child in a session of its own keeps the pipe open.
func TestDeadlineWhileItIsFed(t *testing.T) {
	t.Parallel()
	for name, text := range map[string]string{"alone": `sleep 600`, "with a child": `setsid sleep 600 & sleep 600`} {
		t.Run(name, func(t *testing.T) { t.Parallel(); deadlineWhileItIsFed(t, text) })
	}
}

func deadlineWhileItIsFed(t *testing.T, text string) {
	t.Helper()
	c := script(t, ">started; "+text)
	c.Stdin = bytes.Repeat([]byte("x"), 1<<20)
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	done := make(chan *Failure, 1)
	go func() {
		_, f := new(Processes).Run(ctx, c, io.Discard)
		done <- f
	}()
	awaitFile(t, c.file("started"))
	cancel()
	select {
	case f := <-done:
		if f == nil || !f.Killed {
			t.Errorf("%+v, want killed", f)
		}
	case <-time.After(sandbox.Patience):
		t.Fatal("Run did not return after the deadline")
	}
}

// TestNotStarted: if the context has ended before the delegate starts, Run does not start the
// delegate. The failure reports this (Unstarted), because such a delegate has created nothing. It
// also contains the context's cause, if there is one.
func TestNotStarted(t *testing.T) {
	t.Parallel()
	for want, cause := range map[string]error{
		"not started: unwind was told to stop, or ran out of time": nil,
		"not started: nobody waits":                                errors.New("nobody waits"),
	} {
		ctx, end := context.WithCancelCause(context.Background())
		end(cause)
		c := script(t, `echo >ran`)
		_, f := new(Processes).Run(ctx, c, io.Discard)
		if _, err := os.Stat(c.file("ran")); f == nil || !f.Unstarted || f.Killed || f.Msg != want || err == nil {
			t.Errorf("%+v, ran: %t; want %q", f, err == nil, want)
		}
	}
}
