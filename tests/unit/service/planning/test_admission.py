"""Laws of admission: what a plan promises is what the core of the daemon enforces."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import KVLeaseError, NeverFitsError
from kvlease.ids import Epoch, WorkerId
from kvlease.plan import CachePlan, PlanInputs
from kvlease.spec import FullAttention
from kvleased.core.cache import Cache
from kvleased.core.commands import Attach, Reserve
from kvleased.core.effects import Reserved
from kvleased.core.records import CacheRecords
from kvleased.core.shape import CacheShape
from kvleased.planning import check_request, plan

LAYER = FullAttention(name="0", num_kv_heads=1, head_size=8, dtype="float16")
WORKER = WorkerId(1 << 20)


def core_of(layout: CachePlan) -> Cache:
    """Return an empty core with the plan's numbers and one worker."""
    shape = CacheShape(
        num_blocks=layout.num_blocks,
        num_slots=layout.num_slots,
        tokens_per_block=layout.tokens_per_block,
        max_blocks_per_lease=layout.blocks_per_longest_request,
        max_leases=2,
    )
    core = Cache(shape, CacheRecords.plain(shape), Epoch(1))
    core.handle(Attach(worker_id=WORKER, tenant_digest=1), now=0.0)
    return core


@given(st.integers(1, 40), st.integers(1, 40), st.data())
def test_core_admits_exactly_what_the_plan_promises(
    tokens_per_block: int, num_blocks: int, data: st.DataObject
) -> None:
    """A request as long as the plan's longest is granted; one token more is refused for ever."""
    longest = data.draw(st.integers(0, num_blocks * tokens_per_block))
    inputs = PlanInputs(
        layers=(LAYER,),
        tokens_per_block=tokens_per_block,
        device_blocks=num_blocks,
        longest_request_tokens=longest,
    )
    layout = plan(inputs)
    core = core_of(layout)
    fits = Reserve(
        worker_id=WORKER, request_id="a", keys=b"", num_tokens=layout.longest_request_tokens
    )
    beyond = dataclasses.replace(fits, request_id="b", num_tokens=fits.num_tokens + 1)

    with pytest.raises(NeverFitsError):
        core.handle(beyond, now=0.0)
    assert isinstance(core.handle(fits, now=0.0).reply, Reserved)


def test_refusal_says_what_would_fit() -> None:
    """A request that can never fit is told the largest that can, and what it would take itself."""
    with pytest.raises(KVLeaseError) as refusal:
        check_request(100, num_blocks=4, tokens_per_block=16, bytes_per_block=64)

    error = refusal.value
    assert (error.resource, error.need, error.available, error.limit) == ("device_blocks", 7, 4, 4)
    assert "largest request that fits has 64 tokens" in error.message
    assert "448 bytes" in error.message
