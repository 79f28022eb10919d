"""Own `make observability`: a real Prometheus over a daemon on this machine, with the rules and alerts that lie here.

If no daemon answers, one is started; what was started here ends with this program.
"""

import argparse
import contextlib
import json
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from kvlease._runtime import runtime_directory

ROOT: Final = Path(__file__).parents[2]
RULES: Final = Path(__file__).parent
SECONDS_TO_START: Final = 60.0
_POLL_SECONDS: Final = 0.1


def main() -> int:
    """Run until a signal comes."""
    parser = argparse.ArgumentParser(description="Run Prometheus over a daemon on this machine.")
    parser.add_argument(
        "--daemon", default="http://127.0.0.1:7070", help="where its REST listens on TCP"
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        default=runtime_directory() / "reader.token",
        help="file of the token by which Prometheus reads",
    )
    parser.add_argument("--port", type=int, default=9090, help="port of Prometheus on loopback")
    parser.add_argument("--interval-seconds", type=int, default=5, help="seconds between scrapes")
    parser.add_argument("--directory", type=Path, default=ROOT / "build" / "observability")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with contextlib.ExitStack() as stack:
        if not _answers(f"{arguments.daemon}/livez"):
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


def _prometheus(arguments: argparse.Namespace) -> list[str]:
    directory: Path = arguments.directory
    directory.mkdir(parents=True, exist_ok=True)
    configuration = directory / "prometheus.yml"
    seconds = f"{arguments.interval_seconds}s"
    # JSON is YAML, too.
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
                        "authorization": {"credentials_file": str(arguments.token_file)},
                        "static_configs": [{"targets": [arguments.daemon.removeprefix("http://")]}],
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
    """Return Prometheus: the machine's own, or Debian's, unpacked below build/."""
    found = shutil.which("prometheus")
    if found is None:
        sys.path.insert(0, str(ROOT))
        from tests.servers import debian  # noqa: PLC0415 - only where it is needed

        found = debian.program("prometheus", ("prometheus",))
    return found


@contextlib.contextmanager
def _running(command: list[str], url: str) -> "Iterator[subprocess.Popen[bytes]]":
    """Run a process, which answers at an address when it is ready."""
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
    try:
        with urllib.request.urlopen(url, timeout=2):  # noqa: S310 - loopback
            return True
    except OSError:
        return False


if __name__ == "__main__":
    sys.exit(main())
