"""Own `make bench`: measure each figure beside its floor, print one table, and say how many goals hold.

Nothing here is a test: machines are noisy, so the exit status is 0 and only ratios taken in one run mean anything.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import calls
import copies
import core_alone
import gpu_copies
import gpu_facts
import hostile
import hybrid
import keys
import lag
import manager
import plans
import restarts
import scraping
import serving
import starts
import tenants
from measure import Figure
from rich.console import Console
from rich.table import Table

BENCHMARKS: Final[dict[str, Callable[[Path], list[Figure]]]] = {
    "local": calls.local_socket,
    "rest": calls.rest,
    "grpc": calls.grpc_calls,
    "step": calls.step,
    "serving": serving.serving,
    "copies": copies.evict_and_reload,
    "gpu": gpu_copies.evict_and_reload,
    "gpu-facts": gpu_facts.facts,
    "lag": lag.lag,
    "scrape": scraping.scraping,
    "hostile": hostile.hostile,
    "tenants": tenants.tenants,
    "start": starts.restarts,
    "restarts": restarts.many_blocks,
    "core": core_alone.core_alone,
    "manager": manager.manager,
    "hybrid": hybrid.hybrid,
    "keys": keys.keys,
    "plan": plans.plans,
}
_COLUMNS_OF_A_FILE: Final = 190


def main() -> int:
    """Measure the chosen figures and print them."""
    parser = argparse.ArgumentParser(description="Measure kvlease, each figure beside its floor.")
    parser.add_argument(
        "--only", action="append", choices=BENCHMARKS, help="measure this alone; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args()
    progress = Console(stderr=True, highlight=False)
    figures: list[Figure] = []
    for name in arguments.only or BENCHMARKS:
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="kvlease-bench-") as directory:
            figures += BENCHMARKS[name](Path(directory))
        progress.print(f"[dim]{name}: measured in {time.monotonic() - started:.1f} s[/]")
    if arguments.json:
        sys.stdout.write(json.dumps([figure.to_json() for figure in figures], indent=1) + "\n")
    else:
        print_table(figures)
    goals = [figure.holds for figure in figures if figure.holds is not None]
    if goals:
        progress_or_out = progress if arguments.json else Console(highlight=False)
        progress_or_out.print(f"{sum(goals)} of {len(goals)} goals hold")
    return 0


def print_table(figures: list[Figure]) -> None:
    """Print the table; in a file or a pipe it has a fixed width, wide enough to be readable."""
    is_narrow = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    Console(highlight=False, width=_COLUMNS_OF_A_FILE if is_narrow else None).print(
        table_of(figures)
    )


def table_of(figures: list[Figure]) -> Table:
    """Return the table for people."""
    table = Table(
        title="kvlease beside its floors",
        caption="Medians of rounds that take turns with their floor; ratios are of neighbouring rounds.",
    )
    table.add_column("figure")
    for column in ("ours", "floor", "ratio", "goal"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds")
    table.add_column("note", style="dim")
    for figure in figures:
        verdict = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[figure.holds]
        table.add_row(
            figure.name,
            _with_unit(figure.ours, figure.unit),
            "" if figure.floor is None else _with_unit(figure.floor, figure.unit),
            "" if figure.ratio is None else f"{figure.ratio:.2f}",
            figure.goal,
            verdict,
            figure.note,
        )
    return table


def _with_unit(number: float, unit: str) -> str:
    return f"{number:.0f} {unit}" if number >= 100 else f"{number:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
