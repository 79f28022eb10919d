"""A real Prometheus over a real daemon under load: every panel and every rule has data."""

import json
import math
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.acceptance.serving import ROOT, Serving, served
from tests.deploy.prometheus.load import loaded
from tests.deploy.prometheus.test_rules import BY_ALERT, BY_RECORD, RULES
from tests.servers.processes import free_port
from tests.unit.api.certificates import Authority

pytestmark = pytest.mark.deploy

BOARD: Final[dict[str, Any]] = json.loads(
    (ROOT / "deploy" / "grafana" / "kvlease.json").read_text()
)
OBSERVE: Final = ROOT / "deploy" / "prometheus" / "observe.py"
SECONDS_MAX: Final = 120.0
POLL_SECONDS: Final = 0.5
INTERVAL: Final = "20s"
"""A stand-in for the interval that Grafana chooses."""
QUERIES: Final = {
    f"{panel['title']} | {target['legendFormat']}": target["expr"]
    for panel in BOARD["panels"]
    for target in panel.get("targets", ())
}


STIRRED: Final = (
    *(
        f'kvlease_prefix_tokens_total{{outcome="{tier}_hit"}}'
        for tier in ("device", "host", "disk")
    ),
    *(f'kvlease_refusals_total{{code="{code}"}}' for code in ("POOL_FULL", "NEVER_FITS")),
    *(f'kvlease_waits_total{{outcome="{outcome}"}}' for outcome in ("granted", "refused")),
    *(
        f'kvlease_evictions_total{{tier="{tier}",reason="evicted"}}'
        for tier in ("device", "host", "disk")
    ),
    *(f'kvlease_tenant_blocks{{tenant="{tenant}",tier="disk"}}' for tenant in ("chat", "batch")),
    'kvlease_missed_blocks_total{reason="evicted"}',
    'kvlease_magazine_blocks{state="private"}',
    "kvlease_block_idle_seconds_sum",
    "kvlease_block_residence_seconds_sum",
    "kvlease_group_unfilled_bytes",
    "kvlease_plan_waste_bytes",
    "kvlease_ghost_hits_total",
)
"""Series that are 0 on an idle daemon, and above 0 under this load."""


class Prometheus:
    """A Prometheus that is asked over HTTP."""

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, path: str, **parameters: str) -> Any:
        """Return the data of an answer."""
        url = f"{self._url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:  # noqa: S310 - loopback
            return json.load(answer)["data"]

    def values(self, query: str) -> list[float]:
        """Return the numbers of a query's current result, without NaN."""
        found = [float(one["value"][1]) for one in self.ask("query", query=query)["result"]]
        return [one for one in found if math.isfinite(one)]

    @property
    def names(self) -> set[str]:
        """Return the names of all its metrics."""
        return set(self.ask("label/__name__/values"))


def until(is_done: Callable[[], bool], what: str) -> None:
    """Wait until the condition holds."""
    give_up_at = time.monotonic() + SECONDS_MAX
    while not is_done():
        assert time.monotonic() < give_up_at, what
        time.sleep(POLL_SECONDS)


def probes_of(serving: Serving) -> str:
    """Return the address of a daemon's probes and metrics, without TLS."""
    for line in Path(serving.log.name).read_text().splitlines():
        if line.startswith("{") and "probes" in (told := json.loads(line)):
            return str(told["probes"]).removesuffix("/readyz")
    raise AssertionError("it has no port of probes")


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Prometheus]:
    """Run `make observability` over a daemon with three tiers and a certificate, under load."""
    folder = tmp_path_factory.mktemp("observed")
    disk = folder / "disk"
    disk.mkdir(mode=0o700)
    pair = Authority(folder).sign("server")
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    options += ["--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)]
    options += ["--probe-host", "127.0.0.1", "--probe-port", "0"]
    options += ["--disk-dir", str(disk), "--tick-seconds", "0.1"]
    serving = Serving(folder / "run", *options)
    port = free_port()
    try:
        serving.wait_until_ready()
        command = [sys.executable, str(OBSERVE), "--port", str(port)]
        command += ["--daemon", probes_of(serving)]
        command += ["--token-file", str(folder / "run" / "reader.token")]
        command += ["--interval-seconds", "1", "--directory", str(folder / "prometheus")]
        with loaded(serving), subprocess.Popen(command, stdout=subprocess.PIPE) as observing:
            try:
                assert observing.stdout is not None
                assert observing.stdout.readline(), "Prometheus did not start"
                yield Prometheus(f"http://127.0.0.1:{port}")
            finally:
                observing.terminate()
            assert observing.wait(SECONDS_MAX) == 0
    finally:
        serving.stop()


@pytest.mark.parametrize(
    ("address", "says"),
    [
        pytest.param(
            "unix:///nowhere/kvlease.sock", "start the daemon with --listen-tcp", id="socket"
        ),
        pytest.param("grpc://127.0.0.1:7071", "as KVLEASE_ADDRESS=http://HOST:PORT", id="gRPC"),
        pytest.param(
            "http://127.0.0.1:9", "no daemon answers at http://127.0.0.1:9, by", id="none"
        ),
        pytest.param("nonsense", "'nonsense' is not an address", id="nonsense"),
    ],
)
def test_address_that_prometheus_cannot_read_is_refused(address: str, says: str) -> None:
    """An address that Prometheus cannot read is refused with advice, and no other daemon is started."""
    done = subprocess.run(
        [sys.executable, OBSERVE],
        env={**os.environ, "KVLEASE_ADDRESS": address},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr


@pytest.mark.parametrize("is_by_socket", [True, False], ids=["by its socket", "by its address"])
def test_daemon_that_is_named_is_observed(tmp_path: Path, is_by_socket: bool) -> None:
    """Its socket's or REST address, over TLS, is enough to observe a daemon; its token lies beside the socket.

    What the environment says of proxies is for other machines.
    """
    authority = Authority(tmp_path)
    pair = authority.sign("server")
    options = ["--listen-tcp", "--http-port", "0", "--grpc-port", "0"]
    options += ["--tls-cert-file", str(pair.cert_file), "--tls-key-file", str(pair.key_file)]
    with served(tmp_path / "run", *options) as serving:
        rest = (tmp_path / "run" / "page.url").read_text().strip()
        env = {
            **os.environ,
            "KVLEASE_ADDRESS": serving.address("unix") if is_by_socket else rest,
            "KVLEASE_CA_FILE": str(authority.cert_file),
            "http_proxy": "http://127.0.0.1:9",
            "https_proxy": "http://127.0.0.1:9",
        }
        if not is_by_socket:
            env["KVLEASE_TOKEN_FILE"] = str(tmp_path / "run" / "reader.token")
        port = free_port()
        command = [sys.executable, str(OBSERVE), "--port", str(port)]
        command += ["--interval-seconds", "1", "--directory", str(tmp_path / "prometheus")]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=env) as observing:
            try:
                assert observing.stdout is not None
                assert f"Prometheus over {rest}: ".encode() in observing.stdout.readline()
                asked = Prometheus(f"http://127.0.0.1:{port}")
                until(lambda: asked.values("up") == [1.0], "it is not scraped")
            finally:
                observing.terminate()


@pytest.mark.parametrize("panel", QUERIES)
def test_panel_has_something_to_show(prometheus: Prometheus, panel: str) -> None:
    """The query of every curve finds numbers under load, for all jobs, instances and caches."""
    query = re.sub(r"\$(?!_)\w+", ".*", QUERIES[panel]).replace("$__rate_interval", INTERVAL)

    until(lambda: bool(prometheus.values(query)), f"nothing: {query}")


@pytest.mark.parametrize("series", STIRRED)
def test_load_stirs_what_is_measured(prometheus: Prometheus, series: str) -> None:
    """Under load, series that are 0 on an idle daemon are not: tiers, refusals and waits all move."""
    until(lambda: sum(prometheus.values(f"sum({series})")) > 0, f"nothing but zeros: {series}")


@pytest.mark.parametrize("record", BY_RECORD)
def test_recording_has_something_to_show(prometheus: Prometheus, record: str) -> None:
    """Every recorded series has numbers."""
    until(lambda: bool(prometheus.values(record)), f"nothing: {record}")


def test_every_rule_is_evaluated(prometheus: Prometheus) -> None:
    """Prometheus has all rules and has evaluated each without an error."""

    def are_evaluated() -> bool:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        assert not [rule["lastError"] for rule in rules if rule.get("lastError")]
        return len(rules) == len(RULES) and all(rule["health"] == "ok" for rule in rules)

    until(are_evaluated, "some rule is never evaluated")


@pytest.mark.parametrize("alert", BY_ALERT)
def test_alert_asks_for_what_is_there(prometheus: Prometheus, alert: str) -> None:
    """Each series that an alert looks at exists, whether it fires or not."""
    expr = BY_ALERT[alert]["expr"]
    selectors = re.findall(r"\b(?:kvlease[_:][\w:]+|up)(?:\{[^}]*\})?", expr)
    assert selectors

    for selector in selectors:
        until(
            lambda asked=selector: bool(prometheus.ask("query", query=asked)["result"]),  # type: ignore[misc]
            f"nothing: {selector}",
        )


def test_no_name_is_unknown(prometheus: Prometheus) -> None:
    """Prometheus has seen every metric that a panel names."""
    asked = {
        name
        for query in QUERIES.values()
        for name in re.findall(r"\b(?:kvlease|process)[_:][\w:]+", query)
    }

    until(lambda: asked <= prometheus.names, f"unknown: {asked - prometheus.names}")


def test_daemon_s_books_agree_under_load(prometheus: Prometheus) -> None:
    """No scrape has shown the mismatch that the accounting alert looks for."""
    expr = BY_ALERT["KvleaseAccountingMismatch"]["expr"]

    assert prometheus.values(f"count_over_time(({expr})[5m:1s])") == []
    assert prometheus.values(f"absent(({expr}))") == [1.0]


def test_alerts_of_a_healthy_daemon_are_few(prometheus: Prometheus) -> None:
    """No alert that wakes somebody fires over a daemon that merely has too little room."""
    firing = {
        alert["labels"]["alertname"]
        for alert in prometheus.ask("alerts")["alerts"]
        if alert["state"] == "firing" and alert["labels"]["severity"] == "critical"
    }

    assert firing <= {"KvleasePoolExhausted", "KvleaseMemoryNearLimit"}
