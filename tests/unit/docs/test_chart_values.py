"""Laws of the chart: it has each of the daemon's settings by its name, and no other settings."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Final

import pytest

from helm.write_schema import MADE_BY_THE_CHART, schema
from kvleased.config.addresses import RemoteUrl, RemoteUrlError
from kvleased.config.settings import Settings

_SCHEMA: Final = Path(__file__).parents[3] / "helm" / "kvlease" / "values.schema.json"


def test_chart_takes_every_setting() -> None:
    """A setting is either below `settings`, or the chart makes it from other values."""
    taken = json.loads(_SCHEMA.read_text())["properties"]["settings"]

    assert set(taken["properties"]) == set(Settings.model_fields) - MADE_BY_THE_CHART
    assert taken["additionalProperties"] is False


def test_chart_has_the_bounds_of_settings_tenants_and_connectors() -> None:
    """Helm refuses what the daemon, or an engine, would refuse at each start; `make chart-files` writes the bounds."""
    now = json.loads(_SCHEMA.read_text())

    assert schema(now) == now


def test_every_object_of_the_chart_is_closed() -> None:
    """A misspelt value is refused at every place but `global`, which is other charts'."""
    schema = json.loads(_SCHEMA.read_text())
    defined = schema["definitions"].items()
    open_ones = [path for name, one in defined for path in _open_objects(one, name)]

    assert _open_objects(schema, "") + open_ones == ["global"]


@pytest.mark.parametrize(
    ("address", "is_taken"),
    [
        pytest.param("redis://store:6379/2", True, id="database"),
        pytest.param("rediss://user@[::1]:7000?ssl_ca_certs=/tls/ca.pem&db=4", True, id="options"),
        pytest.param("mooncake://master:50051?metadata=P2PHANDSHAKE", True, id="mooncake"),
        pytest.param("unix:///run/redis/redis.sock?db=1", True, id="socket"),
        pytest.param("http://store", False, id="other scheme"),
        pytest.param("redis://", False, id="no host"),
        pytest.param("unix://", False, id="no path"),
        pytest.param("redis://store/one", False, id="database without a number"),
        pytest.param("redis://store?socket_timeout=999", False, id="deadline got round"),
        pytest.param("rediss://store?ssl_cert_reqs=none", False, id="certificate not looked at"),
        pytest.param("rediss://store/1?ssl_check_hostname=false", True, id="another name"),
        pytest.param("mooncake://m?segment_bytes=1&host=h", True, id="options of mooncake"),
        pytest.param("redis://store?ssl_ca_certs=/tls/ca.pem", False, id="files without TLS"),
        pytest.param("rediss://store?db=1&host=h", False, id="options of another scheme"),
        pytest.param("rediss://store?ssl_check_hostname=no", False, id="neither true nor false"),
        pytest.param("redis://store?db=one", False, id="option without a number"),
        pytest.param("mooncake://master/1", False, id="database of mooncake"),
        pytest.param("mooncake://m?buffer_bytes=1GiB", False, id="bytes with a unit"),
        pytest.param("redis://store:0", False, id="port 0"),
    ],
)
def test_chart_takes_an_address_that_the_daemon_takes(*, address: str, is_taken: bool) -> None:
    """Helm refuses a remote store's address that the daemon would refuse at each start."""
    pattern = json.loads(_SCHEMA.read_text())["properties"]["remote"]["properties"]["url"][
        "pattern"
    ]

    with nullcontext() if is_taken else pytest.raises(RemoteUrlError):
        RemoteUrl.parse(address)
    assert bool(re.search(pattern, address)) == is_taken


def test_chart_takes_no_address() -> None:
    """Without an address there is no remote store."""
    pattern = json.loads(_SCHEMA.read_text())["properties"]["remote"]["properties"]["url"][
        "pattern"
    ]

    assert re.search(pattern, "")


def _open_objects(schema: dict[str, object], path: str) -> list[str]:
    found = (
        [path] if schema.get("type") == "object" and "additionalProperties" not in schema else []
    )
    properties = schema.get("properties")
    if isinstance(properties, dict):
        for name, inner in properties.items():
            found += _open_objects(inner, f"{path}.{name}" if path else name)
    items = schema.get("items")
    return found + (_open_objects(items, f"{path}[]") if isinstance(items, dict) else [])
