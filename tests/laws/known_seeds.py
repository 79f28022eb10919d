"""Know histories in which seeded bugs show: for each bug that a search finds late, a seed that is tried first.

The table `known_seeds.json` maps the name of a bug to a seed, which also determines the cache and its stores. It only
saves time. If the simulation has changed so that a known seed no longer shows anything, the search is as before, and
the tests end with a note. `python -m tests.laws.known_seeds` searches anew for all bugs, and writes the table.
"""

import json
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Final

import pytest

from tests.laws.histories import breaks_a_law
from tests.laws.mutations import CACHES, MUTATIONS, STORES
from tests.laws.shapes import seeds_of

HISTORIES: Final = 1_000
"""Histories within which each bug must show."""
_SOON: Final = 4
"""Histories that are played within about a second: a bug that shows in one of these needs no place in the table."""
_TABLE: Final = Path(__file__).with_suffix(".json")

KNOWN_SEEDS: Final[dict[str, int]] = json.loads(_TABLE.read_text())
"""The seed of a history that shows a bug, by the name of the bug."""


def searched(name: str) -> Iterator[int]:
    """Go through the seeds of the histories in which a bug is searched."""
    return islice(seeds_of(CACHES.get(name, "one"), STORES.get(name, "")), HISTORIES)


def _first(name: str) -> tuple[int, int] | None:
    """Return the place in its search at which a bug first shows, and the seed there; None if it does not show."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        return next(
            ((at, seed) for at, seed in enumerate(searched(name)) if breaks_a_law(seed)), None
        )


def renew() -> int:
    """Search for all bugs on all cores, and write the table; return 1 if a bug shows in no history."""
    with ProcessPoolExecutor() as pool:
        found = dict(zip(MUTATIONS, pool.map(_first, MUTATIONS), strict=True))
    late = {name: one[1] for name, one in found.items() if one is not None and one[0] >= _SOON}
    _TABLE.write_text(json.dumps(late, indent=2) + "\n")
    hidden = [name for name, one in found.items() if one is None]
    sys.stdout.write(f"{len(late)} of {len(found)} bugs show late; in no history: {hidden}\n")
    return int(bool(hidden))


if __name__ == "__main__":
    sys.exit(renew())
