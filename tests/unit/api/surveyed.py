"""Build the survey of a cache as metrics show it, without a daemon."""

import numpy as np

from kvlease.plan import Waste
from kvleased.caches.tallies import Tally
from kvleased.core.blocks.departures import Departures
from kvleased.core.blocks.states import State
from kvleased.core.effects import Tier
from kvleased.core.tenancy.tenants import TenantFacts
from kvleased.core.views.census import Census
from kvleased.core.views.survey import Columns, Filling, Survey
from kvleased.metrics import STATES
from kvleased.movers.batches import LinkFigures
from kvleased.traces.ghosts import GhostFigures
from kvleased.verbs.surveys import GroupFacts, Surveyed

CHAT = 77


DEVICE = dict.fromkeys(STATES, 2) | {"ready_held": 1}


CENSUS = Census(
    device=DEVICE, host=dict.fromkeys(STATES, 0), num_leases=3, num_waiting=1, waiting_by_priority={1: 1},
    num_workers=2, num_pins=0, num_copies=4,
    magazines=((2, 5, 7),),
    counters={
        "prefix_tokens_device": 64, "prefix_tokens_host": 16, "blocks_forked": 4, "missed_evicted": 3,
        "step_refused_POOL_FULL": 6, "leases_granted": 6, "leases_recovered": 2, "leases_released": 3,
        "leases_ended_died": 1, "leases_ended_detached": 1,
    },
)  # fmt: skip


COLUMNS = Columns(
    states=np.array([State.READY, State.READY, State.RESERVED, State.FREE], np.uint8),
    tenants=np.array([CHAT, CHAT, CHAT, CHAT], np.uint64),
    are_held=np.array([True, False, True, False]),
)


LIMITS = TenantFacts(
    tenant_digest=CHAT, used_blocks=3, held_blocks=2, pinned_blocks=1, min_blocks=2, max_blocks=12,
    pinned_blocks_max=4, weight=1.0, num_leases=1, leases_max=8,
)  # fmt: skip


def departed() -> Departures:
    """Return five evicted blocks, each of which was there for 40 seconds and idle for 2."""
    departures = Departures()
    departures.clock.note(1, 0.0)
    departures.count(
        np.zeros(5, np.uint8), np.ones(5, np.int64), np.full(5, 40.0), np.full(5, 38.0)
    )
    return departures


SURVEY = Survey(
    census=CENSUS,
    available_blocks=9,
    columns={Tier.DEVICE: COLUMNS},
    tenants=(LIMITS,),
    phases={"active": 2, "quarantined": 1},
    lease_seconds=np.array([1.0, 2.0, 30.0]),
    quarantined_seconds=8.0,
    waiting_seconds=0.25,
    groups=(Filling(num_blocks=3, tokens_unfilled=6),),
    departures=departed(),
    missed_keys_dropped=11,
)


SURVEYED = Surveyed(
    cache="demo",
    survey=SURVEY,
    waiting={"low": 0, "normal": 0, "high": 1},
    pools={"device": DEVICE, "disk": DEVICE},
    bytes_per_block={"device": 4096, "host": 4096, "disk": 4096},
    tenants=("chat", "(others)"),
    digests=(CHAT,),
    are_up={"host": True, "disk": False},
    max_leases=1024,
    is_draining=True,
    groups=(GroupFacts(tokens_per_block=16, bytes_filled=4000, bytes_padded=96),),
    waste=(Waste(cause="null_blocks", tier="device", num_bytes=4096, why=""),),
    tally=Tally(),
    ghosts=(GhostFigures(name="lru@9", num_keys=5, num_hits=2),),
    num_ghost_keys_dropped=1,
)


MOVER = LinkFigures(num_waiting=3, num_sent=2, oldest_seconds=0.5)
