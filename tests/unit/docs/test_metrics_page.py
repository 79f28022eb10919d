"""The page about metrics is written from the code, and what it asks for is there."""

import re
import subprocess
import sys
from pathlib import Path

from kvleased.metrics.catalogue import BY_NAME, Kind

_DOCS = Path(__file__).parents[3] / "docs"


def test_page_is_written_from_the_catalogue() -> None:
    """Names, kinds, labels and words on the page are those of the code today."""
    done = subprocess.run([sys.executable, str(_DOCS / "write_metrics.py"), "--check"], check=False)

    assert done.returncode == 0, "run make metrics-page"


def test_metrics_that_pages_name_are_there() -> None:
    """No page speaks of a metric that the daemon does not have."""
    known = {one.full_name for one in BY_NAME.values()}
    known |= {
        one.full_name.removesuffix("_bucket")
        for one in BY_NAME.values()
        if one.kind is Kind.HISTOGRAM
    }
    for page in _DOCS.rglob("*.md"):
        named = set(re.findall(r"`(?:sum\()?(kvlease_[a-z_]+)", page.read_text()))
        assert {name for name in named if name not in known} <= {"kvlease_trace"}, page
