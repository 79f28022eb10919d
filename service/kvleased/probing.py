"""Own the probe of a container: it asks cheaply whether a daemon is live, ready or started."""

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from kvlease._output import written_or_refused
from kvlease._runtime import ADDRESS_VARIABLE, runtime_directory

PROBES: Final = ("livez", "readyz", "startupz")
_DEADLINE_SECONDS: Final = 2.0
_ANSWER_BYTES_MAX: Final = 4096
_USAGE: Final = (
    f"usage: kvleased probe [{'|'.join(PROBES)}]\n"
    f"It asks the http.sock beside the socket of {ADDRESS_VARIABLE}, where that is unix://..., else the one in the "
    "runtime directory.\n"
)
_HELP: Final = frozenset({"-h", "--help"})
_LOCAL_SCHEME: Final = "unix://"


def run(argv: Sequence[str]) -> int:
    """Ask one probe, `livez` by default, over the Unix socket of REST; return 0 if the answer is good."""
    if argv and argv[0] in _HELP:
        with written_or_refused("kvleased"):
            sys.stdout.write(_USAGE)
        return 0
    probe = argv[0] if argv else PROBES[0]
    if probe not in PROBES or len(argv) > 1:
        wrong = (
            f"{probe!r} is not a probe"
            if probe not in PROBES
            else "only one probe can be asked at a time"
        )
        sys.stderr.write(f"kvleased probe: {wrong}\n{_USAGE}")
        return 2
    try:
        answer = _ask(probe)
    except OSError as error:
        sys.stderr.write(f"kvleased: {_socket()}: {error.strerror or error}\n")
        return 1
    head, _, body = answer.partition("\r\n\r\n")
    with written_or_refused("kvleased"):
        sys.stdout.write(body)
    return 0 if head.split(" ", 2)[1:2] == ["200"] else 1


def _ask(probe: str) -> str:
    head = f"GET /{probe} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    with socket.socket(socket.AF_UNIX) as asking:
        asking.settimeout(_DEADLINE_SECONDS)
        asking.connect(str(_socket()))
        asking.sendall(head.encode())
        answer = b""
        while len(answer) < _ANSWER_BYTES_MAX and (part := asking.recv(_ANSWER_BYTES_MAX)):
            answer += part
    return answer.decode(errors="replace")


def _socket() -> Path:
    """Return the socket that the environment or the defaults name, without the cost of reading all settings."""
    address = os.environ.get(ADDRESS_VARIABLE, "")
    is_local = address.startswith(_LOCAL_SCHEME)
    directory = (
        Path(address.removeprefix(_LOCAL_SCHEME)).parent if is_local else runtime_directory()
    )
    return directory / "http.sock"
