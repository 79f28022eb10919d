"""Laws of the words for a plan and its settings."""

from dataclasses import replace
from typing import Any

import pytest

from kvlease.cli.plan import settings as plan_settings
from kvlease.cli.plan import words as plan_words
from kvlease.plan import EngineInputs, PlanInputs
from kvlease.plan_report import Equation
from kvlease.spec import MLA, LayerSpec, RingState
from kvleased.planning import plan
from tests.unit.client.cli.plan.test_command import FULL, STATE, WINDOW


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        pytest.param("state_mode=align", "--state-mode align", id="a value"),
        pytest.param("one_group=false", "--no-one-group", id="a switch"),
        pytest.param("prefix_caching=true", "--prefix-caching", id="on"),
        pytest.param(
            "block_multiple_bytes=4096", "block_multiple_bytes=4096  (4.00 KiB)", id="no option"
        ),
        pytest.param(
            "device_bytes=2048 host_bytes=1024",
            "--device-memory 2048 --host-memory 1024  (2.00 KiB, 1.00 KiB)",
            id="a pair",
        ),
    ],
)
def test_settings_are_written_as_options(settings: str, options: str) -> None:
    """A remedy is written as the command line takes it."""
    assert plan_settings.as_options(settings) == options


def kept(*layers: LayerSpec, **engine: Any) -> list[str]:
    """Return what the words say that each group of some layers keeps."""
    inputs = PlanInputs(
        layers=layers, tokens_per_block=64, device_bytes=2**24, engine=EngineInputs(**engine)
    )
    return [plan_words.keeps(group) for group in plan(inputs).groups]


def test_groups_are_said_in_words() -> None:
    """The words for a group say what it keeps, and what is unusual about it."""
    latent = MLA(name="a", head_size=64, dtype="uint8", tokens_per_state=4)
    ring = RingState(name="c", num_kv_heads=1, head_size=64, dtype="float16")
    drafted = kept(replace(WINDOW, name="d"), STATE, drafts_with_last_layer=True)

    assert kept(latent, replace(latent, name="b", head_size=32)) == [
        "MLA, 4 tokens a state and others"
    ]
    assert kept(ring) == ["ring state, not cached"]
    assert kept(FULL, WINDOW, one_group=True) == ["full attention, windows of 1,000 kept whole"]
    assert drafted == ["sliding window of 1,000", "state space, drafted"]


def equation(**changes: Any) -> Equation:
    """Return an equation about a rank's layer."""
    fields = {"name": "n", "formula": "a / b", "arithmetic": "1 / 1", "value": 1, "unit": "blocks"}
    return Equation(**{**fields, **changes})


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        pytest.param(plan_words.numbers([0, 1, 2, 5]), "0-2, 5", id="runs"),
        pytest.param(plan_words.value(equation()), "1 block", id="one"),
        pytest.param(plan_words.value(equation(unit="entries")), "1 entry", id="one entry"),
        pytest.param(plan_words.value(equation(value_divisor=8)), "0.12 blocks", id="a part"),
        pytest.param(
            plan_words.whose(equation(groups=(0,), ranks=(1, 2), layer="x")),
            "  group 0  ranks 1-2  x",
            id="whose",
        ),
        pytest.param(plan_words.plural(2, "entry"), "2 entries", id="entries"),
        pytest.param(plan_words.share(0, 5), "0 %", id="nothing"),
        pytest.param(plan_words.share(1, 2**40), "< 0.1 %", id="hardly anything"),
        pytest.param(plan_words.share(1, 4), "25.0 %", id="a quarter"),
        pytest.param(plan_words.times(3.0, 2.0), "3.00 (x1.50)", id="more"),
        pytest.param(plan_words.times(3.0, 0.0), "3.00", id="from nothing"),
    ],
)
def test_numbers_are_said_in_words(said: str, expected: str) -> None:
    """Numbers are written as people write them."""
    assert said == expected
