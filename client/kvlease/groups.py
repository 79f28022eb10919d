"""Own what each group of layers keeps of a request: which blocks of its table it needs.

The cases:
- EVERYTHING (full and latent attention, sinks): every block from the first token on;
- WINDOW (sliding windows): the blocks of the newest `kept_tokens` tokens; older ones are given back;
- CHUNK (chunked local attention): the blocks of the chunk that the next token is in, `kept_tokens` long;
- STATE (recurrent layers whose states are kept at block ends): the block with the newest state, and the block that the
  next state is written to. The places between them in the table stay empty; a state whose place is empty is in the
  first block behind that place. Behind the block of the newest state come blocks for the states of speculative tokens.
  When the request grows past some of these blocks, they move to the first places that the growth adds;
- FIXED (cross attention, rings, recurrent layers that keep the current state only): the same blocks for as long as the
  request lives, never shared.
"""

from dataclasses import dataclass
from enum import Enum, auto

import numpy as np
from numpy.typing import NDArray


class Keeps(Enum):
    """What a group keeps of a request."""

    EVERYTHING = auto()
    WINDOW = auto()
    CHUNK = auto()
    STATE = auto()
    FIXED = auto()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupShape:
    """The numbers of one group, all of them taken from the plan."""

    keeps: Keeps
    tokens_per_block: int
    """Tokens of a block on all the ranks that share them."""
    keys_per_block: int
    """Block keys for each block: tokens_per_block / hash_block_tokens; 0 if blocks are never shared."""
    table_blocks: int
    """Entries of the group's part of a row."""
    max_blocks: int
    """The most blocks that a lease holds at once."""
    kept_tokens: int = 0
    """WINDOW: tokens before the next token that must stay; CHUNK: tokens of a chunk."""
    extra_blocks: int = 0
    """STATE: blocks behind that of the newest state, for speculative tokens."""
    is_drafted: bool = False
    """Whether a draft model reads the group; then a prefix must have one block more than is used."""
    kernel_blocks_per_block: int = 1
    kernel_block_stride: int = 1
    """Kernel blocks from one block to the next."""

    @property
    def gives_back(self) -> bool:
        """Whether blocks leave a lease while its request runs."""
        return self.keeps in (Keeps.WINDOW, Keeps.CHUNK, Keeps.STATE)

    @property
    def last_state_place(self) -> int:
        """The last place of a table from which a state and all speculative ones fit."""
        return max(0, self.table_blocks - 1 - self.extra_blocks)


def keeps_everything(tokens_per_block: int, table_blocks: int) -> GroupShape:
    """Return a group that keeps every token and names each block by a key of its own."""
    return GroupShape(
        keeps=Keeps.EVERYTHING,
        tokens_per_block=tokens_per_block,
        keys_per_block=1,
        table_blocks=table_blocks,
        max_blocks=table_blocks,
    )


Counts = NDArray[np.int64]


def first_needed(group: GroupShape, num_computed: Counts) -> Counts:
    """Return the first place of the table that a request needs after it has computed `num_computed` tokens."""
    if group.keeps is Keeps.WINDOW:
        first: Counts = np.maximum(num_computed - group.kept_tokens, 0) // group.tokens_per_block
    elif group.keeps is Keeps.CHUNK:
        first = num_computed // group.kept_tokens * group.kept_tokens // group.tokens_per_block
    elif group.keeps is Keeps.STATE:
        first = np.maximum(num_computed - 1, 0) // group.tokens_per_block
    else:
        first = np.zeros_like(num_computed)
    return first


def last_covered(group: GroupShape, num_computed: Counts, num_tokens: Counts) -> Counts:
    """Return the end of the places of a request that is to cover `num_tokens` and has computed `num_computed`.

    A window or a chunk moves on with what is computed, and never has more than `max_blocks` places.
    """
    if group.keeps is Keeps.FIXED:
        return np.full_like(num_tokens, group.max_blocks)
    end: Counts = -(-num_tokens // group.tokens_per_block) + group.extra_blocks
    if group.keeps in (Keeps.WINDOW, Keeps.CHUNK):
        end = np.minimum(end, first_needed(group, num_computed) + group.max_blocks)
    return np.minimum(end, group.table_blocks)


def first_filled(group: GroupShape, num_tokens: Counts) -> Counts:
    """Return the first place that must have a block, among those that a request of `num_tokens` adds.

    At the end of a table, this is no later than the place from which a state and all speculative ones fit, because a
    rank that has asked for fewer tokens still needs a block for each of them.
    """
    if group.keeps is Keeps.STATE:
        return np.minimum((num_tokens - 1) // group.tokens_per_block, group.last_state_place)
    return np.zeros_like(num_tokens)


def first_guessed(group: GroupShape, num_tokens: Counts) -> Counts:
    """Return the first place for states of speculative tokens: the one behind the state of `num_tokens`."""
    return (num_tokens - 1) // group.tokens_per_block + 1


def num_passed(group: GroupShape, num_tokens: Counts, ends: Counts, afters: Counts) -> Counts:
    """Return how many places for speculative tokens' states a request of `num_tokens` passes as its places grow.

    Once the request asks for tokens whose states come behind these places, nothing is written there any more, so their
    blocks move to the first of the added places.
    """
    before = np.minimum(ends, afters - 1 - group.extra_blocks)
    return np.maximum(before - first_guessed(group, num_tokens), 0)


def most_blocks(group: GroupShape, num_tokens: int) -> int:
    """Return the most blocks that a request of `num_tokens` holds at once.

    For STATE this holds only if the request commits what it has computed before it asks for the block after the next;
    until then, its newest state may be the committed one or the one behind it.
    """
    if group.keeps is Keeps.FIXED:
        return group.max_blocks
    return min(-(-num_tokens // group.tokens_per_block) + group.extra_blocks, group.max_blocks)
