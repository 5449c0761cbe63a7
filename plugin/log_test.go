package plugin

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"
)

// TestLogFormat: the log is JSON, if logFormat says so.
func TestLogFormat(t *testing.T) {
	stories(t, `
	conf logFile $dir/log; conf logFormat json
	chain p0 | p1; plan p1 ADD fail; fails add a; logged-as`, acts{
		"logged-as": func(s *story, _ []string) {
			log := read(s, filepath.Join(s.dir, "log"))
			s.want(log != "", "no log")
			for line := range strings.Lines(log) {
				var said struct{ Msg, Attachment string }
				s.must(json.Unmarshal([]byte(line), &said))
				s.want(said.Msg != "" && said.Attachment != "", "%s", line)
			}
		},
	})
}
