"""Laws of the page about metrics: it is written from the code, and every metric in it exists."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

from kvleased.core.admission.refusals import Reason
from kvleased.core.blocks.history import DepartureReason
from kvleased.core.effects import Direction
from kvleased.core.lease.phases import End
from kvleased.core.prefix.regrets import REASONS
from kvleased.metrics.caches import STATES
from kvleased.metrics.catalogue import BY_NAME
from kvleased.metrics.definitions import Kind
from kvleased.supervision.supervisor import RESTARTS

_DOCS = Path(__file__).parents[3] / "docs"


def test_page_is_written_from_the_catalogue() -> None:
    """The page's names, kinds, labels and words are those of the code."""
    done = subprocess.run([sys.executable, str(_DOCS / "write_metrics.py"), "--check"], check=False)

    assert done.returncode == 0, "run make metrics-page"


def test_metrics_that_pages_name_are_there() -> None:
    """No page names a metric that the daemon does not have."""
    known = {one.full_name for one in BY_NAME.values()}
    known |= {
        one.full_name.removesuffix("_bucket")
        for one in BY_NAME.values()
        if one.kind is Kind.HISTOGRAM
    }
    for page in _DOCS.rglob("*.md"):
        named = set(re.findall(r"`(?:sum\()?(kvlease_[a-z_]+)", page.read_text()))
        assert {name for name in named if name not in known} <= {"kvlease_trace"}, page


def test_values_of_labels_are_those_of_the_code() -> None:
    """Exactly the states, directions and reasons that exist have a line."""
    spec = importlib.util.spec_from_file_location("label_values", _DOCS / "label_values.py")
    assert spec is not None
    assert spec.loader is not None
    page = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(page)

    assert list(page.STATES) == list(STATES)
    assert list(page.DIRECTIONS) == [one.value for one in Direction]
    assert list(page.SHORTAGES) == [one.value for one in Reason]
    assert list(page.DEPARTURES) == [one.name.lower() for one in DepartureReason]
    assert list(page.MISSED) == list(REASONS)
    assert list(page.ENDS) == [one.value for one in End]
    assert list(page.RESTARTS) == list(RESTARTS)


def test_every_state_of_a_block_is_on_the_page_about_the_page() -> None:
    """docs/ui.md explains every square that the page can show."""
    ui = (_DOCS / "ui.md").read_text()
    words = (_DOCS.parent / "service" / "kvleased" / "web" / "static" / "colours.js").read_text()
    rows = [line for line in ui.splitlines() if line.startswith("| ")]

    for word in re.findall(r'\w+: "([a-z, ]+)"', words.partition("WORDS = {")[2].partition("}")[0]):
        assert any(word.removeprefix("being ") in row for row in rows), word
