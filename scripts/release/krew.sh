#!/usr/bin/env bash
# Prints the manifest with which krew (https://krew.sigs.k8s.io) installs kubectl-unwind. The manifest lists the
# release's archives, which must be in the current directory, with their URLs on the release's page.
#
# usage: scripts/release/krew.sh VERSION SITE      (SITE is the URL of the repository)
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
    Queries unwind, a CNI plugin that rolls back failed pod networks, on all nodes of the cluster. It reports problems
    (doctor), attachments (list) and the use of the address pools (ipam). "off" bypasses unwind on the nodes, and
    "uninstall" removes it from them.
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
