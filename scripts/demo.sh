#!/usr/bin/env bash
# Shows which addresses a failing plugin leaks, with real plugins in real namespaces. It runs the same failing pods on a
# /28 without and with unwind, and then a working pod with unwind. `make demo` builds the programs and runs this script.
#
# Each line that the script prints fits into 80 columns.
#
# usage: scripts/demo.sh [pods]      (as root; default: 16 pods)
#
# The script runs in its own network and mount namespace, with its own /run/netns and /var/lib/cni. However the script
# ends, its bridges, rules, namespaces and libcni cache disappear. It changes nothing on the machine. It exits with a
# non-zero code if a claim that it prints is not true.
set -euo pipefail
case ${LC_ALL:-${LC_CTYPE:-${LANG:-}}} in # the script runs itself again with LC_ALL=C, so it reads the locale now
	*[Uu][Tt][Ff]-8 | *[Uu][Tt][Ff]8) export UNWIND_DEMO_BAR='█ ░' ;;
esac
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
pods=${1:-16}
addresses=13 # in a /28: 16 minus the network, broadcast and gateway addresses

die() {
	echo "error: $1" >&2
	[[ $# -lt 2 ]] || echo "hint: $2" >&2
	exit 1
}

# --- outside: check the machine, create the namespaces, clean up ----------------------------------------------------

enter_namespaces() {
	[[ $pods =~ ^[1-9][0-9]?$ ]] || die "the number of pods must be between 1 and 99, not '$pods'"
	[[ $(id -u) == 0 ]] || die "the demo must run as root, because it creates network namespaces"
	local file command
	for command in unshare nsenter ip iptables iptables-save ping timeout; do
		command -v "$command" >/dev/null || die "$command is missing" "run make deps"
	done
	for file in bin/unwind bin/unwindctl .tools/bin/cnitool .tools/cni/bridge .tools/test/faulty; do
		[[ -x $root/$file ]] || die "$file is missing" "run make tools build"
	done

	work=$(mktemp -d "${TMPDIR:-/tmp}/unwind-demo.XXXXXX")
	made=()
	trap 'rm -rf "$work"; for d in "${made[@]}"; do rmdir "$d" 2>/dev/null || true; done' EXIT
	for file in /run/netns /var/lib/cni; do # mount points
		[[ -d $file ]] || { mkdir "$file"; made+=("$file"); }
	done
	unshare --net --mount true ||
		die "cannot create a network and mount namespace" "if this is a container, start it with --privileged"
	UNWIND_DEMO_DIR=$work unshare --net --mount "${BASH_SOURCE[0]}" "$pods"
}

# --- inside: configuration -------------------------------------------------------------------------------------------

# failing_chain prints the chain of the failing pods. Each network has its own bridge, subnet and directories.
failing_chain() { # name subnet
	cat <<-JSON
		[ { "type": "bridge", "bridge": "demo-$1",
		    "ipam": { "type": "host-local", "subnet": "$2", "dataDir": "$work/ipam" } },
		  { "type": "faulty", "instance": "last", "dir": "$work/faulty-$1" } ]
	JSON
}

good_chain() { # name subnet
	cat <<-JSON
		[ { "type": "bridge", "bridge": "demo-$1", "isGateway": true,
		    "ipam": { "type": "host-local", "subnet": "$2", "dataDir": "$work/ipam" } },
		  { "type": "firewall", "backend": "iptables" },
		  { "type": "portmap", "backend": "iptables", "capabilities": { "portMappings": true } } ]
	JSON
}

plain_network() { # name chain
	cat >"$work/net/$1.conflist" <<-JSON
		{ "cniVersion": "1.0.0", "name": "$1", "plugins": $2 }
	JSON
}

unwind_network() { # name chain
	cat >"$work/net/$1.conflist" <<-JSON
		{ "cniVersion": "1.0.0", "name": "$1", "plugins": [ {
		    "type": "unwind", "stateDir": "$work/state", "capabilities": { "portMappings": true },
		    "chain": { "cniVersion": "1.0.0", "plugins": $2 } } ] }
	JSON
}

prepare() {
	mount -t tmpfs demo /run/netns
	mount -t tmpfs demo /var/lib/cni
	ip link set lo up
	mkdir "$work"/{net,ipam,faulty-plain,faulty-unwind}
	plain_network plain "$(failing_chain plain 10.213.0.0/28)"
	unwind_network unwind "$(failing_chain unwind 10.213.1.0/28)"
	unwind_network good "$(good_chain good 10.213.2.0/28)"
	break_faulty
	export NETCONFPATH=$work/net CNI_PATH=$root/bin:$root/.tools/cni:$root/.tools/test
}

break_faulty() {
	echo '{ "*": { "ADD": "fail", "DEL": "fail" } }' | tee "$work/faulty-plain/plan.json" >"$work/faulty-unwind/plan.json"
}

heal_faulty() {
	echo '{}' >"$work/faulty-unwind/plan.json"
}

# --- inside: calls that a runtime makes, and counters ---------------------------------------------------------------

cni() { # add|del network pod: calls the chain like a runtime; the output is in $work/out
	timeout 900 "$root/.tools/bin/cnitool" "$1" "$2" "/run/netns/$3" >"$work/out" 2>&1
}

last_line() { # prints the last line of $work/out, which contains cnitool's error
	tail -n 1 "$work/out"
}

reserved() { # network: prints how many addresses host-local has reserved
	mkdir -p "$work/ipam/$1"
	find "$work/ipam/$1" -name '10.*' | wc -l
}

ping_from() { # pod address: the output is in $work/out
	nsenter --net="/run/netns/$1" ping -q -c 1 -w 60 "$2" >"$work/out" 2>&1
}

veths() { # network: prints how many interfaces its bridge has
	ip -o link show master "demo-$1" | wc -l
}

rules() { # address: prints how many iptables rules contain it
	iptables-save | grep -cwF -- "$1" || true
}

journal() { # [--json]
	"$root/bin/unwindctl" list --state-dir "$work/state" "$@"
}

count() { # key, or key and value: prints how often it is in the journal's JSON
	journal --json | { grep -oE "\"$1\"" || true; } | wc -l
}

empty() { # succeeds if unwindctl lists no attachment, and fails if it lists one or cannot print the list
	[[ "$(journal --json)" == *'"attachments": []'* ]]
}

# --- inside: the demo -----------------------------------------------------------------------------------------------

bold='' red='' green='' plain=''
if [[ -t 1 ]]; then
	bold=$'\e[1m' red=$'\e[31m' green=$'\e[32m' plain=$'\e[0m'
fi
wrong=0

title() {
	printf '\n%s%s%s\n' "$bold" "$1" "$plain"
}

# check prints whether a claim is true, and sets wrong=1 if it is not.
check() { # claim command...
	local claim=$1
	shift
	if "$@"; then
		printf '  %sok%s     %s\n' "$green" "$plain" "$claim"
		return
	fi
	wrong=1
	printf '  %sWRONG%s  %s\n' "$red" "$plain" "$claim"
	if [[ $1 == test ]]; then
		echo "         ${*:2}"
	else
		last_line | wrapped '         '
	fi
}

# wrapped prints its input in lines of up to 80 columns, with an indent, and breaks them between words.
wrapped() { # indent
	fold -s -w $((80 - ${#1})) | sed "s/^/$1/; s/ *\$//"
}

# bar prints the pool as a bar, and its reserved addresses in the given color.
bar() { # reserved color
	local full=${UNWIND_DEMO_BAR:-# .} free i
	free=${full#* } full=${full% *}
	printf %s "$2"
	for ((i = 0; i < addresses; i++)); do
		((i != $1)) || printf %s "$plain"
		((i < $1)) && printf %s "$full" || printf %s "$free"
	done
	printf %s "$plain"
}

# fail_pod starts a pod whose ADD fails, sends the DEL like a runtime, and counts the addresses that stay reserved.
declare -A exhausted=() held=() told=() course=() of=([plain]=without [unwind]=with)
fail_pod() { # network try
	local pod=$1-$2
	ip netns add "$pod"
	if cni add "$1" "$pod"; then
		die "ADD of $pod succeeded, although its chain fails"
	fi
	: "${told[$1]:=$(last_line)}"
	if grep -q 'no IP addresses available' "$work/out"; then
		: "${exhausted[$1]:=$2}"
	elif ! grep -q 'faulty: last ADD refused' "$work/out"; then
		die "ADD of $pod did not fail at the faulty plugin: $(last_line)"
	fi
	cni del "$1" "$pod" || true # the DEL fails, too; a runtime logs this and continues
	ip netns del "$pod"
	held[$1]=$(reserved "$1")
	course[$1]+="${held[$1]} "
}

fail_pods() {
	title "1. $pods pods get an address, then the last plugin fails ADD and DEL"
	echo "   Each pod: create netns, cnitool add, cnitool del, delete netns."
	echo "   The pool after each pod, of $addresses addresses:"
	echo
	printf '   %5s   %-36s %s\n' pod 'without unwind' 'with unwind'
	local try note
	for ((try = 1; try <= pods; try++)); do
		fail_pod plain "$try"
		fail_pod unwind "$try"
		note=''
		[[ -z ${exhausted[plain]:-} ]] || note='no address left'
		printf '   %5d   %s %2d %s%-19s%s %s %2d\n' "$try" "$(bar "${held[plain]}" "$red")" "${held[plain]}" \
			"$red" "$note" "$plain" "$(bar "${held[unwind]}" "$red")" "${held[unwind]}"
	done
	local network
	for network in plain unwind; do
		printf '\n   The runtime got this error for pod 1, %s unwind:\n' "${of[$network]}"
		echo "${told[$network]}" | wrapped '     '
	done
	echo
	local expected=$((pods < addresses ? pods : addresses))
	check "without unwind: $expected addresses leaked" test "${held[plain]}" = "$expected"
	if ((pods > addresses)); then
		check "without unwind: no address is left at pod $((addresses + 1))" test "${exhausted[plain]:-}" = $((addresses + 1))
	fi
	check "with unwind: no address leaked" test "${held[unwind]}" = 0
	check "with unwind: the pool was never exhausted" test -z "${exhausted[unwind]:-}"
}

replay() {
	title "2. Only the DELs of the faulty plugin are pending"
	echo
	echo "   Some columns of unwindctl list:"
	echo
	journal | awk 'NR <= 4 { printf "   %-20s  %-12s  %-11s ", $2, $4, $7; for (i = 8; i <= NF; i++) printf " %s", $i; print "" }
		END { if (NR > 4) printf "   … and %d more\n", NR - 4 }'
	echo
	echo "   host-local has released these addresses already. The pending DELs name them."
	echo
	pending=$(count containerID)
	check "the journal contains each pod once" test "$pending" = "$pods"
	check "each pod has one pending DEL" test "$(count plugin)" = "$pods"
	check "each pending DEL is for the faulty plugin" test "$(count 'plugin": "faulty')" = "$pods"
	title "3. The faulty plugin is repaired, and each pod gets one more DEL"
	echo
	heal_faulty
	local try failed=0
	for ((try = 1; try <= pods; try++)); do
		cni del unwind "unwind-$try" || failed=$((failed + 1))
	done
	pending_after=$(count containerID)
	check "every DEL succeeds, although the netns is gone" test "$failed" = 0
	check "the journal is empty: unwindctl list --json prints no attachment" empty
}

good_pod() {
	title "4. A working pod with unwind: bridge, firewall, portmap (host port 18080)"
	echo
	ip netns add good
	export CAP_ARGS='{"portMappings":[{"hostPort":18080,"containerPort":80,"protocol":"tcp"}]}'
	check "ADD succeeds" cni add good good
	local address
	address=$(grep -oE '10\.213\.2\.[0-9]+/28' "$work/out" | head -n 1) || die "no address in its result: $(last_line)"
	address=${address%/*}
	echo "         it has the address $address, $(veths good) veth, and $(rules "$address") iptables rules"
	check "it pings its gateway" ping_from good 10.213.2.1
	sed -n 's/^.* received/         &/p' "$work/out"
	check "its iptables rules exist" test "$(rules "$address")" -gt 0
	check "DEL succeeds" cni del good good
	ip netns del good
	left="$(reserved good), $(veths good), $(rules "$address")"
	check "no address, veth or rule is left" test "$left" = "0, 0, 0"
	check "the journal is empty" empty
}

# picture prints an SVG of the addresses that stay reserved after each pod.
picture() {
	cat <<-SVG
		<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 640 250" font-family="sans-serif" font-size="13">
		<title>Addresses held after each of $pods pods that fail to start, of $addresses in a /28</title>
		<style>text{fill:#57606a}path{fill:none;stroke-width:3}.grid{stroke:#d0d7de;stroke-width:1}
		.plain{stroke:#cf222e;fill:#cf222e}path.plain{fill:none}.unwind{stroke:#1a7f37;fill:#1a7f37}path.unwind{fill:none}text.plain,text.unwind{stroke:none}
		@media(prefers-color-scheme:dark){text{fill:#8b949e}.grid{stroke:#30363d}.plain{stroke:#ff7b72;fill:#ff7b72}.unwind{stroke:#3fb950;fill:#3fb950}}</style>
		<path class="grid" d="M40 205H616M40 23H616"/><text x="34" y="209" text-anchor="end">0</text><text x="34" y="27" text-anchor="end">$addresses</text>
		<text x="40" y="235">pod 1</text><text x="616" y="235" text-anchor="end">pod $pods</text><text x="328" y="235" text-anchor="middle">addresses held after each pod that failed to start</text>
	SVG
	local network step=$((576 / pods)) x y d=''
	for network in plain unwind; do
		x=40 d="M40 205"
		for y in ${course[$network]}; do
			d+="V$((205 - y * 14))H$((x += step))"
		done
		echo "<path class=\"$network\" d=\"$d\"/>"
	done
	x=$((40 + step * (exhausted[plain] - 1)))
	cat <<-SVG
		<path class="grid" stroke-dasharray="4" d="M${x} 23V205"/>
		<text class="plain" x="48" y="48">without unwind: ${held[plain]} of $addresses leaked</text>
		<text class="plain" x="$((x - 6))" y="160" text-anchor="end">pod ${exhausted[plain]}: no IP addresses available</text>
		<text class="unwind" x="$((x - 6))" y="192" text-anchor="end">with unwind: ${held[unwind]} of $addresses</text>
		</svg>
	SVG
}

# draw checks that the README's picture shows the numbers of this run. With UPDATE=1, it first writes the picture.
draw() {
	((pods == 16)) || return 0
	picture >"$work/out"
	[[ -z ${UPDATE:-} ]] || cp "$work/out" "$root/scripts/demo.svg"
	check "the picture in the README shows these figures (UPDATE=1 writes it)" cmp "$work/out" "$root/scripts/demo.svg"
}

table() {
	title "In short"
	echo
	local row='   %-46s %14s %13s\n'
	printf "$row" '' 'without unwind' 'with unwind'
	printf "$row" 'pods that failed to start' "$pods" "$pods"
	printf "$row" 'addresses leaked' "${held[plain]} of $addresses" "${held[unwind]} of $addresses"
	printf "$row" 'first pod that got "no IP addresses available"' "${exhausted[plain]:-none}" "${exhausted[unwind]:-none}"
	printf "$row" 'pods with a recorded pending DEL' none "$pending"
	printf "$row" '  - once the plugin works again' '' "$pending_after"
	printf "$row" 'addresses, veths, rules left by the working pod' '' "$left"
	echo
}

main() {
	work=$UNWIND_DEMO_DIR
	set -E
	trap 'echo "error: line $LINENO: $BASH_COMMAND" >&2' ERR
	prepare
	fail_pods
	replay
	good_pod
	table
	draw
	[[ $wrong == 0 ]] || die "a claim above is marked WRONG"
	printf '\n%s%d pods failed to start; %d of %d addresses leaked without unwind, %d with it.%s\n' \
		"$green" "$pods" "${held[plain]}" "$addresses" "${held[unwind]}" "$plain"
}

if [[ -n ${UNWIND_DEMO_DIR:-} ]]; then
	main
else
	enter_namespaces
fi
