"""Laws of kernels: they read blocks whole or in equal parts, and every page of a plan can be viewed."""

import dataclasses

import pytest

from kvlease.errors import InvalidError
from kvlease.plan import BackendInputs, CachePlan, GroupPlan, PlanInputs
from kvlease.spec import MLA, FullAttention, LayerSpec, StateSpace
from kvleased.planning import plan

BACKENDS = (
    BackendInputs(name="any16", multiples_tokens=(16,)),
    BackendInputs(name="only64", exact_tokens=(64,)),
)
FULL = FullAttention(
    name="f", backend="only64", num_kv_heads=1, head_size=8, dtype="float16", tokens_per_block=128
)
LATENT = MLA(
    name="m",
    backend="only64",
    head_size=64,
    dtype="uint8",
    tokens_per_block=128,
    tokens_per_state=4,
    block_stride_multiple_bytes=1024,
)
"""Pages of 32 states of 64 bytes; half a block is 1024 bytes."""
STATE = StateSpace(name="s", backend="only64", shapes=((64,),), dtypes=("float32",))


def planned(*layers: LayerSpec, **changes: object) -> CachePlan:
    """Return a plan of ten blocks."""
    fields = {
        "layers": layers,
        "tokens_per_block": 128,
        "device_blocks": 10,
        "backends": BACKENDS,
        "block_multiple_bytes": 1,
    } | changes
    return plan(PlanInputs(**fields))  # type: ignore[arg-type]  # fields of several types


def counted(group: GroupPlan) -> tuple[int, int, int]:
    """Return how kernels count the group's blocks."""
    return (
        group.kernel_tokens_per_block,
        group.kernel_blocks_per_block,
        group.kernel_block_stride,
    )


@pytest.mark.parametrize("backend", ["", "any16"])
def test_block_that_kernels_read_stays_whole(backend: str) -> None:
    """A kernel that reads the whole block, or that is not known, counts it as one kernel block."""
    layer = dataclasses.replace(FULL, backend=backend)

    assert counted(planned(layer).groups[0]) == (128, 1, 1)


def test_state_stays_whole() -> None:
    """A recurrent state is not a sequence of tokens, so its block is not cut."""
    assert counted(planned(STATE).groups[0]) == (128, 1, 1)


def test_dense_block_is_counted_in_parts() -> None:
    """If pages follow each other without gaps, the next block's parts follow at once."""
    assert counted(planned(FULL, layout="LBHNC").groups[0]) == (64, 2, 2)


def test_compressed_block_is_counted_through_its_neighbours() -> None:
    """A compressed layer's parts go on through other pages, so the next block begins more parts away."""
    made = planned(LATENT, dataclasses.replace(LATENT, name="n"))

    assert made.bytes_per_block == 4096
    assert counted(made.groups[0]) == (64, 2, 4)


def test_block_with_other_pages_between_is_not_cut() -> None:
    """If other layers' pages lie between, parts of heads cannot be counted; the refusal names a readable block."""
    with pytest.raises(InvalidError) as refusal:
        planned(FULL, dataclasses.replace(FULL, name="g"))

    assert refusal.value.rule == "packed_cache_not_splittable"
    assert (refusal.value.need, refusal.value.available) == (64, 128)


def test_layers_that_would_count_differently_are_not_cut() -> None:
    """Layers that share a table but would count its blocks differently are refused."""
    wide = dataclasses.replace(LATENT, name="n", head_size=128, block_stride_multiple_bytes=2048)

    with pytest.raises(InvalidError) as refusal:
        planned(LATENT, wide)

    assert refusal.value.rule == "packed_cache_not_splittable"
    assert refusal.value.need == 64


@pytest.mark.parametrize("layout", ["BLHNC", "LBHNC"])
def test_page_off_its_elements_is_refused(layout: str) -> None:
    """A page whose padding ends within an element cannot be viewed, and is refused before it is allocated."""
    odd = dataclasses.replace(FULL, backend="", bytes_per_page_padded=4097)

    with pytest.raises(InvalidError) as refusal:
        planned(odd, dataclasses.replace(odd, name="g"), layout=layout)

    assert refusal.value.rule == "view_off_element_boundary"


def test_state_off_its_elements_is_refused() -> None:
    """A state with a tensor that does not start at an element of its own type is refused; another order is planned."""
    odd = StateSpace(name="s", shapes=((1,), (4,)), dtypes=("bfloat16", "float32"))

    with pytest.raises(
        InvalidError, match="order its tensors by the size of their elements, largest first"
    ) as told:
        planned(odd)

    assert told.value.rule == "view_off_element_boundary"
    planned(dataclasses.replace(odd, shapes=((4,), (1,)), dtypes=("float32", "bfloat16")))
