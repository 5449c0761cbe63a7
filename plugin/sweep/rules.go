package sweep

import (
	"context"
	"errors"
	"net/netip"
	"os/exec"
	"regexp"
	"slices"
	"strings"

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
	iptablesTable = regexp.MustCompile(`^\*(\w+)$`)
	iptablesLabel = regexp.MustCompile(
		`--comment "(?:dnat )?name: \\"([\w.-]+)\\" id: \\"([\w.-]+)\\""`)
	iptablesRule = regexp.MustCompile(`^[\w-]+(?: (?:! )?(?:-[sdpmioj]|--(?:[^\Wm]|m[^\Wo])[\w-]*)` +
		`(?: [\w.:/,+][\w.:/,+-]*)+)+$`) // LABEL in the place of a label; --modprobe runs a program
	accepts = regexp.MustCompile(`^CNI-FORWARD -(?:s ([\da-f.:/]+)|d ([\da-f.:/]+) ` +
		`-m conntrack --ctstate RELATED,ESTABLISHED) -j ACCEPT$`)
	source      = regexp.MustCompile(`^POSTROUTING -s (\S+) `)
	destination = regexp.MustCompile(` --to-destination (\S+)`)
	plainPath   = regexp.MustCompile(`^[\w./@:-]+$`)

	nftTable = regexp.MustCompile(`^table ((?:ip|ip6|inet) \w+) {`)
	nftChain = regexp.MustCompile(`^chain (\w+) {`)
	nftLine  = regexp.MustCompile(`^(.*) comment "([^"]*)" # handle (\d+)$`)
	nftLabel = regexp.MustCompile(`^[0-9a-f-]+, net: ([\w.-]+), if: ([^ ,]+), id: ([\w.-]+)$`)
	plainID  = regexp.MustCompile(`^[\w.-]+$`)
	nftTo    = regexp.MustCompile(`(?:dnat to|masq_checks ip6? saddr|masquerading .* daddr) (\S+)`)
)

// isPlain reports whether a rule of a container has only packet matches, a target and its
// label, so that a shell and iptables read it unchanged.
func isPlain(rule string) bool {
	return iptablesRule.MatchString(iptablesLabel.ReplaceAllString(rule, "--comment LABEL"))
}

// readRules reads the iptables and nftables rules with a label of a reference plugin. It ignores
// rules in any form other than the plugin's, and all rules of a program that is missing.
func (s *Sweep) readRules(ctx context.Context) *leftovers {
	l := &leftovers{
		of: map[journal.Key]*leftover{}, firewall: map[netip.Addr][]string{},
		files: map[string][]alive.CacheFile{}, near: map[netip.Addr][]alive.CacheFile{},
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
		if m := iptablesLabel.FindStringSubmatch(line); m != nil {
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
			if run = ""; iptablesTable.MatchString(line) {
				run = program + " -w -t " + line[1:]
			}
		case run == "":
		case line[0] == ':' && chains[chain] != nil:
			o := chains[chain]
			o.chains = append(o.chains, run+" -F "+chain, run+" -X "+chain)
		case isRule && chains[chain] != nil:
			chains[chain].has(destination.FindStringSubmatch(rule))
		case isRule && chains[target] != nil && isPlain(rule):
			chains[target].has(source.FindStringSubmatch(rule))
			chains[target].commands = append(chains[target].commands, run+" -D "+rule)
		case isRule:
			if a, is := addressIn(accepts.FindStringSubmatch(rule)); is {
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
		if m := nftTable.FindStringSubmatch(line); m != nil {
			table, chain = m[1], ""
		} else if m := nftChain.FindStringSubmatch(line); m != nil {
			chain = m[1]
		}
		m := nftLine.FindStringSubmatch(line)
		if m == nil || chain == "" {
			continue
		}
		var o *leftover
		label := nftLabel.FindStringSubmatch(m[2])
		switch {
		case strings.HasSuffix(table, " cni_hostport") && plainID.MatchString(m[2]):
			o = l.by("", m[2])
		case table == "inet cni_plugins_masquerade" && label != nil:
			o = l.by(label[1], label[3])
			o.cut = len(m[2]) >= 128 // knftables 0.0.18, CommentLengthMax
		default:
			continue
		}
		o.has(nftTo.FindStringSubmatch(chain + " " + m[1]))
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
