package plugin

import (
	"crypto/sha256"
	"fmt"
	"path/filepath"
	"testing"
)

// cilium are statements about a plugin of the type cilium-cni, and its queue of DELs.
func cilium() acts {
	dir := func(s *story) string { return filepath.Join(s.dir, "deleteQueue") }
	return acts{
		"cilium": func(s *story, _ []string) {
			s.link("cilium-cni", filepath.Join(s.path[2], "faulty"))
			s.mkdir(dir(s))
			s.conf["stores"] = map[string]string{"cilium-cni": dir(s)}
			s.chain = []string{fmt.Sprintf(`{"type": "cilium-cni", "dir": %q, "instance": "cilium"}`, s.faultyDir()), "p1"}
		},
		// queue writes the file of a pod's DEL, as cilium-cni 1.20 does: $file.
		"queue": func(s *story, w []string) {
			content := "cni-attachment-id:" + w[0] + ":eth0"
			s.vars["file"] = filepath.Join(dir(s), fmt.Sprintf("%x.delete", sha256.Sum256([]byte(content))))
			s.write(s.vars["file"], content)
		},
		// unwritten POD: since it was asked last
		"unwritten": func(s *story, w []string) { s.steady("updated", fmt.Sprintf("%+v", s.who(w[0]).entry().Updated)) },
	}
}

// TestQueuedDEL: cilium-cni's DEL passes, and is only queued. It stays pending, and does not run
// again while its file is in the queue, whoever asks: each would take up to 43 s while the agent is
// away; nor do sweeps write its entry. The history has a DEL of the runtime that ran nothing. Once the
// agent has taken the file, the DEL is done, and nothing runs.
func TestQueuedDEL(t *testing.T) {
	stories(t, `
	cilium; add a
	queue a; del a
	unverified a $file; entry a deleting 1; pending a cilium
	del a; events 'unverified a' 'no-op a [] []: pending: cilium-cni (waiting: its plugin has queued the deletion)'
	unwritten a; agent; agent; agent; unwritten a
	times 1 DEL cilium; unverified a $file
	lose $file; agent
	times 1 DEL cilium; gone a`, cilium())
}
