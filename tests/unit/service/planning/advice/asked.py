"""Build inputs of plans, with layers that are quickly counted."""

from kvlease.plan import PlanInputs
from kvlease.spec import FullAttention

LAYER = FullAttention(name="0", num_kv_heads=2, head_size=32, dtype="float16")


def inputs(**changes: object) -> PlanInputs:
    """Return inputs of ten blocks of 4096 bytes with some fields changed."""
    fields = {"layers": (LAYER,), "tokens_per_block": 16, "device_bytes": 40960} | changes
    return PlanInputs(**fields)  # type: ignore[arg-type]  # tests pass wrong values on purpose
