package plugin

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// TestTrace: the runtime's trace reaches the delegates, the log and the history. Another text in its
// place reaches the delegates alone. The log is JSON, if logFormat says so.
func TestTrace(t *testing.T) {
	t.Parallel()
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	for text, want := range map[string]string{trace: trace, "00-xyz": "", strings.ToUpper(trace): ""} {
		t.Run(text, func(t *testing.T) {
			t.Parallel()
			n := newNode(t)
			log := filepath.Join(n.dir, "log")
			n.conf["logFile"], n.conf["logFormat"] = log, "json"
			n.env = append(n.env, "TRACEPARENT="+text)
			n.write(filepath.Join(n.path[0], "traced"), "#!/bin/sh\ncat >/dev/null\necho \"$TRACEPARENT\" >"+n.dir+"/seen\n"+
				`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0"}'`)
			if err := os.Chmod(filepath.Join(n.path[0], "traced"), 0o700); err != nil {
				t.Fatal(err)
			}
			n.plan(map[string]map[string]string{"p1": {"ADD": "fail"}})
			if _, err := n.pod("a").add(n.unwind(`{"type": "traced"}`, n.faulty("p1", ""))); err == nil {
				t.Fatal("the ADD succeeded")
			}
			if seen, err := os.ReadFile(filepath.Join(n.dir, "seen")); string(seen) != text+"\n" || err != nil {
				t.Errorf("the delegate saw %q (%v)", seen, err)
			}
			err := n.store.View(n.Context(), func(tx *journal.Tx) error {
				return tx.History(func(e journal.Event) error {
					if e.Trace != want {
						t.Errorf("the history has %q, want %q", e.Trace, want)
					}
					return nil
				})
			})
			if len(n.events()) != 1 || err != nil {
				t.Errorf("history: %q (%v)", n.events(), err)
			}
			data, err := os.ReadFile(log)
			if err != nil {
				t.Fatal(err)
			}
			for line := range bytes.Lines(data) {
				var said struct{ Traceparent string }
				if err := json.Unmarshal(line, &said); err != nil || said.Traceparent != want {
					t.Errorf("%s: %q (%v), want %q", line, said.Traceparent, err, want)
				}
			}
		})
	}
}
