"""Laws of what keys cover beside tokens: a block's key covers the items that overlap it, and where they lie."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from kvlease import ContextItem, EmbeddedSpan
from kvlease.errors import InvalidError
from kvlease.items import Item
from kvlease.keys import BlockKeys

TOKENS_PER_BLOCK = 4
NUM_TOKENS = 40
NUM_BLOCKS = NUM_TOKENS // TOKENS_PER_BLOCK
TOKENS = list(range(NUM_TOKENS))
KEYS = BlockKeys(bytes(range(32)), "layout", "model")

PLACES = st.tuples(st.integers(0, NUM_TOKENS - 1), st.integers(1, NUM_TOKENS))
IMAGES = st.builds(
    lambda digest, place: ContextItem(digest=digest, first_token=place[0], num_tokens=place[1]),
    st.sampled_from(["cat", "dog", b"\x00"]),
    PLACES,
)
SPANS = st.builds(
    lambda seed, place: span(place[0], place[1], seed=seed), st.integers(0, 2), PLACES
)
ITEMS = st.lists(IMAGES | SPANS, max_size=4)


def image(first_token: int, num_tokens: int = 6, digest: bytes | str = "cat") -> ContextItem:
    """Return the place of an image in a request."""
    return ContextItem(digest=digest, first_token=first_token, num_tokens=num_tokens)


def vectors(num_tokens: int, seed: int = 0) -> NDArray[np.float32]:
    """Return embeddings for so many tokens."""
    return np.random.default_rng(seed).random((num_tokens, 3), np.float32)


def span(first_token: int, num_tokens: int, *, seed: int = 0) -> EmbeddedSpan:
    """Return embeddings and their place in a request."""
    return EmbeddedSpan(vectors=vectors(num_tokens, seed), first_token=first_token)


def keys_of(*items: Item, tokens: list[int] = TOKENS, parent: bytes = b"") -> list[bytes]:
    """Return the keys of a request's blocks one by one."""
    packed = KEYS.chain(tokens, TOKENS_PER_BLOCK, parent, items=items)
    return [packed[start : start + 32] for start in range(0, len(packed), 32)]


@given(ITEMS, IMAGES | SPANS)
def test_an_item_changes_the_keys_from_its_first_block_on(items: list[Item], other: Item) -> None:
    """Blocks before an item keep their keys; the item's first block and all later blocks get other keys."""
    before, after = keys_of(*items), keys_of(*items, other)
    first = other.first_token // TOKENS_PER_BLOCK

    assert before[:first] == after[:first]
    assert not set(before[first:]) & set(after)


@given(ITEMS, st.integers(0, NUM_BLOCKS))
def test_a_chain_with_items_goes_on_from_a_parent(items: list[Item], num_blocks: int) -> None:
    """In two parts the keys are the same as at once; items are counted from the second part's first token."""
    at_once = keys_of(*items)
    start = num_blocks * TOKENS_PER_BLOCK
    moved = [
        image(item.first_token - start, item.num_tokens, item.digest)
        if isinstance(item, ContextItem)
        else EmbeddedSpan(vectors=item.vectors, first_token=item.first_token - start)
        for item in items
    ]
    parent = at_once[num_blocks - 1] if num_blocks else b""

    assert keys_of(*moved, tokens=TOKENS[start:], parent=parent) == at_once[num_blocks:]


@given(ITEMS, st.lists(st.integers(0, NUM_TOKENS), max_size=5))
def test_items_are_hashed_as_tokens_come(items: list[Item], cuts: list[int]) -> None:
    """A growing request that gets each item in time has the same keys as with all tokens at once."""
    chain = KEYS.grow(TOKENS_PER_BLOCK)
    edges = [0, *sorted(cuts), NUM_TOKENS]
    for start, end in pairwise(edges):
        fresh = [item for item in items if start <= item.first_token < end]
        chain.append(TOKENS[start:end], items=fresh)

    assert chain.keys == b"".join(keys_of(*items))


@given(st.lists(IMAGES | SPANS, min_size=2, max_size=4))
def test_the_order_of_items_says_nothing(items: list[Item]) -> None:
    """The order in which a request's items are listed does not matter."""
    assert keys_of(*items) == keys_of(*reversed(items))


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(image(9), id="another place in the block"),
        pytest.param(image(12), id="another block"),
        pytest.param(image(8, 5), id="fewer tokens"),
        pytest.param(image(8, digest="dog"), id="another image"),
        pytest.param(span(8, 6), id="embeddings"),
    ],
)
def test_other_items_share_no_key(other: Item) -> None:
    """The same tokens with another item, or with the same item elsewhere, have other keys."""
    assert not set(keys_of(image(8))[2:]) & set(keys_of(other)[2:])


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(vectors(6, seed=1), id="other vectors"),
        pytest.param(vectors(6).astype(np.float64), id="the same ones in another dtype"),
        pytest.param(vectors(6).view(np.int32), id="the same bytes in another dtype"),
        pytest.param(vectors(6).reshape(6, 3)[:, :2], id="fewer numbers"),
    ],
)
def test_other_vectors_share_no_key(other: NDArray[np.generic]) -> None:
    """Embeddings are equal only if their bytes, dtype and width are equal."""
    given_vectors = EmbeddedSpan(vectors=other, first_token=8)

    assert not set(keys_of(span(8, 6))[2:]) & set(keys_of(given_vectors)[2:])


def test_embeddings_count_by_what_is_in_a_block() -> None:
    """What a span has behind a block's end, and how its memory is laid out, does not change that block's key."""
    long = vectors(20)
    short = np.asfortranarray(long[:12])

    of_long = keys_of(EmbeddedSpan(vectors=long, first_token=2))
    of_short = keys_of(EmbeddedSpan(vectors=short, first_token=2))

    assert of_long[:3] == of_short[:3]
    assert of_long[3] != of_short[3]


def test_items_are_hashed_behind_the_key_of_the_tokens() -> None:
    """The code computes the formula in the modules' docstrings, so that other languages can compute it, too."""
    plain = KEYS.chain(TOKENS[:4], 4)
    numbers = b"".join(number.to_bytes(8, "little", signed=True) for number in (1, 2, 3))
    expected = blake3(
        b"kvlease block items 1" + plain + b"I" + numbers + b"cat", key=bytes(range(32))
    )

    assert KEYS.chain(TOKENS[:4], 4, items=[image(1, 2)]) == expected.digest()
    assert keys_of(image(1, digest=b"cat")) == keys_of(image(1, digest="cat"))


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(image(0, digest=""), id="no digest"),
        pytest.param(image(0, digest=7), id="a number for a digest"),  # type: ignore[arg-type]
        pytest.param(image(0, 0), id="no tokens"),
        pytest.param(image(2**31), id="beyond all requests"),
        pytest.param(EmbeddedSpan(vectors=np.zeros(3), first_token=0), id="one dimension"),
        pytest.param(EmbeddedSpan(vectors=np.zeros((0, 3)), first_token=0), id="no vectors"),
        pytest.param(
            EmbeddedSpan(vectors=np.array([[object()]]), first_token=0), id="vectors of objects"
        ),
    ],
)
def test_malformed_items_are_refused(item: Item) -> None:
    """An item without content or place is refused at once by whoever takes it."""
    with pytest.raises(InvalidError):
        keys_of(item)
    with pytest.raises(InvalidError):
        KEYS.grow(4).append([], items=[item])


def test_items_said_too_late_are_refused() -> None:
    """A growing request never keeps a key that a later item would have changed."""
    chain = KEYS.grow(4)
    chain.append(TOKENS[:6])

    with pytest.raises(InvalidError, match="item"):
        chain.append(TOKENS[6:8], items=[image(3)])

    assert chain.append(TOKENS[6:8], items=[image(4)]) == keys_of(image(4))[1]


@pytest.mark.parametrize(
    ("items", "told"),
    [
        pytest.param(None, "items must be a list", id="none"),
        pytest.param(5, "items must be a list", id="number"),
        pytest.param(["image"], r"items\[0\] must be a ContextItem", id="text"),
        pytest.param(
            [ContextItem(digest="\ud800", first_token=0, num_tokens=1)],
            "digest must be",
            id="digest",
        ),
        pytest.param(
            [EmbeddedSpan(vectors=[[1, 2], [3]], first_token=0)],  # type: ignore[arg-type]  # the mistake
            "embeddings must be",
            id="ragged",
        ),
    ],
)
def test_what_are_no_items_is_refused(items: Any, told: str) -> None:
    """Items that are none are refused, and say what is wanted; a growing chain stays as it was."""
    chain = KEYS.grow(TOKENS_PER_BLOCK)

    with pytest.raises(InvalidError, match=told):
        KEYS.chain(TOKENS, TOKENS_PER_BLOCK, items=items)
    with pytest.raises(InvalidError, match=told):
        chain.append(TOKENS, items=items)

    assert chain.num_tokens == 0
