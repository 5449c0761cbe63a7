#!/usr/bin/env bash
# Prints the manifest by which krew (https://krew.sigs.k8s.io) installs kubectl-unwind: the archives of the current
# directory, which is the release's, as they are downloaded from the release's page.
#
# usage: scripts/release/krew.sh VERSION SITE      (SITE is the address of the repository)
set -euo pipefail
version=$1 site=$2

cat <<YAML
apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: unwind
spec:
  version: $version
  homepage: $site
  shortDescription: Show leaked pod addresses and pending CNI DELs of all nodes
  description: |
    Asks the agents of unwind, a CNI plugin that undoes failed pod networks, on all nodes of the cluster: what is
    wrong (doctor), what is attached (list), how full the address pools are (ipam). It changes nothing on a node.
  platforms:
YAML
for archive in kubectl-unwind-"$version"-*.tar.gz; do
	platform=${archive#"kubectl-unwind-$version-"}
	platform=${platform%.tar.gz}
	bin=kubectl-unwind
	[[ $platform != windows-* ]] || bin+=.exe
	sum=$(sha256sum "$archive")
	cat <<-YAML
		  - selector:
		      matchLabels:
		        os: ${platform%-*}
		        arch: ${platform#*-}
		    uri: $site/releases/download/$version/$archive
		    sha256: ${sum%% *}
		    files:
		      - from: "*/$bin"
		        to: .
		      - from: "*/LICENSE"
		        to: .
		    bin: $bin
	YAML
done
