"""Own the account of bytes that hold nothing: by tier and cause, each with its numbers.

A block belongs to one group at a time, and groups fill it differently. So the account divides the usable blocks between
groups as the longest request does. Then, on every rank, except for what division leaves over:

    device bytes = content of the usable blocks + the waste of all causes
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from kvlease.geometry import floor_div
from kvlease.layout import Layout
from kvlease.plan import Waste
from kvleased.planning.groups.grouping import Group
from kvleased.planning.pool import bytes_in_block


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAccount:
    """What the account must know of one rank."""

    groups: tuple[Group, ...]
    """The groups, with only this rank's layers."""
    bytes_per_block: int
    own_blocks: int
    """Blocks that the rank would have by itself."""
    budget_bytes: int
    """Bytes that the rank was given; 0 means as many as its blocks take."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolAccount:
    """What the account must know of the device pools of all ranks."""

    ranks: tuple[RankAccount, ...]
    layout: Layout
    num_blocks: int
    null_blocks: int
    blocks_by_group: tuple[int, ...]
    """Blocks of each group that the longest request takes."""
    padding_given: Mapping[str, int]
    """Bytes of padding in each layer's page before the planner changed it, by the layer's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostAccount:
    """What the account must know of the host pool."""

    budget_bytes: int
    num_slots: int
    bytes_per_slot: int
    content_bytes: int
    """Bytes of a slot without its padding."""


def device_waste(account: PoolAccount) -> tuple[Waste, ...]:
    """Return the causes that waste any bytes of the device pools."""
    found = [
        *_inside_blocks(account),
        _null_blocks(account),
        _rank_minimum(account),
        _unfilled(account),
    ]
    return tuple(waste for waste in found if waste.num_bytes)


def host_waste(account: HostAccount) -> tuple[Waste, ...]:
    """Return the causes that waste any bytes of the host pool."""
    padding = account.bytes_per_slot - account.content_bytes
    filled = account.num_slots * account.bytes_per_slot
    found = (
        Waste(
            cause="slot_padding",
            tier="host",
            num_bytes=account.num_slots * padding,
            why=f"{account.num_slots} slots of {account.content_bytes} bytes take {account.bytes_per_slot} each",
        ),
        Waste(
            cause="unfilled_budget",
            tier="host",
            num_bytes=max(0, account.budget_bytes - filled),
            why=f"{account.num_slots} slots of {account.bytes_per_slot} bytes fill {filled} of {account.budget_bytes}",
        ),
    )
    return tuple(waste for waste in found if waste.num_bytes and account.num_slots)


@dataclass(frozen=True, slots=True)
class _Split:
    """Bytes of one block of a group on one rank, by cause; together with the content they add up to bytes_per_block."""

    page_padding: int
    page_unification: int
    uneven_groups: int
    block_padding: int


_WHY = {
    "page_padding": "pages are padded as their layers require, by up to {most} bytes of a block",
    "page_unification": "pages are padded to the size of other groups' pages, by up to {most} bytes of a block",
    "uneven_groups": (
        "the pages of groups fill different parts of a block; the least full group leaves "
        "{most} bytes of a block"
    ),
    "block_padding": "blocks are rounded up to whole multiples, by {most} bytes in a block",
}


def _inside_blocks(account: PoolAccount) -> Iterator[Waste]:
    """Yield what goes unused in blocks that hold something, divided between groups as in the longest request."""
    usable = account.num_blocks - account.null_blocks
    # Ranks with the same layers are equally full.
    parts = {id(rank.groups): rank for rank in account.ranks}
    by_part = {part: _splits(rank, account) for part, rank in parts.items()}
    splits = [
        (blocks, split)
        for rank in account.ranks
        for blocks, split in zip(account.blocks_by_group, by_part[id(rank.groups)], strict=True)
    ]
    total_blocks = max(1, sum(account.blocks_by_group))
    for cause, why in _WHY.items():
        weighted = sum(blocks * getattr(split, cause) for blocks, split in splits)
        most = max((getattr(split, cause) for _, split in splits), default=0)
        yield Waste(
            cause=cause,
            tier="device",
            num_bytes=floor_div(usable * weighted, total_blocks),
            why=f"{why.format(most=most)} of {account.ranks[0].bytes_per_block}",
        )


def _splits(rank: RankAccount, account: PoolAccount) -> list[_Split]:
    in_block = [bytes_in_block(group, account.layout) for group in rank.groups]
    widest = max(in_block, default=0)
    splits = []
    for group, taken in zip(rank.groups, in_block, strict=True):
        pages = given = content = 0
        for layer in group.layers:
            page_bytes, content_bytes = layer.bytes_per_page, layer.content_bytes_per_page
            pages += page_bytes
            content += content_bytes
            # Any padding beyond what the layer came with was added by the planner.
            given += min(page_bytes - content_bytes, account.padding_given[layer.name])
        splits.append(
            _Split(
                page_padding=given + taken - pages,
                page_unification=pages - content - given,
                uneven_groups=widest - taken,
                block_padding=rank.bytes_per_block - widest,
            )
        )
    return splits


def _null_blocks(account: PoolAccount) -> Waste:
    block = sum(rank.bytes_per_block for rank in account.ranks)
    return Waste(
        cause="null_blocks",
        tier="device",
        num_bytes=account.null_blocks * block,
        why=f"{account.null_blocks} of {account.num_blocks} blocks are never granted; each takes {block} bytes",
    )


def _rank_minimum(account: PoolAccount) -> Waste:
    beyond = [rank.own_blocks - account.num_blocks for rank in account.ranks]
    num_bytes = sum(
        blocks * rank.bytes_per_block for blocks, rank in zip(beyond, account.ranks, strict=True)
    )
    return Waste(
        cause="rank_minimum",
        tier="device",
        num_bytes=num_bytes,
        why=f"all ranks have {account.num_blocks} blocks; the rank with the most room could have {max(beyond)} more",
    )


def _unfilled(account: PoolAccount) -> Waste:
    left = [
        max(0, rank.budget_bytes - rank.own_blocks * rank.bytes_per_block) for rank in account.ranks
    ]
    return Waste(
        cause="unfilled_budget",
        tier="device",
        num_bytes=sum(left),
        why=f"up to {max(left)} bytes of a rank's memory hold no block",
    )
