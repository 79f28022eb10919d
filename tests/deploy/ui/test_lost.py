"""The page over a daemon that ends and comes back: what it shows is marked as old meanwhile."""

import socket
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest

from tests.acceptance.serving import Serving
from tests.deploy.ui.browsing import Eyes

pytestmark = pytest.mark.deploy

OPACITY = "Number(getComputedStyle(document.querySelector('main')).opacity)"


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
