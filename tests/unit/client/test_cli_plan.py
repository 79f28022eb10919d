"""Laws of `kvlease plan`: it prints what the planner says, with equations that hold."""

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kvlease.cli.plan import equations, plan_command
from kvlease.plan import PlanInputs
from kvlease.spec import FullAttention
from kvleased.planning import plan

CONFIG = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "dtype": "bfloat16",
}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Return a model's directory with a config.json."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def run(*arguments: str) -> tuple[int, str, str]:
    """Return the exit status, output and errors of `kvlease plan`."""
    app = typer.Typer()
    app.command()(plan_command)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
    return result.exit_code, result.stdout, result.stderr


def test_json_is_the_plan(model: Path) -> None:
    """What is printed for machines is the very plan that the daemon makes of the same inputs."""
    status, output, _ = run("--model", str(model), "--device-memory", "8GiB", "--json")
    expected = plan(
        PlanInputs(model_config=json.dumps(CONFIG), tokens_per_block=16, device_bytes=8 * 2**30)
    )

    assert status == 0
    assert json.loads(output)["num_blocks"] == expected.num_blocks
    assert json.loads(output)["layout_fingerprint"] == expected.layout_fingerprint


def test_table_shows_equations_and_numbers(model: Path) -> None:
    """People see where every number comes from, from a file as from its directory."""
    status, output, _ = run(
        "--model", str(model / "config.json"), "--device-memory", "8GiB", "--host-memory", "1GiB"
    )

    assert status == 0
    assert "floor(8589934592 / 2097152) = 4096" in output
    assert "32 layers * 8 heads * (128 + 128) * 2 B = 131072" in output
    assert "512 slots" in output


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        pytest.param(["--device-memory", "1MiB"], "NEVER_FITS", id="no block fits"),
        pytest.param(["--device-memory", "lots"], "INVALID", id="memory unclear"),
        pytest.param([], "exactly one of device_bytes", id="no budget"),
    ],
)
def test_refusal_is_printed_and_fails(model: Path, arguments: list[str], complaint: str) -> None:
    """A plan that cannot be made ends with status 2, its code and the reason on standard error."""
    status, output, errors = run("--model", str(model), *arguments)

    assert status == 2
    assert not output
    assert complaint in errors


def test_missing_config_is_refused(tmp_path: Path) -> None:
    """A path without a config is named in the refusal."""
    status, _, errors = run("--model", str(tmp_path), "--device-blocks", "1")

    assert status == 2
    assert "cannot read" in errors


@pytest.mark.parametrize("longest", [0, 100])
def test_equations_hold(longest: int) -> None:
    """Equations carry the plan's numbers: equal layers are counted together, whole blocks are promised."""
    layers = [
        FullAttention(name=str(index), num_kv_heads=heads, head_size=7, dtype="float32")
        for index, heads in enumerate((3, 3, 1))
    ]
    inputs = PlanInputs(
        layers=tuple(layers), tokens_per_block=8, device_blocks=20, longest_request_tokens=longest
    )
    rows = {name: equation for name, equation, _ in equations(inputs, plan(inputs))}

    assert rows["bytes_per_token"] == (
        "2 layers * 3 heads * (7 + 7) * 4 B + 1 layers * 1 heads * (7 + 7) * 4 B = 392"
    )
    assert rows["num_blocks"] == "as given = 20"
    assert rows["longest_request_tokens"].endswith("= 104" if longest else "= 160")
