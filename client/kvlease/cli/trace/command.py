"""Own `kvlease trace`: record a cache's requests, replay them, and simulate what each policy would find."""

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Annotated

import typer

from kvlease.cli import printing
from kvlease.cli.connecting import Address, Json, connected, told
from kvlease.cli.drawing import drawing
from kvlease.cli.printing import counted
from kvlease.cli.trace import tables
from kvlease.cli.trace.record import (
    REQUESTS_MAX,
    STANDARD_OUTPUT,
    Recorded,
    record,
    write_recorded,
    written_at_the_end,
)
from kvlease.cli.trace.replay import TENANT, replay
from kvlease.cli.trace.simulator import find_simulator
from kvlease.errors import InvalidError
from kvlease.trace_files import read_trace
from kvlease.traces import Simulated, Trace, gathered

trace_app = typer.Typer(
    no_args_is_help=True, help="Record requests, replay them, and simulate policies on them."
)

File = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="A trace file in Mooncake's format, one request per line."
    ),
]
Cache = Annotated[str, typer.Option(help="The cache.")]
First = Annotated[
    int | None,
    typer.Option(
        "--requests", min=1, help="Only this many requests, the first ones.", show_default="all"
    ),
]


@trace_app.command("simulate")
def simulate_command(
    trace: File,
    *,
    policy: Annotated[
        list[str] | None,
        typer.Option(help="A policy, or belady. May be repeated.", show_default="all"),
    ] = None,
    blocks: Annotated[
        list[int] | None,
        typer.Option(
            min=1,
            help="Size of the pool in blocks of one key each. May be repeated.",
            show_default="some shares of the distinct keys",
        ),
    ] = None,
    requests: First = None,
    plot: Annotated[
        Path | None,
        typer.Option(help="A .png or .svg file in which to draw hit ratio against blocks."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print what share of a trace's keys each policy finds, beside Belady's bound."""
    with told(status=2):
        simulator = find_simulator()
        plotting = None if plot is None else drawing("kvlease.cli.trace.plot", plot)
        read = _read(trace, requests)
        results = list(simulator.simulate(read, policy or (), blocks or ()))
        if as_json:
            typer.echo(json.dumps(_answer(read, results), indent=2))
        else:
            console = printing.console()
            for part in tables.simulated(read, results, console.width):
                console.print(part, highlight=False)
        if plotting is not None:
            plotting.draw(results, plot)


@trace_app.command("record")
def record_command(
    *,
    cache: Cache,
    output: Annotated[
        Path,
        typer.Option(help="The file to write, in Mooncake's format; - is standard output."),
    ],
    seconds: Annotated[
        float | None,
        typer.Option(min=0, help="Stop after this many seconds.", show_default="at ^C"),
    ] = None,
    requests: Annotated[
        int, typer.Option(min=1, help="Stop after this many requests.")
    ] = REQUESTS_MAX,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing file, once all is recorded.")
    ] = False,
    address: Address = "",
) -> None:
    """Record a cache's requests: times, sizes and digests of keys, but nothing of the tokens."""
    with told(status=1), written_at_the_end(output, may_replace=force) as file:
        recorded = asyncio.run(record(address, cache, seconds, requests))
        if not recorded.requests:
            message = (
                f"no lease of {cache} ended meanwhile, so nothing was written; record for longer"
            )
            raise InvalidError(message, resource="requests")
        trace = gathered(recorded.requests)
        write_recorded(trace, file)
    # What was recorded has been written, even if the recording ended early.
    with told(status=1):
        # A pipe may be standard output, which has the trace then.
        is_apart = output != STANDARD_OUTPUT and output.is_file()
        typer.echo(_said(trace, recorded, output), err=not is_apart)
        if recorded.error is not None:
            raise recorded.error


@trace_app.command("replay")
def replay_command(
    trace: File,
    *,
    cache: Cache,
    speed: Annotated[
        float, typer.Option(min=0, help="How many times as fast as recorded; 0: without pauses.")
    ] = 1.0,
    requests: First = None,
    tenant: Annotated[str, typer.Option(help="The tenant to ask as.")] = TENANT,
    address: Address = "",
    as_json: Json = False,
) -> None:
    """Send a trace's requests to a cache. No K and V are written, but cached blocks may be evicted.

    The exit status is 1 if a request was refused for a reason that no retry mends: the cache differs from the one that
    was recorded, or is too small.
    """
    with told(status=2):
        read = _read(trace, requests)
    with connected(address, "raise") as client:
        replayed = replay(client, cache, read, speed=speed, tenant=tenant)
    if as_json:
        typer.echo(json.dumps(dataclasses.asdict(replayed), indent=2))
    else:
        console = printing.console()
        for part in tables.replayed(replayed):
            console.print(part, highlight=False)
    if replayed.has_refused_for_good:
        raise typer.Exit(1)


def _read(path: Path, num_requests: int | None) -> Trace:
    """Read a trace, and say on stderr if its last line was cut off.

    Raises:
        InvalidError: the file is no trace, or the trace has no keys.
    """
    trace = read_trace(path, num_requests, lambda said: typer.echo(f"warning: {said}", err=True))
    if not len(trace.key_ids):
        what = "requests with keys (hash_ids)" if len(trace) else "requests"
        message = f"{path} has no {what}, so there is nothing to ask for; record a trace for longer"
        raise InvalidError(message, resource="trace")
    return trace


def _answer(trace: Trace, results: list[Simulated]) -> dict[str, object]:
    """Return the results for JSON; if there is one result, its numbers are also at the top level."""
    entries = [_entry(result) for result in results]
    answer: dict[str, object] = dict(entries[0]) if len(entries) == 1 else {}
    return answer | {
        "num_requests": len(trace),
        "num_keys": len(trace.key_ids),
        "num_distinct_keys": trace.num_distinct,
        "is_prefix_closed": trace.is_prefix_closed,
        "results": entries,
    }


def _entry(result: Simulated) -> dict[str, object]:
    ratios = {"hit_ratio": result.hit_ratio, "bound_hit_ratio": result.bound_hit_ratio}
    return ratios | dataclasses.asdict(result)


def _said(trace: Trace, recorded: Recorded, output: Path) -> str:
    hits = 0 if trace.hit_tokens is None else int(trace.hit_tokens.sum())
    text = (
        f"{counted(len(trace), 'request')} with {counted(len(trace.key_ids), 'key')} ({trace.num_distinct:,} distinct) "
        f"of {counted(trace.tokens_per_key, 'token')} written to {output}; the cache had {hits:,} of "
        f"{int(trace.input_tokens.sum()):,} tokens"
    )
    if recorded.num_dropped:
        text += f"; missing because they came too fast: {recorded.num_dropped:,}"
    return text
