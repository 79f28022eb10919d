"""Laws of block keys: equal keys mean equal context and tenant, and equal tokens in the block and before it."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import InvalidError
from kvlease.ids import BYTES_PER_KEY
from kvlease.keys import BlockKeys, Tokens
from kvlease.tables import Ints

TOKENS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=60)
KEYS = BlockKeys(bytes(range(32)), "layout", "model")


def split(packed: bytes) -> list[bytes]:
    """Return the keys of a chain one by one."""
    return [packed[start : start + 32] for start in range(0, len(packed), BYTES_PER_KEY)]


@given(TOKENS, st.integers(1, 8))
def test_chain_names_full_blocks_only(tokens: list[int], tokens_per_block: int) -> None:
    """There is one key for each full block; tokens behind the last full block change no key."""
    chain = KEYS.chain(tokens, tokens_per_block)
    num_full = len(tokens) // tokens_per_block

    assert len(chain) == num_full * BYTES_PER_KEY
    assert chain == KEYS.chain(tokens[: num_full * tokens_per_block], tokens_per_block)


@given(TOKENS, TOKENS)
def test_equal_keys_mean_equal_prefixes(left: list[int], right: list[int]) -> None:
    """Two requests share a key exactly where all their tokens up to the block's end are equal."""
    pairs = zip(split(KEYS.chain(left, 4)), split(KEYS.chain(right, 4)), strict=False)
    for index, (key, other) in enumerate(pairs):
        end = (index + 1) * 4

        assert (key == other) == (left[:end] == right[:end])


@given(TOKENS, st.integers(0, 10))
def test_chain_goes_on_from_a_parent(tokens: list[int], num_blocks: int) -> None:
    """Hashing in two parts gives the same keys as hashing at once."""
    at_once = KEYS.chain(tokens, 4)
    head = KEYS.chain(tokens[: num_blocks * 4], 4)

    assert head + KEYS.chain(tokens[num_blocks * 4 :], 4, head[-32:]) == at_once


@given(TOKENS)
def test_arrays_and_lists_are_keyed_alike(tokens: list[int]) -> None:
    """Tokens in an array and in a list have the same keys."""
    wide = np.array(tokens, np.int64)

    assert (
        KEYS.chain(tokens, 4)
        == KEYS.chain(wide, 4)
        == KEYS.chain(wide.astype(np.int32), 4)
        == KEYS.chain(tuple(tokens), 4)
    )


def test_type_of_tokens_names_every_array_that_is_keyed() -> None:
    """Whoever checks types may give arrays of any whole numbers, such as NumPy's own, which have 64 bits."""
    assert set(get_args(Tokens)) == set(get_args(Ints))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(BlockKeys(bytes(32), "layout", "model"), id="tenant"),
        pytest.param(BlockKeys(bytes(range(32)), "layout2", "model"), id="layout"),
        pytest.param(BlockKeys(bytes(range(32)), "layout", "model2"), id="model"),
        pytest.param(BlockKeys(bytes(range(32)), "layout", "model", adapter="a"), id="adapter"),
        pytest.param(BlockKeys(bytes(range(32)), "layout", "model", salt="a"), id="salt"),
        pytest.param(BlockKeys(bytes(range(32)), "layoutm", "odel"), id="shifted fields"),
    ],
)
def test_contexts_share_no_key(other: BlockKeys) -> None:
    """Anything that changes what the bytes mean, or who may see them, changes every key."""
    tokens = list(range(32))

    assert not set(split(KEYS.chain(tokens, 4))) & set(split(other.chain(tokens, 4)))


def test_key_is_a_keyed_digest_of_parent_and_tokens() -> None:
    """The code computes the formula in the module's docstring, so that other languages can compute it, too."""
    fields = b"".join(
        len(text).to_bytes(8, "little") + text for text in (b"layout", b"model", b"", b"")
    )
    root = blake3(b"kvlease block key 1" + fields, key=bytes(range(32))).digest()
    tokens = b"".join(number.to_bytes(4, "little") for number in (7, 8))

    assert KEYS.chain([7, 8, 9], 2) == blake3(root + tokens, key=bytes(range(32))).digest()


@pytest.mark.parametrize(
    "tokens",
    [
        pytest.param([1.5, 2.0], id="floats"),
        pytest.param([True, False], id="bools"),
        pytest.param([[1, 2], [3, 4]], id="two dimensions"),
        pytest.param([2**31, 0], id="too large"),
        pytest.param([-(2**31) - 1, 0], id="too small"),
        pytest.param([2**80, 0], id="beyond any integer"),
        pytest.param(["1", "2"], id="text"),
        pytest.param([[1, 2], [3]], id="ragged"),
        pytest.param([np.array([1, 2])], id="list of arrays"),
        pytest.param(np.array([2**31, 0]), id="array too large"),
        pytest.param(np.zeros((2, 2), np.int32), id="array of two dimensions"),
        pytest.param(np.zeros((0, 2), np.int32), id="array of no rows"),
    ],
)
def test_what_is_no_token_is_refused(tokens: list[object]) -> None:
    """Tokens are int32; no other value is rounded or wrapped into one."""
    with pytest.raises(InvalidError):
        KEYS.chain(tokens, 2)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize(
    ("block_keys", "tokens", "tokens_per_block", "keys"),
    [
        pytest.param(
            KEYS,
            range(32),
            16,
            "a1739f256760665d47f79be0542b8db554f644933c3b53d662d81e046fa4a633"
            "b4a0c5137dd02dbc4f591dcc0b29a1490d4654b2c8f6c76565cc32ced9451005",
            id="two blocks",
        ),
        pytest.param(
            BlockKeys(bytes(range(32)), "layout", "model", "adapter", "salt"),
            [-1, 2**31 - 1, 0, 7],
            2,
            "a74cd6d32d79b2e1f16c244e4fffa1dc5144694e140f33971972db67021487a5"
            "ef010f2af1ab6529e6b8c43000a7a0b1b6fc32c2bb2a05f3f1aa2cc6e7bdf6cd",
            id="all of the context",
        ),
        pytest.param(
            BlockKeys(bytes(32), "", ""),
            [5],
            1,
            "f16027d62b5f4a0d2ac67c5e32b71213f5f21564484a16972f67fcd7a6e5d0af",
            id="no context",
        ),
    ],
)
def test_keys_are_those_of_the_first_release(
    block_keys: BlockKeys, tokens: Sequence[int], tokens_per_block: int, keys: str
) -> None:
    """What is cached under a key stays findable, because recorded keys never change."""
    assert block_keys.chain(tokens, tokens_per_block).hex() == keys


@given(TOKENS, st.integers(1, 8), st.data())
def test_tokens_are_hashed_as_they_come(
    tokens: list[int], tokens_per_block: int, data: st.DataObject
) -> None:
    """However its tokens are cut into pieces, a growing request gets the keys of all tokens at once, block by block."""
    chain = KEYS.grow(tokens_per_block)
    fresh, start = [], 0
    while start < len(tokens):
        end = data.draw(st.integers(start, len(tokens)))
        fresh.append(chain.append(tokens[start : end + 1]))
        start = end + 1

    assert b"".join(fresh) == chain.keys == KEYS.chain(tokens, tokens_per_block)
    assert chain.num_tokens == len(tokens)


def test_refused_tokens_change_nothing() -> None:
    """After a refusal a growing request goes on as if the refused tokens had not been given."""
    chain = KEYS.grow(2)
    chain.append([1, 2, 3])

    with pytest.raises(InvalidError):
        chain.append([2**31])

    assert chain.append([4]) == KEYS.chain([1, 2, 3, 4], 2)[32:]
    assert repr(chain) == "<KeyChain 4 tokens, 2 keys>"


def test_malformed_parents_keys_and_blocks_are_refused() -> None:
    """A parent is a key, a tenant's key is 32 bytes, a block has tokens."""
    with pytest.raises(InvalidError, match="parent"):
        KEYS.chain([1], 1, b"short")
    with pytest.raises(InvalidError, match="tenant"):
        BlockKeys(b"short", "", "").chain([1], 1)
    with pytest.raises(InvalidError, match="tenant"):
        BlockKeys(b"short", "", "").grow(1)
    for name in (KEYS.grow, lambda tokens_per_block: KEYS.chain([1], tokens_per_block)):
        with pytest.raises(InvalidError, match="tokens_per_block"):
            name(0)


def test_repr_keeps_the_secret() -> None:
    """The repr of a context does not have the tenant's key, so it never reaches a log that way."""
    assert "tenant_key" not in repr(KEYS)


def test_copy_of_a_chain_goes_on_by_itself() -> None:
    """A forked request's chain is a copy of its parent's: what either appends is not in the other's keys."""
    parent = KEYS.grow(4)
    parent.append(range(6))
    forked = copy.copy(parent)

    parent.append([6, 7])
    forked.append([60, 70])

    assert parent.keys == KEYS.chain([*range(6), 6, 7], 4)
    assert forked.keys == KEYS.chain([*range(6), 60, 70], 4)


@pytest.mark.parametrize(
    "field", ["tenant_key", "layout_fingerprint", "model_digest", "adapter", "salt"]
)
@pytest.mark.parametrize("value", [None, 5, "\ud800", ["a"]])
def test_context_of_the_wrong_type_is_refused(field: str, value: Any) -> None:
    """What names the context of keys is refused by its name if it is no text, or no key."""
    with pytest.raises(InvalidError, match=f"^{field} must be"):
        replace(KEYS, **{field: value}).chain([1, 2, 3, 4], 4)
