"""Own how a plan explains itself: its numbers as equations, and what other settings would change."""

from dataclasses import dataclass
from fractions import Fraction
from typing import Final, Self

from kvlease._records import from_proto, to_proto
from kvlease.plan import CachePlan
from kvlease.v1 import kvlease_pb2 as pb

WAY_OUT: Final = "; there is a plan with "
"""The words between a refusal's sentence and the settings that would work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Equation:
    """One number of a plan, with the formula that it comes from, in names and in numbers."""

    name: str
    """The number's name in the plan."""
    groups: tuple[int, ...] = ()
    """The groups that each have this number; empty: it is of all groups together."""
    ranks: tuple[int, ...] = ()
    """The ranks that each have this number; empty: all of them have it."""
    layer: str = ""
    """The first layer that has this number, if a group's layers differ."""
    formula: str
    """The formula in names, such as floor(device_bytes / bytes_per_block)."""
    arithmetic: str
    """The formula in numbers, such as floor(8589934592 / 2097152)."""
    value: int
    value_divisor: int = 1
    """The number is exactly value / value_divisor."""
    unit: str
    """What the number counts: bytes, blocks, tokens, slots, requests, states, entries, ranks or 1."""

    @property
    def exact(self) -> Fraction:
        """The number itself: value / value_divisor."""
        return Fraction(self.value, self.value_divisor)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanReport:
    """Every number of a plan as an equation, ordered so that each follows from earlier ones."""

    equations: tuple[Equation, ...]
    notes: tuple[str, ...] = ()
    """What people may not expect of the plan: one sentence for each point."""

    def to_proto(self) -> pb.PlanReport:
        """Return the message that says the same."""
        return to_proto(self, pb.PlanReport)

    @classmethod
    def from_proto(cls, message: pb.PlanReport) -> Self:
        """Return what the message says."""
        return from_proto(message, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOutcome:
    """The numbers by which people compare plans; all are 0 if there is a refusal."""

    bytes_per_block: int = 0
    """Bytes of a block on the rank whose blocks are the largest."""
    num_blocks: int = 0
    usable_blocks: int = 0
    blocks_per_longest_request: int = 0
    longest_request_tokens: int = 0
    """Tokens of the longest request as planned."""
    largest_request_tokens: int = 0
    """Tokens of the longest request that could ever be admitted."""
    capacity_tokens: int = 0
    num_slots: int = 0
    """Slots of the host pool."""
    bytes_per_slot: int = 0
    """Bytes from one slot of a lower tier to the next."""
    num_disk_slots: int = 0
    num_remote_slots: int = 0
    refusal: str = ""
    """Why there is no such plan; empty if there is one."""

    @property
    def concurrency(self) -> float:
        """Longest requests that fit at once: usable_blocks / blocks_per_longest_request."""
        return self.usable_blocks / max(1, self.blocks_per_longest_request)


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """What one changed setting would change."""

    change: str
    """The setting, written name=value."""
    before: PlanOutcome
    after: PlanOutcome

    def to_proto(self) -> pb.WhatIf:
        """Return the message that says the same."""
        return to_proto(self, pb.WhatIf)

    @classmethod
    def from_proto(cls, message: pb.WhatIf) -> Self:
        """Return what the message says."""
        return from_proto(message, cls)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedPlan:
    """A plan, the report that explains its numbers, and what other settings would change."""

    plan: CachePlan
    report: PlanReport
    what_ifs: tuple[WhatIf, ...]
    """One for each change that was asked for."""
