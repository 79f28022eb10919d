"""Laws of the board: it is what its generator writes, and every panel is readable on any cluster."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest

from kvleased.metrics.catalogue import BY_NAME
from kvleased.metrics.definitions import Kind
from tests.deploy.prometheus.test_rules import BY_RECORD, evaluate
from tests.deploy.tools import ROOT, VENV

pytestmark = pytest.mark.deploy

FOLDER: Final = ROOT / "deploy" / "grafana"
BOARD: Final[dict[str, Any]] = json.loads((FOLDER / "kvlease.json").read_text())
PANELS: Final = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
QUERIES: Final = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_board_is_what_its_generator_writes() -> None:
    """The board's file equals its generator's output."""
    command = [VENV / "python", FOLDER / "board.py", "--check"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, f"run make board\n{done.stderr}"


def test_board_has_seven_rows() -> None:
    """The board has seven rows, in the order in which an operator asks."""
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]

    assert rows == [
        "Overview",
        "Pools",
        "Calls",
        "Leases",
        "Reuse and eviction",
        "Tiers and copies",
        "Process",
    ]
    assert 30 <= len(PANELS) <= 50


def test_board_can_be_imported_anywhere() -> None:
    """The board names no particular data source, job, instance or cache, and has an address of its own."""
    names = [variable["name"] for variable in BOARD["templating"]["list"]]

    assert names == ["datasource", "job", "instance", "cache"]
    assert BOARD.get("id") is None
    assert 0 < len(BOARD["uid"]) <= 40
    assert BOARD["schemaVersion"] > 30
    assert {panel["datasource"]["uid"] for panel in PANELS} == {"${datasource}"}
    for query in QUERIES:
        assert re.search(r'job=~"\$job", instance=~"\$instance"', query), query


def test_every_panel_can_be_read() -> None:
    """Every panel has a unique title, a text with its metric, a unit, and a name for each curve."""
    titles = [panel["title"] for panel in PANELS]
    assert len(set(titles)) == len(titles)
    for panel in PANELS:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        assert all(target["legendFormat"] for target in panel["targets"]), panel["title"]


def test_daemon_that_grants_nothing_is_red() -> None:
    """The first panel is green for 1 alone, and does not take daemons that cannot be scraped for idle ones."""
    shown = PANELS[0]["fieldConfig"]["defaults"]

    assert PANELS[0]["title"] == "Ready"
    assert [(step["value"], step["color"]) for step in shown["thresholds"]["steps"]] == [
        (None, "red"),
        (1, "green"),
    ]
    assert shown["noValue"] == "nothing there"


def test_bytes_out_of_use_are_not_in_use(tmp_path: Path) -> None:
    """What a resize gave back, and what is retired, is no more in use than what is free."""
    (panel,) = [panel for panel in PANELS if panel["title"] == "Bytes in use by tier"]
    query = re.sub(r"\$\w+", ".*", panel["targets"][0]["expr"])
    states = {"free": 1, "ready": 20, "reserved": 300, "parked": 4_000, "bad": 50_000}
    series = {
        f'kvlease_pool_bytes{{cache="main", tier="device", state="{state}"}}': f"{num_bytes}x10"
        for state, num_bytes in states.items()
    }
    expected = {
        "eval_time": "5m",
        "expr": query,
        "exp_samples": [{"labels": '{tier="device"}', "value": 320}],
    }

    evaluate(tmp_path, series, promql_expr_test=[expected])


def test_blocks_of_tenants_are_on_the_board() -> None:
    """The board shows what each tenant has on the device, and how much of it is pinned."""
    shown = " ".join(QUERIES)

    assert all(f"kvlease_tenant_{name}" in shown for name in ("blocks", "pinned_blocks"))


def test_panels_do_not_overlap() -> None:
    """Each place of the grid has at most one panel, and each panel a number of its own."""
    places = [
        (x, y)
        for at in (panel["gridPos"] for panel in BOARD["panels"])
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    ids = [panel["id"] for panel in BOARD["panels"]]

    assert len(set(places)) == len(places)
    assert all(x < 24 for x, _ in places)
    assert len(set(ids)) == len(ids)


def test_counters_are_asked_for_as_rates() -> None:
    """Every counter is drawn as a rate, over the interval that the board chooses."""
    for query in QUERIES:
        bare = re.sub(r"rate\([^()]*\[\$__rate_interval\]\)", "", query)
        assert "_total" not in bare, query
        assert "_bucket" not in bare, query
        assert "[" not in bare, query


def test_queries_name_what_is_there() -> None:
    """Every metric is the daemon's or a rule's, with its own labels."""
    known = {one.full_name: {*one.labels} for one in BY_NAME.values()}
    for query in QUERIES:
        for name, inner in re.findall(r"\b(kvlease[_:][\w:]+)\{([^}]*)\}", query):
            assert name in known or name in BY_RECORD, query
            if name in known:
                assert set(re.findall(r"(\w+)(?:=~|!=|=)", inner)) <= known[name] | {
                    "job",
                    "instance",
                }, query


def test_every_kind_of_metric_is_on_the_board() -> None:
    """The board shows every kind of metric, and all histograms as quantiles."""
    shown = " ".join(QUERIES + [rule["expr"] for rule in BY_RECORD.values()])

    assert all(one.full_name in shown for one in BY_NAME.values() if one.kind is Kind.HISTOGRAM)
