"""Own `make observability`: a real Prometheus over a daemon on this machine, with this folder's rules and alerts.

The daemon is the one that KVLEASE_ADDRESS names, if it is set. If none is named and none answers, one is started. All
that is started here ends with this program.
"""

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvlease._runtime import ADDRESS_VARIABLE, PAGE_FILE, runtime_directory
from kvlease.credentials import CA_FILE_VARIABLE, TOKEN_FILE_VARIABLE, from_environment
from kvlease.errors import InvalidError
from kvlease.transports.base import parse_address

ROOT: Final = Path(__file__).parents[2]
RULES: Final = Path(__file__).parent
DEFAULT: Final = "http://127.0.0.1:7070"
"""Default REST address of a daemon, such as of one that is started here."""
SECONDS_TO_START: Final = 60.0
_POLL_SECONDS: Final = 0.1


def main() -> int:
    """Run until a signal comes."""
    parser = argparse.ArgumentParser(description="Run Prometheus over a daemon on this machine.")
    parser.add_argument(
        "--daemon",
        default="",
        help=f"where its REST, or its probes, listen on TCP; else {ADDRESS_VARIABLE}, where that is http or https, or "
        f"what the daemon left beside its socket; else {DEFAULT}",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help=f"file of the token by which Prometheus reads; else {TOKEN_FILE_VARIABLE}, else reader.token beside the "
        "socket",
    )
    parser.add_argument("--port", type=int, default=9090, help="port of Prometheus on loopback")
    parser.add_argument("--interval-seconds", type=int, default=5, help="seconds between scrapes")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "observability")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    known = "" if arguments.daemon else os.environ.get(ADDRESS_VARIABLE, "")
    try:
        _choose(arguments, known)
    except InvalidError as error:
        raise SystemExit(error.message) from error
    with contextlib.ExitStack() as stack:
        if not _answers(f"{arguments.daemon}/livez"):
            if known:
                message = (
                    f"no daemon answers at {arguments.daemon}, by {ADDRESS_VARIABLE}={known}; start it or name "
                    f"another, and where it has TLS, name who signed its certificate by {CA_FILE_VARIABLE}"
                )
                raise SystemExit(message)
            command = [sys.executable, "-m", "kvleased", "serve"]
            stack.enter_context(_running(command, f"{arguments.daemon}/readyz"))
        command = _prometheus(arguments)
        url = f"http://127.0.0.1:{arguments.port}"
        process = stack.enter_context(_running(command, f"{url}/-/ready"))
        sys.stdout.write(f"Prometheus over {arguments.daemon}: {url}/alerts and {url}/graph\n")
        sys.stdout.flush()
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()
    return 0


def _choose(arguments: argparse.Namespace, known: str) -> None:
    """Fill in the daemon's address and its reader's token file where the command line does not give them.

    Raises:
        InvalidError: the environment's address is invalid, or Prometheus cannot read there.
    """
    address = parse_address(known) if known else None
    directory = Path(address.path).parent if address and address.path else runtime_directory()
    if arguments.token_file is None:
        arguments.token_file = Path(
            os.environ.get(TOKEN_FILE_VARIABLE) or directory / "reader.token"
        )
    if arguments.daemon:
        return
    if address and address.protocol == "http" and not address.path:
        arguments.daemon = known.rstrip("/")
        return
    left = "" if address and not address.path else _left_in(directory)
    if known and not left:
        message = (
            f"{ADDRESS_VARIABLE} is {known}, and Prometheus reads over HTTP on TCP alone: start the daemon with "
            f"--listen-tcp, or write where its REST or its probes listen, as {ADDRESS_VARIABLE}=http://HOST:PORT"
        )
        raise InvalidError(message, resource="address")
    # An address that an ended daemon left behind says nothing about the next one.
    arguments.daemon = left if left and (known or _answers(f"{left}/livez")) else DEFAULT


def _left_in(directory: Path) -> str:
    """Return the REST address on TCP that a daemon left beside its sockets, or an empty string."""
    try:
        return (directory / PAGE_FILE).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _prometheus(arguments: argparse.Namespace) -> list[str]:
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    configuration = directory / "prometheus.yml"
    seconds = f"{arguments.interval_seconds}s"
    scheme, _, target = arguments.daemon.partition("://")
    shown = from_environment()
    files = {"ca_file": shown.ca_file, "cert_file": shown.cert_file, "key_file": shown.key_file}
    tls = {name: os.path.abspath(path) for name, path in files.items() if path}  # noqa: PTH100 - no link is followed
    # JSON is valid YAML, too.
    configuration.write_text(
        json.dumps(
            {
                "global": {
                    "scrape_interval": seconds,
                    "scrape_timeout": seconds,
                    "evaluation_interval": seconds,
                },
                "rule_files": [str(RULES / "*rules*.yaml")],
                "scrape_configs": [
                    {
                        "job_name": "kvlease",
                        "scheme": scheme,
                        "authorization": {"credentials_file": str(arguments.token_file.absolute())},
                        **({"tls_config": tls} if scheme == "https" and tls else {}),
                        "static_configs": [{"targets": [target]}],
                    }
                ],
            }
        )
    )
    return [
        _program(),
        f"--config.file={configuration}",
        f"--storage.tsdb.path={directory / 'samples'}",
        f"--web.listen-address=127.0.0.1:{arguments.port}",
        "--log.level=warn",
    ]


def _program() -> str:
    """Return the path of Prometheus: the machine's own, or Debian's, unpacked below build/."""
    found = shutil.which("prometheus")
    if found is None:
        sys.path.insert(0, str(ROOT))
        from tests.servers import debian  # noqa: PLC0415 - only where it is needed

        found = debian.program("prometheus", ("prometheus",))
    return found


@contextlib.contextmanager
def _running(command: list[str], url: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a process, and wait until it answers at the URL."""
    process = subprocess.Popen(command)  # noqa: S603 - our own
    try:
        give_up_at = time.monotonic() + SECONDS_TO_START
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > give_up_at:
                message = f"{Path(command[0]).name} did not start; nothing answers at {url}"
                raise SystemExit(message)
            time.sleep(_POLL_SECONDS)
        yield process
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    context = from_environment().tls() if url.startswith("https:") else None
    # As Prometheus, past the proxies that the environment names for other machines.
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
    )
    try:
        with opener.open(url, timeout=2):
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
