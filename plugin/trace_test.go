package plugin

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"cni-unwind/journal"
)

// TestTrace: the runtime's trace reaches the delegates, the log and the history. Another text in its
// place reaches the delegates alone. The log is JSON, if logFormat says so.
func TestTrace(t *testing.T) {
	const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	stories(t, `
	either a trace: let text `+trace+`; let traced `+trace+`
	or another text: let text 00-xyz; let traced
	or in capitals: let text `+strings.ToUpper(trace)+`; let traced
	conf logFile $dir/log; conf logFormat json; traceparent
	chain {"type": "traced"} | p1; plan p1 ADD fail; fails add a
	saw; recorded; logged-as`, acts{
		"traceparent": func(s *story, _ []string) {
			s.env = append(s.env, "TRACEPARENT="+s.vars["text"])
			s.node.script("traced", "cat >/dev/null; echo \"$TRACEPARENT\" >"+s.dir+"/seen\n"+
				`[ "$CNI_COMMAND" != ADD ] || echo '{"cniVersion": "1.0.0"}'`)
		},
		"saw": func(s *story, _ []string) {
			seen := read(s, filepath.Join(s.dir, "seen"))
			s.want(seen == s.vars["text"]+"\n", "the delegate saw %q", seen)
		},
		"recorded": func(s *story, _ []string) {
			s.must(s.store.View(s.Context(), func(tx *journal.Tx) error {
				return tx.History(func(e journal.Event) error {
					s.want(e.Trace == s.vars["traced"], "the history has %q", e.Trace)
					return nil
				})
			}))
			s.want(len(s.node.events()) == 1, "%q", s.node.events())
		},
		"logged-as": func(s *story, _ []string) {
			for line := range strings.Lines(read(s, filepath.Join(s.dir, "log"))) {
				var said struct{ Traceparent string }
				s.must(json.Unmarshal([]byte(line), &said))
				s.want(said.Traceparent == s.vars["traced"], "%s", line)
			}
		},
	})
}
