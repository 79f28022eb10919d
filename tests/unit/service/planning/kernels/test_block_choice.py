"""Laws of the block that layers of different kinds share: its page holds the largest of them, with little waste."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.plan import BackendInputs
from kvleased.planning.kernels.block_choice import hybrid_blocks, largest_block_within, mixed_blocks
from kvleased.planning.kernels.kernel_blocks import BACKENDS, supports_block

BACKEND_NAMES = ["FLASH_ATTN", "FLASHINFER", "CPU_ATTN", "FLASHMLA", "ROCM_AITER_FA"]


def test_block_of_a_known_hybrid() -> None:
    """Qwen3-Next on one rank: a state of 1,097,728 bytes beside 2048 bytes a token makes blocks of 544 tokens."""
    blocks = hybrid_blocks(
        [BACKENDS["FLASH_ATTN"]],
        tokens_per_block=16,
        bytes_per_token=2048,
        bytes_per_state=1_097_728,
        are_states_aligned=True,
    )

    assert (blocks.tokens_per_block, blocks.state_tokens_per_block) == (544, 544)
    assert blocks.state_bytes_per_page_padded == 1_114_112


@given(
    st.lists(st.sampled_from(BACKEND_NAMES), max_size=3, unique=True),
    st.sampled_from([16, 32, 64, 1024]),
    st.integers(1, 5000),
    st.integers(1, 10**6),
    st.booleans(),
)
def test_attention_page_holds_the_state(
    names: list[str], tokens: int, per_token: int, state: int, is_latent: bool
) -> None:
    """Both pages are equal; the block is no shorter than before, and a longer one suits all backends."""
    backends = [BACKENDS[name] for name in names]

    blocks = hybrid_blocks(
        backends,
        tokens_per_block=tokens,
        bytes_per_token=per_token,
        bytes_per_state=state,
        is_latent=is_latent,
    )

    page = blocks.tokens_per_block * per_token
    assert (blocks.state_bytes_per_page_padded or state) == page >= state
    assert blocks.tokens_per_block >= tokens
    assert blocks.state_tokens_per_block is None
    if blocks.tokens_per_block > tokens:
        assert all(supports_block(backend, blocks.tokens_per_block) for backend in backends)


def test_state_that_fills_a_page_needs_no_padding() -> None:
    """A state that fills a page exactly is not padded."""
    blocks = hybrid_blocks(
        [BACKENDS["FLASH_ATTN"]], tokens_per_block=16, bytes_per_token=100, bytes_per_state=3200
    )

    assert (blocks.tokens_per_block, blocks.state_bytes_per_page_padded) == (32, None)


def test_model_without_states_keeps_its_block() -> None:
    """Without bytes of states, the block stays as it is."""
    blocks = hybrid_blocks([], tokens_per_block=16, bytes_per_token=100, bytes_per_state=0)

    assert (blocks.tokens_per_block, blocks.state_bytes_per_page_padded) == (16, None)


def test_block_that_another_backend_cannot_use_is_refused() -> None:
    """If a backend reads only blocks of 16 and a state needs larger ones, the plan is refused."""
    with pytest.raises(InvalidError, match="CPU_MLA") as refusal:
        hybrid_blocks(
            [BACKENDS["FLASH_ATTN"], BACKENDS["CPU_MLA"]],
            tokens_per_block=16,
            bytes_per_token=100,
            bytes_per_state=3000,
        )

    assert (refusal.value.rule, refusal.value.need) == ("no_common_block_size", 32)


@given(
    st.sampled_from(BACKEND_NAMES),
    st.sampled_from([16, 48, 64]),
    st.integers(1, 2000),
    st.integers(1, 3),
    st.integers(0, 10**6),
)
def test_quantised_page_holds_what_is_not_quantised(
    name: str, tokens: int, per_token: int, factor: int, state: int
) -> None:
    """A quantised page has room for a state, and for the other layers' smallest block that the backend reads."""
    backend = BACKENDS[name]
    least = min(backend.exact_tokens + backend.multiples_tokens)

    blocks = mixed_blocks(
        backend,
        tokens_per_block=tokens,
        bytes_per_token=per_token,
        bytes_per_token_unquantised=factor * per_token,
        bytes_per_state_page=state,
    )

    assert blocks.bytes_per_page == blocks.tokens_per_block * per_token
    assert blocks.bytes_per_page >= max(factor * per_token * least, state)
    assert blocks.tokens_per_block % max(least, tokens) == 0


@pytest.mark.parametrize(
    ("exact", "multiples", "page", "tokens"),
    [
        pytest.param((), (16,), 147_456, 144, id="the largest multiple"),
        pytest.param((), (16,), 100, 16, id="the least where none fits"),
        pytest.param((16,), (64,), 65_536, 64, id="of sizes and multiples"),
        pytest.param((16, 32, 128), (), 65_536, 32, id="of sizes"),
        pytest.param((), (), 65_536, 7, id="none declared"),
    ],
)
def test_largest_block_within_a_page(
    exact: tuple[int, ...], multiples: tuple[int, ...], page: int, tokens: int
) -> None:
    """The largest block is the longest that the backend reads and the page holds, at 1024 bytes a token."""
    backend = BackendInputs(name="b", exact_tokens=exact, multiples_tokens=multiples)

    assert (
        largest_block_within(backend, bytes_per_token=1024, bytes_per_page=page, fallback=7)
        == tokens
    )
