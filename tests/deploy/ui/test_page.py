"""The page in a real browser over a real daemon under load: it moves, informs, obeys keys, and fits all screens."""

import asyncio
import os
import re
import threading
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from kvlease import Client
from kvlease.cli.top import Moment, Top, read
from tests.deploy.ui.browsing import Eyes, loaded

pytestmark = pytest.mark.deploy

SHOTS = Path(os.environ.get("KVLEASE_SHOTS", ""))
"""Directory for screenshots, such as docs/ui; a temporary one if unset."""
MOMENTS = 45
"""Refreshes of the terminal's screen before it is drawn, to fill its timelines."""
WAIT = ("wait", "canvas.map >> nth=3")
LAST_CELL = """(() => {
    const canvas = document.querySelector("canvas.map");
    return [...canvas.getContext("2d").getImageData(canvas.width - 4, canvas.height - 4, 1, 1).data].slice(0, 3);
})()"""
"""The colour of the last block of the first pool."""
HOLES = """(() => {
    const canvas = document.querySelector("#usage");
    const { data } = canvas.getContext("2d").getImageData(0, canvas.height - 40, canvas.width, 1);
    const painted = [...Array(canvas.width).keys()].filter((column) => data[4 * column + 3]);
    return painted.at(-1) - painted[0] + 1 - painted.length;
})()"""
"""Empty columns of the usage timeline between its first and last points."""
SILENCE = """(async () => {
    const { Stream } = await import("/ui/live.js");
    const told = [];
    const real = window.fetch;
    window.fetch = async () => new Response(new ReadableStream({ start() {} }));
    const stream = new Stream((kind, value) => told.push(value));
    stream.start("");
    await new Promise((done) => setTimeout(done, 8400));
    stream.stop();
    window.fetch = real;
    return told;
})()"""
"""What the page's stream reports of a daemon that answers and then falls silent."""


@pytest.fixture(scope="module")
def http(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str, str]]:
    """Give the address of a daemon under load, the token of a reader, and the local address."""
    with loaded(tmp_path_factory.mktemp("ui")) as found:
        yield found


@pytest.fixture(scope="module")
def eyes(http: tuple[str, str, str]) -> Iterator[Eyes]:
    """Give a browser."""
    url, token, _ = http
    made = Eyes(url, token)
    yield made
    made.close()


@pytest.fixture
def shots(tmp_path: Path) -> str:
    """Give the directory of screenshots."""
    return str(SHOTS.absolute() if SHOTS.name else tmp_path)


def test_map_moves_while_a_load_runs(eyes: Eyes) -> None:
    """The squares change from one look to the next, and a paused page stands still."""
    _, before, _, after, _, _, paused, _, later, said = eyes.look(
        WAIT,
        ("pixels",),
        ("pause", 4000),
        ("pixels",),
        ("click", "#pause"),
        ("pause", 1500),
        ("pixels",),
        ("pause", 2500),
        ("pixels",),
        ("text", "#status"),
    )

    assert before != after
    assert paused == later
    assert said == "paused"


def test_hover_tells_of_a_block(eyes: Eyes, shots: str) -> None:
    """Hovering over a block shows its state, tenant, lease, age and the beginning of its key."""
    acts: list[tuple[object, ...]] = [WAIT, ("pause", 18000)]
    for left in range(200, 440, 30):
        acts += [
            ("hover", "canvas.map >> nth=2", left, 120),
            ("wait", "#tip dt:has-text('Unchanged')"),
            ("pause", 700),
            ("text", "#tip"),
        ]
    acts.append(("shot", f"{shots}/light.png", False))

    tips = eyes.look(*acts)[5:-1:4]

    assert all(re.search(r"Block\s+[\d,]+", tip) for tip in tips)
    told = [tip for tip in tips if "Lease" in tip and "Key" in tip]
    assert told, tips
    assert re.search(r"Key\s+[0-9a-f]{8}… at position \d+", told[0])
    assert re.search(r"Age\s+[\d.]+ (s|min)", told[0])
    assert re.search(r"Tenant\s+(chat|search|batch|default)", told[0])


def test_keys_alone_reach_every_block(eyes: Eyes) -> None:
    """The map is reached with Tab, walked with arrows, read aloud, and left with Escape."""
    acts: list[tuple[object, ...]] = [
        WAIT,
        ("focus", "canvas.map >> nth=2"),
        ("press", "End"),
        ("press", "Home"),
        ("press", "ArrowRight"),
        ("press", "ArrowDown"),
        ("wait", "#tip dt:has-text('Block')"),
        ("pause", 1200),
        ("text", "#tip"),
        ("evaluate", "document.querySelector('#spoken').textContent"),
        ("attribute", "canvas.map >> nth=2", "aria-label"),
        ("press", "Escape"),
        ("count", "#tip[hidden]"),
    ]

    *_, tip, spoken, label, _, hidden = eyes.look(*acts)

    assert re.search(r"Block\s+[\d,]+", tip)
    assert "Block" in spoken
    assert "llama-8b, device:" in label
    assert hidden == 1


def test_tab_goes_from_top_to_bottom(eyes: Eyes) -> None:
    """Tab follows the page's order: the skip link, the controls, the colours, the maps."""
    acts: list[tuple[object, ...]] = [WAIT]
    for _ in range(8):
        acts += [("press", "Tab"), ("focused",)]

    found = eyes.look(*acts)[2::2]

    assert found[0] == "a#skip.skip"
    assert found[1:4] == ["select#cache.", "button#pause.", "button#theme."]
    assert found[4].startswith("input")
    assert found[5:] == ["canvas.map"] * 3


def test_skip_link_leads_to_a_map_that_takes_arrows(eyes: Eyes) -> None:
    """After the skip link leads to the block map, the next arrow key moves in it."""
    *_, focused, _, _, _, spoken = eyes.look(
        WAIT,
        ("press", "Tab"),
        ("press", "Enter"),
        ("focused",),
        ("press", "ArrowRight"),
        ("wait", "#tip dt:has-text('Block')"),
        ("pause", 1200),
        ("evaluate", "document.querySelector('#spoken').textContent"),
    )

    assert focused == "canvas.map"
    assert "Block" in spoken


@pytest.mark.parametrize("width", [641, 700, 1024, 1181, 1280, 1359, 1361, 1920])
def test_lists_fit_their_cards(eyes: Eyes, width: int) -> None:
    """No column is cut off at any width of the window."""
    beside = "(() => { const one = document.querySelector('#leases'); return one.scrollWidth - one.clientWidth; })()"
    lists = eyes.look(
        WAIT, ("wait", "#leases tbody tr"), ("evaluate", beside), width=width, height=900
    )

    assert lists[-1] == 0


def test_number_of_a_lease_is_on_one_line(eyes: Eyes) -> None:
    """The digits of a lease's number are not parted where a cache is chosen and its name left out."""
    lines = """(() => {
        const range = document.createRange();
        range.selectNodeContents(document.querySelector('#leases td.name'));
        return range.getClientRects().length;
    })()"""
    acts = [("wait", "#leases tbody tr"), ("evaluate", lines)]

    assert eyes.look(*acts, path="/ui?cache=llama-8b", width=1360)[-1] == 1


def test_forced_colours_show_what_is_chosen(eyes: Eyes) -> None:
    """Where the system forces its colours, the chosen way to colour blocks still looks unlike the others."""
    grounds = """['state', 'tier'].map((one) => getComputedStyle(
        document.querySelector(`input[value=${one}] + span`)).backgroundColor)"""

    chosen, other = eyes.look(WAIT, ("evaluate", grounds), forced=True)[-1]

    assert chosen != other


def test_browser_that_keeps_nothing_shows_the_page(eyes: Eyes) -> None:
    """Where the data of sites are blocked, the page is live, and its token and theme last as long as it does."""
    *_, status, theme = eyes.look(
        ("wait", "#tiles .tile"),
        ("click", "#theme"),
        ("text", "#status"),
        ("text", "#theme"),
        blocked=True,
    )

    assert (status, theme) == ("live", "Theme: light")


def test_labels_of_charts_are_whole(eyes: Eyes) -> None:
    """No label touches the chart's left edge, where it would be cut off."""
    ink = """[...document.querySelectorAll('canvas.chart')].map((one) => {
      const { data } = one.getContext('2d').getImageData(0, 0, 1, one.height);
      return data.some((value, at) => at % 4 === 3 && value > 0);
    })"""

    assert eyes.look(WAIT, ("pause", 1500), ("evaluate", ink))[-1] == [False, False]


def test_dark_view_by_tenant(eyes: Eyes, shots: str) -> None:
    """The page follows a dark colour scheme, and blocks can be coloured by tenant, tier and cache."""
    _, _, _, ground, legend, *_ = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("check", "input[value=tenant]"),
        ("pause", 16000),
        ("evaluate", "getComputedStyle(document.body).backgroundColor"),
        ("text", "#legend"),
        ("shot", f"{shots}/dark.png", True),
        ("check", "input[value=tier]"),
        ("check", "input[value=cache]"),
        path="/ui?cache=llama-8b",
        dark=True,
    )

    assert max(int(one) for one in re.findall(r"\d+", ground)[:3]) < 40
    assert {"chat", "search", "batch"} <= set(legend.split())


def test_phone_view_fits(eyes: Eyes, shots: str) -> None:
    """On a phone nothing leaves the screen, and a tap shows what hovering would."""
    _, _, overflow, _, _, tip, _ = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("pause", 4000),
        ("overflow",),
        ("tap", "canvas.map", 100, 60),
        ("wait", "#tip dt:has-text('Block')"),
        ("text", "#tip"),
        ("shot", f"{shots}/phone.png", False),
        path="/ui?cache=llama-8b",
        width=390,
        height=844,
        scale=2,
        mobile=True,
    )

    assert overflow <= 0
    assert "Block" in tip


async def test_terminal_shows_the_same_load(
    eyes: Eyes, http: tuple[str, str, str], shots: str
) -> None:
    """`kvlease top` shows pools, timelines, leases and tenants on one screen, which the browser draws here."""
    *_, address = http
    reading = threading.Lock()

    def look(cache: str) -> Moment:
        with reading:
            return read(client, cache)

    with Client(address, on_doubt="raise") as client:
        top = Top(look, "llama-8b", 0.5)
        async with top.run_test(size=(120, 46)) as pilot, asyncio.timeout(120):
            while len(top.moments) < MOMENTS:
                await pilot.pause(0.5)
            drawing = top.export_screenshot(title="kvlease top")
        # A read that the screen has given up must end before its connection.
        with reading:
            client.close()

    # The drawing's fonts would come from another host.
    drawing = re.sub(r"@font-face *{.*?}", "", drawing, flags=re.DOTALL)
    _, said, _ = eyes.look(
        ("show", f"<!doctype html><style>body {{ margin: 0 }}</style>{drawing}"),
        ("evaluate", "document.querySelector('svg').textContent"),
        ("shot", f"{shots}/top.png", True),
        width=1500,
        height=1180,
    )
    words = said.replace("\xa0", " ")
    for part in ("device", "host", "cached, in use", "tokens hit", "would hit", "expires in"):
        assert part in words
    assert re.search(r"chat +\d+", words)


CLIPPED = """
  const PARTS = "td, th, caption, dd, dt, li, p, h2, figcaption span, .flow span, .line span";
  [...document.querySelectorAll(PARTS)].filter((one) => {
    const box = one.getBoundingClientRect();
    const isInline = getComputedStyle(one).display === "inline";
    return one.offsetParent && box.width && !one.closest("thead") && (box.right > innerWidth + 1 || box.left < -1
      || (one.scrollWidth > one.clientWidth + 1 && !isInline));
  }).map((one) => `${one.tagName} ${one.textContent.slice(0, 40)}`)"""
"""Elements that leave the screen or overflow their place."""


@pytest.mark.parametrize("dark", [False, True])
def test_phone_clips_nothing_and_folds_its_lists(eyes: Eyes, dark: bool) -> None:
    """On a phone lists are folded, with their sums; unfolded ones are whole, and every cell has its title."""
    unfold = "document.querySelectorAll('details').forEach((one) => { one.open = true; }), 1"
    _, _, folded, clipped, sums, _, _, opened, titles = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("pause", 2500),
        ("count", "details.fold:not([open])"),
        ("evaluate", CLIPPED),
        ("text", "#refusals-now"),
        ("evaluate", unfold),
        ("wait", "#refusals td"),
        ("evaluate", CLIPPED),
        (
            "evaluate",
            "getComputedStyle(document.querySelector('#refusals td + td'), '::before').content",
        ),
        width=375,
        height=812,
        mobile=True,
        still=True,
        dark=dark,
    )

    assert folded == 5
    assert re.fullmatch(r"[\d,]+ refused, [\d,]+ waiting", sums)
    assert (clipped, opened) == ([], [])
    assert "Code" in titles


LABELS = """(async () => {
    const type = CanvasRenderingContext2D.prototype;
    const real = type.fillText;
    const drawn = new Map();
    type.fillText = function (label, x, y) {
      const isTime = this.canvas.id === "usage" && / ago|now/.test(label);
      if (isTime) drawn.set(label, [x, x + this.measureText(label).width]);
      real.call(this, label, x, y);
    };
    await new Promise((done) => setTimeout(done, 2500));
    type.fillText = real;
    return [...drawn.values()].sort(([one], [other]) => one - other);
})()"""
"""Where the labels of the usage timeline's times begin and end, from left to right."""
CHOSEN_WIDTH = "document.querySelector('#cache').clientWidth"


def test_narrow_phone_is_read(eyes: Eyes) -> None:
    """On the narrowest phones labels of a timeline are apart, and the chosen cache's name has room."""
    _, labels, chosen, overflow = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("evaluate", LABELS),
        ("evaluate", CHOSEN_WIDTH),
        ("overflow",),
        path="/ui?cache=llama-8b",
        width=320,
        height=568,
        mobile=True,
        still=True,
    )

    assert len(labels) >= 2
    assert all(end < begin for (_, end), (begin, _) in pairwise(labels))
    assert chosen > 120
    assert overflow <= 0


def test_cache_that_is_not_there_is_told(eyes: Eyes) -> None:
    """An address with an unknown cache shows all caches, and says so until one is chosen."""
    _, _, words, _, _, is_hidden = eyes.look(
        ("wait", "#tiles .tile"),
        ("wait", "#notice:visible:has-text('nosuch')"),
        ("text", "#notice"),
        ("select", "#cache", "gemma-2b"),
        ("pause", 2500),
        ("count", "#notice[hidden]"),
        path="/ui?cache=nosuch",
        misses="404",
        still=True,
    )

    assert words == "There is no cache nosuch, so all caches are shown."
    assert is_hidden == 1


def test_figures_are_told(eyes: Eyes) -> None:
    """The page shows leases, tenants, transfers, refusals with reasons, magazines and ghosts."""
    _, _, *texts = eyes.look(
        WAIT,
        ("wait", "#refusals td"),
        *(
            ("text", f"#{part}")
            for part in ("leases", "tenants", "flows", "refusals", "magazines", "ghosts")
        ),
        still=True,
    )

    leases, tenants, flows, refusals, magazines, ghosts = texts
    assert "quarantined" in leases
    assert "chat" in tenants
    assert "device → host" in flows
    assert "NEVER_FITS" in refusals
    assert re.search(r"POOL_FULL\s+(blocks|copies)", refusals)
    assert "ask for less" in refusals
    assert "48" in magazines
    assert "number 1" in magazines, "as kvlease magazines names it"
    assert "adaptive@2400" in ghosts


def test_blocks_that_were_given_back_are_not_used(eyes: Eyes) -> None:
    """A smaller pool's usage counts its remaining blocks only; tile and legend show the same number."""
    _, _, caption, tile, legend = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("wait", "#legend li"),
        ("text", "figure.pool figcaption"),
        ("text", "#tiles .tile:has(dt:text-is('Out of use'))"),
        ("text", "#legend li:has-text('out of use')"),
        path="/ui?cache=gemma-2b",
        still=True,
    )

    found = re.search(r"([\d,]+) of ([\d,]+) used, .* %, ([\d,]+) out of use", caption)
    assert found, caption
    used, usable, gone = (int(number.replace(",", "")) for number in found.groups())
    assert used <= usable <= 400
    assert usable + gone == 480
    assert f"{gone} given back" in tile
    assert legend.endswith(str(gone))


@pytest.mark.parametrize("by", ["state", "tenant", "tier", "cache"])
def test_blocks_out_of_use_look_so_whatever_the_map_is_coloured_by(eyes: Eyes, by: str) -> None:
    """Blocks out of use look so under every colouring."""
    _, _, _, colour, legend = eyes.look(
        ("wait", "canvas.map >> nth=1"),
        ("click", f"#colour-by label:has-text('{by}')"),
        ("wait", "#legend li:has-text('out of use')"),
        ("evaluate", LAST_CELL),
        ("count", "#legend li:has-text('out of use')"),
        path="/ui?cache=gemma-2b",
        still=True,
    )

    assert colour == [0x8B, 0x95, 0xA1]
    assert legend == 1


def test_refusals_are_those_of_the_chosen_cache(eyes: Eyes) -> None:
    """The refusals are those of the chosen cache only."""
    _, every = eyes.look(("wait", "#refusals td"), ("text", "#refusals-now"), still=True)
    _, own, words = eyes.look(
        ("wait", "#refusals td"),
        ("text", "#refusals-now"),
        ("text", "#refusals"),
        path="/ui?cache=llama-8b",
        still=True,
    )

    numbers = [int(told.split()[0].replace(",", "")) for told in (own, every)]
    assert 0 < numbers[0] < numbers[1]
    assert "·" not in words


def test_time_that_nobody_saw_is_a_hole(eyes: Eyes) -> None:
    """A timeline has a hole where the page was paused, and no line across it."""
    _, _, before, _, _, _, _, after = eyes.look(
        ("wait", "#tiles .tile"),
        ("pause", 4000),
        ("evaluate", HOLES),
        ("click", "#pause"),
        ("pause", 5000),
        ("click", "#pause"),
        ("pause", 3500),
        ("evaluate", HOLES),
        still=True,
    )

    assert before == 0
    assert after > 0


def test_daemon_that_goes_silent_is_told(eyes: Eyes) -> None:
    """When no figures have come for some seconds, the page no longer calls itself live."""
    _, told = eyes.look(("wait", "#tiles .tile"), ("evaluate", SILENCE), still=True)

    assert told == [{"state": "lost", "why": "nothing has come for 8 seconds"}]


def test_stranger_is_told_how_to_look(http: tuple[str, str, str]) -> None:
    """A visitor without a token is told which command prints the page's address with one."""
    stranger = Eyes(http[0], "")
    try:
        words = stranger.look(("wait", "#token-form:visible"), ("text", "#notice"), misses="401")[
            -1
        ]
    finally:
        stranger.close()

    assert "kvlease ui" in words
    assert "reader.token" in words
    assert "attach" not in words


def test_token_that_cannot_be_sent_is_asked_for_again(http: tuple[str, str, str]) -> None:
    """A token with letters that no header can have, as after a copy of more than it, is refused as a wrong one is."""
    stranger = Eyes(http[0], "")
    try:
        *_, status, is_shown = stranger.look(
            ("wait", "#token-form:visible"),
            ("fill", "#token", "\u201csecret\u201d"),
            ("press", "Enter"),
            ("pause", 1500),
            ("text", "#status"),
            ("count", "#token-form:visible"),
            misses="401",
        )
    finally:
        stranger.close()

    assert (status, is_shown) == ("not allowed", 1)


def test_drained_cache_is_told(eyes: Eyes, http: tuple[str, str, str]) -> None:
    """While a cache or the daemon is drained, the page says so and how to end that."""
    *_, address = http
    notices = []
    with Client(address) as client:
        for cache, told in (("gemma-2b", "The cache gemma-2b is"), ("", "The daemon is")):
            client.drain(cache=cache)
            # For a moment a viewer is shown what was made for the one before.
            shown = f"#notice:visible:has-text('{told} drained')"
            notices.append(eyes.look(("wait", shown), ("text", "#notice"))[-1])
            client.undrain(cache=cache)

    assert "grants nothing new until kvlease drain --cache NAME --undo" in notices[0]
    assert "kvlease drain --undo" in notices[1]
    assert eyes.look(("wait", "#tiles .tile"), ("wait", "body:has(#notice[hidden])"))[-1]


def test_bytes_of_several_caches_are_each_ones_own(eyes: Eyes) -> None:
    """Bytes moved by all caches are the sum of each one's blocks times its block size."""
    sums = """import("/ui/sums.js").then((sums) => sums.grownBytes([
        { cache: "a", bytes_per_copy: 100, counters: { offloads: 7 } },
        { cache: "b", bytes_per_copy: 3, counters: { offloads: 5 } },
      ], [{ cache: "a", counters: { offloads: 5 } }], "offloads"))"""

    assert eyes.look(("evaluate", sums))[-1] == 2 * 100 + 5 * 3


def test_deleted_cache_hides_nothing_of_the_others(eyes: Eyes) -> None:
    """What all caches did since the last look is the sum of each one's, whatever a cache that has gone had counted."""
    sums = """import("/ui/sums.js").then((sums) => sums.grown([
        { cache: "b", counters: { evictions: 8 } }, { cache: "c", counters: { evictions: 1 } },
      ], [
        { cache: "a", counters: { evictions: 1000 } }, { cache: "b", counters: { evictions: 5 } },
      ], "evictions"))"""

    assert eyes.look(("evaluate", sums))[-1] == 3 + 1


def test_every_part_has_a_name(eyes: Eyes) -> None:
    """Every focusable part has a name, each section a heading, each table head a scope, and there is one h1."""
    nameless = """
      [...document.querySelectorAll("button, select, input, canvas, [tabindex='0'], img")].filter((one) => !(
        ["aria-label", "aria-labelledby", "alt", "aria-hidden"].some((name) => one.hasAttribute(name))
        || one.textContent.trim() || one.closest("label") || one.labels?.length)).length"""
    _, found, headings, sections, heads = eyes.look(
        WAIT,
        ("evaluate", nameless),
        ("count", "h1"),
        ("count", "section:not([aria-labelledby])"),
        ("count", "th:not([scope])"),
        still=True,
    )

    assert (found, headings, sections, heads) == (0, 1, 0, 0)
