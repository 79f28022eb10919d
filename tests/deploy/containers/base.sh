#!/usr/bin/env bash
# Make the image that stands in for Python's slim one, out of Debian's packages, where images cannot be pulled: once, below
# build/containers. DEBIAN_MIRROR names where packages come from; without it the mirror that mmdebstrap takes by itself.
set -euo pipefail
cd "$(dirname "$0")/../../.."

name=docker.io/library/python:3.11-slim-bookworm
place=$PWD/build/containers
export BUILDAH_ISOLATION=chroot TMPDIR="$place/tmp"
mkdir -p "$TMPDIR"

# Layers that lie over each other where the kernel lets us mount them, whole copies elsewhere.
mounts_layers() {
    local buildah=(buildah --root "$TMPDIR/try" --runroot "$TMPDIR/try-run" --storage-driver overlay) container rc=0
    container=$("${buildah[@]}" from scratch) && "${buildah[@]}" mount "$container" || rc=1
    "${buildah[@]}" rm --all || true
    rm -rf "$TMPDIR/try" "$TMPDIR/try-run"
    return "$rc"
}
if [ ! -e "$place/driver" ]; then
    if mounts_layers >/dev/null 2>&1; then echo overlay >"$place/driver"; else echo vfs >"$place/driver"; fi
fi
buildah=(buildah --root "$place/images" --runroot "$place/images-run" --storage-driver "$(cat "$place/driver")")
if "${buildah[@]}" inspect --type image "$name" >/dev/null 2>&1; then exit 0; fi

# The user of apt's own sandbox may not come into every directory. The hook's "$1" is the new root.
# shellcheck disable=SC2016
mmdebstrap --quiet --variant=minbase --include=python3-venv,ca-certificates --aptopt='APT::Sandbox::User "root"' \
    --dpkgopt='path-exclude=/usr/share/doc/*' --dpkgopt='path-exclude=/usr/share/man/*' \
    --customize-hook='ln -s /usr/bin/python3 "$1/usr/local/bin/python"' \
    bookworm "$place/base.tar" ${DEBIAN_MIRROR:+"$DEBIAN_MIRROR"}
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" add -q "$container" "$place/base.tar" / >/dev/null
"${buildah[@]}" commit -q --rm "$container" "$name" >/dev/null
rm "$place/base.tar"
