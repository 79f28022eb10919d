"""Laws of remedies: a setting that a refusal names works and is the nearest that does, and at most three are named."""

import importlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, KVLeaseError, NeverFitsError
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import RingState
from kvleased.planning import changed, plan, plan_or_explain
from kvleased.planning.advice.remedies import REMEDIES_MAX, remedies
from tests.golden.words import plan_inputs_of
from tests.unit.service.planning.advice.test_what_if import CONFIG
from tests.unit.service.planning.specs import (
    chunk,
    full,
    latent,
    states,
    times,
    window,
)

_VECTORS = Path(__file__).parents[4] / "golden" / "vectors" / "planning.json"
_GOLDEN = json.loads(_VECTORS.read_text())["vectors"]
searching = importlib.import_module("kvleased.planning.advice.remedies")
"""The module itself, which the package hides behind its function of the same name."""
OPEN = replace(full("full"), tokens_per_block=None)

RING = RingState(name="ring", tokens_per_block=8, num_kv_heads=1, head_size=64, dtype="float16")


def inputs_of(**changes: Any) -> PlanInputs:
    """Return inputs that fit: two layers, 64 blocks of 16384 bytes, 1024 tokens."""
    return replace(
        PlanInputs(
            layers=tuple(times(OPEN, 2)),
            tokens_per_block=16,
            device_bytes=64 * 16384,
            longest_request_tokens=1024,
        ),
        **changes,
    )


def refusal_of(inputs: PlanInputs) -> KVLeaseError:
    """Return the error with which the plan is refused."""
    with pytest.raises(KVLeaseError) as refusal:
        plan_or_explain(inputs)
    return refusal.value


def is_planned(inputs: PlanInputs, setting: str) -> bool:
    """Tell whether the inputs with one setting changed can be planned."""
    try:
        plan(changed(inputs, setting))
    except KVLeaseError:
        return False
    return True


def test_plan_that_fits_is_the_plan() -> None:
    """If nothing is refused, the answer is the plan itself."""
    assert plan_or_explain(inputs_of()) == plan(inputs_of())


def test_refusal_names_the_nearest_settings() -> None:
    """With one block too few, the refusal names a shorter request, more memory in whole blocks, and smaller blocks."""
    error = refusal_of(inputs_of(longest_request_tokens=1025))

    assert error.remedies == ("longest_request_tokens=1024", "device_bytes=1064960")
    assert error.message.endswith(
        "; there is a plan with longest_request_tokens=1024 or device_bytes=1064960 (1.01 MiB)"
    )
    assert (error.rule, error.resource) == ("not_enough_memory", "device_blocks")
    assert (error.need, error.available, error.limit) == (65, 64, 1024)


@pytest.mark.parametrize("vector", _GOLDEN, ids=lambda vector: vector["id"])
def test_remedies_of_golden_refusals_work(vector: dict[str, Any]) -> None:
    """Each setting that the refusal of a golden vector names makes a plan of it."""
    inputs = plan_inputs_of(vector["input"])
    try:
        plan_or_explain(inputs)
    except KVLeaseError as error:
        assert len(error.remedies) <= REMEDIES_MAX
        assert all(is_planned(inputs, setting) for setting in error.remedies)


def test_row_that_is_too_long_names_what_it_covers() -> None:
    """A request whose row is too long is told the longest that has places, and a block with which it has them."""
    wide = replace(window("w"), tokens_per_block=None)
    asked = inputs_of(layers=(wide,), device_bytes=2**26, longest_request_tokens=2**27)

    assert refusal_of(asked).remedies == ("longest_request_tokens=67108864", "tokens_per_block=32")


@given(
    st.integers(1, 5000),
    st.integers(1, 2**21),
    st.integers(0, 2),
    st.sampled_from([(OPEN,), (OPEN, window("window"))]),
)
def test_remedies_are_exact(
    longest: int, device_bytes: int, null_blocks: int, layers: tuple[Any, ...]
) -> None:
    """With one token more, or one byte less, than a refusal names, there is no plan."""
    inputs = inputs_of(
        layers=layers,
        device_bytes=device_bytes,
        null_blocks=null_blocks,
        longest_request_tokens=longest,
        engine=EngineInputs(tokens_per_step=64),
    )
    try:
        plan_or_explain(inputs)
    except NeverFitsError as error:
        named = dict(setting.split("=") for setting in error.remedies)
        for name, beyond in (("longest_request_tokens", 1), ("device_bytes", -1)):
            if name in named:
                assert is_planned(inputs, f"{name}={named[name]}")
                assert not is_planned(inputs, f"{name}={int(named[name]) + beyond}")


@pytest.mark.parametrize(
    ("inputs", "remedy"),
    [
        pytest.param(inputs_of(device_bytes=0, device_blocks=60), "device_blocks=64", id="blocks"),
        pytest.param(inputs_of(device_bytes=1), "device_bytes=1048576", id="no block"),
        pytest.param(
            inputs_of(device_bytes=10000, longest_request_tokens=0), "tokens_per_block=8", id="block"
        ),
        pytest.param(
            inputs_of(layers=(), model_config=CONFIG, device_bytes=2**20),
            "kv_dtype=fp8",
            id="element type",
        ),
        pytest.param(
            inputs_of(layers=(), model_config=CONFIG, kv_dtype="fp8", device_bytes=2**19),
            "tensor_ranks=2",
            id="ranks",
        ),
        pytest.param(
            inputs_of(layers=(window("w"),), longest_request_tokens=1000, device_bytes=20 * 8192,
                      engine=EngineInputs(tokens_per_step=512)),
            "tokens_per_step=128",
            id="shorter steps",
        ),
        pytest.param(inputs_of(host_bytes=1), "host_bytes=16384", id="one slot"),
        pytest.param(
            inputs_of(layers=(RING,), longest_request_tokens=1, host_bytes=2**20),
            "host_bytes=0",
            id="nothing to keep",
        ),
        pytest.param(inputs_of(disk_bytes=1), "disk_bytes=0", id="no disk"),
        pytest.param(
            inputs_of(engine=EngineInputs(match_tokens=3)), "match_tokens=none", id="keys"
        ),
        pytest.param(
            inputs_of(layers=(latent("a", head_size=96), chunk("b")), layout="LBNHC"),
            "layout=BLHNC",
            id="pages",
        ),
        pytest.param(
            inputs_of(layers=(full("a"), full("b", head_size=32)), layout="LHBNC"),
            "layout=BLHNC",
            id="layout",
        ),
        pytest.param(
            inputs_of(layers=(full("a"), states("b")), engine=EngineInputs(one_group=True)),
            "one_group=false",
            id="one group",
        ),
        pytest.param(
            inputs_of(layers=(window("a"),), parallel=ParallelInputs(context_ranks=2)),
            "context_ranks=1",
            id="shared window",
        ),
        pytest.param(
            inputs_of(layers=(replace(OPEN, backend="FLASHINFER"),), tokens_per_block=24),
            "tokens_per_block=32",
            id="kernel",
        ),
    ],
)  # fmt: skip
def test_every_kind_of_refusal_has_its_way_out(inputs: PlanInputs, remedy: str) -> None:
    """If one setting can mend a refusal, the refusal names it."""
    assert remedy in refusal_of(inputs).remedies


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda inputs: replace(inputs, tokens_per_block=0), id="out of range"),
        pytest.param(lambda inputs: replace(inputs, layers=()), id="nothing to plan"),
        pytest.param(
            lambda inputs: replace(inputs, layout="XYZ", ranks=(RankInputs(),)), id="two mistakes"
        ),
    ],
)
def test_mistakes_of_writing_have_no_remedy(spoil: Callable[[PlanInputs], PlanInputs]) -> None:
    """A malformed input is named as it is, without a guess at what was meant."""
    inputs = spoil(inputs_of())
    error = refusal_of(inputs)

    assert isinstance(error, InvalidError)
    assert error.remedies == () or all(is_planned(inputs, one) for one in error.remedies)


def test_two_lacks_have_pairs_of_settings() -> None:
    """If device and host memory are both too small, pairs of settings are named, each of which makes a plan."""
    inputs = inputs_of(device_bytes=10000, host_bytes=1, longest_request_tokens=1)
    error = refusal_of(inputs)

    assert "device_bytes=16384 host_bytes=16384" in error.remedies
    assert "device_bytes=16384 (16.00 KiB) and host_bytes=16384 (16.00 KiB)" in error.message
    assert all(is_planned(inputs, pair) and len(pair.split()) == 2 for pair in error.remedies)


def test_three_lacks_have_no_remedy() -> None:
    """A refusal that takes three settings to mend names none."""
    assert refusal_of(inputs_of(device_bytes=1, host_bytes=1, disk_bytes=1)).remedies == ()


def test_number_of_plans_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The number of plans tried is limited, and lower for many ranks."""
    inputs = inputs_of(device_bytes=1, host_bytes=1, disk_bytes=1)
    tried: list[PlanInputs] = []
    monkeypatch.setattr(searching, "plan", lambda asked: tried.append(asked) or plan(asked))
    refusal_of(inputs)
    num_of_few = len(tried)
    tried.clear()
    refusal_of(replace(inputs, parallel=ParallelInputs(tensor_ranks=1024)))

    # The first plan is the one that was asked for.
    assert 1 < num_of_few <= searching.PLANS_MAX + 1
    assert len(tried) <= 13


@pytest.mark.parametrize(
    ("longest", "expected"),
    [
        pytest.param(0, ("device_blocks=64", "device_bytes=16384000"), id="as many as fit"),
        pytest.param(512, ("device_blocks=64", "device_bytes=16384000"), id="a short request"),
        pytest.param(2000, ("device_bytes=16384000",), id="a longer one"),
    ],
)
def test_blocks_beyond_memory_name_those_that_it_holds(
    longest: int, expected: tuple[str, ...]
) -> None:
    """If memory does not hold the blocks asked for, the refusal names those that it holds and the memory needed."""
    error = refusal_of(inputs_of(device_blocks=1000, longest_request_tokens=longest))
    named = tuple(one for one in error.remedies if one.startswith("device_"))

    assert error.rule == "device_blocks_do_not_fit"
    assert sorted(named) == sorted(expected)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            {"ranks": (RankInputs(device_bytes=2**20),), "device_bytes": 0},
            ("device_blocks=64", "tokens_per_block=1", "device_bytes=16384000"),
            id="a rank's own memory",
        ),
        pytest.param({"device_bytes": 1}, ("device_bytes=16384000",), id="no block"),
        pytest.param(
            {"device_blocks": 2**31 - 1, "layers": tuple(times(OPEN, 1024))},
            (),
            id="no such memory",
        ),
    ],
)
def test_blocks_beyond_any_memory(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    """No blocks are named if memory holds none, and no memory beyond what there can be."""
    error = refusal_of(inputs_of(**{"device_blocks": 1000, "longest_request_tokens": 0, **changes}))

    assert error.rule == "device_blocks_do_not_fit"
    assert error.remedies == expected


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        pytest.param({"device_bytes": 1}, "device_bytes=12288 layout=LBHNC", id="memory"),
        pytest.param(
            {"device_bytes": 0, "device_blocks": 1, "null_blocks": 1},
            "device_bytes=24576 layout=LBHNC",
            id="a null block",
        ),
    ],
)
def test_memory_and_layout_are_both_named(device: dict[str, int], expected: str) -> None:
    """If no memory suffices for a layout, the memory is named together with a layout for which it does."""
    layers = (full("a"), full("b", head_size=32))
    error = refusal_of(inputs_of(layers=layers, layout="LHBNC", longest_request_tokens=1, **device))

    assert error.remedies == (expected,)


def of_model(**changes: Any) -> dict[str, Any]:
    """Return the changes that plan for a model with some fields changed."""
    fields = json.loads(CONFIG) | changes.pop("fields", {})
    return {"layers": (), "model_config": json.dumps(fields), "device_bytes": 2**30, **changes}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        pytest.param(
            of_model(parallel=ParallelInputs(tensor_ranks=3)),
            ("tensor_ranks=4", "tensor_ranks=2", "tensor_ranks=1"),
            id="ranks",
        ),
        pytest.param(
            of_model(parallel=ParallelInputs(pipeline_ranks=3)), ("pipeline_ranks=2",), id="stages"
        ),
        pytest.param(
            of_model(kv_dtype="fp8_ds_mla"),
            ("kv_dtype=fp8", "kv_dtype=int8", "kv_dtype=bfloat16"),
            id="another model's type",
        ),
        pytest.param(
            of_model(fields={"torch_dtype": None}),
            ("kv_dtype=bfloat16", "kv_dtype=float16", "kv_dtype=float32"),
            id="no type",
        ),
    ],
)
def test_values_that_work_are_named(changes: dict[str, Any], expected: tuple[str, ...]) -> None:
    """If a value does not suit the model, values that do are named, the nearest first."""
    assert refusal_of(inputs_of(**changes)).remedies == expected


def test_refusal_without_a_rule_has_no_remedy() -> None:
    """A refusal without a rule, such as of a number out of range, has no remedy."""
    assert remedies(inputs_of(), InvalidError("no", resource="device_bytes")) == ()


def test_states_that_do_not_divide_the_plans_blocks_are_refused_with_blocks_that_do() -> None:
    """The states of a compressed layer must fill the plan's block; the refusal names blocks that they fill."""
    layer = latent(tokens_per_block=None, tokens_per_state=3)

    with pytest.raises(InvalidError) as refusal:
        plan_or_explain(PlanInputs(layers=(layer,), tokens_per_block=16, device_bytes=2**24))

    assert refusal.value.rule == "tokens_per_state_does_not_divide"
    assert "have 15 and 18 tokens" in refusal.value.message
