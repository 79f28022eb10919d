"""What the page's tests need: a browser, the daemon under its load, and a way to ask the browser for facts."""

import json
import os
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.acceptance.serving import ROOT, Serving

BUILD = ROOT / "build" / "ui"
LOOK = Path(__file__).with_name("look.mjs")
SECONDS_MAX = 120


def browser() -> str:
    """Return the path of a Chromium, which is installed if missing."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        packages = ["chromium", "fonts-dejavu-core"]
        install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *packages]
        environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
        if subprocess.run(install, env=environment, capture_output=True, check=False).returncode:
            subprocess.run(["apt-get", "update", "-qq"], capture_output=True, check=True)
            subprocess.run(install, env=environment, capture_output=True, check=True)
        found = shutil.which("chromium")
    assert found, "there is no Chromium, and none could be installed"
    if not (BUILD / "node_modules" / "playwright-core").is_dir():
        BUILD.mkdir(parents=True, exist_ok=True)
        command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", ".", "playwright-core"]
        subprocess.run(command, cwd=BUILD, capture_output=True, check=True)
    return found


class Eyes:
    """One browser that takes orders and reports what it sees."""

    def __init__(self, url: str, token: str) -> None:
        """Start the browser, which shows the token when the daemon asks for one."""
        self._url = url
        self._token = token
        self._browser = browser()
        self._process = subprocess.Popen(
            ["node", str(LOOK)], cwd=BUILD, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def look(
        self, *acts: tuple[object, ...], path: str = "/ui", misses: str = "", **view: Any
    ) -> list[Any]:
        """Reload the page, act, and return each act's result; a script error or a file of another host fails.

        `misses` are messages that the browser may log about failed requests.
        """
        job = {
            "url": f"{self._url}{path}#token={self._token}",
            "browser": self._browser,
            "acts": acts,
            **view,
        }
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        found = json.loads(self._process.stdout.readline())
        assert "failure" not in found, found["failure"]
        wrong = [one for one in found["errors"] if not (misses and misses in one)]
        assert wrong == [], wrong
        assert all(one.startswith(self._url) for one in found["requests"]), found["requests"]
        facts: list[Any] = found["facts"]
        return facts

    def close(self) -> None:
        """End the browser."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(SECONDS_MAX)
        self._process.stdout.close()


@contextmanager
def loaded(directory: Path) -> Iterator[tuple[str, str, str]]:
    """Run a daemon and its load; give its page's address, a reader's token, and its local address."""
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    options += ["--lease-seconds", "4", "--heartbeat-seconds", "2"]
    serving = Serving(directory / "run", *options)
    try:
        serving.wait_until_ready()
        http = address_of(Path(serving.log.name))
        joiner, reader = (
            (directory / "run" / f"{role}.token").read_text().strip()
            for role in ("joiner", "reader")
        )
        command = [sys.executable, "-m", "tests.deploy.ui.load", serving.address("unix"), http]
        command.append(joiner)
        with subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as load:
            assert load.stdin is not None
            assert load.stdout is not None
            assert load.stdout.readline() == "running\n"
            serving.until(lambda: _is_quarantined(http, reader))
            yield http, reader, serving.address("unix")
            load.stdin.close()
            load.wait(SECONDS_MAX)
    finally:
        serving.stop()


def address_of(log: Path) -> str:
    """Return the address of REST on TCP that a daemon wrote to its log."""
    (found,) = {
        json.loads(line)["rest_on_tcp"]
        for line in log.read_text().splitlines()
        if line.startswith("{") and "rest_on_tcp" in line
    }
    return str(found)


def _is_quarantined(http: str, token: str) -> bool:
    """Tell whether the worker that vanished has been noticed."""
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{http}/ui/data/map?cache=llama-8b", headers={"Authorization": f"Bearer {token}"}
    )
    with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - loopback
        head, _, planes = answer.read().partition(b"\n")
    told = json.loads(head)
    return told["looks"].index("quarantined") in planes[: told["num_cells"]]
