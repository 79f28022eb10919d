#!/usr/bin/env bash
# Have what the checks of the API need: schemathesis in build/venv-schemathesis, buf in build/buf. npm comes from Debian where it is
# not there and can be had. PIP_FIND_LINKS, PIP_INDEX_URL and npm's own settings are honoured.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=build/venv-schemathesis
uv=$(command -v uv || echo .venv/bin/uv)
sources=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"})
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"; fi

mkdir -p build/buf
[ -x "$venv/bin/python" ] || "$uv" venv -q --python .venv/bin/python "$venv"
"$uv" pip install -q -p "$venv/bin/python" "${sources[@]}" schemathesis==4.32.5

if ! command -v npm >/dev/null && [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    apt-get install -y -qq --no-install-recommends npm >/dev/null 2>&1 ||
        { apt-get update -qq && apt-get install -y -qq --no-install-recommends npm; } >/dev/null
fi
npm install --silent --no-fund --no-audit --prefix build/buf @bufbuild/buf@1.75.0
