#!/usr/bin/env bash
# Make build/cluster with what a cluster of one node is made of, once, on Debian bookworm, as root: programs of Debian's packages,
# unpacked there and not installed; and Kubernetes, of which Debian has sources alone, which a C compiler is needed to build.
# DEBIAN_MIRROR is honoured. KUBERNETES_BINARIES names a directory that has the four programs already.
set -euo pipefail
cd "$(dirname "$0")/../../.."

place=$PWD/build/cluster
programs=$place/debian
binaries=$place/bin
version=1.20.5+really1.20.2-1.1+deb12u1
wanted=(kube-apiserver kube-controller-manager kube-scheduler kubelet)
packages=(busybox-static containerd containernetworking-plugins etcd-server runc)
# Where this machine's own packages come from, unless DEBIAN_MIRROR names another place.
# shellcheck disable=SC2016 # the words of apt-get's format
mirror=${DEBIAN_MIRROR:-$(apt-get indextargets --format '$(REPO_URI)' "Codename: bookworm" "Created-By: Packages" | head -n 1)}
: "${mirror:?apt knows no source of Debian bookworm; set DEBIAN_MIRROR}"
mkdir -p "$programs" "$binaries"

download() (
    mkdir -p "$place/packages"
    cd "$place/packages"
    apt-get download -qq "$@" >/dev/null 2>&1 || { apt-get update -qq && apt-get download -qq "$@"; } >/dev/null
    for name in "$@"; do dpkg -x "$name"_*.deb "$programs"; done
    rm -r "$place/packages"
)

# Lists of Debian's sources are read in a place of their own, as few machines have any.
unpack_sources() (
    own=$place/apt
    mkdir -p "$own/lists/partial"
    echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror bookworm main" >"$own/sources.list"
    apt=(apt-get -qq -o "Dir::Etc::sourcelist=$own/sources.list" -o Dir::Etc::sourceparts=/dev/null -o "Dir::State::lists=$own/lists"
        -o Dir::Cache::pkgcache= -o Dir::Cache::srcpkgcache= -o APT::Sandbox::User=root)
    "${apt[@]}" update
    cd "$place"
    "${apt[@]}" source --tar-only --download-only "kubernetes=$version"
    mkdir -p "$1"
    tar -xzf "kubernetes_${version%-*}.orig.tar.gz" -C "$1" --strip-components 1
    rm -rf "$own" "$place"/kubernetes_*
)

# Debian's sources lack what is generated of them.
write_openapi() {
    local directories
    directories=$(cd vendor && grep -RlE '^// \+k8s:openapi-gen=' --include='*.go' k8s.io/ | xargs -n 1 dirname | sort -u |
        grep -vE '^k8s.io/(sample|code-generator|kube-openapi)|testdata' | sed 's|^|k8s.io/kubernetes/vendor/|' | paste -sd,)
    go build -o "$place/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    "$place/openapi-gen" --input-dirs "$directories" -O zz_generated.openapi --output-package k8s.io/kubernetes/pkg/generated/openapi \
        --output-base "$GOPATH/src" -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt --report-filename "$place/report"
}

build() {
    echo "setup: building Kubernetes below build/cluster, once; this takes a quarter of an hour"
    download golang-1.19-go golang-1.19-src
    export GO111MODULE=off GOFLAGS='' GOPATH=$place/go GOCACHE=$place/go-cache PATH=$programs/usr/lib/go-1.19/bin:$PATH
    local sources=$GOPATH/src/k8s.io/kubernetes told=k8s.io/kubernetes/vendor/k8s.io/component-base/version
    rm -rf "$sources"
    unpack_sources "$sources"
    cd "$sources"
    write_openapi
    go build -o "$binaries" -ldflags "-s -w -X $told.gitVersion=v1.20.2 -X $told.gitMajor=1 -X $told.gitMinor=20" "${wanted[@]/#/./cmd/}"
    cd "$OLDPWD"
    rm -rf "$GOPATH" "$GOCACHE" "$place/openapi-gen" "$place/report" "$programs"/usr/{lib,share}/go-1.19
}

[ "$(id -u)" = 0 ] || { echo "a cluster needs root" >&2; exit 1; }
download "${packages[@]}"
command -v kubectl >/dev/null || download kubernetes-client
for name in "${wanted[@]}"; do
    if [ -x "${KUBERNETES_BINARIES:-}/$name" ]; then cp "$KUBERNETES_BINARIES/$name" "$binaries"; fi
done
for name in "${wanted[@]}"; do
    [ -x "$binaries/$name" ] || { build; break; }
done

# What every pod's namespaces are held by.
export BUILDAH_ISOLATION=chroot
buildah=(buildah --root "$place/images" --runroot "$place/images-run" --storage-driver vfs)
container=$("${buildah[@]}" from scratch)
"${buildah[@]}" copy -q "$container" "$programs/bin/busybox" /bin/busybox >/dev/null
"${buildah[@]}" config --entrypoint '["/bin/busybox", "sleep", "1000000"]' "$container"
"${buildah[@]}" commit -q --rm "$container" localhost/pause:1 >/dev/null
rm -f "$place/pause.tar"
"${buildah[@]}" push -q localhost/pause:1 "docker-archive:$place/pause.tar:localhost/pause:1"
rm -rf "$place/images" "$place/images-run"
touch "$place/.ready"
