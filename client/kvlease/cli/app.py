"""Own the commands of `kvlease` and their exit statuses; what a snapshot looks like is `tables`' business.

Exit status 0: done. 1: the daemon refused or was not there. 2: the command line makes no sense, to us or to the daemon.
3: the state is not what was asked for: a drain left leases, or, for health, nothing new is granted. 4: the drain that
the command waited for no longer holds.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from typing import Annotated, Final

import typer
from rich.table import Table

from kvlease._output import written_or_refused
from kvlease._version import installed_version
from kvlease.cli import advice, operating, printing, tables
from kvlease.cli.connecting import Address, Json, connected
from kvlease.cli.following import followed
from kvlease.cli.listing import shown_of
from kvlease.cli.misses import explanation
from kvlease.cli.mistakes import Commands
from kvlease.cli.naming import Named, OnlyCache, either, explained
from kvlease.cli.page import ui
from kvlease.cli.plan.command import PlanCommand, plan_command
from kvlease.cli.printing import counted, say
from kvlease.cli.trace.command import trace_app
from kvlease.client import Listed
from kvlease.replies import Inspection

_PLAN: Final = "Plan and try"
_LOOK: Final = "Look"
_CHANGE: Final = "Change"

app = typer.Typer(
    name="kvlease",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("plan", cls=PlanCommand, rich_help_panel=_PLAN)(plan_command)
app.add_typer(trace_app, name="trace", rich_help_panel=_PLAN)
tenants_app = typer.Typer(invoke_without_command=True)
tenants_app.command("set")(operating.set_tenant)
tenants_app.command("get")(operating.get_tenant)
app.add_typer(tenants_app, name="tenants", rich_help_panel=_LOOK)

CacheName = Annotated[str, typer.Option(help="Only this cache.", show_default="all")]
Limit = Annotated[int, typer.Option(min=1, help="How many entries of each cache to show.")]


def main() -> None:
    """Run the command line."""
    if not os.environ.get("COLUMNS", "").strip("0"):
        # A width of 0 is one that nobody knows, and rich would write nothing at all.
        os.environ.pop("COLUMNS", None)
    with written_or_refused("kvlease"):
        app()


def _print_version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"kvlease {installed_version()}")
        raise typer.Exit


@app.callback()
def options(
    *,
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Inspect and control the KV-cache daemon of this node."""


@app.command(rich_help_panel=_LOOK)
def status(*, address: Address = "", cache: CacheName = "", as_json: Json = False) -> None:
    """Show caches, their pools by state, their leases and their prefix hits."""
    with connected(address) as client:
        stats = client.stats(cache)
        caches = client.list_caches()
    if as_json:
        _print_json(dataclasses.asdict(stats))
        return
    console = printing.console()
    told = f"epoch {stats.epoch}, {counted(len(stats.caches), 'cache')}"
    console.print(told, highlight=False)
    for table in (
        tables.caches(caches, stats),
        tables.pools(stats),
        tables.hits(stats),
        tables.exchanges(stats),
        tables.moves(stats),
        tables.ghosts(stats),
    ):
        if table.row_count:
            console.print(table, crop=False)
    for said in advice.of(caches, stats):
        console.print(f"\n{said}", highlight=False, markup=False)


@app.command(rich_help_panel=_LOOK)
def caches(*, address: Address = "", as_json: Json = False) -> None:
    """List the registered caches, with their plans and lower tiers."""
    with connected(address) as client:
        found = client.list_caches()
    if as_json:
        _print_json([dataclasses.asdict(cache) for cache in found])
        return
    console = printing.console()
    for table in (tables.plans(found), tables.blocks(found), tables.tiers(found)):
        if table.row_count:
            console.print(table, crop=False)
    if not found:
        typer.echo("no caches")


@app.command(rich_help_panel=_LOOK)
def workers(
    *, address: Address = "", cache: CacheName = "", limit: Limit = 100, as_json: Json = False
) -> None:
    """List the workers, with their processes and leases, and whether their death can be proven."""
    _list("workers", address, cache, limit, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def leases(
    *, address: Address = "", cache: CacheName = "", limit: Limit = 100, as_json: Json = False
) -> None:
    """List the leases, with their workers, tenants, blocks and ages."""
    _list("leases", address, cache, limit, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def pins(
    *, address: Address = "", cache: CacheName = "", limit: Limit = 100, as_json: Json = False
) -> None:
    """List the pins, with their tenants, blocks and ages; kvlease unpin ends one."""
    _list("pins", address, cache, limit, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def waiting(
    *, address: Address = "", cache: CacheName = "", limit: Limit = 100, as_json: Json = False
) -> None:
    """List the calls that wait for blocks, and why each one waits."""
    _list("waiting", address, cache, limit, as_json=as_json)


@tenants_app.callback()
def tenants(
    context: typer.Context,
    *,
    address: Address = "",
    cache: CacheName = "",
    limit: Limit = 100,
    as_json: Json = False,
) -> None:
    """List the tenants, those that use most first, with what they have and may have.

    The commands below show and set a tenant's limits.
    """
    if context.invoked_subcommand is None:
        _list("tenants", address, cache, limit, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def magazines(
    *, address: Address = "", cache: CacheName = "", limit: Limit = 100, as_json: Json = False
) -> None:
    """List the magazines, with the processes that share them and their blocks."""
    _list("magazines", address, cache, limit, as_json=as_json)


@app.command(rich_help_panel=_LOOK)
def explain(
    lease_id: Annotated[
        int, typer.Argument(metavar="LEASE", min=1, help="The lease's id, as in `kvlease leases`.")
    ],
    *,
    address: Address = "",
    cache: Annotated[
        str, typer.Option(help="The cache.", show_default="the one with this lease")
    ] = "",
    as_json: Json = False,
) -> None:
    """Explain, run by run, why blocks of a lease's prefix were not found, and what to change."""
    with connected(address) as client:
        found = explained(client, lease_id, cache)
    if as_json:
        _print_json(dataclasses.asdict(found))
        return
    console = printing.console()
    console.print(explanation(found, console.width), highlight=False)


@app.command(rich_help_panel=_CHANGE)
def evict(
    name: Named = "",
    *,
    blocks: Annotated[
        int, typer.Option(min=1, help="How many blocks to evict, the coldest first.")
    ],
    cache: OnlyCache = "",
    wait_ms: Annotated[int, typer.Option(min=0, help="Milliseconds to wait for the copies.")] = 0,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Move the coldest cached blocks out of the device pool."""
    cache = either(name, cache)
    with connected(address) as client:
        gone = client.evict(num_blocks=blocks, wait_ms=wait_ms, cache=cache)
    if as_json:
        _print_json({"num_evicted": gone.num_evicted, "num_offloaded": gone.num_offloaded})
        return
    typer.echo(
        f"{counted(gone.num_evicted, 'block')} evicted, {gone.num_offloaded:,} copied to the host pool"
    )


@app.command(rich_help_panel=_CHANGE)
def detach(
    worker_id: Annotated[
        int,
        typer.Argument(metavar="WORKER", min=1, help="The worker's id, as in `kvlease workers`."),
    ],
    *,
    force: Annotated[
        bool, typer.Option("--force", help="End it even if its process is watched and alive.")
    ] = False,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """End a worker that has gone and whose death cannot be proven. You vouch that it no longer writes."""
    with connected(address) as client:
        num_leases = client.detach(worker_id, force=force)
    if as_json:
        _print_json({"worker_id": worker_id, "num_leases": num_leases})
        return
    typer.echo(f"worker {worker_id} ended, and {counted(num_leases, 'lease')} with it")


@app.command(rich_help_panel=_LOOK)
def events(
    *,
    address: Address = "",
    cache: CacheName = "",
    after: Annotated[int, typer.Option(min=0, help="Begin after this sequence number.")] = 0,
    idle_seconds: Annotated[
        float, typer.Option(min=0, help="Stop after this many seconds without an event; 0: never.")
    ] = 0.0,
    with_snapshot: Annotated[
        bool,
        typer.Option(
            "--with-snapshot",
            help="Begin with a snapshot of each cache, and repeat it after each gap and resync.",
        ),
    ] = False,
    as_json: Json = False,
) -> None:
    """Print events as they happen, oldest first; go on when a daemon that was lost comes back."""
    with connected(address) as client:
        for event in followed(
            client,
            cache=cache,
            after=after,
            idle_seconds=idle_seconds or None,
            with_snapshot=with_snapshot,
        ):
            if as_json:
                _print_json(dataclasses.asdict(event), indent=None)
            else:
                say(tables.event_line(event))


@app.command(rich_help_panel=_LOOK)
def health(*, address: Address = "", as_json: Json = False) -> None:
    """Say whether the daemon is healthy; scripts use the exit status.

    0: it answers. It is healthy, too, without a cache, or if some caches are drained and others are not.
    1: it does not answer, or refuses. 3: it answers and grants nothing new, because it or every cache is drained, or
    it was told to stop.
    """
    with connected(address) as client:
        stats = client.stats()
        found = client.list_caches()
    num_leases = sum(cache.num_leases for cache in stats.caches)
    drained = [one.cache for one in found if one.is_draining]
    state = "stopping" if stats.is_stopping else "ok"
    is_drained = stats.is_draining or (drained and len(drained) == len(found))
    if is_drained and not stats.is_stopping:
        state = "draining"
    if as_json:
        facts = {"epoch": stats.epoch, "num_caches": len(stats.caches), "num_leases": num_leases}
        _print_json({"status": state, **facts, "drained": drained})
    else:
        also = f"; drained: {', '.join(drained)}" if drained else ""
        also = {"stopping": f"; {advice.STOPPING}", "draining": f"; {advice.UNDRAIN}"}.get(
            state, also
        )
        count = f"{counted(len(stats.caches), 'cache')}, {counted(num_leases, 'lease')}"
        say(f"{state}: epoch {stats.epoch}, {count}{also}")
    if state != "ok":
        raise typer.Exit(operating.NOT_SO)


@app.command(rich_help_panel=_LOOK)
def top(
    *,
    address: Address = "",
    cache: Annotated[
        str, typer.Option(help="The cache to show first.", show_default="the first")
    ] = "",
    every_seconds: Annotated[
        float, typer.Option(min=0.2, help="Seconds between two updates.")
    ] = 1.0,
) -> None:
    """Show pools, hit rates, leases and waiting calls on one live screen; q quits."""
    if not printing.has_terminal():
        message = "top needs a terminal; kvlease status shows the same once, also with --json"
        raise typer.BadParameter(message)
    # Imported here: no other command draws a screen.
    from kvlease.cli.top import run  # noqa: PLC0415

    with connected(address, on_doubt="raise") as client:
        client.stats(cache)
        run(client, cache, every_seconds)


# Commands whose functions are elsewhere; in each panel, the help lists commands in the order of registration.
app.command("ui", rich_help_panel=_LOOK)(ui)
app.command("drain", rich_help_panel=_CHANGE)(operating.drain)
app.command("undrain", rich_help_panel=_CHANGE)(operating.undrain)
app.command("clear", rich_help_panel=_CHANGE)(operating.clear)
app.command("resize", rich_help_panel=_CHANGE)(operating.resize)
app.command("delete", rich_help_panel=_CHANGE)(operating.delete)
app.command("unpin", rich_help_panel=_CHANGE)(operating.unpin)


def _list(what: Listed, address: str, cache: str, limit: int, *, as_json: bool) -> None:
    """Show one list of one cache or of all caches, and at its end how much was left out."""
    with connected(address) as client:
        names = [cache] if cache else [found.cache for found in client.list_caches()]
        pages = {name: shown_of(client, name, what, limit) for name in names}
    if as_json:
        _print_json({name: _listed(page, what) for name, page in pages.items()})
        return
    console = printing.console()
    for name, page in pages.items():
        num_shown = len(getattr(page, what))
        if num_shown:
            for table in _TABLES[what]:
                console.print(table(name, page), crop=False)
        if num_shown < page.num_total:
            text = f"{num_shown:,} of {page.num_total:,} shown; --limit shows more"
            console.print(text, highlight=False)
    if not any(page.num_total for page in pages.values()):
        nothing = "no call is waiting" if what == "waiting" else f"no {what}"
        typer.echo(nothing if pages else nothing + _WITHOUT_CACHES.get(what, _NO_CACHE))


_NO_CACHE: Final = ": no cache is registered"
_WITHOUT_CACHES: Final[dict[Listed, str]] = {
    "tenants": f"{_NO_CACHE}, and each lists its own; kvlease tenants get NAME shows what a tenant may have",
}
"""What is said behind an empty list where no cache is registered, if more than that helps."""

_TABLES: Final[dict[Listed, tuple[Callable[[str, Inspection], Table], ...]]] = {
    "workers": (tables.workers,),
    "leases": (tables.leases,),
    "pins": (tables.pins,),
    "waiting": (tables.waiting,),
    "tenants": (tables.tenants, tables.tenants_limits),
    "magazines": (tables.magazines,),
}


def _listed(page: Inspection, what: Listed) -> dict[str, object]:
    entries = [dataclasses.asdict(entry) for entry in getattr(page, what)]
    return {"num_total": page.num_total, what: entries}


def _print_json(value: object, indent: int | None = 2) -> None:
    typer.echo(json.dumps(value, indent=indent))
