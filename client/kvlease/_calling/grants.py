"""Own what is known of one lease: its life and its blocks, by group; what calls mean for it is the session's job."""

from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvlease._checks import check_range
from kvlease.errors import KVLeaseError
from kvlease.geometry import blocks_covering
from kvlease.groups import GroupShape, Keeps, first_needed, last_covered
from kvlease.replies import Miss

_BYTES_PER_BLOCK_ID: Final = 4
_NO_BLOCK: Final = 0
"""The id at a place that needs no block."""
_NO_IDS: Final = np.empty(0, np.int32)


class Grant:
    """A lease with one group, which keeps everything; the base of all grants.

    Its blocks are stored packed. Whoever asks for them gets an array of his own, and may write to it.
    """

    __slots__ = (
        "_packed",
        "_tokens_per_block",
        "covered_tokens",
        "device_hit_tokens",
        "disk_hit_tokens",
        "host_hit_tokens",
        "is_evicted",
        "is_live",
        "lease_id",
        "misses",
        "num_blocks",
        "refusal",
        "remote_hit_tokens",
        "request_id",
        "row",
    )

    has_groups = False
    """Whether places are stored by group, and may be empty."""

    def __init__(
        self, *, request_id: str, tokens_per_block: int, refusal: KVLeaseError | None = None
    ) -> None:
        """Begin without blocks."""
        self.request_id = request_id
        self.lease_id = 0
        self.row = 0
        self.device_hit_tokens = 0
        self.host_hit_tokens = 0
        self.misses: tuple[Miss, ...] = ()
        self.disk_hit_tokens = 0
        self.remote_hit_tokens = 0
        self.is_live = False
        self.is_evicted = False
        self.refusal = refusal
        """Why there is no lease, or why its last verb was refused."""
        self.num_blocks = 0
        self.covered_tokens = 0
        """Tokens that the blocks have room for."""
        self._tokens_per_block = tokens_per_block
        self._packed = bytearray()

    @property
    def hit_tokens(self) -> int:
        """Tokens of the prefix that were found, in whichever tier."""
        below = self.host_hit_tokens + self.disk_hit_tokens + self.remote_hit_tokens
        return self.device_hit_tokens + below

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """The blocks, in token order."""
        # Another thread may append or replace blocks meanwhile, so the copy comes first.
        return np.frombuffer(self._packed[:], "<i4")

    def blocks(self, group: int) -> NDArray[np.int32]:
        """Return the blocks of a group, one for each place of its table.

        Raises:
            InvalidError: there is no such group.
        """
        check_range("group", group, 0, 0)
        return self.block_ids

    def put(self, packed: bytes | bytearray, num_places: Sequence[int] = ()) -> None:  # noqa: ARG002 - of groups
        """Replace the blocks by packed int32 ids; with several groups, `num_places` says how many each group has."""
        self._packed = bytearray(packed)
        self.num_blocks = num_blocks = len(packed) // _BYTES_PER_BLOCK_ID
        self.covered_tokens = num_blocks * self._tokens_per_block

    def grow(self, packed: bytes, covered_tokens: int) -> bool:
        """Append packed int32 ids unless `covered_tokens` are covered already; tell whether they are covered then."""
        covered = self.covered_tokens
        if covered < covered_tokens:
            held = self._packed
            held += packed
            self.num_blocks = num_blocks = len(held) // _BYTES_PER_BLOCK_ID
            self.covered_tokens = covered = num_blocks * self._tokens_per_block
        return covered >= covered_tokens

    def add_unknown(
        self,
        packed: bytes,
        num_added: Sequence[int],  # noqa: ARG002 - of groups
        num_tokens: int,  # noqa: ARG002 - of groups
        num_places: Sequence[int] = (),  # noqa: ARG002 - of groups
    ) -> None:
        """Add the blocks of an extend, except those known from the table, which has other ranks' blocks, too."""
        ids = np.frombuffer(packed, "<i4")
        self.put(self._packed + ids[~np.isin(ids, self.block_ids)].tobytes())

    def reach(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` one extend covers."""
        return num_tokens

    def cover(self, num_tokens: int) -> None:
        """Note for how many tokens the lease was granted."""

    def give_back(self, num_tokens: int) -> None:
        """Drop the places that no token after the first `num_tokens` needs."""

    def compute(self, num_tokens: int) -> None:
        """Note that `num_tokens` are computed, and drop the places that no later token needs."""

    def cut(self, num_tokens: int) -> None:
        """Drop the places behind those that cover `num_tokens`."""
        num_kept = blocks_covering(num_tokens, self._tokens_per_block)
        if num_kept < self.num_blocks:
            self.put(bytes(self._packed[: num_kept * _BYTES_PER_BLOCK_ID]))


class GroupedGrant(Grant):
    """A lease whose groups each have their own places; some places need no block yet, or none any more."""

    __slots__ = (
        "_firsts",
        "_groups",
        "_num_tokens",
        "_places",
        "_tables",
        "_version",
        "num_computed",
    )

    has_groups = True

    def __init__(
        self,
        *,
        request_id: str,
        groups: tuple[GroupShape, ...],
        refusal: KVLeaseError | None = None,
    ) -> None:
        """Begin without blocks."""
        super().__init__(request_id=request_id, tokens_per_block=0, refusal=refusal)
        self.num_computed = 0
        """Tokens that are computed, as far as we know; never more than the daemon knows of."""
        self._groups = groups
        self._num_tokens = 0
        self._places: list[list[int]] = [[] for _ in groups]
        self._firsts = [0] * len(groups)
        """For each group, the place before which all places are known to be empty."""
        self._version = 0
        self._tables: list[tuple[int, NDArray[np.int32]]] = [(-1, _NO_IDS)] * len(groups)

    @property
    def block_ids(self) -> NDArray[np.int32]:
        """The tables of all groups, one after another."""
        return np.concatenate([self.blocks(group) for group in range(len(self._groups))])

    def blocks(self, group: int) -> NDArray[np.int32]:
        """Return the blocks of a group, one for each place of its table; 0 where a place needs no block."""
        check_range("group", group, 0, len(self._groups) - 1)
        # A change of places increases the version afterwards, so a table read during the change is not kept.
        version = self._version
        read_version, table = self._tables[group]
        if read_version != version:
            table = np.array(self._places[group], np.int32)
            self._tables[group] = (version, table)
        return table.copy()

    def put(self, packed: bytes | bytearray, num_places: Sequence[int] = ()) -> None:
        """Replace the places of all groups."""
        self._places = self._split(packed, num_places)
        self._firsts = [0] * len(self._places)
        self._settle(sum(map(self._held, self._groups, self._places)))

    def add_unknown(
        self,
        packed: bytes,
        num_added: Sequence[int],
        num_tokens: int,
        num_places: Sequence[int] = (),
    ) -> None:
        """Put an extend's blocks where the daemon says that they are; blocks that are known already change nothing.

        A group's blocks end at `num_places`. Where they are cannot be found by counting blocks: answers to simultaneous
        calls come in any order, and a block that a commit has given back may come again, at another place, before the
        answer to that commit.
        """
        self._num_tokens = max(self._num_tokens, num_tokens)
        num_new = 0
        ends = num_places or [0] * len(self._groups)
        for at, (ids, end) in enumerate(zip(self._split(packed, num_added), ends, strict=True)):
            if not (ids and end):
                continue
            group, places = self._groups[at], self._places[at]
            if group.keeps is Keeps.STATE:
                num_new += _put_states(places, ids, end, self._firsts[at])
                continue
            begin = end - len(ids)
            # If earlier blocks are missing, these are left out, so that the block table is read instead.
            new = ids[len(places) - begin :] if 0 <= begin <= len(places) else []
            places.extend(new)
            num_new += self._held(group, new)
        self._settle(self.num_blocks + num_new)

    def reach(self, num_tokens: int) -> int:
        """Return how many of `num_tokens` one extend covers: a window must move on before it covers more."""
        ends = [
            _room(group, self._end(group, num_tokens), num_tokens)
            for group in self._groups
            if group.keeps is not Keeps.FIXED
        ]
        return min([num_tokens, *ends])

    def give_back(self, num_tokens: int) -> None:
        """Drop the places that no token after the first `num_tokens` needs."""
        num_dropped = 0
        for index, (group, places) in enumerate(zip(self._groups, self._places, strict=True)):
            if not group.gives_back:
                continue
            begin = self._firsts[index]
            end = min(len(places), int(first_needed(group, np.array(num_tokens))))
            if end > begin:
                num_dropped += self._held(group, places[begin:end])
                places[begin:end] = [_NO_BLOCK] * (end - begin)
                self._firsts[index] = end
        self._settle(self.num_blocks - num_dropped)

    def compute(self, num_tokens: int) -> None:
        """Note that `num_tokens` are computed, and drop the places that no later token needs."""
        self.num_computed = max(self.num_computed, num_tokens)
        self.give_back(num_tokens)

    def cut(self, num_tokens: int) -> None:
        """Drop the places behind those that cover `num_tokens`."""
        self._num_tokens = min(self._num_tokens, num_tokens)
        num_dropped = 0
        for group, places in zip(self._groups, self._places, strict=True):
            # As if all tokens were computed, which is safe: a window has no places beyond those it may have.
            end = int(last_covered(group, np.array(num_tokens), np.array(num_tokens)))
            behind = places[end:]
            del places[end:]
            if group.keeps is Keeps.STATE:
                behind = self._move_down(group, places, behind)
            num_dropped += self._held(group, behind)
        self._settle(self.num_blocks - num_dropped)

    def cover(self, num_tokens: int) -> None:
        """Note for how many tokens the lease was granted; places alone do not tell it of fixed blocks and of states."""
        self._num_tokens = max(self._num_tokens, num_tokens)

    def _end(self, group: GroupShape, num_tokens: int) -> int:
        return int(last_covered(group, np.array(self.num_computed), np.array(num_tokens)))

    def _split(self, packed: bytes | bytearray, counts: Sequence[int]) -> list[list[int]]:
        """Return ids by group; if there is only one group, it has them all, whatever `counts` says."""
        ids: list[int] = np.frombuffer(packed, "<i4").tolist()
        if len(self._groups) == 1 or not ids:
            return [ids, *([] for _ in self._groups[1:])]
        parts, end = [], 0
        for count in counts:
            begin, end = end, end + count
            parts.append(ids[begin:end])
        assert len(parts) == len(self._groups), "the daemon's groups are not the plan's"
        return parts

    def _move_down(self, group: GroupShape, places: list[int], behind: list[int]) -> list[int]:
        """Move blocks to the last places, without gaps and in their order, so that the newest state comes first.

        Return the blocks of `behind` that are left.
        """
        computed = int(first_needed(group, np.array(self.num_computed)))
        first = max(computed, len(places) - 1 - group.extra_blocks)
        blocks = [block for block in [*places[first:], *behind] if block != _NO_BLOCK]
        moved = blocks[: max(0, len(places) - first)]
        places[first : first + len(moved)] = moved
        return [block for block in behind if block not in moved]

    def _held(self, group: GroupShape, places: list[int]) -> int:
        """Return how many of a group's places have a block; in a group without empty places, block 0 counts."""
        return len(places) - (places.count(_NO_BLOCK) if group.gives_back else 0)

    def _settle(self, num_blocks: int) -> None:
        """Count blocks and covered tokens anew after a change of places."""
        self.num_blocks = num_blocks
        covered = [
            _covered(group, places, self._num_tokens)
            for group, places in zip(self._groups, self._places, strict=True)
            if group.keeps is not Keeps.FIXED
        ]
        self.covered_tokens = min(covered, default=self._num_tokens if num_blocks else 0)
        self._version += 1


def _put_states(places: list[int], ids: list[int], end: int, first: int) -> int:
    """Put blocks, 0 for none, at the last places before `end`; returns how many more blocks there are then.

    A block has only one place. If it is known at a place from `end` on, it has moved there since, and stays; from any
    other place it has moved here. Places before `first` need no block any more, however late the answer comes.
    """
    places.extend([_NO_BLOCK] * (end - len(places)))
    wanted = {
        block: at
        for at, block in enumerate(ids, end - len(ids))
        if block != _NO_BLOCK and at >= first
    }
    num_before = 0
    for at in range(first, len(places)):
        if places[at] in wanted:
            if at >= end:
                del wanted[places[at]]
            else:
                num_before += 1
                places[at] = _NO_BLOCK
    for block, at in wanted.items():
        places[at] = block
    return len(wanted) - num_before


def _covered(group: GroupShape, places: list[int], num_tokens: int) -> int:
    """Return how many tokens may be computed with a group's places, if a lease was granted for `num_tokens`.

    Another rank that asked for more tokens may have moved blocks for speculative tokens' states farther on. Then the
    places reach farther than their blocks: behind the newest state there must be one for each speculative token.
    """
    room = _room(group, len(places), num_tokens)
    if not group.extra_blocks or room <= num_tokens:
        return room
    held = (end for end in range(len(places), 0, -1) if places[end - 1] != _NO_BLOCK)
    num_places = next(islice(held, group.extra_blocks, None), 0)
    return min(room, max(num_tokens, num_places * group.tokens_per_block))


def _room(group: GroupShape, num_places: int, num_tokens: int) -> int:
    """Return how many tokens `num_places` have room for; places for states of speculative tokens do not count.

    At the end of its table, a request has fewer places for these, and its tokens may go on to the last place.
    """
    room = max(0, num_places - group.extra_blocks) * group.tokens_per_block
    if group.extra_blocks and num_places == group.table_blocks:
        return max(room, min(num_tokens, num_places * group.tokens_per_block))
    return room


def unpacked(counts: bytes) -> list[int]:
    """Return counts of blocks by group; empty if there is one group."""
    return np.frombuffer(counts, "<i4").tolist() if counts else []
