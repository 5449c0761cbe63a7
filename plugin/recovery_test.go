package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
)

// TestNeverRan: a delegate that never ran has no pending DEL: a binary that is missing or cannot be
// executed.
func TestNeverRan(t *testing.T) {
	stories(t, `
	hasty; chain p0 | {"type": "broken"}
	either not executable: file 0644 '#!/bin/sh'
	or of another format: file 0755 '1234'
	or missing:
	fails add a; left
	del a`, acts{"file": func(s *story, w []string) {
		s.write(filepath.Join(s.path[0], "broken"), w[1])
		run(s, "chmod", w[0], filepath.Join(s.path[0], "broken"))
	}})
}

// TestBridgeFailsAtItsRules: bridge removes the interface and then fails at its rules. The next DEL
// finds no interface in an existing namespace, and would pass without a look at the rules.
func TestBridgeFailsAtItsRules(t *testing.T) {
	stories(t, `
	chain bridge, "ipMasq": true; failing-rules; add a; fails del a
	lose $dir/fail; del a`, acts{"failing-rules": func(s *story, _ []string) {
		real, err := filepath.EvalSymlinks("/usr/sbin/iptables")
		s.must(err)
		s.mkdir(filepath.Join(s.dir, "fail"))
		s.mkdir(filepath.Join(s.dir, "path"))
		s.must(os.WriteFile(filepath.Join(s.dir, "path", "iptables"), fmt.Appendf(nil, `#!/bin/bash
			for a; do if [ "$a" = -D ] && [ -e %s ]; then exit 4; fi; done
			exec -a iptables %s "$@"`, filepath.Join(s.dir, "fail"), real), 0o755))
		s.env = append(s.env, "PATH="+filepath.Join(s.dir, "path")+":"+os.Getenv("PATH"))
	}})
}
