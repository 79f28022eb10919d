"""Laws of what-ifs: a changed setting is a fresh plan of changed inputs, and nothing else."""

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError, KVLeaseError
from kvlease.plan import EngineInputs, PlanInputs, RankInputs
from kvlease.plan_report import PlanOutcome, WhatIf
from kvlease.units import TOKENS_MAX
from kvleased.planning import changed, plan, what_if, what_ifs
from kvleased.planning.advice.settings import SETTINGS
from tests.unit.service.planning.specs import full, window

LAYERS = (
    replace(full("full"), tokens_per_block=None),
    replace(window("window"), tokens_per_block=None),
)
CONFIG = json.dumps({
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "torch_dtype": "bfloat16",
    "max_position_embeddings": 4096,
})  # fmt: skip

CHANGES = st.one_of(
    st.integers(0, 64).map(lambda tokens: f"tokens_per_block={tokens}"),
    st.integers(0, 2**22).map(lambda size: f"device_bytes={size}"),
    st.integers(0, 2**12).map(lambda blocks: f"device_blocks={blocks}"),
    st.integers(0, 2**22).map(lambda size: f"host_bytes={size}"),
    st.integers(0, 2**12).map(lambda tokens: f"longest_request_tokens={tokens}"),
    st.sampled_from(["layout=LBNHC", "layout=LHBNC", "null_blocks=1", "tokens_per_step=64"]),
    st.sampled_from(
        ["context_ranks=2", "prefix_caching=no", "one_group=true", "match_tokens=none"]
    ),
)


def inputs_of(**changes: Any) -> PlanInputs:
    """Return inputs with a window and a full layer."""
    return replace(
        PlanInputs(
            layers=LAYERS, tokens_per_block=16, device_bytes=2**20, longest_request_tokens=200
        ),
        **changes,
    )


def outcome_of(inputs: PlanInputs) -> PlanOutcome:
    """Return the numbers of a plan that a what-if compares."""
    try:
        made = plan(inputs)
        largest = plan(replace(inputs, longest_request_tokens=TOKENS_MAX, fit_longest_request=True))
    except KVLeaseError as error:
        return PlanOutcome(refusal=f"{error.code}: {error.message}")
    return PlanOutcome(
        bytes_per_block=max(rank.bytes_per_block for rank in made.ranks),
        num_blocks=made.num_blocks,
        usable_blocks=made.usable_blocks,
        blocks_per_longest_request=made.blocks_per_longest_request,
        longest_request_tokens=made.longest_request_tokens,
        largest_request_tokens=largest.longest_request_tokens,
        capacity_tokens=made.capacity_tokens,
        num_slots=made.num_slots,
        bytes_per_slot=made.bytes_per_slot,
        num_disk_slots=made.num_disk_slots,
        num_remote_slots=made.num_remote_slots,
    )


@given(CHANGES)
def test_what_if_is_a_fresh_plan(change: str) -> None:
    """A change gives what a plan of the changed inputs gives."""
    inputs = inputs_of()
    found = what_if(inputs, change)

    assert found.before == outcome_of(inputs)
    assert found.after == outcome_of(changed(inputs, change))
    assert WhatIf.from_proto(found.to_proto()) == found


def test_what_if_keeps_the_request_that_was_asked_for() -> None:
    """Concurrency is compared for the same request, so it grows with memory."""
    found = what_if(inputs_of(), "device_bytes=2MiB")

    assert found.after.longest_request_tokens == found.before.longest_request_tokens == 200
    assert found.after.concurrency == 2 * found.before.concurrency


def test_shortened_request_is_the_largest() -> None:
    """A request that is shortened to fit is the longest that could ever be admitted."""
    inputs = inputs_of(longest_request_tokens=10**6, fit_longest_request=True)
    found = what_if(inputs, "device_bytes=2MiB")

    for outcome in (found.before, found.after):
        assert outcome.largest_request_tokens == outcome.longest_request_tokens < 10**6


def test_refused_change_says_why() -> None:
    """A change that cannot be planned has a refusal in place of numbers."""
    after = what_if(inputs_of(), "device_bytes=1KiB").after

    assert after.refusal.startswith("NEVER_FITS: rank 0 has 1024 bytes")
    assert (after.num_blocks, after.concurrency) == (0, 0.0)


@pytest.mark.parametrize("change", ["kv_dtype=fp8", "tensor_ranks=2", "pipeline_ranks=2"])
def test_change_of_the_model_needs_its_config(change: str) -> None:
    """Layers given by hand have a fixed number of ranks and a fixed type, so these cannot be changed."""
    assert "needs model_config" in what_if(inputs_of(), change).after.refusal


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        pytest.param("tokens=8", "unknown_setting", id="unknown"),
        pytest.param("tokens_per_block", "unknown_setting", id="no value"),
        pytest.param("tokens_per_block=many", "not_a_number", id="no number"),
        pytest.param("tokens_per_block=" + "9" * 21, "not_a_number", id="too long"),
        pytest.param("match_tokens=", "not_a_number", id="nothing"),
        pytest.param("one_group=perhaps", "not_a_truth", id="no truth"),
        pytest.param("device_bytes=lots", "not_a_number_of_bytes", id="no bytes"),
    ],
)
def test_what_is_no_change_is_refused(change: str, rule: str | None) -> None:
    """A misspelt setting or a malformed value is refused, and is no outcome."""
    with pytest.raises(InvalidError) as refusal:
        what_if(inputs_of(), change)

    assert refusal.value.rule == rule
    if rule != "unknown_setting":
        assert refusal.value.resource == change.partition("=")[0]
        assert refusal.value.message.startswith(str(refusal.value.resource))


@pytest.mark.parametrize(
    "change",
    [
        *(
            f"{name}=-3"
            for name in SETTINGS
            if name.endswith(("_bytes", "_blocks", "_tokens", "_ranks"))
        ),
        "tokens_per_block=0",
        "kv_dtype=foo",
        "layout=foo",
        "state_mode=foo",
    ],
)
def test_what_the_planner_refuses_is_an_outcome(change: str) -> None:
    """A well-formed value that cannot be planned is an outcome."""
    assert what_if(inputs_of(layers=(), model_config=CONFIG), change).after.refusal


def test_several_settings_change_at_once() -> None:
    """Settings separated by spaces change together, so that a pair of remedies can be tried."""
    both = changed(inputs_of(), "device_bytes = 2 MiB  host_bytes=1MiB")

    assert (both.device_bytes, both.host_bytes) == (2**21, 2**20)


def test_memory_and_blocks_that_are_both_given_change_alone() -> None:
    """If blocks and memory are both given, a change of one leaves the other."""
    both = inputs_of(device_blocks=7)

    assert changed(both, "device_blocks=9").device_bytes == both.device_bytes
    assert changed(both, "device_bytes=2MiB").device_blocks == 7


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ("disk_bytes=1MiB", "num_disk_slots"),
        ("remote_bytes=1MiB", "num_remote_slots"),
        ("blocks_per_slot=4", "bytes_per_slot"),
    ],
)
def test_lower_tiers_are_compared(change: str, field: str) -> None:
    """A change of a lower tier changes a number of the outcome."""
    found = what_if(inputs_of(), change)

    assert getattr(found.after, field) > getattr(found.before, field)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_changes_its_own_field(setting: str) -> None:
    """Each setting changes the field of its name, wherever in the inputs the field is."""
    texts = {"kv_dtype": "fp8", "layout": "LBNHC", "state_mode": "align"}
    truths = {"prefix_caching": "no", "one_group": "yes", "fit_longest_request": "true"}
    before = inputs_of(layers=(), model_config=CONFIG)
    after = changed(before, f"{setting}={texts.get(setting) or truths.get(setting) or 3}")

    different = [
        name
        for part in ("engine", "parallel")
        for name in getattr(before, part).__dataclass_fields__
        if getattr(getattr(before, part), name) != getattr(getattr(after, part), name)
    ] + [
        name
        for name in before.__dataclass_fields__
        if name not in {"engine", "parallel"} and getattr(before, name) != getattr(after, name)
    ]
    assert set(different) - {"device_bytes", "device_blocks"} <= {setting}
    assert setting in different


def test_memory_goes_in_place_of_blocks() -> None:
    """If only blocks were given, memory takes their place, equal for all ranks, and the other way round."""
    ranks = (RankInputs(device_bytes=5),)
    of_blocks = inputs_of(device_bytes=0, device_blocks=7, ranks=ranks)

    in_bytes = changed(of_blocks, "device_bytes=1MiB")
    assert (in_bytes.device_bytes, in_bytes.device_blocks) == (2**20, 0)
    assert in_bytes.ranks == (RankInputs(),)
    assert changed(in_bytes, "device_blocks=9").device_bytes == 0


def test_auto_is_as_many_tokens_as_fit() -> None:
    """A longest request of "auto" is planned as long as fits."""
    assert changed(inputs_of(), "longest_request_tokens=auto").longest_request_tokens == 0


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        pytest.param(
            inputs_of(),
            ["tokens_per_block=8", "tokens_per_block=32", "device_bytes=2097152", "host_bytes=2097152"],
            id="layers by hand",
        ),
        pytest.param(
            inputs_of(tokens_per_block=1, device_bytes=0, device_blocks=4),
            ["tokens_per_block=2", "device_blocks=8"],
            id="blocks",
        ),
        pytest.param(
            inputs_of(layers=(), model_config=CONFIG, host_bytes=8),
            ["tokens_per_block=8", "tokens_per_block=32", "kv_dtype=fp8", "tensor_ranks=2", "device_bytes=2097152",
             "host_bytes=16"],
            id="a model",
        ),
        pytest.param(
            inputs_of(layers=(), model_config=CONFIG, kv_dtype="int8", device_bytes=0),
            ["tokens_per_block=8", "tokens_per_block=32", "tensor_ranks=2"],
            id="a model in bytes",
        ),
    ],
)  # fmt: skip
def test_all_stands_for_the_usual_changes(inputs: PlanInputs, expected: list[str]) -> None:
    """The change "all" stands for the usual changes: blocks, type, ranks, memory and a host pool."""
    assert [found.change for found in what_ifs(inputs, ["all"])] == expected


def test_change_is_compared_once() -> None:
    """A change that is asked for twice is answered once; without any change the answer is empty."""
    asked = ["tokens_per_block=8", "all", "tokens_per_block=8"]

    assert [found.change for found in what_ifs(inputs_of(), asked)].count(asked[0]) == 1
    assert what_ifs(inputs_of(), []) == ()


def test_too_many_changes_are_refused() -> None:
    """The number of changes in one call is limited."""
    with pytest.raises(InvalidError, match="what_if must be from 0 to 32"):
        what_ifs(inputs_of(), ["tokens_per_block=8"] * 33)


def test_mistake_beyond_a_setting_is_not_an_outcome() -> None:
    """If the inputs themselves are malformed, both sides have that refusal."""
    found = what_if(inputs_of(layers=(), engine=EngineInputs()), "tokens_per_block=8")

    assert (
        found.before.refusal
        == found.after.refusal
        == "INVALID: layers and model_config are both missing; give one of them"
    )
