"""The page over a daemon that ends or hangs: it says so, and marks what it shows as old until figures come again."""

import os
import signal
import socket
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.acceptance.serving import Serving
from tests.deploy.ui.browsing import Eyes, address_of

pytestmark = pytest.mark.deploy

OPACITY = "Number(getComputedStyle(document.querySelector('main')).opacity)"

STANDS_STILL = """(async () => {
    try {
        for (;;) await fetch("/livez", { signal: AbortSignal.timeout(500) });
    } catch (error) {
        return error.name;
    }
})()"""
"""Ask until an answer stays away, and return what that ends with."""


def test_picture_without_a_daemon_is_old_until_it_is_back(tmp_path: Path) -> None:
    """When the connection is lost, the page dims its picture and says of when it is, until figures come again."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    serving = Serving(
        tmp_path / "run", "--listen-tcp", "--http-port", str(port), "--grpc-port", "0"
    )
    shown, dimmed = tmp_path / "shown.png", tmp_path / "dimmed.png"
    acts = [
        ("wait", "#tiles .tile"),
        ("evaluate", OPACITY),
        ("text", "#tiles"),
        ("shot", str(shown)),
        ("wait", "main.old"),
        ("evaluate", OPACITY),
        ("text", "#notice"),
        ("shot", str(dimmed)),
        ("wait", "main:not(.old)"),
        ("evaluate", OPACITY),
        ("count", "#notice[hidden]"),
    ]
    try:
        serving.wait_until_ready()
        token = (tmp_path / "run" / "reader.token").read_text().strip()
        eyes = Eyes(f"http://127.0.0.1:{port}", token)
        with ThreadPoolExecutor(1) as beside:
            looking = beside.submit(eyes.look, *acts, misses="net::ERR_")
            serving.until(lambda: shown.exists() or looking.done())
            serving.stop()
            while not (dimmed.exists() or looking.done()):
                wait([looking], timeout=0.02)
            serving.start()
            serving.wait_until_ready()
            _, before, tiles, _, _, lost, words, _, _, after, num_silent = looking.result()
        eyes.close()
    finally:
        serving.stop()

    assert (before, after, num_silent) == (1, 1, 1)
    assert lost < before
    assert "What is shown is old: it is of " in words
    # This daemon has no cache.
    assert "0 of them free" in tiles


def test_token_behind_the_address_of_a_page_that_is_open_is_taken(tmp_path: Path) -> None:
    """An address with the token, entered where the page asks for one, opens the page and does not keep the token."""
    serving = Serving(tmp_path / "run", "--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    try:
        serving.wait_until_ready()
        token = (tmp_path / "run" / "reader.token").read_text().strip()
        eyes = Eyes(address_of(Path(serving.log.name)), "stale")
        *_, words, address = eyes.look(
            ("wait", "#token-form:visible"),
            ("evaluate", f"location.hash = 'token={token}'"),
            ("wait", "#tiles .tile"),
            ("text", "#status"),
            ("evaluate", "location.href"),
            misses="401",
        )
        eyes.close()
    finally:
        serving.stop()

    assert words == "live"
    assert token not in address


def test_page_without_a_cache_says_so(tmp_path: Path) -> None:
    """A page that has no block to point at says why, and speaks of no lease where it has only seen no prompt."""
    serving = Serving(tmp_path / "run", "--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    try:
        serving.wait_until_ready()
        token = (tmp_path / "run" / "reader.token").read_text().strip()
        eyes = Eyes(address_of(Path(serving.log.name)), token)
        *_, help_, hits = eyes.look(
            ("wait", "#tiles .tile"), ("text", "#map-help"), ("text", "#hits-now")
        )
        eyes.close()
    finally:
        serving.stop()

    assert help_.startswith("There is no cache.")
    assert hits == "no prompt seen yet"


def test_page_that_is_resumed_over_a_hanging_daemon_says_so(tmp_path: Path) -> None:
    """A page that connects to a daemon that takes connections but does not answer says so, and tries again."""
    # The supervisor is to leave the control process as it is.
    options = ("--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    serving = Serving(tmp_path / "run", *options, "--control-silent-seconds-max", "0")
    shown = tmp_path / "shown.png"
    acts = [
        ("wait", "#tiles .tile"),
        ("click", "#pause"),
        ("shot", str(shown)),
        ("evaluate", STANDS_STILL),
        ("click", "#pause"),
        ("wait", "#notice:has-text('has not answered')"),
        ("text", "#notice"),
        ("text", "#status"),
    ]
    try:
        serving.wait_until_ready()
        token = (tmp_path / "run" / "reader.token").read_text().strip()
        eyes = Eyes(address_of(Path(serving.log.name)), token)
        with ThreadPoolExecutor(1) as beside:
            looking = beside.submit(eyes.look, *acts)
            serving.until(lambda: shown.exists() or looking.done())
            os.kill(control := serving.control(), signal.SIGSTOP)
            try:
                *_, name, _, _, words, status = looking.result()
            finally:
                os.kill(control, signal.SIGCONT)
        eyes.close()
    finally:
        serving.stop()

    assert (name, status) == ("TimeoutError", "connection lost, trying again")
    assert words.startswith("The daemon has not answered for 8 seconds. What is shown is old: ")
