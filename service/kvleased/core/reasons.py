"""Own the reasons for which a call is not served; what a caller is told of them is the business of `refusals`."""

from enum import Enum, auto
from typing import Final


class Reason(Enum):
    """Why a call is not served."""

    BLOCKS = "blocks"
    """It needs more blocks than it can get."""
    COPIES = "copies"
    """It can get enough blocks as soon as copies or scrubs have ended."""
    POSITION = "position"
    """Other calls come first."""
    LIMITS = "limits"
    """There are enough blocks, but its tenant's maximum, or what other tenants are guaranteed, keeps them from it."""
    LEASES = "leases"
    """All rows of the block table are in use."""
    TENANT_LEASES = "tenant_leases"
    """Its tenant has as many leases as it may have."""
    KEPT_LEASES = "kept_leases"
    """The free rows of the block table are kept for other tenants."""


class Detail(Enum):
    """How much a refusal says; to say all takes a few passes over the pool, for which a step cannot wait."""

    CODE = auto()
    FIGURES = auto()
    """What is needed, what there is, and when to try again."""
    ALL = auto()
    """The figures, who has the pool, and what would be granted."""


OF_TENANT: Final = (Reason.TENANT_LEASES, Reason.KEPT_LEASES)
"""If a call waits for one of these reasons, the calls behind it need not wait for it."""
OF_LEASES: Final = (Reason.LEASES, *OF_TENANT)
"""Reasons that have nothing to do with blocks."""
