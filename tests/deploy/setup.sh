#!/usr/bin/env bash
# Make build/venv-deploy with what the checks of charts, images and units need. PIP_FIND_LINKS, PIP_INDEX_URL and PIP_CERT are
# honoured. systemd-analyze comes from Debian where it is not there and can be had.
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

if ! command -v systemd-analyze >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y -qq --no-install-recommends systemd >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends systemd; } >/dev/null
fi
bash tests/deploy/setup-api.sh
touch "$venv/.ready"
