"""Run daemon and Prometheus in a network of their own: `alone.py FOLDER PROMETHEUS CONFIGURATION HOST`.

It is started in user, mount and network namespaces, so that every port is free and host names are those of
FOLDER/hosts. The daemon opens its probes at HOST.
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
    """Run both, and print targets and alerts once all have been evaluated."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["mount", "--bind", folder / "hosts", "/etc/hosts"], check=True)
    serve = [sys.executable, "-m", "kvleased", "serve", "--runtime-dir", str(folder / "run")]
    serve += ["--no-listen-tcp", "--probe-host", host]
    watch = [prometheus, f"--config.file={configuration}"]
    watch += [f"--storage.tsdb.path={folder / 'samples'}", "--web.listen-address=127.0.0.1:9090"]
    with (folder / "log").open("wb") as log, ExitStack() as stack:
        daemon = _running(serve, log, stack)
        _until(lambda: _ask(f"http://{host}:7072/readyz") == b"ready\n", daemon)
        watcher = _running(watch, log, stack)
        _until(_is_scraped, watcher)
        # The first evaluation may have begun before there were samples.
        for _ in range(2):
            before = _evaluations()
            _until(lambda before=before: _is_evaluated_since(before), watcher)  # type: ignore[misc]
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


def _is_scraped() -> bool:
    """Tell whether each target was scraped and each rule evaluated."""
    targets, evaluations = _told("targets").get("activeTargets", []), _evaluations()
    return bool(
        targets and evaluations and all(one["health"] != "unknown" for one in targets)
    ) and all(is_well for is_well, _ in evaluations)


def _is_evaluated_since(before: list[tuple[bool, str]]) -> bool:
    """Tell whether each rule has been evaluated again without an error."""
    pairs = zip(before, _evaluations(), strict=True)
    return all(is_well and at > earlier for (_, earlier), (is_well, at) in pairs)


def _evaluations() -> list[tuple[bool, str]]:
    """Return for each rule whether its last evaluation succeeded, and when it was."""
    groups = _told("rules").get("groups", [])
    rules = [rule for group in groups for rule in group["rules"]]
    return [(rule["health"] == "ok", rule["lastEvaluation"]) for rule in rules]


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
