"""Laws of kernel blocks: all backends of a group read them, and no state of a compressed layer is cut or lost."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.kernel_split import kernel_blocks_per_block, states_per_kernel_block
from kvlease.plan import BackendInputs, TensorPlan
from kvlease.spec import MLA, EncoderOnly, FullAttention, LayerSpec, StateSpace
from kvleased.planning.kernels.kernel_blocks import (
    BACKENDS,
    accepts,
    backends_of,
    common_kernel_tokens,
    group_kernel_tokens,
    kernel_tokens_by_group,
    preferred_block,
    sizes_of,
    supports_block,
    with_backend_stride,
)

NAMES = st.lists(st.sampled_from(sorted(BACKENDS)), max_size=3, unique=True)


def known(*names: str) -> list[BackendInputs]:
    """Return known backends."""
    return [BACKENDS[name] for name in names]


def exactly(*tokens: int) -> BackendInputs:
    """Return a backend that reads these sizes only."""
    return BackendInputs(name="exact", exact_tokens=tokens)


def multiples(*tokens: int) -> BackendInputs:
    """Return a backend that reads all multiples of these sizes."""
    return BackendInputs(name="multiples", multiples_tokens=tokens)


def full(tokens: int = 128, backend: str = "") -> FullAttention:
    """Return a layer with a block of so many tokens."""
    return FullAttention(
        name="full",
        backend=backend,
        num_kv_heads=2,
        head_size=64,
        dtype="bfloat16",
        tokens_per_block=tokens,
    )


def compressed(tokens: int, per_state: int) -> MLA:
    """Return a layer that keeps one state for several tokens."""
    return MLA(
        name="compressed",
        head_size=132,
        dtype="uint8",
        tokens_per_state=per_state,
        tokens_per_block=tokens,
    )


def tensor(group: int = 0, *, is_packed: bool = False) -> TensorPlan:
    """Return a run of layers, with or without other pages between its blocks."""
    block, layer = (2, 1) if is_packed else (1, 2)
    return TensorPlan(
        group=group,
        layer_names=(),
        offset_bytes=0,
        layer_stride_bytes=layer,
        block_stride_bytes=block,
    )


def test_layers_backends_are_each_taken_once_and_a_given_one_goes_first() -> None:
    """A caller's description of a backend replaces ours, and a layer without a backend adds none."""
    given = BackendInputs(name="FLASHMLA", exact_tokens=(32,))
    layers = [full(backend="FLASHMLA"), full(), full(backend="CPU_MLA"), full(backend="FLASHMLA")]

    assert backends_of(layers, [given]) == (given, BACKENDS["CPU_MLA"])


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        pytest.param([], "unknown_backend", id="nobody knows it"),
        pytest.param(
            [BackendInputs(name="MINE", exact_tokens=(0,))],
            "backend_size_not_positive",
            id="no size",
        ),
    ],
)
def test_backend_that_cannot_be_asked_is_refused(given: list[BackendInputs], rule: str) -> None:
    """A backend that layers name must be described with positive sizes."""
    with pytest.raises(InvalidError) as refusal:
        backends_of([full(backend="MINE")], given)

    assert refusal.value.rule == rule


@pytest.mark.parametrize(
    ("backend", "tokens", "is_accepted", "is_supported"),
    [
        pytest.param(exactly(16, 32), 32, True, True, id="one of its sizes"),
        pytest.param(exactly(16, 32), 48, False, True, id="can be cut into one"),
        pytest.param(exactly(64), 48, False, False, id="cannot"),
        pytest.param(multiples(16), 544, True, True, id="a multiple"),
        pytest.param(multiples(32), 48, False, False, id="no multiple"),
        pytest.param(exactly(), 7, True, True, id="says nothing"),
        pytest.param(BACKENDS["CPU_MLA"], 32, False, False, id="must be one itself"),
    ],
)
def test_backend_reads_what_it_declares(
    backend: BackendInputs, tokens: int, is_accepted: bool, is_supported: bool
) -> None:
    """A kernel reads its sizes and multiples; a longer block is supported unless the backend wants it whole."""
    assert accepts(backend, tokens) == is_accepted
    assert supports_block(backend, tokens) == is_supported


@pytest.mark.parametrize(
    ("backends", "tokens"),
    [
        pytest.param([], 16, id="nobody asked"),
        pytest.param(known("FLASH_ATTN"), 16, id="the default"),
        pytest.param(known("FLASHMLA"), 64, id="the least of one"),
        pytest.param([exactly(24), multiples(16)], 48, id="the least common multiple"),
        pytest.param([exactly(96, 64), exactly(), multiples(48)], 96, id="of the best pair"),
    ],
)
def test_preferred_block_is_the_default_or_the_least_that_suits_all(
    backends: list[BackendInputs], tokens: int
) -> None:
    """By default a block has 16 tokens, or the fewest that all backends can use."""
    assert preferred_block(backends) == tokens


def test_no_preferred_block_is_a_refusal() -> None:
    """A backend of blocks of 16 only and one of multiples of 32 share no block; the refusal names both."""
    with pytest.raises(
        InvalidError, match=r"CPU_MLA reads 16; CPU_ATTN reads multiples of 32"
    ) as no:
        preferred_block(known("CPU_MLA", "CPU_ATTN"))

    assert no.value.rule == "no_common_block_size"


@pytest.mark.parametrize(
    ("tokens", "names", "kernel_tokens"),
    [
        pytest.param(544, ["FLASH_ATTN"], 544, id="read as it is"),
        pytest.param(128, ["FLASHINFER"], 64, id="PR 42766: 128 in two of 64"),
        pytest.param(544, ["FLASHINFER"], 32, id="the largest part that divides"),
        pytest.param(64, ["ROCM_AITER_FA", "TRITON_ATTN"], 32, id="that both read"),
        pytest.param(16, [], 16, id="nobody asked"),
    ],
)
def test_kernel_block_is_the_block_or_its_largest_part(
    tokens: int, names: list[str], kernel_tokens: int
) -> None:
    """A block that all backends read stays whole; else the largest part that all read is taken."""
    assert common_kernel_tokens(tokens, known(*names)) == kernel_tokens


@given(st.integers(1, 64).map(lambda n: n * 8), NAMES, st.sampled_from([1, 4, 8, 128]))
def test_kernel_block_is_read_by_all_and_keeps_all_states(
    tokens: int, names: list[str], per_state: int
) -> None:
    """PR 43988: the kernel block divides the block, all backends read it, and it has whole states of the block."""
    layer, backends = compressed(tokens, min(per_state, tokens)), known(*names)
    try:
        kernel_tokens = common_kernel_tokens(tokens, backends, [layer])
    except InvalidError as refusal:
        assert refusal.rule == "no_common_kernel_block_size"
        return

    assert all(accepts(backend, kernel_tokens) for backend in backends)
    parts = kernel_blocks_per_block(layer, kernel_tokens)
    assert parts * states_per_kernel_block(layer, kernel_tokens) == layer.states_per_block


def test_part_without_a_state_is_not_chosen() -> None:
    """PR 43988: 64 tokens divide a block of 256 but hold no state of 128; the refusal names what does."""
    with pytest.raises(InvalidError) as refusal:
        common_kernel_tokens(256, known("FLASHINFER"), [compressed(256, 128)])

    assert refusal.value.rule == "no_common_kernel_block_size"
    assert "whole states of 128 tokens" in refusal.value.message
    assert common_kernel_tokens(256, [exactly(64, 128)], [compressed(256, 128)]) == 128


@pytest.mark.parametrize(
    ("tokens", "backends", "advice"),
    [
        pytest.param(8, known("FLASHINFER"), "a multiple of 16", id="too small"),
        pytest.param(50, known("FLASH_ATTN"), "48 or 64", id="between two"),
        pytest.param(100, known("FLASHINFER", "FLASHMLA"), "64 or 128", id="of several"),
        pytest.param(
            256, known("CUTLASS_MLA", "FLASHMLA"), "choose backends that share a size", id="of none"
        ),
    ],
)
def test_refused_block_comes_with_those_next_to_it(
    tokens: int, backends: list[BackendInputs], advice: str
) -> None:
    """A block that a refusal advises is accepted."""
    with pytest.raises(InvalidError, match=advice) as refusal:
        common_kernel_tokens(tokens, backends)

    assert refusal.value.available == tokens
    for advised in (int(word) for word in advice.split() if word.isdecimal()):
        assert common_kernel_tokens(advised, backends)


def test_group_of_recurrent_or_packed_layers_is_not_split() -> None:
    """Recurrent states are never split, nor blocks with other pages between, where each layer is mapped alone."""
    state = StateSpace(name="s", shapes=((4,),), dtypes=("uint8",), tokens_per_block=544)
    backends = known("FLASHINFER")

    assert group_kernel_tokens([state], backends) == 544
    assert group_kernel_tokens([full()], backends, [tensor(is_packed=True)]) == 128
    assert group_kernel_tokens([full()], backends, [tensor()]) == 64


def test_groups_take_their_own_tensors_and_backends() -> None:
    """A group that keeps nothing between steps is skipped, and each other group has its own kernel block."""
    encoder = EncoderOnly(
        name="e", num_kv_heads=1, head_size=8, dtype="float16", tokens_per_block=64
    )
    groups: list[list[LayerSpec]] = [[encoder], [full()], [full()]]
    backends = [known("FLASHMLA"), known("FLASHINFER"), known("FLASHINFER")]

    sizes = kernel_tokens_by_group(groups, backends, [tensor(1), tensor(2, is_packed=True)])

    assert sizes == (64, 128)


def test_backend_of_fixed_sizes_spaces_blocks_by_its_largest() -> None:
    """Blocks lie a multiple of the backend's largest size apart, unless the layer gives its own multiple."""
    spec = full()

    spaced = with_backend_stride(spec, BACKENDS["FLASHINFER"])

    assert spaced.block_stride_multiple_tokens == 64
    assert spaced.block_stride_multiple == 32_768
    assert with_backend_stride(spaced, exactly(16)) == spaced
    assert (
        with_backend_stride(
            spec, BackendInputs(name="b", exact_tokens=(64,), multiples_tokens=(16,))
        )
        == spec
    )
    assert with_backend_stride(spec, exactly()) == spec


def test_known_backends_declare_something() -> None:
    """Each backend that is known by name declares sizes."""
    assert all(min(sizes_of(backend)) > 0 for backend in BACKENDS.values())
