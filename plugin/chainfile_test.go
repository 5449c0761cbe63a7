package plugin

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"cni-unwind/plugin/netconf"
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
	// listed NAME PLUGIN: a file of one plugin in the directory of the network's name beside it
	"listed": func(s *story, w []string) {
		s.chain = w[1:]
		dir := filepath.Join(filepath.Dir(s.vars["file"]), s.network)
		s.mkdir(dir)
		s.write(filepath.Join(dir, w[0]), s.plugins(s.node)[0])
	},
	"back": func(s *story, _ []string) { // soon
		back := time.AfterFunc(200*time.Millisecond, func() { _ = os.Rename(s.vars["file"]+".new", s.vars["file"]) })
		s.Cleanup(func() { back.Stop() })
	},
}

func (n *node) write(path, content string) {
	n.Helper()
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		n.Fatal(err)
	}
}

// wantCalls checks the calls of the faulty plugins since the last check.
func (n *node) wantCalls(what string, want ...string) {
	n.Helper()
	if got := n.calls(); !slices.Equal(got, want) {
		n.Errorf("%s: %q, want %q", what, got, want)
	}
	n.forgetCalls()
}

// TestChainFileIsReadAtEachADD: after the file's owner rewrites it, the next ADD uses the new
// chain. The DEL of the first pod uses its own, even when the file is gone.
func TestChainFileIsReadAtEachADD(t *testing.T) {
	stories(t, `
	chainfile old; add a; chainfile new; add b; calls ADD old, ADD new
	del a; calls DEL old
	lose $file; check b; del b; calls CHECK new, DEL new`, chainFiles)
}

// TestChainFileForms: for every form of file that libcni reads, unwind runs the chain that libcni
// would run.
func TestChainFileForms(t *testing.T) {
	stories(t, `
	chainfile p0; let ran ADD p0, DEL p0; let inline "plugins": [{"type": "faulty", "dir": "$dir/faulty", "instance": "p1"}]
	either inlined only: listed 10.conf p1; shell 'sed -i s/{/{\"loadOnlyInlinedPlugins\":true,/ $file'
	or inlined only, as a string: listed 10.conf p1; shell 'sed -i s/{/{\"loadOnlyInlinedPlugins\":\"True\",/ $file'
	or with a folder: listed 20.conf p1; listed 10.conf p0; listed 15.json p1
		file $dir/net.d/$network/README text; file $file '{"cniVersion": "1.0.0", "name": "$network", $inline}'
		let ran ADD p1, ADD p0, ADD p1, DEL p1, DEL p0, DEL p1
	or a folder alone: listed 10.conf p0; file $file '{"cniVersion": "1.0.0", "loadOnlyInlinedPlugins": false}'
	or a folder without files:
	or one plugin: listed 10.conf p1
		file $file '{"cniVersion": "1.0.0", "name": "$network", "type": "faulty", "dir": "$dir/faulty", "instance": "p0"}'
	add a; del a; calls $ran`, chainFiles)
}

// TestChainFileLink: unwind follows a symbolic link only in a directory that none but its owner can
// write to.
func TestChainFileLink(t *testing.T) {
	stories(t, `
	chainfile p0; shell 'mv $file $dir/target; ln -s $dir/target $file'
	either only the owner: shell 'chmod 755 $dir/net.d'; add a
	or the group: shell 'chmod 775 $dir/net.d'; fails add a 'chainFile $file'
	or all: shell 'chmod 1777 $dir/net.d'; fails add a 'chainFile $file'
	del a`, chainFiles)
}

// TestChainFileUnusable: ADD refuses a file that is no chain, names it and the fault, and starts
// nothing. A DEL of a pod that the journal does not know succeeds if the runtime has no result of
// an ADD either; otherwise, as after an ADD by the plain chain, it is an error too.
func TestChainFileUnusable(t *testing.T) {
	stories(t, `
	chainfile; let one "plugins": [{"type": "faulty"}]}
	either gone: let says no such file or directory
	or truncated: file $file '{"cniVersion": "1.0.0", "plugins": [{"type": "fau'; let says not valid JSON
	or empty: file $file; let says not valid JSON
	or no plugins: file $file '{"cniVersion": "1.0.0", "plugins": []}'; let says "plugins" is empty
	or unwind in it: file $file '{"cniVersion": "1.0.0", "plugins": [{"type": "unwind"}]}'; let says unwind cannot run
	or another name: file $file '{"cniVersion": "1.0.0", "name": "other", $one'; let says key "name" is "other"
	or unknown version: file $file '{"cniVersion": "0.5.0", $one'; let says cniVersion "0.5.0"
	or a FIFO: shell 'mkfifo $file'; let says not a regular file
	or a directory: shell 'mkdir $file'; let says not a regular file
	or a device: shell 'ln -s /dev/zero $file'; let says not a regular file
	or a dangling link: shell 'ln -s /nowhere $file'; let says no such file or directory
	or a loop of links: shell 'ln -s $file $file'; let says too many levels
	or unreadable: shell 'ln -s /proc/self/mem $file'; let says input/output error
	or huge: shell 'truncate -s `+strconv.Itoa(netconf.MaxConfig+1)+` $file'; let says more than
	# A directory is no file.
	or a plugin's file broken: shell 'mkdir -p $dir/net.d/$network/10.conf'; file $dir/net.d/$network/20.conf {"type"
		file $file '{"cniVersion": "1.0.0", $one'; let says plugins[1]: not valid JSON
	fails add a 'unwind: ' 'chainFile $file: ' '$says'; del a
	chain p0; past add a; forgets
	fails del a 'unwind: ' 'chainFile $file: ' '$says'; calls
	past del a`, chainFiles)
}

// TestChainFileGoneOldRuntime: a DEL without an entry is an error if the runtime's version gives no
// result with a DEL, since the missing result then says nothing.
func TestChainFileGoneOldRuntime(t *testing.T) {
	stories(t, `
	versions 0.3.1 1.0.0; chainfile
	fails del a 'unwind: ' 'chainFile $file: no such file or directory'`, chainFiles)
}

// TestChainFileIsLookedForAgain: an ADD and a STATUS wait for a provider that is just rewriting its
// file.
func TestChainFileIsLookedForAgain(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.0.0; chainfile p0; shell 'mv $file $file.new'
	either away:
	or half written: file $file '{"cniVersion": "1.0.0", "plug'
	or empty: file $file ' '
	back
	either ADD: add a; del a
	or STATUS: libcni-status`, chainFiles)
}

// TestChainIsNotLookedForAgain: a STATUS waits for another program's file, but not for an error in
// unwind's own entry.
func TestChainIsNotLookedForAgain(t *testing.T) {
	t.Parallel()
	n := newNode(t)
	took := func(changes keys) time.Duration {
		began := time.Now()
		if out := n.status("1.1.0", changes); out.said.Code != 50 {
			t.Errorf("STATUS: %s", out.stdout)
		}
		return time.Since(began)
	}
	file := took(keys{"chain": nil, "chainFile": n.dir + "/none"})
	if file < time.Second {
		t.Errorf("a file that is away was looked for for %s", file)
	}
	for _, own := range []keys{
		{"chain": keys{"plugins": []string{}}}, {"chain": nil}, {"chainFile": n.dir + "/none"},
	} {
		if took := took(own); took >= file {
			t.Errorf("%v took %s, a file that is away %s", own, took, file)
		}
	}
}

// hang covers a directory with a file system whose server never answers.
func (n *node) hang(dir string) {
	n.Helper()
	server, err := unix.Open("/dev/fuse", unix.O_RDWR|unix.O_CLOEXEC, 0)
	if err != nil {
		n.Skip(err)
	}
	n.Cleanup(func() {
		_ = unix.Close(server) // ends all that wait for it
		_ = unix.Unmount(dir, unix.MNT_DETACH)
	})
	options := fmt.Sprintf("fd=%d,rootmode=40000,user_id=0,group_id=0", server)
	if err := unix.Mount("hangs", dir, "fuse", unix.MS_NODEV|unix.MS_NOSUID, options); err != nil {
		n.Fatal(err)
	}
}

// TestChainFileHangs: a DEL that the journal knows does without the file. A verb that looks into it
// gives up in time, and says which file it is; the DEL of a delegate that rejects its configuration
// stays pending.
func TestChainFileHangs(t *testing.T) {
	stories(t, `
	versions 1.1.0 1.0.0; chainfile p0, "code": 7; plan pod:rejected DEL fail
	add known rejected looked; past add unknown; hang; del known
	start add new; start del unknown; start del rejected; start check looked
	let hangs 'unwind: STATUS timed out: a delegate or a configuration file hangs'
	fails libcni-status code=50 '$hangs'
	fails wait add new 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del unknown 'unwind: ' 'chainFile $file: ' 'not read within 10s'
	fails wait del rejected 'code 7'; wait check looked
	entry rejected removing 1; leaves`, chainFiles, acts{"hang": func(s *story, _ []string) { s.hang(filepath.Dir(s.vars["file"])) }})
}

// TestKnownDELReadsNoFile: a DEL that the journal knows opens nothing beside chainFile.
func TestKnownDELReadsNoFile(t *testing.T) {
	stories(t, `
	chainfile p0; watched
	add a; opened true
	del a; opened false`, chainFiles, acts{"watched": func(s *story, _ []string) {
		fd, err := unix.InotifyInit1(unix.IN_NONBLOCK | unix.IN_CLOEXEC)
		s.must(err)
		s.Cleanup(func() { _ = unix.Close(fd) })
		_, err = unix.InotifyAddWatch(fd, filepath.Dir(s.vars["file"]), unix.IN_OPEN)
		s.must(err)
		s.acts["opened"] = func(s *story, w []string) { // since it was asked last
			got, err := unix.Read(fd, make([]byte, 64<<10))
			s.want(fmt.Sprint(err == nil && got > 0) == w[0], "it is not so")
		}
	}})
}
