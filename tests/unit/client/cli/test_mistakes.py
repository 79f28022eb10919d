"""Laws of mistaken options: the status is 2, and the message repeats what was written and says what to write."""

import pytest
from typer.testing import CliRunner

from kvlease.cli import app as cli


@pytest.mark.parametrize(
    ("line", "said"),
    [
        pytest.param("evict --blocks many", "'--blocks': it is 'many'; it must be a whole number", id="word"),
        pytest.param("evict --blocks 1.5", "'--blocks': it is '1.5'; it must be a whole number", id="part"),
        pytest.param("evict --blocks 0", "'--blocks': it is '0'; it must be 1 or more", id="too few"),
        pytest.param("explain x", "'LEASE': it is 'x'; it must be a whole number", id="argument"),
        pytest.param("detach x", "'WORKER': it is 'x'; it must be a whole number", id="worker"),
        pytest.param("top --every-seconds soon", "'--every-seconds': it is 'soon'; it must be a number", id="number"),
        pytest.param("top --every-seconds 0", "'--every-seconds': it is '0'; it must be 0.2 or more", id="too often"),
        pytest.param("tenants set a --weight x", "'--weight': it is 'x'; it must be a number", id="below a group"),
    ],
)  # fmt: skip
def test_wrong_value_is_told_with_what_to_write(line: str, said: str) -> None:
    """A value of the wrong kind or out of range is repeated, and the message says what is right."""
    result = CliRunner().invoke(cli.app, line.split(), env={"COLUMNS": "200"})

    assert result.exit_code == 2
    assert said in result.stderr
