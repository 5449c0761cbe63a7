package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// chainFile names the file from which unwind reads its chain, and makes it unless the content is "".
func (n *node) chainFile(content string) string {
	n.Helper()
	path := filepath.Join(n.dir, "net.d", "net.conflist")
	n.mkdir(filepath.Dir(path))
	if content != "" {
		n.write(path, content)
	}
	n.conf["chain"], n.conf["chainFile"] = nil, path
	return path
}

// chainFiles are statements about this file.
var chainFiles = acts{
	// chainfile [PLUGIN | PLUGIN …]: $file has these; without them it is not there
	"chainfile": func(s *story, w []string) {
		content := ""
		if len(w) > 0 {
			s.chain = strings.Split(strings.Join(w, " "), " | ")
			content = conflistOf(s.plugins(s.node))
		}
		s.vars["file"] = s.chainFile(content)
	},
	"back": func(s *story, _ []string) { // soon
		back := time.AfterFunc(200*time.Millisecond, func() { _ = os.Rename(s.vars["file"]+".new", s.vars["file"]) })
		s.Cleanup(func() { back.Stop() })
	},
}

func (n *node) write(path, content string) {
	n.Helper()
	must(n, os.WriteFile(path, []byte(content), 0o600))
}

// TestChainFileIsReadAtEachADD: after the file's owner rewrites it, the next ADD uses the new
// chain. The DEL of the first pod uses its own, even when the file is gone.
func TestChainFileIsReadAtEachADD(t *testing.T) {
	stories(t, `
	chainfile old; add a; chainfile new; add b; calls ADD old, ADD new
	del a; calls DEL old
	lose $file; check b; del b; calls CHECK new, DEL new`, chainFiles)
}

// TestChainFileUnusable: ADD refuses a file that is no chain, names it and the fault, and starts
// nothing (netconf's tests have each fault). A DEL of a pod that the journal does not know succeeds if the runtime has no result of
// an ADD either; otherwise, as after an ADD by the plain chain, it is an error too.
func TestChainFileUnusable(t *testing.T) {
	stories(t, `
	chainfile; let one "plugins": [{"type": "faulty"}]}
	either gone: let says no such file or directory
	or truncated: file $file '{"cniVersion": "1.0.0", "plugins": [{"type": "fau'; let says not valid JSON
	or a plugin's file broken: shell 'mkdir -p $dir/net.d/$network/10.conf'; file $dir/net.d/$network/20.conf {"type"
		file $file '{"cniVersion": "1.0.0", $one'; let says plugins[1]: not valid JSON
	fails add a 'unwind: ' 'chainFile $file: ' '$says'; del a
	chain p0; past add a; forgets
	fails del a 'unwind: ' 'chainFile $file: ' '$says'; calls
	past del a`, chainFiles)
}

// TestChainFileIsLookedForAgain: an ADD and a STATUS wait for a provider that is just rewriting its
// file.
func TestChainFileIsLookedForAgain(t *testing.T) {
	stories(t, `
	budget Exchange 3m; versions 1.1.0 1.0.0; chainfile p0; shell 'mv $file $file.new'
	either away:
	or half written: file $file '{"cniVersion": "1.0.0", "plug'
	or empty: file $file ' '
	back
	either ADD: add a; del a
	or STATUS: libcni-status`, chainFiles)
}

// TestChainFileHangs: a DEL that the journal knows does without the file. A verb that looks into it
// gives up in time, and says which file it is; the DEL of a delegate that rejects its configuration
// stays pending.
func TestChainFileHangs(t *testing.T) {
	stories(t, `
	budget Status 2s; versions 1.1.0 1.0.0; chainfile p0, "code": 7; plan pod:rejected DEL fail
	add known rejected looked; past add unknown; hang; del known
	start add new; start del unknown; start del rejected; start check looked
	let hangs 'unwind: STATUS timed out: a plugin does not respond, or a configuration file cannot be read; check the plugins and the file system'
	fails libcni-status code=50 '$hangs'
	fails wait add new 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del unknown 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del rejected 'code 7'; wait check looked
	entry rejected deleting 1; leaves`, chainFiles, acts{"hang": func(s *story, _ []string) { // the file is on a file system whose server never answers
		server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			s.Skip(err)
		}
		s.Cleanup(func() { _ = unix.Close(server) }) // ends all that wait for it
		options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
		s.mount("hangs", filepath.Dir(s.vars["file"]), "fuse", unix.MS_NODEV|unix.MS_NOSUID, options)
	}})
}
