"""The page when another cache comes to be shown, by choice or because one was deleted, and with many tenants."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvlease import Client, Worker
from tests.acceptance.serving import Serving
from tests.deploy.ui.browsing import Eyes, address_of
from tests.deploy.ui.load import inputs_of

pytestmark = pytest.mark.deploy

NUM_TENANTS = 30
"""More than the legend has room for."""
HELD = (0, 121, 91)
"""How blocks in use look in the light."""

TALL_BARS = """[...document.querySelectorAll('.flow canvas')].some((canvas) => {
    const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height / 2);
    return data.some((value, at) => at % 4 === 3 && value > 0);
})"""
"""Whether any bar of the transfers is more than a line on the ground."""
SEES_HELD = f"""(() => {{
    const canvas = document.querySelector('#usage');
    const {{ data }} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
    let seen = 0;
    for (let at = 0; at < data.length; at += 4) {{
        seen += data[at] === {HELD[0]} && data[at + 1] === {HELD[1]} && data[at + 2] === {HELD[2]};
    }}
    return seen;
}})()"""
"""How many pixels of the timeline of use show blocks in use."""


@pytest.fixture(scope="module")
def looking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Eyes, Client]]:
    """Give a browser over a daemon with a cache `busy`, whose blocks come and go, and a cache `still`."""
    directory = tmp_path_factory.mktemp("switching")
    serving = Serving(directory / "run", "--listen-tcp", "--http-port", "0", "--grpc-port", "0")
    ended = threading.Event()
    try:
        serving.wait_until_ready()
        token = (directory / "run" / "reader.token").read_text().strip()
        with contextlib.ExitStack() as stack:
            client = stack.enter_context(Client(serving.address("unix"), on_doubt="raise"))
            workers = {}
            for name in ("busy", "still"):
                _register(client, serving, name)
                workers[name] = stack.enter_context(client.attach(name))
                _move(workers[name], 0)
            beside = threading.Thread(target=_come_and_go, args=(workers["busy"], ended))
            beside.start()
            stack.callback(beside.join)
            stack.callback(ended.set)
            made = Eyes(address_of(Path(serving.log.name)), token)
            stack.callback(made.close)
            yield made, client
    finally:
        serving.stop()


def test_transfers_of_another_cache_are_not_shown(looking: tuple[Eyes, Client]) -> None:
    """The bars of a cache that is chosen are its own, and not those of what was shown before."""
    eyes, _ = looking

    *_, before, _, _, after = eyes.look(
        ("wait", ".flow canvas"),
        ("pause", 4000),
        ("evaluate", TALL_BARS),
        ("select", "#cache", "still"),
        ("pause", 2500),
        ("evaluate", TALL_BARS),
    )

    assert before
    assert not after


def test_use_of_a_deleted_cache_is_no_part_of_the_others(looking: tuple[Eyes, Client]) -> None:
    """When the chosen cache is deleted, the timelines of all others begin anew."""
    eyes, client = looking
    client.register("going", inputs_of("going", 100, 50))
    worker = client.attach("going")
    keys = worker.keys.chain(list(range(1600)), 16)
    lease = worker.reserve("all", keys=keys, num_tokens=1600, wait_ms=5000)
    lease.commit(1600, keys)

    def delete() -> None:
        lease.release()
        worker.close()
        client.delete_cache("going")

    deleting = threading.Timer(8, delete)
    deleting.start()
    *_, before, _, _, after = eyes.look(
        ("wait", "#tiles .tile"),
        ("pause", 3000),
        ("evaluate", SEES_HELD),
        ("wait", "#notice:has-text('there is no cache going')"),
        ("pause", 1500),
        ("evaluate", SEES_HELD),
        path="/ui?cache=going",
    )
    deleting.join()

    assert before > 0
    assert after == 0


def test_legend_names_the_tenants_with_the_most_blocks(looking: tuple[Eyes, Client]) -> None:
    """Of more tenants than the legend has room for, it names those that have blocks, and counts the others."""
    eyes, client = looking
    with contextlib.ExitStack() as stack:
        for number in range(NUM_TENANTS):
            stack.enter_context(client.attach("still", tenant=f"tenant-{number:02}"))
        last = stack.enter_context(client.attach("still", tenant="zest"))
        last.reserve("some", num_tokens=160)

        *_, words = eyes.look(
            ("wait", "canvas.map"),
            ("check", "input[value=tenant]"),
            ("pause", 1500),
            ("text", "#legend"),
            path="/ui?cache=still",
        )

    assert "zest" in words
    assert "more tenants" in words


def test_paused_page_offers_no_other_cache(looking: tuple[Eyes, Client]) -> None:
    """While the page is paused another cache cannot be chosen, as its figures would not come."""
    eyes, _ = looking

    *_, paused, _, going = eyes.look(
        ("wait", "#tiles .tile"),
        ("click", "#pause"),
        ("count", "#cache:disabled"),
        ("click", "#pause"),
        ("count", "#cache:disabled"),
    )

    assert (paused, going) == (1, 0)


def test_tenant_that_joins_changes_no_block_of_others(looking: tuple[Eyes, Client]) -> None:
    """A block of a tenant is unchanged when another tenant comes whose name is before its own."""
    eyes, client = looking
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(client.attach("still", tenant="middle"))
        worker.reserve("all", num_tokens=1600, wait_ms=5000)
        joining = threading.Timer(
            5, lambda: stack.enter_context(client.attach("still", tenant="first"))
        )
        joining.start()
        *_, words = eyes.look(
            ("wait", "canvas.map"),
            ("pause", 8000),
            ("focus", "canvas.map"),
            ("press", "Home"),
            ("wait", "#tip dt:has-text('Lease')"),
            ("text", "#tip"),
            path="/ui?cache=still",
        )
        joining.join()

    assert "middle" in words
    assert "since the page was opened" in words


def test_what_comes_changes_neither_colours_nor_the_place_of_the_keyboard(
    looking: tuple[Eyes, Client],
) -> None:
    """A tenant and a cache whose names are first leave others their colours, and the map under the cursor its keys."""
    eyes, client = looking
    colour = """[...document.querySelectorAll("#legend li")]
        .find((one) => one.textContent.startsWith("middle")).firstChild.style.background"""
    with contextlib.ExitStack() as stack:
        worker = stack.enter_context(client.attach("still", tenant="middle"))
        worker.reserve("some", num_tokens=160, wait_ms=5000)

        def join() -> None:
            stack.enter_context(client.attach("still", tenant="first"))
            client.register("a", inputs_of("a", 100, 50))
            stack.callback(client.delete_cache, "a")

        joining = threading.Timer(6, join)
        joining.start()
        *_, before, _, _, _, _, focused, after = eyes.look(
            ("wait", "canvas.map"),
            ("check", "input[value=tenant]"),
            ("wait", "#legend li:has-text('middle')"),
            ("evaluate", colour),
            ("focus", "canvas.map >> nth=-1"),
            ("press", "End"),
            ("wait", "#pools .pool-row:first-child:has-text('a · device')"),
            ("wait", "#legend li:has-text('first')"),
            ("focused",),
            ("evaluate", colour),
        )
        joining.join()

    assert focused == "canvas.map"
    assert before == after


def test_tip_follows_its_block(looking: tuple[Eyes, Client]) -> None:
    """What is told of the block under the pointer is told anew when its lease has ended."""
    eyes, client = looking
    with client.attach("still") as worker:
        lease = worker.reserve("all", num_tokens=1600, wait_ms=5000)
        releasing = threading.Timer(5, lease.release)
        releasing.start()
        eyes.look(
            ("wait", "canvas.map"),
            ("hover", "canvas.map", 10, 10),
            ("wait", "#tip:has-text('Lease')"),
            ("wait", "#tip:not(:has-text('Lease')):has-text('free')"),
            path="/ui?cache=still",
        )
        releasing.join()


def test_refusals_of_a_deleted_cache_are_not_taken_back(looking: tuple[Eyes, Client]) -> None:
    """There are never less than no refusals a second, though those of a deleted cache's steps are told no more."""
    eyes, _ = looking
    sums = """import("/ui/sums.js").then((sums) => [9, 3].map((count) => sums.grownRefusals(
        [{ cache: "b", count: 1 }, { cache: "b", count }], [{ cache: "a", count: 4 }, { cache: "b", count: 1 }],
      )))"""

    assert eyes.look(("evaluate", sums))[-1] == [5, 0]


def _register(client: Client, serving: Serving, name: str) -> None:
    client.register(name, inputs_of(name, 100, 50))
    serving.until(lambda: client.get_cache(name).status == "ready")


def _come_and_go(worker: Worker, ended: threading.Event) -> None:
    number = 0
    while not ended.wait(0.2):
        number += 1
        _move(worker, number)


def _move(worker: Worker, number: int) -> None:
    """Commit some blocks that are new, and have them copied to the host pool."""
    tokens = [number * 1000 + at for at in range(160)]
    keys = worker.keys.chain(tokens, 16)
    with worker.reserve(f"request-{number}", keys=keys, num_tokens=160, wait_ms=5000) as lease:
        lease.commit(160, keys)
    worker.evict(keys=keys)
