package plugin

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// environment is a statement: env NAME=VALUE …: the runtime's environment from now on. $path is what it
// was.
var environment = acts{"env": func(s *story, w []string) {
	s.vars["path"] = os.Getenv("PATH")
	s.env = append(s.env, w...)
}}

// TestSweepHasTheADDsPATH: the PATH of a sweep has no iptables, or only what portmap cannot use and then
// passes without effect. portmap's and firewall's DELs remove the rules, since they get the ADD's PATH.
func TestSweepHasTheADDsPATH(t *testing.T) {
	stories(t, `
	shell 'mkdir $dir/none $dir/six; ln -s $(command -v ip6tables) $dir/six'
	chain masquerading bridge IPv4 | portmap | firewall; add a; remember a; drop a
	each of none six
	env PATH=$dir/$of; ruleless; env PATH=$path; until 0 status; vanished a`, environment, acts{
		"ruleless": func(s *story, _ []string) { // by STATUS
			eventually(s, "the rules are gone", func() bool {
				s.passes([]string{"status"})
				return len(s.node.rules("--to-destination "+s.value("$a")+":80", "-d "+s.value("$a")+"/32")) == 0
			})
		},
	})
}

// TestSearchPaths: a sweep's DEL gets the search paths of the ADD, if the directories that existed then
// are there and the ADD was in this boot. The runtime's DEL gets the runtime's.
func TestSearchPaths(t *testing.T) {
	stories(t, `
	shell 'mkdir $dir/one $dir/two $dir/three'
	script p1 'echo $CNI_COMMAND $PATH,$LD_LIBRARY_PATH,$XTABLES_LIBDIR >> $dir/paths; [ $CNI_COMMAND != ADD ] || echo "{\"cniVersion\": \"1.0.0\"}"'
	chain {"type": "p1"}; let now DEL $dir/three,$dir/three,
	env PATH=$dir/one:.:$dir/never:$dir/two LD_LIBRARY_PATH= XTABLES_LIBDIR=$dir/two; add a
	env PATH=$dir/three LD_LIBRARY_PATH=$dir/three XTABLES_LIBDIR=
	either a sweep: drop a; status; saw DEL $dir/one:$dir/two,,$dir/two
	or the runtime: drop a; del a; saw $now
	or a directory is gone: drop a; lose $dir/two; status; saw $now
	or another boot: reboot a; status; saw $now`, environment, acts{
		"saw": func(s *story, w []string) {
			lines := strings.Split(strings.TrimSpace(read(s, filepath.Join(s.dir, "paths"))), "\n")
			s.want(len(lines) == 2 && lines[1] == strings.Join(w, " "), "%q", lines)
		},
	})
}
