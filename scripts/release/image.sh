#!/usr/bin/env bash
# Writes the agent's image as an OCI archive. The layer for each ARCH is DIRECTORY/ARCH.tar.gz. No
# daemon is needed: crane serves a temporary registry on the loopback interface, and builds the
# image in it. scripts/deploy/Containerfile builds the same image: change both together.
#
# usage: scripts/release/image.sh NAME VERSION SOURCE REVISION ARCHIVE DIRECTORY ARCH…
#
# SOURCE is the repository's URL, and REVISION is the commit. Each may be empty.
set -euo pipefail
name=$1 version=$2 source=$3 revision=$4 archive=$(realpath "$5") dir=$(realpath "$6")
shift 6
key=org.opencontainers.image
labels=$key.title=unwind,$key.version=$version,$key.licenses=Apache-2.0
labels+=${source:+,$key.source=$source}${revision:+,$key.revision=$revision}

work=$(mktemp -d)
crane registry serve --address 127.0.0.1:0 2>"$work/log" &
trap 'kill $! || true; rm -r "$work"' EXIT
until port=$(sed -n 's/.*serving on port \([0-9]*\).*/\1/p' "$work/log") && [[ $port ]]; do
	kill -0 $! || { cat "$work/log" >&2; exit 1; }
	sleep 0.1
done
image=127.0.0.1:$port/unwind

for arch; do
	crane append --oci-empty-base --platform "linux/$arch" --new_layer "$dir/$arch.tar.gz" --new_tag "$image:$arch"
	crane mutate "$image:$arch" --set-platform "linux/$arch" --entrypoint /unwindctl --label "$labels" \
		--annotation "$labels" --tag "$image:$arch"
done
crane index append "${@/#/--manifest=$image:}" --tag "$image:all"
crane pull --format oci "$image:all" "$work/image"

# containerd reads the first annotation. podman and skopeo read the second.
names="\"annotations\":{\"io.containerd.image.name\":\"$name\",\"org.opencontainers.image.ref.name\":\"$name\"}"
sed -i "s|\(\"digest\":\s*\"sha256:[0-9a-f]*\"\)|\1,$names|" "$work/image/index.json"
tar -C "$work/image" --format=ustar --sort=name --mtime="@$SOURCE_DATE_EPOCH" --owner=0 --group=0 --numeric-owner \
	--mode=a-x,u=rwX,go=rX -cf "$archive" blobs index.json oci-layout
