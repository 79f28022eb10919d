"""Settings that a start warns of."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvleased.config.settings import Settings
from kvleased.control import risks

TCP: dict[str, int | str] = {
    "tcp_host": "127.0.0.2",
    "http_port": 7000,
    "grpc_port": 7001,
    "tls_cert_file": "/cert",
    "tls_key_file": "/key",
    "tls_client_ca_file": "/ca",
    "insecure_tcp_without_tls": True,
    "operator_token_file": "/operator",
    "joiner_token_file": "/joiner",
    "reader_token_file": "/reader",
}
"""A value of each setting that is for TCP alone."""


@pytest.mark.parametrize(
    ("given", "named"),
    [
        pytest.param({"disk_bytes_max": 1 << 30}, ["disk_bytes_max"], id="disk"),
        pytest.param(
            {"remote_ttl_seconds": 60, "remote_ms_max": 9},
            ["remote_ttl_seconds", "remote_ms_max"],
            id="remote",
        ),
        pytest.param({"probe_port": 7000}, ["probe_port"], id="probes"),
        pytest.param({"probe_port": 7000, "probe_host": "127.0.0.1"}, [], id="both"),
        pytest.param({"listen_tcp": False, "http_port": 7000}, ["http_port"], id="port"),
        pytest.param({"listen_tcp": False, **TCP}, [*TCP], id="all of TCP"),
        pytest.param({**TCP}, [], id="TCP"),
        pytest.param({"serve_grpc": False, "grpc_port": 7000}, ["grpc_port"], id="gRPC"),
        pytest.param({"listen_tcp": False, "http_port": 7070}, [], id="default that is given"),
        pytest.param({"listen_tcp": False, "serve_grpc": False}, [], id="no TCP"),
        pytest.param({}, [], id="defaults"),
    ],
)
def test_setting_that_does_nothing_is_named(
    tmp_path: Path, given: dict[str, int | str], named: list[str]
) -> None:
    """A limit on a store that no setting names, or a port of no listener, has no effect; the warning names it."""
    settings = Settings.model_validate({"runtime_dir": tmp_path, **given})
    with capture_logs() as lines:
        risks.warn(settings)

    found = [line["setting"] for line in lines if line["event"] == "setting_without_effect"]
    assert found == named


def test_advice_names_all_that_is_missing(tmp_path: Path) -> None:
    """A setting that needs two others is warned of once, and nothing is said of a network that nobody listens to."""
    given = {"grpc_port": 1, "insecure_tcp_without_tls": True}
    none = {"listen_tcp": False, "serve_grpc": False}
    settings = Settings.model_validate({"runtime_dir": tmp_path, **given, **none})
    with capture_logs() as lines:
        risks.warn(settings)

    said = {line["setting"]: line["advice"] for line in lines if "setting" in line}
    assert said == {
        "grpc_port": "set listen_tcp and serve_grpc too",
        "insecure_tcp_without_tls": "set listen_tcp too",
    }
    assert "tcp_without_tls" not in [line["event"] for line in lines]
