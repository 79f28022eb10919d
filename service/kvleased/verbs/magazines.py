"""Own the verbs on magazines, by which engines with block tables of their own take and give blocks by block id."""

from collections.abc import Mapping

from kvlease.v1 import kvlease_pb2 as pb
from kvlease.wire.fields import JSON_INTEGER_MAX
from kvleased.access.callers import Caller
from kvleased.caches.registry import Registry
from kvleased.calls import checks
from kvleased.calls.idempotency import Answer
from kvleased.config.settings import Settings
from kvleased.core import commands as c
from kvleased.core.magazine_replies import Exchanged, Inventoried
from kvleased.verbs.runner import Runner, Verb

_BYTES_PER_BLOCK = 4


class MagazineVerbs:
    """The verbs of a worker that shares a magazine."""

    def __init__(self, registry: Registry, runner: Runner, settings: Settings) -> None:
        """Take what the verbs work with."""
        self._registry = registry
        self._run = runner.run
        self._entries_max = settings.max_blocks_a_call

    @property
    def table(self) -> Mapping[str, Verb]:
        """The verbs by name."""
        return {"exchange": self.exchange, "inventory": self.inventory}

    def exchange(self, request: pb.ExchangeRequest, caller: Caller) -> Answer:
        """Change the magazine that the worker shares."""
        worker = self._registry.worker(caller.token)
        checks.count("sequence", request.sequence, 0, JSON_INTEGER_MAX)
        # The core checks that the columns fit each other. Each column is read only once, because reading copies it.
        command = c.Exchange(
            worker_id=worker.worker_id,
            sequence=request.sequence,
            publish_blocks=request.publish_blocks,
            publish_keys=request.publish_keys,
            publish_positions=request.publish_positions,
            retract_blocks=request.retract_blocks,
            drop_blocks=request.drop_blocks,
            hold_keys=request.hold_keys,
            stops_at_miss=request.stops_at_miss,
            brings=request.brings,
            holds_all=request.holds_all,
            take_running=request.take_running,
            take_new=request.take_new,
            all_or_nothing=request.all_or_nothing,
            missed_keys=request.missed_keys,
        )
        for name, blocks in (
            ("publish_blocks", command.publish_blocks),
            ("retract_blocks", command.retract_blocks),
            ("drop_blocks", command.drop_blocks),
        ):
            if blocks:
                checks.packed(name, blocks, _BYTES_PER_BLOCK, self._entries_max)
        if command.hold_keys:
            checks.keys("hold_keys", command.hold_keys, self._entries_max)
        if command.missed_keys:
            checks.keys("missed_keys", command.missed_keys, self._entries_max)
        return self._run(worker.entry, command, _exchanged)

    def inventory(self, _: pb.InventoryRequest, caller: Caller) -> Answer:
        """Tell what is in the magazine that the worker shares."""
        worker = self._registry.worker(caller.token)
        return self._run(worker.entry, c.Inventory(worker_id=worker.worker_id), _inventoried)


def _exchanged(reply: Exchanged) -> pb.ExchangeResponse:
    return pb.ExchangeResponse(
        published=reply.published,
        retracted=reply.retracted,
        dropped=reply.dropped,
        held_blocks=reply.held_blocks,
        held_all_blocks=reply.held_all_blocks,
        held_all_keys=reply.held_all_keys,
        taken_blocks=reply.taken_blocks,
        num_taken_running=reply.num_taken_running,
        num_available=reply.num_available,
        num_magazines=reply.num_magazines,
    )


def _inventoried(reply: Inventoried) -> pb.InventoryResponse:
    return pb.InventoryResponse(blocks=reply.blocks, keys=reply.keys, sequence=reply.sequence)
