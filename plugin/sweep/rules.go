package sweep

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"sync"

	"cni-unwind/journal"
	"cni-unwind/plugin/alive"
	"cni-unwind/plugin/internal/host"
	"cni-unwind/plugin/known"
)

// The rules of bridge, ptp, portmap and firewall (plugins 1.9.1), as iptables-save and nft print
// them. Both print a comment with its line breaks, so any line may be an attacker's text. Therefore
// each part of a command is matched as a whole. Names have only the characters that SPEC 1.1 §2
// allows.
var (
	iptablesTable = pattern{text: `^\*(\w+)$`}
	iptablesLabel = pattern{text: `--comment "(?:dnat )?name: \\"([\w.-]+)\\" id: \\"([\w.-]+)\\""`}
	iptablesRule  = pattern{text: `^[\w-]+(?: (?:! )?(?:-[sdpmioj]|--(?:[^\Wm]|m[^\Wo])[\w-]*)` +
		`(?: [\w.:/,+][\w.:/,+-]*)+)+$`} // LABEL in the place of a label; --modprobe runs a program
	accepts = pattern{text: `^CNI-FORWARD -(?:s ([\da-f.:/]+)|d ([\da-f.:/]+) ` +
		`-m conntrack --ctstate RELATED,ESTABLISHED) -j ACCEPT$`}
	source      = pattern{text: `^POSTROUTING -s (\S+) `}
	destination = pattern{text: ` --to-destination (\S+)`}
	plainPath   = pattern{text: `^[\w./@:-]+$`}

	nftTable = pattern{text: `^table ((?:ip|ip6|inet) \w+) {`}
	nftChain = pattern{text: `^chain (\w+) {`}
	nftLine  = pattern{text: `^(.*) comment "([^"]*)" # handle (\d+)$`}
	nftLabel = pattern{text: `^[0-9a-f-]+, net: ([\w.-]+), if: ([^ ,]+), id: ([\w.-]+)$`}
	plainID  = pattern{text: `^[\w.-]+$`}
	nftTo    = pattern{text: `(?:dnat to|masq_checks ip6? saddr|masquerading .* daddr) (\S+)`}
)

// pattern is a regular expression that is compiled at its first use: this package is in the plugin,
// which starts for each verb of each pod and reads no rules.
type pattern struct {
	text     string
	once     sync.Once
	compiled *regexp.Regexp
}

func (p *pattern) regexp() *regexp.Regexp {
	p.once.Do(func() { p.compiled = regexp.MustCompile(p.text) })
	return p.compiled
}

// isPlain reports whether a rule of a container has only packet matches, a target and its
// label, so that a shell and iptables read it unchanged.
func isPlain(rule string) bool {
	plain := iptablesLabel.regexp().ReplaceAllString(rule, "--comment LABEL")
	return iptablesRule.regexp().MatchString(plain)
}

// readRules reads the iptables and nftables rules with a label of a reference plugin. It ignores
// rules in any form other than the plugin's, and all rules of a program that is missing.
func (s *Sweep) readRules(ctx context.Context) *leftovers {
	l := &leftovers{
		of: map[journal.Key]*leftover{}, firewall: map[netip.Addr][]string{},
		files: map[string][]alive.Cached{}, near: map[netip.Addr][]alive.Cached{},
		used: map[netip.Addr]bool{},
	}
	for _, program := range [][]string{
		{"iptables-save"}, {"ip6tables-save"}, {"nft", "-a", "list", "ruleset"},
	} {
		lines, err := host.Printed(ctx, program...)
		if err != nil && !errors.Is(err, exec.ErrNotFound) {
			s.w.Log.Warn("cannot list firewall rules", "err", err)
		}
		for i := range lines {
			lines[i] = strings.TrimSpace(lines[i])
		}
		lines = slices.DeleteFunc(lines, func(line string) bool { return line == "" })
		if program[0] == "nft" {
			l.addNFTables(lines)
		} else {
			l.addIPTables(strings.TrimSuffix(program[0], "-save"), lines)
		}
	}
	return l
}

// addIPTables adds the chain of a container, which has no other owner, and the rules that jump to
// it.
func (l *leftovers) addIPTables(program string, lines []string) {
	chains := map[string]*leftover{}
	for _, line := range lines {
		if m := iptablesLabel.regexp().FindStringSubmatch(line); m != nil {
			for _, label := range known.AllLabels(m[1], m[2], "") {
				if strings.HasPrefix(label, "CNI-") {
					chains[label] = l.by(m[1], m[2])
				}
			}
		}
	}
	run := ""
	for _, line := range lines {
		rule, isRule := strings.CutPrefix(line, "-A ")
		chain, _, _ := strings.Cut(strings.TrimPrefix(rule, ":"), " ")
		target := rule[strings.LastIndex(rule, " ")+1:]
		switch {
		case line[0] == '*':
			if run = ""; iptablesTable.regexp().MatchString(line) {
				run = program + " -w -t " + line[1:]
			}
		case run == "":
		case line[0] == ':' && chains[chain] != nil:
			o := chains[chain]
			o.chains = append(o.chains, run+" -F "+chain, run+" -X "+chain)
		case isRule && chains[chain] != nil:
			chains[chain].has(destination.regexp().FindStringSubmatch(rule))
		case isRule && chains[target] != nil && isPlain(rule):
			chains[target].has(source.regexp().FindStringSubmatch(rule))
			chains[target].commands = append(chains[target].commands, run+" -D "+rule)
		case isRule:
			if a, is := addressIn(accepts.regexp().FindStringSubmatch(rule)); is {
				l.firewall[a] = append(l.firewall[a], run+" -D "+rule)
			}
		}
	}
}

// addNFTables adds the rules with a comment. A handle identifies one rule as long as its table
// exists.
func (l *leftovers) addNFTables(lines []string) {
	table, chain := "", ""
	for _, line := range lines {
		if m := nftTable.regexp().FindStringSubmatch(line); m != nil {
			table, chain = m[1], ""
		} else if m := nftChain.regexp().FindStringSubmatch(line); m != nil {
			chain = m[1]
		}
		m := nftLine.regexp().FindStringSubmatch(line)
		if m == nil || chain == "" {
			continue
		}
		var o *leftover
		label := nftLabel.regexp().FindStringSubmatch(m[2])
		switch {
		case strings.HasSuffix(table, " cni_hostport") && plainID.regexp().MatchString(m[2]):
			o = l.by("", m[2])
		case table == "inet cni_plugins_masquerade" && label != nil:
			o = l.by(label[1], label[3])
			o.cut = len(m[2]) >= 128 // knftables 0.0.18, CommentLengthMax
		default:
			continue
		}
		o.has(nftTo.regexp().FindStringSubmatch(chain + " " + m[1]))
		o.commands = append(o.commands, "nft delete rule "+table+" "+chain+" handle "+m[3])
	}
}

// has adds the address of a rule, if it has one.
func (o *leftover) has(match []string) {
	if a, is := addressIn(match); is {
		o.addresses = append(o.addresses, a)
	}
}

// addressIn returns the address in the last group of a match that has one. The address may have a
// port or be a prefix of a single address.
func addressIn(match []string) (netip.Addr, bool) {
	for _, text := range slices.Backward(match) {
		if port, err := netip.ParseAddrPort(text); err == nil {
			return port.Addr(), true
		}
		if prefix, err := netip.ParsePrefix(text); err == nil && prefix.IsSingleIP() {
			return prefix.Addr(), true
		}
		if a, err := netip.ParseAddr(text); err == nil {
			return a, true
		}
	}
	return netip.Addr{}, false
}
