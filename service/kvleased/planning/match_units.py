"""Own the numbers of tokens at which prefixes are named and found; the keys themselves are made elsewhere."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd, lcm

from kvlease.errors import InvalidError
from kvlease.plan import EngineInputs
from kvlease.spec import AttentionSpec, FullAttention, StateSpace
from kvleased.planning.groups.grouping import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchUnits:
    """The numbers of tokens at whose multiples prefixes are named and found."""

    scheduler_block_tokens: int
    """Every group ends a block at each multiple of this."""
    hash_block_tokens: int
    """Tokens that one key stands for."""
    hit_alignment_tokens: int
    """A prefix that is found ends at a multiple of this."""


def match_units(groups: Sequence[Group], engine: EngineInputs, context_ranks: int) -> MatchUnits:
    """Return the units of a model's groups, where a sharded block covers tokens_per_block * context_ranks.

    Raises:
        InvalidError: match_tokens does not divide a group's block, or prefixes would end inside of a compressed
            state (rule invalid_prefix_match_unit).
    """
    if not groups:
        return MatchUnits(scheduler_block_tokens=1, hash_block_tokens=1, hit_alignment_tokens=1)
    block_tokens = lcm(*(group.tokens_on_all_ranks(context_ranks) for group in groups))
    if len(groups) == 1:
        _check_single(block_tokens, engine)
        return _all_equal(block_tokens)
    hash_tokens = _hash_tokens(groups, engine, context_ranks, block_tokens)
    ends_inside = _ends_inside_blocks(groups, engine, context_ranks, hash_tokens)
    _check_states(groups, hash_tokens if ends_inside else block_tokens)
    is_fine = engine.prefix_caching and ends_inside
    is_fine = is_fine and _all_reach(groups, context_ranks, hash_tokens)
    return MatchUnits(
        scheduler_block_tokens=block_tokens,
        hash_block_tokens=hash_tokens,
        hit_alignment_tokens=hash_tokens if is_fine else block_tokens,
    )


def _all_equal(num_tokens: int) -> MatchUnits:
    return MatchUnits(
        scheduler_block_tokens=num_tokens,
        hash_block_tokens=num_tokens,
        hit_alignment_tokens=num_tokens,
    )


def _hash_tokens(
    groups: Sequence[Group], engine: EngineInputs, context_ranks: int, block_tokens: int
) -> int:
    """Return the tokens of a key: the finest that all cacheable groups allow, or a block's if states are unaligned."""
    has_states = any(isinstance(group.spec, StateSpace) for group in groups)
    if not _is_matched(engine) or (has_states and engine.state_mode != "align"):
        return block_tokens
    sizes = [group.tokens_on_all_ranks(context_ranks) for group in _cacheable(groups) or groups]
    match_tokens = engine.match_tokens
    if match_tokens is None:
        return gcd(*sizes)
    if any(size % match_tokens for size in sizes):
        message = (
            f"match_tokens is {match_tokens}, which does not divide all block sizes "
            f"({', '.join(map(str, sorted(set(sizes))))} tokens); set it to a divisor of {gcd(*sizes)}, or leave it out"
        )
        raise InvalidError(
            message,
            resource="match_tokens",
            rule="invalid_prefix_match_unit",
            need=match_tokens,
            limit=gcd(*sizes),
        )
    return match_tokens


def _check_single(block_tokens: int, engine: EngineInputs) -> None:
    if engine.match_tokens in (None, block_tokens) or not _is_matched(engine):
        return
    message = (
        f"match_tokens is {engine.match_tokens}, but with a single group, prefixes end where its blocks of "
        f"{block_tokens} tokens end; set it to {block_tokens}, or leave it out"
    )
    raise InvalidError(
        message,
        resource="match_tokens",
        rule="invalid_prefix_match_unit",
        need=engine.match_tokens,
        limit=block_tokens,
    )


def _ends_inside_blocks(
    groups: Sequence[Group], engine: EngineInputs, context_ranks: int, hash_tokens: int
) -> bool:
    """Tell whether a prefix may end inside of a block, because the state at that point may be kept."""
    least_tokens = hash_tokens + 1 if context_ranks == 1 else hash_tokens
    return engine.state_mode == "align" and any(
        isinstance(group.spec, StateSpace) and group.tokens_per_block >= least_tokens
        for group in groups
    )


def _check_states(groups: Sequence[Group], unit_tokens: int) -> None:
    """Refuse compressed states that would cover tokens beyond a prefix's end."""
    for group in _cacheable(groups):
        for layer in group.layers:
            if isinstance(layer, AttentionSpec) and unit_tokens % layer.tokens_per_state:
                message = (
                    f"layer {layer.name!r} keeps one state of {layer.tokens_per_state} tokens, but a prefix may end at "
                    f"any multiple of {unit_tokens}; set match_tokens to a multiple of {layer.tokens_per_state}"
                )
                raise InvalidError(
                    message,
                    resource="match_tokens",
                    rule="invalid_prefix_match_unit",
                    need=layer.tokens_per_state,
                    available=unit_tokens,
                )


def _all_reach(groups: Sequence[Group], context_ranks: int, hash_tokens: int) -> bool:
    """Tell whether every cacheable group can serve a prefix that ends at any multiple of a key's tokens."""
    return all(
        isinstance(group.spec, FullAttention | StateSpace)
        or group.tokens_on_all_ranks(context_ranks) == hash_tokens
        for group in _cacheable(groups)
    )


def _cacheable(groups: Sequence[Group]) -> list[Group]:
    return [group for group in groups if group.is_prefix_cacheable]


def _is_matched(engine: EngineInputs) -> bool:
    """Tell whether anything looks for prefixes."""
    return engine.prefix_caching or engine.has_connector
