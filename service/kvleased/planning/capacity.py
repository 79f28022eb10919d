"""Own how many blocks a request takes and which requests can ever fit; whether one fits now is the core's business.

need(tokens)  = sum over groups of the blocks that a request of so many tokens takes
usable_blocks = min over ranks of floor(device_bytes / bytes_per_block) - null_blocks
admitted      = need(tokens) <= usable_blocks
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from kvlease.errors import NeverFitsError
from kvlease.geometry import floor_div
from kvlease.spec import LayerSpec
from kvlease.units import TOKENS_MAX, show_bytes
from kvleased.counted import counted
from kvleased.planning.demand import Demand, blocks_per_request, table_blocks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """The memory that one rank has for its blocks."""

    rank: int
    bytes_per_block: int
    device_bytes: int

    @property
    def num_blocks(self) -> int:
        """floor(device_bytes / bytes_per_block): the blocks that the rank could have by itself."""
        return floor_div(self.device_bytes, self.bytes_per_block)


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What admission counts with: what the groups keep, and the blocks of the rank that has the fewest."""

    specs_by_group: tuple[tuple[LayerSpec, ...], ...]
    """The different specs of each group's layers."""
    demand: Demand
    """What a request takes, except for its number of tokens."""
    memory: RankMemory
    """The rank that has the fewest blocks."""
    null_blocks: int

    @property
    def usable_blocks(self) -> int:
        """num_blocks - null_blocks, but at least 0."""
        return max(0, self.memory.num_blocks - self.null_blocks)

    def request_blocks(self, num_tokens: int) -> int:
        """Return the blocks of all groups that a request takes."""
        return sum(self.request_blocks_by_group(num_tokens))

    def request_blocks_by_group(self, num_tokens: int) -> tuple[int, ...]:
        """Return the blocks of each group that a request takes."""
        demand = replace(self.demand, num_tokens=num_tokens)
        return tuple(group_blocks(specs, demand) for specs in self.specs_by_group)

    def largest_request_tokens(self, most: int = TOKENS_MAX) -> int:
        """Return the tokens of the largest request that can ever fit, up to `most`; 0 if not even one token fits.

        A longer request never takes fewer blocks, so halving finds the largest that fits.
        """
        fits, too_many = 0, most + 1
        while too_many - fits > 1:
            tokens = floor_div(fits + too_many, 2)
            if self.request_blocks(tokens) <= self.usable_blocks:
                fits = tokens
            else:
                too_many = tokens
        return fits

    def check_memory(self) -> None:
        """Refuse memory that has room only for the blocks that are never granted.

        Raises:
            NeverFitsError: the memory has no room for another block.
        """
        memory = self.memory
        reserved = self.null_blocks * memory.bytes_per_block
        if memory.device_bytes > reserved and memory.num_blocks:
            return
        need = (self.null_blocks + 1) * memory.bytes_per_block
        message = (
            f"rank {memory.rank} has {memory.device_bytes} bytes ({show_bytes(memory.device_bytes)}) for its pool; one "
            f"block takes {memory.bytes_per_block} bytes and {self.null_blocks} are never granted, so the pool needs "
            f"at least {need} ({show_bytes(need)}); give more memory or fewer tokens_per_block"
        )
        raise NeverFitsError(
            message,
            resource="device_bytes",
            rule="no_available_memory",
            need=need,
            available=memory.device_bytes,
            limit=memory.device_bytes,
        )

    def check_request(self, num_tokens: int) -> int:
        """Return the blocks that a request takes.

        Raises:
            NeverFitsError: it takes more blocks than there are; `limit` is the tokens of the largest request that fits.
        """
        by_group = self.request_blocks_by_group(num_tokens)
        need = sum(by_group)
        if need <= self.usable_blocks:
            return need
        largest = self.largest_request_tokens(num_tokens)
        what_fits = (
            f"the largest request that fits has {counted(largest, 'token')}"
            if largest
            else f"no request fits: even one token needs {counted(self.request_blocks(1), 'block')}; "
            "give more memory or fewer tokens_per_block"
        )
        memory = self.memory
        worst = max(range(len(by_group)), key=by_group.__getitem__)
        spec = self.specs_by_group[worst][0]
        need_bytes = need * memory.bytes_per_block
        message = (
            f"a request of {counted(num_tokens, 'token')} takes {counted(need, 'block')} ({show_bytes(need_bytes)}, "
            f"{need_bytes} bytes), {by_group[worst]} of them in group {worst} ({spec.kind}, such as {spec.name!r}); "
            f"rank {memory.rank} has {self.usable_blocks} that can be granted, of {memory.bytes_per_block} bytes each; "
            + what_fits
        )
        raise NeverFitsError(
            message,
            resource="device_blocks",
            rule="not_enough_memory",
            need=need,
            available=self.usable_blocks,
            limit=largest,
        )

    def fit_request(self, asked_tokens: int) -> int:
        """Return the tokens of the longest request that fits, at most `asked_tokens`.

        Raises:
            NeverFitsError: not even one token fits.
        """
        largest = self.largest_request_tokens(asked_tokens)
        if largest:
            return largest
        need, usable = self.request_blocks(1), self.usable_blocks
        message = (
            f"no request fits: even one token needs {counted(need, 'block')} of {self.memory.bytes_per_block} bytes, "
            f"but rank {self.memory.rank} can grant {usable}; give more memory or fewer tokens_per_block"
        )
        raise NeverFitsError(
            message,
            resource="device_blocks",
            rule="auto_fit_failed",
            need=need,
            available=usable,
            limit=0,
        )


def group_blocks(specs: Iterable[LayerSpec], demand: Demand) -> int:
    """Return the blocks that one request takes of a group: those that its most demanding layer needs."""
    return max(blocks_per_request(spec, demand) for spec in specs)


def group_table_blocks(specs: Iterable[LayerSpec], demand: Demand) -> int:
    """Return the entries of a group's table row for one request; an encoder's input may be longer than the request."""
    longest = replace(demand, num_tokens=max(demand.num_tokens, demand.encoder_tokens))
    return max(table_blocks(spec, longest) for spec in specs)


def fewest_blocks(memories: Sequence[RankMemory]) -> RankMemory:
    """Return the rank with the fewest blocks, which decides for all; of several, one with no bytes left over."""
    return min(
        memories,
        key=lambda memory: (
            memory.num_blocks,
            memory.device_bytes > memory.num_blocks * memory.bytes_per_block,
        ),
    )
