"""What a process is started with."""

import pytest

from kvleased.processes import _for_copies

_OURS = "glibc.cpu.x86_non_temporal_threshold=0x5000"


@pytest.mark.parametrize(
    ("told", "expected"),
    [
        pytest.param(None, _OURS, id="nothing"),
        pytest.param("", _OURS, id="empty"),
        pytest.param("glibc.malloc.check=1", f"glibc.malloc.check=1:{_OURS}", id="something else"),
        pytest.param(
            "glibc.cpu.x86_non_temporal_threshold=0x40000",
            "glibc.cpu.x86_non_temporal_threshold=0x40000",
            id="the same",
        ),
    ],
)
def test_movers_write_past_the_caches_unless_told_otherwise(
    told: str | None, expected: str
) -> None:
    """What an operator says of the C library's copies goes first, and nothing else of the environment changes."""
    environment = {"HOME": "/"} | ({} if told is None else {"GLIBC_TUNABLES": told})

    assert _for_copies(environment) == {"HOME": "/", "GLIBC_TUNABLES": expected}
