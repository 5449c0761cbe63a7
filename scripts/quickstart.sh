#!/usr/bin/env bash
# Shows on a Kubernetes node which addresses a failing plugin leaks, and how unwind releases them. Pods that fail to
# start use up a network of five addresses. The script then installs unwind, which releases the addresses. Once the
# plugin works, the pods start. The script needs no registry, because it imports the image into the node's runtime.
#
# usage: scripts/quickstart.sh [--keep]      (on the node, as root, with kubectl; --keep leaves unwind installed)
#
# Environment variables:
#   NODE      the name of the node, if the cluster has several nodes
#   ON_NODE   if the node is a container, the command that runs commands in it: "docker exec -i kind-control-plane"
#   ARCHIVE   the image of a release, unwind-VERSION-image.tar; without ARCHIVE, "make image" builds an image
#
# Use an idle node: pods that start on it meanwhile get this script's network. When the script ends, even after an error
# or Ctrl-C, it restores the node's own network, and removes what it installed, except the image and a non-empty journal.
set -euo pipefail
export LC_ALL=C

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
name=unwind-quickstart
dir=/run/$name # on the node
addresses=5    # in a /29: 8 minus the network, broadcast and gateway addresses
pods=3
keep=
[[ ${1-} != --keep ]] || { keep=yes && shift; }

die() {
	echo "error: $1" >&2
	[[ $# -lt 2 ]] || echo "hint: $2" >&2
	exit 1
}

title() { printf '\n== %s\n' "$1"; }

# on_node runs a shell script on the node, with the stdin of the caller.
on_node() {
	${ON_NODE-} sh -c "$1"
}

# until_true waits until a command succeeds.
until_true() { # seconds what command...
	local end=$((SECONDS + $1)) what=$2
	shift 2
	until "$@"; do
		((SECONDS < end)) || die "timed out while waiting until $what"
		sleep 1
	done
}

# first looks on the node, and prints the first of the directories that contains a file matching the pattern.
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
	nodes=$(kubectl get nodes -o 'jsonpath={.items[*].metadata.name}') || die "kubectl cannot reach a cluster"
	node=${NODE:-$nodes}
	[[ $node != *' '* ]] || die "the cluster has several nodes: $nodes" "set NODE to the name of this node"
	hostname=$(kubectl get node "$node" -o 'jsonpath={.metadata.labels.kubernetes\.io/hostname}')
	[[ $(on_node 'id -u') == 0 ]] || die "must run as root on the node, to change its network"
	conf_dir=$(first '*.conf*' /etc/cni/net.d /var/lib/rancher/k3s/agent/etc/cni/net.d \
		/var/snap/microk8s/current/args/cni-network)
	bin_dir=$(first host-local /opt/cni/bin /home/kubernetes/bin /var/lib/rancher/k3s/data/cni \
		/var/snap/microk8s/current/opt/cni/bin)
	[[ $conf_dir && $bin_dir ]] || die "found no conflist, or no plugin host-local, in the usual directories of the node" \
		"if the node is a container, set ON_NODE to a command that runs a command in it"
	[[ -z $(first '00-unwind.json*' "$conf_dir") ]] ||
		die "unwind is already installed: $conf_dir/00-unwind.json" "use a node without unwind, or run unwindctl uninstall"
	[[ -z $(kubectl get daemonsets -A -l app.kubernetes.io/name=unwind -o name) ]] ||
		die "unwind's agents already run in this cluster" "use a cluster without unwind, such as one that kind creates"
}

# import imports the image into the node's runtime, and sets the variable image to the image's name.
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
		die "cannot import the image into the runtime" "containerd needs ctr in PATH, and CRI-O needs skopeo"
	on_node "rm $dir/image.tar"
}

# network writes a conflist that sorts before the node's own. Its chain is bridge or ptp with five addresses, followed
# by the given plugins.
network() { # plugins
	local main
	main=$(on_node "ls $bin_dir" | grep -xE 'bridge|ptp' | head -n 1)
	on_node "cat >$dir/conflist && mv $dir/conflist $conf_dir/01-$name.conflist" <<-JSON
		{ "cniVersion": "1.0.0", "name": "$name", "plugins": [
		  { "type": "$main", "bridge": "quickstart0", "isGateway": true,
		    "ipam": { "type": "host-local", "subnet": "10.213.77.0/29", "dataDir": "$dir" } }$1 ] }
	JSON
}

# failing installs a plugin on the node. The plugin fails each ADD, and until the file "works" exists, each DEL.
failing() {
	on_node "cat >$bin_dir/$name && chmod 755 $bin_dir/$name" <<-SH
		#!/bin/sh
		cat >/dev/null
		case \$CNI_COMMAND in
		VERSION) echo '{ "cniVersion": "1.0.0", "supportedVersions": [ "1.0.0" ] }' && exit ;;
		DEL) [ ! -e $dir/works ] || exit 0 ;;
		esac
		echo '{ "cniVersion": "1.0.0", "code": 100, "msg": "this plugin fails on purpose" }'
		exit 1
	SH
}

taken() { # prints how many addresses of the network are reserved
	on_node "find $dir/$name -name '10.*' 2>/dev/null | wc -l"
}

run_pods() {
	kubectl create namespace "$name"
	until_true 60 "the namespace has a service account" kubectl -n "$name" get serviceaccount default >/dev/null 2>&1
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
	installing=yes
	if command -v helm >/dev/null; then
		helm install unwind "$root/scripts/deploy/helm/unwind" -n kube-system --set "image.repository=${image%:*}" \
			--set "image.tag=${image##*:}" --set "nodeSelector.kubernetes\\.io/hostname=$hostname"
	else # daemonset.yaml equals the chart with its default values
		daemonset | kubectl apply -f -
	fi
	kubectl -n kube-system rollout status ds/unwind --timeout=180s
	until_true 60 "the agent has installed unwind" on_node "test -e $conf_dir/00-unwind.json"
}

daemonset() {
	sed "s|image: unwind:dev|image: $image|; s|kubernetes.io/os: linux|kubernetes.io/hostname: $hostname|" \
		"$root/scripts/deploy/daemonset.yaml"
}

# grace_period adds the key gracePeriod to unwind's file or, with an empty argument, removes the key.
grace_period() { # JSON
	on_node "cd $conf_dir && sed -E -e 's/, *\"gracePeriod\": *\"10s\"//' -e '/^ *\"gracePeriod\": *\"10s\",?\$/d' \
		-e 's/\"type\": *\"unwind\"/&$1/' 00-unwind.json >$dir/unwind.json && mv $dir/unwind.json 00-unwind.json"
}

unwindctl() {
	local pod
	pod=$(kubectl -n kube-system get pods -l app.kubernetes.io/name=unwind --field-selector "spec.nodeName=$node" -o name)
	kubectl -n kube-system exec "$pod" -- /unwindctl --host "$@"
}

# --- the demo ----------------------------------------------------------------------------------------------------------

exhausted() {
	kubectl -n "$name" get events | grep -o 'no IP addresses available in range set: .*' | head -n 1
}

# freed runs a sweep, and succeeds if all addresses of the network are free. While a pod is being started, freed fails,
# because the pod has an address. freed sets the variable pools to the output of "unwindctl ipam".
freed() {
	unwindctl sweep >/dev/null 2>&1 || true # the failing plugin's DELs stay pending
	pools=$(unwindctl ipam)
	[[ $pools == *" $addresses addresses, 0 used, "* ]]
}

started() {
	[[ $(kubectl -n "$name" get pods -o 'jsonpath={.items[*].status.phase}' | grep -o Succeeded | wc -l) == "$pods" ]]
}

clean_up() {
	trap - EXIT
	title "restoring the node's own network"
	kubectl delete namespace "$name" --ignore-not-found --timeout=120s || true
	if [[ $installing && -z $keep ]]; then
		# Uninstall first: without the script's conflist, a running agent would switch to the next one.
		unwindctl uninstall --install-dir= || true # agents don't reinstall unwind after this; unwindctl itself stays
		helm uninstall unwind -n kube-system 2>/dev/null || daemonset | kubectl delete --ignore-not-found -f - || true
		kubectl -n kube-system wait --for=delete pod -l app.kubernetes.io/name=unwind --timeout=90s || true
		# a journal with attachments stays
		on_node 'state=/var/lib/cni/unwind; left=$(/usr/local/bin/unwindctl list -o name) || left=unknown
			/usr/local/bin/unwindctl uninstall; if [ "$left" ]; then rm -f $state/off; else rm -rf $state; fi'
	elif [[ $installing ]]; then
		grace_period '' || true
	fi
	on_node "rm -rf $conf_dir/01-$name.conflist $bin_dir/$name $dir; ip link delete quickstart0 2>/dev/null || true"
}

main() {
	find_node "$@"
	image='' installing=''
	trap clean_up EXIT
	title "importing the image into the runtime of $node"
	import

	title "without unwind: $pods pods on a network of $addresses addresses; each try gets an address, and then a plugin fails"
	failing
	network ", { \"type\": \"$name\" }"
	run_pods
	until_true 180 "all addresses have leaked" exhausted
	echo "$(taken) of $addresses addresses are taken, and no pod runs"

	title "installing unwind"
	install
	unwindctl ipam
	# For this demo, an address is old enough to be released after 10 seconds instead of 10 minutes.
	grace_period ', "gracePeriod": "10s"'

	title "unwind releases the leaked addresses; the pods are still retried, and leak no more addresses"
	until_true 180 "all addresses are free" freed
	echo "$pools"
	unwindctl list

	title "the plugin is repaired, and the pods start"
	on_node "touch $dir/works"
	network ""
	until_true 180 "the pods have run" started
	kubectl -n "$name" get pods
	kubectl delete namespace "$name" --timeout=120s
	until_true 120 "all addresses are free" freed
	unwindctl list

	title "unwindctl check: does the network work through unwind, and is a failed ADD rolled back?"
	unwindctl check
}

main "$@"
