"""Write the tables of docs/metrics.md from the catalogue, or with `--check` compare them."""

import sys
from pathlib import Path

from label_values import TABLES

from kvleased.caches.tallies import WAIT_BOUNDS_SECONDS
from kvleased.core.blocks.departures import BOUNDS_SECONDS
from kvleased.metrics.calls import BUCKETS
from kvleased.metrics.catalogue import SECTIONS
from kvleased.metrics.definitions import Definition

PAGE = Path(__file__).with_name("metrics.md")
_START = "<!-- written by write_metrics.py -->\n"
_END = "<!-- end of what is written -->\n"
_HEAD = "| metric | kind | labels | what it says |\n|---|---|---|---|\n"
_BOUNDS = {
    "request_seconds, loop_lag_seconds": BUCKETS,
    "wait_seconds": WAIT_BOUNDS_SECONDS,
    "block_residence_seconds, block_idle_seconds": BOUNDS_SECONDS,
}


def page(text: str) -> str:
    """Return the page with up-to-date tables."""
    before, _, rest = text.partition(_START)
    _, _, after = rest.partition(_END)
    return f"{before}{_START}\n{_tables()}\n{_END}{after}"


def _tables() -> str:
    parts = [
        f"## {title}\n\n{_HEAD}{''.join(map(_row, section))}" for title, section in SECTIONS.items()
    ]
    bounds = "".join(
        f"| `{names.replace(', ', '`, `')}` | {', '.join(f'{bound:g}' for bound in values)} |\n"
        for names, values in _BOUNDS.items()
    )
    values = "".join(
        f"| {label} | `{value}` | {meaning} |\n"
        for label, meanings in TABLES
        for value, meaning in meanings.items()
    )
    parts.append(f"## Values of labels\n\n| label | value | it says |\n|---|---|---|\n{values}")
    parts.append(f"## Bounds of histograms\n\n| histogram | seconds |\n|---|---|\n{bounds}")
    return "\n".join(parts)


def _row(one: Definition) -> str:
    labels = ", ".join(f"`{label}`" for label in one.labels)
    name = one.full_name.removesuffix("_bucket")
    return f"| `{name}` | {one.kind.value} | {labels} | {one.text} |\n"


if __name__ == "__main__":
    written = PAGE.read_text()
    if "--check" in sys.argv[1:]:
        sys.exit(written != page(written))
    PAGE.write_text(page(written))
