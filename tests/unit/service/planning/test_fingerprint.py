"""Laws of the fingerprint: it tells apart whatever moves a byte or changes its meaning, and nothing else."""

import dataclasses

import pytest

from kvlease.layout import Layout
from kvlease.plan import EngineInputs, ParallelInputs, PlanInputs, RankInputs
from kvlease.spec import FullAttention, SlidingWindow
from kvleased.planning import plan

LAYER = FullAttention(name="0", num_kv_heads=2, head_size=32, dtype="float16")
NEXT = dataclasses.replace(LAYER, name="1")
WINDOW = SlidingWindow(name="w", num_kv_heads=2, head_size=32, dtype="float16", window_tokens=64)


def fingerprint(**changes: object) -> str:
    """Return the fingerprint of two layers, with some fields of the inputs changed."""
    fields = {"layers": (LAYER, NEXT), "tokens_per_block": 16, "device_bytes": 409600} | changes
    return plan(PlanInputs(**fields)).layout_fingerprint  # type: ignore[arg-type]  # of several types


def changed(**changes: object) -> tuple[FullAttention, ...]:
    """Return the layers with a change in the first one."""
    return (dataclasses.replace(LAYER, **changes), NEXT)  # type: ignore[arg-type]  # of several types


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"tokens_per_block": 32}, id="tokens per block"),
        pytest.param({"layers": changed(name="2")}, id="name"),
        pytest.param({"layers": (NEXT, LAYER)}, id="order"),
        pytest.param({"layers": changed(num_kv_heads=4)}, id="heads"),
        pytest.param({"layers": changed(head_size=64)}, id="head size"),
        pytest.param({"layers": changed(head_size_v=64)}, id="V head size"),
        pytest.param({"layers": changed(dtype="bfloat16")}, id="dtype"),
        pytest.param({"layers": changed(window_tokens=64)}, id="what attention looks at"),
        pytest.param({"layers": (LAYER, WINDOW)}, id="groups"),
        pytest.param({"layers": changed(bytes_per_page_padded=8192)}, id="padding"),
        pytest.param({"block_multiple_bytes": 12288}, id="block padding"),
        pytest.param({"parallel": ParallelInputs(tensor_ranks=2)}, id="ranks"),
        pytest.param(
            {"ranks": (RankInputs(layers=(LAYER,)), RankInputs(layers=(NEXT,)))}, id="stages"
        ),
        pytest.param({"blocks_per_slot": 2}, id="blocks in a slot"),
        pytest.param({"slot_multiple_bytes": 12288}, id="slot padding"),
    ],
)
def test_what_moves_a_byte_or_its_meaning_tells_layouts_apart(changes: dict[str, object]) -> None:
    """Whatever changes a byte's place or meaning changes the fingerprint."""
    assert fingerprint(**changes) != fingerprint()


def test_ranks_that_share_tokens_are_told_apart() -> None:
    """If ranks share a block's tokens, the fingerprint differs, even if all places are the same."""
    layers = (
        dataclasses.replace(LAYER, num_kv_heads=1),
        dataclasses.replace(WINDOW, num_kv_heads=1, is_context_sharded=False),
    )
    ranks = [ParallelInputs(tensor_ranks=2, context_ranks=number) for number in (1, 2)]

    assert len({fingerprint(layers=layers, parallel=parallel) for parallel in ranks}) == 2


def test_every_layout_is_told_apart() -> None:
    """Each order of the axes has a fingerprint of its own."""
    assert len({fingerprint(layout=layout.value) for layout in Layout}) == len(Layout)


@pytest.mark.parametrize("layout", list(Layout))
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"device_bytes": 819200}, id="more device memory"),
        pytest.param({"device_bytes": 0, "device_blocks": 1}, id="one block"),
        pytest.param({"host_bytes": 81920}, id="a host tier"),
        pytest.param({"null_blocks": 1}, id="a null block"),
        pytest.param({"longest_request_tokens": 16}, id="longest request"),
        pytest.param({"model_digest": "abc"}, id="other weights"),
        pytest.param({"layers": changed(head_size_v=32)}, id="a default written out"),
        pytest.param({"layers": changed(backend="FLASH_ATTN")}, id="a backend"),
        pytest.param({"engine": EngineInputs(tokens_per_step=1)}, id="another engine"),
    ],
)
def test_capacities_are_not_told_apart(layout: Layout, changes: dict[str, object]) -> None:
    """A change that leaves every byte of a block in place leaves the fingerprint, in every layout."""
    assert fingerprint(layout=layout.value, **changes) == fingerprint(layout=layout.value)


def test_fingerprint_is_the_hex_of_32_bytes() -> None:
    """A fingerprint is 32 bytes in hex, enough that no two layouts share one."""
    assert len(bytes.fromhex(fingerprint())) == 32
