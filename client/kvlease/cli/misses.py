"""Own how the explanation of a lease reads on a terminal: what was found where, and why the rest was not found."""

from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from kvlease.cli.printing import show_age
from kvlease.cli.sheets import Column, pairs, sheet
from kvlease.replies import Explanation, Miss

_MS_PER_SECOND: Final = 1_000
_COLUMNS: Final = (
    Column(name="blocks", is_number=False),
    Column(name="reason", is_number=False),
    Column(name="left", is_number=False),
    Column(name="tier", is_number=False),
    Column(name="policy", is_number=False),
    Column(name="room for", is_number=False, wrapped_columns=12),
)


def explanation(found: Explanation, width: int) -> RenderableType:
    """Return the tokens by where they were found, then each run of misses, then why each was missed."""
    num_hits = sum(found.hit_tokens.values())
    head = Text(f"Lease {found.lease_id}: {num_hits:,} of {found.num_tokens:,} tokens were found")
    sources = [(tier, f"{count:,} tokens") for tier, count in found.hit_tokens.items()]
    sources.append(("to compute", f"{max(0, found.num_tokens - num_hits):,} tokens"))
    parts: list[RenderableType] = [head, pairs(sources)]
    if found.misses:
        parts += [Text(""), sheet(_COLUMNS, [_row(miss) for miss in found.misses], width)]
        parts += [Text(""), pairs([(_blocks(miss), miss.why) for miss in found.misses])]
    return Group(*parts)


def _row(miss: Miss) -> tuple[str, ...]:
    reason = miss.reason.replace("_", " ")
    return _blocks(miss), reason, _left(miss.age_ms), miss.tier, miss.policy, miss.tenant


def _left(age_ms: int | None) -> str:
    if age_ms is None:
        return ""
    return "just now" if age_ms < _MS_PER_SECOND else f"{show_age(age_ms)} ago"


def _blocks(miss: Miss) -> str:
    """Return the indexes of a run's first and last block."""
    last = miss.first_block + miss.num_blocks - 1
    return f"{miss.first_block:,}" if last == miss.first_block else f"{miss.first_block:,}-{last:,}"
