#!/usr/bin/env bash
# Shows on a Kubernetes node what a failing plugin leaks, and what unwind makes of it: pods that cannot start use up a
# network of five addresses; unwind is installed, gives the addresses back, and the pods start once the plugin works.
# No registry takes part: the image goes into the node's runtime.
#
# usage: scripts/quickstart.sh [--keep]      (on the node, as root, with kubectl; --keep leaves unwind installed)
#
# The environment may name:
#   NODE      the node, if the cluster has several
#   ON_NODE   a command that runs another on the node, for a node that is a container: "docker exec -i kind-control-plane"
#   ARCHIVE   the image of a release, unwind-VERSION-image.tar; without it, make image builds one
#
# Pods that start on the node meanwhile get the network of this script: it is for a node without work. In the end,
# however that comes, the node has its own network again, and nothing of this.
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=unwind-quickstart
dir=/run/$name # on the node
addresses=5    # of a /29: 8 less network, broadcast and gateway
pods=3
keep=
[[ ${1-} != --keep ]] || { keep=yes && shift; }

die() {
	echo "error: $1" >&2
	[[ $# -lt 2 ]] || echo "hint: $2" >&2
	exit 1
}

title() { printf '\n== %s\n' "$1"; }

# on_node runs a script on the node; its stdin is the caller's.
on_node() {
	${ON_NODE-} sh -c "$1"
}

# until_true waits until a command succeeds.
until_true() { # seconds what command...
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		((SECONDS < end)) || die "waited in vain: $what"
		sleep 1
	done
}

# first prints the first of the node's directories in which a file of a pattern is.
first() { # pattern directory...
	local pattern=$1
	shift
	on_node "for d in $*; do ls \$d/$pattern >/dev/null 2>&1 && echo \$d && break; done"
}

# --- the node ----------------------------------------------------------------------------------------------------------

find_node() {
	[[ $# == 0 ]] || die "usage: scripts/quickstart.sh [--keep]"
	command -v kubectl >/dev/null || die "kubectl is missing"
	local nodes
	nodes=$(kubectl get nodes -o 'jsonpath={.items[*].metadata.name}') || die "kubectl reaches no cluster"
	node=${NODE:-$nodes}
	[[ $node != *' '* ]] || die "the cluster has several nodes: $nodes" "NODE=NAME names this one"
	hostname=$(kubectl get node "$node" -o 'jsonpath={.metadata.labels.kubernetes\.io/hostname}')
	[[ $(on_node 'id -u') == 0 ]] || die "the node's network takes root"
	conf_dir=$(first '*.conf*' /etc/cni/net.d /var/lib/rancher/k3s/agent/etc/cni/net.d \
		/var/snap/microk8s/current/args/cni-network)
	bin_dir=$(first host-local /opt/cni/bin /home/kubernetes/bin /var/lib/rancher/k3s/data/cni \
		/var/snap/microk8s/current/opt/cni/bin)
	[[ $conf_dir && $bin_dir ]] || die "neither conflists nor the plugin host-local are where they are looked for" \
		"if the node is a container, ON_NODE names a command that runs another in it"
	[[ -z $(first 00-unwind.json "$conf_dir") ]] || die "unwind is installed here" "scripts/quickstart.sh is for a node without it"
}

# import puts the image into the node's runtime. That is known as image.
import() {
	local archive=${ARCHIVE:-$root/dist/quickstart-image.tar}
	[[ -n ${ARCHIVE-} ]] || make -C "$root" image IMAGE="docker.io/library/unwind:quickstart" IMAGE_ARCHIVE="$archive" >&2
	image=$(tar -xOf "$archive" index.json | sed -n 's/.*"io.containerd.image.name": *"\([^"]*\)".*/\1/p')
	on_node "mkdir -p $dir && cat >$dir/image.tar" <"$archive"
	on_node "
		PATH=\$PATH:/var/lib/rancher/rke2/bin
		for ctr in ctr 'k3s ctr' 'microk8s ctr' 'k0s ctr' 'ctr -a /run/k3s/containerd/containerd.sock'; do
			\$ctr -n k8s.io images import $dir/image.tar 2>/dev/null && exit
		done
		skopeo copy oci-archive:$dir/image.tar containers-storage:$image" ||
		die "the image cannot be imported" "ctr of containerd, or skopeo for CRI-O, has to be in PATH"
	on_node "rm $dir/image.tar"
}

# network writes a network of the node in front of its own: five addresses, and then these plugins.
network() { # plugins
	local main
	main=$(on_node "ls $bin_dir" | grep -xE 'bridge|ptp' | head -n 1)
	on_node "cat >$dir/conflist && mv $dir/conflist $conf_dir/01-$name.conflist" <<-JSON
		{ "cniVersion": "1.0.0", "name": "$name", "plugins": [
		  { "type": "$main", "bridge": "quickstart0",
		    "ipam": { "type": "host-local", "subnet": "10.213.77.0/29", "dataDir": "$dir" } }$1 ] }
	JSON
}

# failing puts a plugin onto the node that refuses each ADD, and each DEL until the file works is there.
failing() {
	on_node "cat >$bin_dir/$name && chmod 755 $bin_dir/$name" <<-SH
		#!/bin/sh
		cat >/dev/null
		case \$CNI_COMMAND in
		VERSION) echo '{ "cniVersion": "1.0.0", "supportedVersions": [ "1.0.0" ] }' && exit ;;
		DEL) [ ! -e $dir/works ] || exit 0 ;;
		esac
		echo '{ "cniVersion": "1.0.0", "code": 100, "msg": "this plugin fails, for the show" }'
		exit 1
	SH
}

taken() { # how many addresses of the network are reserved
	on_node "find $dir/$name -name '10.*' 2>/dev/null | wc -l"
}

run_pods() {
	kubectl create namespace "$name"
	until_true 60 "the namespace has its service account" kubectl -n "$name" get serviceaccount default >/dev/null 2>&1
	local i
	for ((i = 1; i <= pods; i++)); do
		kubectl apply -f - <<-YAML
			{ apiVersion: v1, kind: Pod, metadata: { name: pod-$i, namespace: $name },
			  spec: { nodeName: $node, tolerations: [ { operator: Exists } ], restartPolicy: Never,
			    automountServiceAccountToken: false, terminationGracePeriodSeconds: 0,
			    containers: [ { name: main, image: "$image", imagePullPolicy: Never, command: [ /unwindctl, version ] } ] } }
		YAML
	done
}

# --- unwind ------------------------------------------------------------------------------------------------------------

install() {
	if command -v helm >/dev/null; then
		helm install unwind "$root/scripts/deploy/helm/unwind" -n kube-system --set "image.repository=${image%:*}" \
			--set "image.tag=${image##*:}" --set "nodeSelector.kubernetes\\.io/hostname=$hostname"
	else # the chart without values
		daemonset | kubectl apply -f -
	fi
	kubectl -n kube-system rollout status ds/unwind --timeout=180s
	until_true 60 "the agent installs unwind" on_node "test -e $conf_dir/00-unwind.json"
}

daemonset() {
	sed "s|image: unwind:dev|image: $image|; s|kubernetes.io/os: linux|kubernetes.io/hostname: $hostname|" \
		"$root/scripts/deploy/daemonset.yaml"
}

# grace_period gives the key of unwind's file, or with nothing takes it away.
grace_period() { # JSON
	on_node "cd $conf_dir && sed -E -e 's/, *\"gracePeriod\": *\"10s\"//' -e '/^ *\"gracePeriod\": *\"10s\",?\$/d' \
		-e 's/\"type\": *\"unwind\"/&$1/' 00-unwind.json >$dir/unwind.json && mv $dir/unwind.json 00-unwind.json"
}

unwindctl() {
	local pod
	pod=$(kubectl -n kube-system get pods -l app.kubernetes.io/name=unwind --field-selector "spec.nodeName=$node" -o name)
	kubectl -n kube-system exec "$pod" -- /unwindctl --host "$@"
}

# --- the show ----------------------------------------------------------------------------------------------------------

exhausted() {
	kubectl -n "$name" get events | grep -o 'no IP addresses available in range set: .*' | head -n 1
}

# freed sweeps, and is true once the network has all its addresses. That is known as pools: a pod that is tried holds one.
freed() {
	unwindctl sweep --cri auto >/dev/null 2>&1 || true # the failing plugin's DELs stay pending
	pools=$(unwindctl ipam)
	[[ $pools == *" $addresses addresses, 0 used, "* ]]
}

started() {
	[[ $(kubectl -n "$name" get pods -o 'jsonpath={.items[*].status.phase}' | grep -o Succeeded | wc -l) == "$pods" ]]
}

clean_up() {
	trap - EXIT
	title "the node gets its own network back"
	kubectl delete namespace "$name" --ignore-not-found --timeout=120s || true
	if [[ -z $keep ]]; then # before its chain goes: an agent that runs then would take up the next one
		unwindctl uninstall --install-dir= || true # the agents leave it so, and have put unwindctl on the node
		helm uninstall unwind -n kube-system 2>/dev/null || daemonset | kubectl delete --ignore-not-found -f - || true
		kubectl -n kube-system wait --for=delete pod -l app.kubernetes.io/name=unwind --timeout=90s || true
		on_node "/usr/local/bin/unwindctl uninstall --purge || rm -f /var/lib/cni/unwind/off"
	else
		grace_period '' || true
	fi
	on_node "rm -rf $conf_dir/01-$name.conflist $bin_dir/$name $dir; ip link delete quickstart0 2>/dev/null || true"
}

main() {
	find_node "$@"
	image=
	trap clean_up EXIT
	title "the image goes into the runtime of $node"
	import

	title "without unwind: $pods pods on a network of $addresses addresses; each try gets an address, then a plugin fails"
	failing
	network ", { \"type\": \"$name\" }"
	run_pods
	until_true 180 "each address leaks without unwind" exhausted
	echo "$(taken) of $addresses addresses are taken, and no pod runs"

	title "the chart is installed"
	install
	unwindctl ipam
	# For the show: what has just leaked counts as dead after 10 seconds, not 10 minutes.
	grace_period ', "gracePeriod": "10s"'

	title "unwind frees what leaked; the pods are still tried, and leak nothing more"
	until_true 180 "each address is free" freed
	echo "$pools"
	unwindctl list

	title "the plugin is repaired: the pods start"
	on_node "touch $dir/works"
	network ""
	until_true 180 "the pods have run" started
	kubectl -n "$name" get pods
	kubectl delete namespace "$name" --timeout=120s
	until_true 120 "each address is free" freed
	unwindctl list
}

main "$@"
