"""The page over many caches with long names: it says what it leaves out, and nothing is pushed off its card."""

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import CacheOptions, Client, KVLeaseError
from tests.acceptance.serving import Serving
from tests.deploy.ui.browsing import Eyes, address_of
from tests.deploy.ui.load import inputs_of

pytestmark = pytest.mark.deploy

NUMBERS = (1, *range(3, 11))
"""The numbers in the names of all caches but one."""
LONGEST = "w" * 63
"""The longest name of a cache, of one word."""
TENANT = "t" * 128
"""The longest name of a tenant."""
BESIDE = """['#leases', '#tenants', '#movers', '#refusals', '#ghosts'].map((one) => {
    const { scrollWidth, clientWidth } = document.querySelector(one);
    return scrollWidth - clientWidth;
})"""
"""How many pixels of each list lie beside its card."""


@pytest.fixture(scope="module")
def eyes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eyes]:
    """Give a browser that looks at ten caches of two pools each; one cache and one tenant have the longest names."""
    directory = tmp_path_factory.mktemp("many")
    serving = Serving(directory / "run", "--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    try:
        serving.wait_until_ready()
        token = (directory / "run" / "reader.token").read_text().strip()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(Client(serving.address("unix"), on_doubt="raise"))
            for name in (LONGEST, *(f"cache-{number}" for number in NUMBERS)):
                client.register(name, inputs_of(name, 100, 50), CacheOptions(ghosts=("adaptive",)))
            serving.until(lambda: client.get_cache(LONGEST).status == "ready")
            worker = stack.enter_context(client.attach(LONGEST, tenant=TENANT))
            worker.reserve("request", num_tokens=160)
            younger = stack.enter_context(client.attach("cache-1"))
            younger.reserve("request", num_tokens=16)
            with pytest.raises(KVLeaseError):
                worker.reserve("never", num_tokens=10**6)
            made = Eyes(address_of(Path(serving.log.name)), token)
            yield made
            made.close()
    finally:
        serving.stop()


@pytest.mark.parametrize("width", [641, 1024, 1360])
def test_long_names_push_no_column_off_its_card(eyes: Eyes, width: int) -> None:
    """A long name of one word breaks, and the columns beside it are seen."""
    *_, lists, page = eyes.look(
        ("wait", "#leases tbody tr"),
        ("wait", "#refusals tbody tr"),
        ("check", "input[value=tenant]"),
        ("evaluate", BESIDE),
        ("overflow",),
        width=width,
    )

    assert lists == [0] * 5
    assert page <= 0


@pytest.mark.parametrize("by", ["state", "tenant", "cache"])
def test_long_names_fit_a_phone(eyes: Eyes, by: str) -> None:
    """On a phone nothing leaves the screen, whatever the caches and tenants are called."""
    found = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("check", f"input[value={by}]"),
        (
            "evaluate",
            "document.querySelectorAll('details.fold').forEach((one) => { one.open = true; })",
        ),
        ("overflow",),
        width=360,
        height=740,
        mobile=True,
    )

    assert found[-1] <= 0


def test_leases_of_all_caches_are_listed_by_their_age(eyes: Eyes) -> None:
    """The oldest lease is first, whatever its cache is called."""
    _, first, second = eyes.look(
        ("wait", "#leases tbody tr >> nth=1"),
        ("text", "#leases tbody tr >> nth=0"),
        ("text", "#leases tbody tr >> nth=1"),
    )

    assert LONGEST in first
    assert "cache-1" in second


def test_pools_without_a_picture_are_told(eyes: Eyes) -> None:
    """The page says how many of the pools its map shows; a chosen cache is shown as a whole."""
    _, shown, told = eyes.look(
        ("wait", "canvas.map >> nth=15"),
        ("count", "canvas.map"),
        ("text", "#map-cut"),
    )
    _, own, hidden = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("count", "canvas.map"),
        ("count", "#map-cut[hidden]"),
        path=f"/ui?cache={LONGEST}",
    )

    assert (shown, own, hidden) == (16, 2, 1)
    assert told == "Here are 16 of 20 pools; choose a cache to see its own."


def test_numbers_in_names_are_ordered_as_numbers(eyes: Eyes) -> None:
    """Pools of the map, and the caches to choose from, are ordered as people count."""
    _, pools, choices = eyes.look(
        ("wait", "canvas.map >> nth=15"),
        (
            "evaluate",
            "[...document.querySelectorAll('#pools .pool-row .what')].map((one) => one.textContent)",
        ),
        ("evaluate", "[...document.querySelectorAll('#cache option')].map((one) => one.value)"),
    )

    shown = [number for text in pools for number in re.findall(r"cache-(\d+)", text)]
    assert shown == sorted(shown, key=int)
    assert {"1", "10"} < set(shown)
    assert choices == ["", *(f"cache-{number}" for number in NUMBERS), LONGEST]


def test_lines_of_ghosts_are_explained_once(eyes: Eyes) -> None:
    """What the lines of ghost caches mean is said once, not for each cache."""
    _, lines, helps = eyes.look(
        ("wait", "#ghosts .ghost"),
        ("count", "#ghosts .ghost"),
        ("count", "p.hint:visible:has-text('compare a ghost')"),
    )

    assert (lines, helps) == (len(NUMBERS) + 1, 1)
