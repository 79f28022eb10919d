"""Own what each group of layers keeps of a request: which blocks of its table it needs, and what a prefix must have.

The cases:
- EVERYTHING (full and latent attention, sinks): every block from the first token on;
- WINDOW (sliding windows): the blocks of the newest `kept_tokens` tokens; older ones are given back;
- CHUNK (chunked local attention): the blocks of the chunk that the next token is in, `kept_tokens` long;
- STATE (recurrent layers whose states are kept at block ends): the block with the newest state, and the one that the
  next state is written to; the places between them in the table stay empty, and a state whose place is empty stands
  in the first block behind it. Behind the newest stand those of speculative tokens; those that growth passes over move
  on to the first places that it adds;
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
    """On all ranks that share the tokens of a block."""
    keys_per_block: int
    """Keys from one block's to the next one's: tokens_per_block / hash_tokens; 0 where blocks are never shared."""
    table_blocks: int
    """Entries of the group's part of a row."""
    max_blocks: int
    """Blocks that a lease holds at once at most."""
    kept_tokens: int = 0
    """WINDOW: tokens before the next one that must stay; CHUNK: tokens of a chunk."""
    extra_blocks: int = 0
    """STATE: blocks behind the newest state's, for speculative tokens."""
    is_drafted: bool = False
    """Whether a draft model reads the group: a prefix must then have one block more than is used."""
    kernel_blocks_per_block: int = 1
    kernel_block_stride: int = 1
    """Kernel blocks from one block to the next."""

    @property
    def gives_back(self) -> bool:
        """Whether blocks leave a lease while its request runs."""
        return self.keeps in (Keeps.WINDOW, Keeps.CHUNK, Keeps.STATE)


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
    """Return the first place of the table that a request needs which has computed so many tokens."""
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
    """Return the end of the places that a request has, which is to cover `num_tokens` and has computed so many.

    A window or a chunk moves on with what is computed, and never has more than `max_blocks` places.
    """
    if group.keeps is Keeps.FIXED:
        return np.full_like(num_tokens, group.max_blocks)
    end: Counts = -(-num_tokens // group.tokens_per_block) + group.extra_blocks
    if group.keeps in (Keeps.WINDOW, Keeps.CHUNK):
        end = np.minimum(end, first_needed(group, num_computed) + group.max_blocks)
    return np.minimum(end, group.table_blocks)


def first_filled(group: GroupShape, num_tokens: Counts) -> Counts:
    """Return the first place that must have a block, among those that a request of so many tokens adds."""
    if group.keeps is Keeps.STATE:
        filled: Counts = (num_tokens - 1) // group.tokens_per_block
        return filled
    return np.zeros_like(num_tokens)


def first_guessed(group: GroupShape, num_tokens: Counts) -> Counts:
    """Return the first place behind the state of so many tokens: from there on stand those of speculative tokens."""
    return (num_tokens - 1) // group.tokens_per_block + 1


def num_passed(group: GroupShape, num_tokens: Counts, ends: Counts, afters: Counts) -> Counts:
    """Return how many places of speculative tokens' states a request of `num_tokens` passes over as its places grow.

    Nothing is written there any more once it asks for tokens whose states stand behind them, so their blocks move on to
    the first of the places that are added.
    """
    before = np.minimum(ends, afters - 1 - group.extra_blocks)
    return np.maximum(before - first_guessed(group, num_tokens), 0)


def most_blocks(group: GroupShape, num_tokens: int) -> int:
    """Return the blocks that a request of so many tokens ever holds at once.

    STATE: as long as it has committed what it computed before it asks for the block after the next; until then both
    the state that is committed and the one behind it may be its newest.
    """
    if group.keeps is Keeps.FIXED:
        return group.max_blocks
    return min(-(-num_tokens // group.tokens_per_block) + group.extra_blocks, group.max_blocks)
