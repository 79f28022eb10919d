"""Daemon and Prometheus in a network of their own: `alone.py FOLDER PROMETHEUS CONFIGURATION HOST` tells of both.

It is started in namespaces of a user, of mounts and of a network, so that every port is free, and names are as
FOLDER/hosts says. The daemon opens its probes at HOST.
"""

import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

PROMETHEUS = "http://127.0.0.1:9090/api/v1"
SECONDS_MAX = 60.0


def main(folder: Path, prometheus: str, configuration: str, host: str) -> None:
    """Run both, and print targets and alerts once all were looked at."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)
    serve = [sys.executable, "-m", "kvleased", "serve", "--runtime-dir", str(folder / "run")]
    serve += ["--no-listen-tcp", "--probe-host", host]
    watch = [prometheus, f"--config.file={configuration}"]
    watch += [f"--storage.tsdb.path={folder / 'samples'}", "--web.listen-address=127.0.0.1:9090"]
    with (folder / "log").open("wb") as log, ExitStack() as stack:
        daemon = _running(serve, log, stack)
        _until(lambda: _ask(f"http://{host}:7072/readyz") == b"ready\n", daemon)
        _until(_is_looked_at, _running(watch, log, stack))
        found = {
            "targets": _told("targets")["activeTargets"],
            "alerts": _told("alerts")["alerts"],
        }
    sys.stdout.write(json.dumps(found))


def _running(command: list[str], log: IO[bytes], stack: ExitStack) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(command, stdout=log, stderr=log)
    stack.callback(process.wait)
    stack.callback(process.terminate)
    return process


def _until(is_done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS_MAX
    while not is_done():
        assert process.poll() is None, "it ended"
        assert time.monotonic() < end, "what is waited for does not come"
        time.sleep(0.2)


def _is_looked_at() -> bool:
    """Whether each target was scraped, and each rule evaluated since."""
    targets = _told("targets").get("activeTargets", [])
    rules = [rule for group in _told("rules").get("groups", []) for rule in group["rules"]]
    if not targets or not rules or any(one["health"] == "unknown" for one in targets):
        return False
    scraped = max(one["lastScrape"] for one in targets)
    return all(rule["health"] == "ok" and rule["lastEvaluation"] > scraped for rule in rules)


def _told(what: str) -> dict[str, Any]:
    answer = json.loads(_ask(f"{PROMETHEUS}/{what}") or b"{}")
    found: dict[str, Any] = answer.get("data") or {}
    return found


def _ask(url: str) -> bytes:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - loopback
            found: bytes = answer.read()
            return found
    except OSError:
        return b""


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
