"""Own `kvlease top`: the daemon's pools, leases and hit rates on one screen of a terminal, redrawn every moment.

What each part says is `top_parts`'s business.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from threading import Thread
from time import monotonic
from typing import ClassVar, Final

from rich.console import RenderableType
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Header, Static
from textual.worker import Worker

from kvlease.cli import top_parts as parts
from kvlease.cli.listing import TENANTS_READ_MAX, first_of
from kvlease.cli.printing import cell
from kvlease.client import Client
from kvlease.errors import KVLeaseError
from kvlease.replies import CacheInfo, Inspection, Stats

HISTORY_MAX: Final = 240
"""Most moments that the timelines show."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What was read from the daemon at one moment."""

    seconds: float
    """When, on a clock that never goes back."""
    stats: Stats
    caches: tuple[CacheInfo, ...]
    lists: dict[str, Inspection]
    """The leases, waiting calls and tenants of the cache that is shown, by list."""


def read(client: Client, cache: str) -> Moment:
    """Read everything that is shown; `cache` may be empty, or no longer exist."""
    stats = client.stats()
    caches = tuple(client.list_caches())
    names = [one.cache for one in caches]
    chosen = cache if cache in names else (names[0] if names else "")
    lists = {}
    if chosen:
        lists = {
            "leases": client.inspect(chosen, "leases", limit=parts.ROWS_MAX),
            "waiting": client.inspect(chosen, "waiting", limit=parts.ROWS_MAX),
            "tenants": first_of(client, chosen, "tenants", TENANTS_READ_MAX),
        }
    return Moment(seconds=monotonic(), stats=stats, caches=caches, lists=lists)


class Top(App[None]):
    """The screen."""

    TITLE = "kvlease top"
    CSS = """
    Screen { layout: vertical; }
    #body { padding: 0 1; }
    .part { height: auto; margin-bottom: 1; }
    #leases, #waiting, #tenants { height: auto; max-height: 14; margin-bottom: 1; }
    #trouble { color: $error; height: auto; display: none; }
    #trouble.shown { display: block; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        ("q", "quit", "Quit"),
        Binding("ctrl+c", "quit", show=False, system=True),
        ("p", "pause", "Pause"),
        ("c", "next_cache", "Next cache"),
        ("r", "refresh_now", "Read now"),
    ]

    def __init__(
        self, read_moment: Callable[[str], Moment], cache: str = "", every_seconds: float = 1.0
    ) -> None:
        """Take the function that reads the daemon, given the cache that is shown."""
        super().__init__()
        self._read_moment = read_moment
        self.cache = cache
        self.every_seconds = every_seconds
        self.is_paused = False
        self.moments: deque[Moment] = deque(maxlen=HISTORY_MAX)
        self._reading: Worker[None] | None = None

    def compose(self) -> ComposeResult:
        """Lay the parts out."""
        yield Header()
        yield Static(id="trouble", markup=False)
        with VerticalScroll(id="body"):
            for name in ("summary", "pools", "timelines", "moves", "ghosts"):
                yield Static(id=name, classes="part")
            for name in parts.LISTS:
                table: DataTable[Text] = DataTable(id=name, cursor_type="row", zebra_stripes=True)
                table.border_title = name
                yield table
        yield Footer()

    def on_mount(self) -> None:
        """Start reading."""
        for name, columns in parts.LISTS.items():
            self._table(name).add_columns(*columns)
        self.set_interval(self.every_seconds, self._tick)
        self._tick()

    def action_pause(self) -> None:
        """Pause or resume."""
        self.is_paused = not self.is_paused
        self._entitle()

    def action_next_cache(self) -> None:
        """Show the next cache."""
        if not self.moments:
            return
        names = [one.cache for one in self.moments[-1].caches]
        if names:
            at = names.index(self.cache) + 1 if self.cache in names else 0
            self.cache = names[at % len(names)]
            self.action_refresh_now()

    def action_refresh_now(self) -> None:
        """Read at once, unless an answer is still to come."""
        if self._reading is None or self._reading.is_finished:
            self._reading = self._read()

    def _tick(self) -> None:
        if not self.is_paused:
            self.action_refresh_now()

    @work(exit_on_error=False)
    async def _read(self) -> None:
        """Read what is shown, and once more if another cache was chosen before the answer came."""
        shown = None
        while shown != self.cache:
            shown = self.cache
            try:
                found: Moment | KVLeaseError = await _aside(partial(self._read_moment, shown))
            except KVLeaseError as error:
                found = error
        if isinstance(found, KVLeaseError):
            self.show_trouble(f"{found.code}: {found.message}")
        else:
            self.show(found)

    def show_trouble(self, words: str) -> None:
        """Say why nothing new is shown."""
        trouble = self.query_one("#trouble", Static)
        trouble.set_class(bool(words), "shown")
        trouble.update(words)

    def show(self, moment: Moment) -> None:
        """Show what was read."""
        self.show_trouble("")
        if self.moments and self.moments[-1].stats.epoch != moment.stats.epoch:
            # Counters start again with each life of the daemon.
            self.moments.clear()
        self.moments.append(moment)
        names = [one.cache for one in moment.caches]
        if names and self.cache not in names:
            self.cache = names[0]
        self._entitle()
        history = [(one.seconds, one.stats) for one in self.moments]
        found: dict[str, RenderableType] = {
            "summary": parts.summary(moment.stats, moment.caches, self.cache),
            "pools": parts.pools(moment.stats, self.cache, max(20, self.size.width - 34)),
            "timelines": parts.timelines(history, self.cache, max(20, self.size.width - 34)),
            "moves": parts.moves(history, self.cache),
            "ghosts": parts.ghosts(moment.stats, self.cache),
        }
        for name, part in found.items():
            self.query_one(f"#{name}", Static).update(part)
        for name in parts.LISTS:
            self._fill(name, parts.rows(name, moment.lists.get(name)))

    def _entitle(self) -> None:
        """Say which cache is shown, and whether it stands still."""
        said = [self.cache] if self.cache else []
        self.sub_title = ", ".join([*said, "paused"] if self.is_paused else said)

    def _fill(self, name: str, rows: list[tuple[str, ...]]) -> None:
        table = self._table(name)
        cursor = table.cursor_row
        table.clear()
        table.add_rows(map(cell, row) for row in rows)
        table.move_cursor(row=min(cursor, len(rows) - 1))
        table.display = bool(rows)

    def _table(self, name: str) -> "DataTable[Text]":
        return self.query_one(f"#{name}", DataTable)


def run(client: Client, cache: str, every_seconds: float) -> None:
    """Show the screen until it is left."""
    Top(lambda name: read(client, name), cache, every_seconds).run()


async def _aside(ask: Callable[[], Moment]) -> Moment:
    """Await an answer that a thread asks for, so that keys work, and the screen can be left, while none comes."""
    answer: Future[Moment] = Future()
    answer.set_running_or_notify_cancel()
    # At its end a process waits for all other threads, also for those of an executor.
    Thread(target=_settle, args=(answer, ask), name="kvlease-top", daemon=True).start()
    return await asyncio.wrap_future(answer)


def _settle(answer: Future[Moment], ask: Callable[[], Moment]) -> None:
    try:
        answer.set_result(ask())
    except BaseException as error:  # noqa: BLE001 -- it is raised where the answer is awaited
        answer.set_exception(error)
