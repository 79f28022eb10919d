"""Settings that a start warns of."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from kvleased import risks
from kvleased.config.settings import Settings


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
        pytest.param({}, [], id="defaults"),
    ],
)
def test_setting_that_does_nothing_is_named(
    tmp_path: Path, given: dict[str, int | str], named: list[str]
) -> None:
    """A limit on a store that no setting names has no effect, and the warning names that limit."""
    settings = Settings.model_validate({"runtime_dir": tmp_path, **given})
    with capture_logs() as lines:
        risks.warn(settings)

    found = [line["setting"] for line in lines if line["event"] == "setting_without_effect"]
    assert found == named
