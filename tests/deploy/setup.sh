#!/usr/bin/env bash
# Make build/venv-deploy with what the checks of charts, images and units need, and build/containers with the image that images
# are built from. PIP_FIND_LINKS, PIP_INDEX_URL, PIP_CERT and DEBIAN_MIRROR are honoured.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-deploy
uv=$(command -v uv || echo .venv/bin/uv)
sources=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"})
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"; fi
if [ -n "${PIP_DEFAULT_TIMEOUT:-}" ]; then export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-$PIP_DEFAULT_TIMEOUT}"; fi

mkdir -p build
[ -x "$venv/bin/python" ] || "$uv" venv -q --python .venv/bin/python "$venv"
"$uv" pip install -q -p "$venv/bin/python" "${sources[@]}" -r tests/deploy/requirements.txt

# What brings versions of its own of everything has a place of its own.
[ -x build/venv-checkov/bin/python ] || "$uv" venv -q --python .venv/bin/python build/venv-checkov
"$uv" pip install -q -p build/venv-checkov/bin/python "${sources[@]}" checkov==3.3.30

# What Debian has of it, where it is Debian and ours; the tests say what they miss elsewhere.
wanted=(buildah catatonit conmon mmdebstrap podman runc systemd)
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! dpkg-query -W "${wanted[@]}" >/dev/null 2>&1; then
    export DEBIAN_FRONTEND=noninteractive
    apt-get install -y -qq --no-install-recommends "${wanted[@]}" >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends "${wanted[@]}"; } >/dev/null
fi
bash tests/deploy/setup-api.sh
bash tests/deploy/containers/base.sh
touch "$venv/.ready"
