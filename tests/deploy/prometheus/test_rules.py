"""Laws of the rules: promtool finds no fault, each alert fires exactly when it should, and has a runbook."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any, Final

import pytest
import yaml

from kvleased.metrics.catalogue import BY_NAME
from tests.deploy.prometheus.cases import ALERTS, RECORDS, Case, Series
from tests.deploy.tools import ROOT
from tests.servers import debian

pytestmark = pytest.mark.deploy

FILES: Final = sorted((ROOT / "deploy" / "prometheus").glob("*rules*.yaml"))
RUNBOOKS: Final = ROOT / "docs" / "runbooks"
RULES: Final[list[dict[str, Any]]] = [
    rule
    for file in FILES
    for group in yaml.safe_load(file.read_text())["groups"]
    for rule in group["rules"]
]
BY_ALERT: Final = {rule["alert"]: rule for rule in RULES if "alert" in rule}
BY_RECORD: Final = {rule["record"]: rule for rule in RULES if "record" in rule}
POD: Final = {
    "namespace": "caches", "pod": "caches-0", "container": "kvleased",
    "endpoint": "kvlease-metrics", "node": "n1",
}  # fmt: skip
"""The labels that a PodMonitor adds to job and instance."""
SECTIONS: Final = ("## What it means", "## What to look at", "## What to do")


def promtool(*arguments: str | Path) -> None:
    """Run promtool, which must find no fault."""
    program = debian.program("promtool", ("prometheus",))
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def evaluate(folder: Path, series: Series, **test: object) -> None:
    """Have promtool evaluate all rules over series, and compare the results."""
    named = [{"series": _named(name), "values": values} for name, values in series.items()]
    whole = {"interval": "1m", "input_series": named, **test}
    file = folder / "test.yaml"
    file.write_text(json.dumps({"rule_files": [str(one) for one in FILES], "tests": [whole]}))
    promtool("test", "rules", file)


def _named(series: str) -> str:
    name, _, labels = series.rstrip("}").partition("{")
    own = [*filter(None, [labels])]
    if "job=" not in labels:
        own.append('job="kvlease"')
    if "instance=" not in labels:
        own.append('instance="node:7070"')
    return name + "{" + ", ".join(own) + "}"


def _alert(name: str, case: Case) -> dict[str, object]:
    rule = BY_ALERT[name]
    labels = {**case.labels, **rule["labels"]}
    if case.has_job:
        labels["job"] = "kvlease"
    if case.has_instance:
        labels["instance"] = "node:7070"
    annotations = rule["annotations"] | {"summary": case.summary}
    return {"exp_labels": labels, "exp_annotations": annotations}


def test_rules_and_configuration_are_sound() -> None:
    """Promtool finds no fault in the rules, nor in the configuration that names them."""
    promtool("check", "rules", *FILES)
    for configuration in (ROOT / "deploy" / "prometheus").glob("*.yml"):
        promtool("check", "config", configuration)


@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires(name: str, tmp_path: Path) -> None:
    """An alert fires once over its series, with its labels and texts."""
    case = ALERTS[name]
    expected = {
        "eval_time": f"{case.at_minutes}m",
        "alertname": name,
        "exp_alerts": [_alert(name, case)],
    }
    for series in (case.fires, *case.also_fires):
        evaluate(tmp_path, series, alert_rule_test=[expected])


@pytest.mark.parametrize("name", ALERTS)
def test_alert_fires_for_a_pod(name: str, tmp_path: Path) -> None:
    """An alert fires as well over series with the labels of a pod, which recorded series do not have."""
    case = ALERTS[name]
    labels = ", ".join(f'{label}="{value}"' for label, value in POD.items())
    series = {
        one.removesuffix("}") + (", " if "{" in one else "{") + labels + "}": values
        for one, values in case.fires.items()
    }
    firing = {
        "eval_time": f"{case.at_minutes}m",
        "expr": f'count(ALERTS{{alertname="{name}", alertstate="firing"}})',
        "exp_samples": [{"labels": "{}", "value": 1}],
    }

    evaluate(tmp_path, series, promql_expr_test=[firing])


@pytest.mark.parametrize("name", ALERTS)
def test_alert_is_quiet(name: str, tmp_path: Path) -> None:
    """An alert does not fire over series just below its bounds."""
    case = ALERTS[name]
    expected = {"eval_time": f"{case.at_minutes}m", "alertname": name, "exp_alerts": []}
    evaluate(tmp_path, case.quiet, alert_rule_test=[expected])
    for series in case.also_quiet:
        never = [expected | {"eval_time": f"{at}m"} for at in range(case.at_minutes + 1)]
        evaluate(tmp_path, series, alert_rule_test=never)


@pytest.mark.parametrize("name", RECORDS)
def test_recording_has_its_value(name: str, tmp_path: Path) -> None:
    """A recording rule records the expected value."""
    series, value = RECORDS[name]
    expr = f"round(100000 * sum({name}))"
    expected = {
        "eval_time": "10m",
        "expr": expr,
        "exp_samples": [{"labels": "{}", "value": round(100_000 * value)}],
    }
    evaluate(tmp_path, series, promql_expr_test=[expected])


def test_store_that_accepts_nothing_is_told(tmp_path: Path) -> None:
    """A full remote store stays up and refuses each block, whatever the disk store beside it accepts."""
    series = {
        'kvlease_copies_failed_total{cache="main"}': "0x30",
        'kvlease_copies_lost_total{cache="main"}': "0x30",
        'kvlease_store_failures_total{cache="main", tier="remote"}': "0+60x30",
        'kvlease_blocks_moved_total{cache="main", direction="host_to_disk"}': "0+60x30",
        'kvlease_blocks_moved_total{cache="main", direction="host_to_remote"}': "0x30",
        'kvlease_tier_up{cache="main", tier="remote"}': "1x30",
    }
    firing = {
        "eval_time": "25m",
        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
        "exp_samples": [{"labels": '{alertname="KvleaseCopiesFailing"}', "value": 1}],
    }

    evaluate(tmp_path, series | {"up": "1x30"}, promql_expr_test=[firing])


def test_pools_that_are_not_used_memory_hide_nothing(tmp_path: Path) -> None:
    """Where pools are larger than what is used, as on huge pages, which count apart, all of the limit is looked at."""
    series = {
        "kvlease_memory_used_bytes": "960x10",
        "kvlease_memory_limit_bytes": "1000x10",
        "kvlease_memory_pools_bytes": "2000x10",
    }
    whole = {"labels": "{}", "value": 0.96}

    expr = "sum(kvlease:memory_used:ratio)"
    evaluate(
        tmp_path,
        series,
        promql_expr_test=[{"eval_time": "5m", "expr": expr, "exp_samples": [whole]}],
    )


def test_every_rule_has_a_case() -> None:
    """Every alert and every recording rule has a case."""
    assert set(ALERTS) == set(BY_ALERT)
    assert set(RECORDS) == set(BY_RECORD)


def test_every_name_in_a_rule_is_known() -> None:
    """Rules ask for metrics that the daemon has, or that another rule records."""
    known = {one.full_name for one in BY_NAME.values()} | set(BY_RECORD)
    for rule in RULES:
        asked = set(re.findall(r"\bkvlease[_:][\w:]+", rule["expr"]))
        assert asked <= known, rule


@pytest.mark.parametrize("name", sorted(BY_ALERT))
def test_alert_has_a_runbook(name: str) -> None:
    """Each alert's runbook says what it means, where to look and what to do; only its summary is a template."""
    rule = BY_ALERT[name]
    runbook = RUNBOOKS / f"{name}.md"
    text = runbook.read_text()

    assert rule["annotations"]["runbook_url"] == str(runbook.relative_to(ROOT))
    assert rule["labels"]["severity"] in {"critical", "warning"}
    assert "{{" not in rule["annotations"]["description"]
    assert text.startswith(f"# {name}\n")
    assert [line for line in text.splitlines() if line.startswith("## ")] == list(SECTIONS)


def test_every_runbook_is_of_an_alert() -> None:
    """Every runbook belongs to an alert, and the list of runbooks is complete."""
    found = {path.stem for path in RUNBOOKS.glob("*.md")} - {"README"}
    listed = set(re.findall(r"\]\((\w+)\.md\)", (RUNBOOKS / "README.md").read_text()))

    assert found == listed == set(BY_ALERT)
