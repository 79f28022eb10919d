"""Own the words for why a call is not served; who is told what is the business of `refusals`."""

from enum import Enum, auto
from typing import Final


class Reason(Enum):
    """Why a call is not served."""

    BLOCKS = "blocks"
    """More are needed than can be had."""
    COPIES = "copies"
    """Enough can be had as soon as copies or scrubs have ended."""
    POSITION = "position"
    """Others come first."""
    LIMITS = "limits"
    """Only its tenant's maximum, or what others are guaranteed, keeps it from blocks that are there."""
    LEASES = "leases"
    """All rows of the block table are in use."""
    TENANT_LEASES = "tenant_leases"
    """Its tenant has as many leases as it may have."""
    KEPT_LEASES = "kept_leases"
    """The rows of the block table that are free are kept for other tenants."""


class Detail(Enum):
    """How much a refusal says; all of it takes a few passes over the pool, which a step cannot wait for."""

    CODE = auto()
    FIGURES = auto()
    """What is needed, what there is, and when to try again."""
    ALL = auto()
    """Who has the pool, and what would be granted, too."""


OF_TENANT: Final = (Reason.TENANT_LEASES, Reason.KEPT_LEASES)
"""Reasons for which others need not wait behind a call."""
OF_LEASES: Final = (Reason.LEASES, *OF_TENANT)
"""Reasons that have nothing to do with blocks."""
