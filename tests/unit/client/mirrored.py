"""A worker of a real core that reads no block table: what it knows of its one lease must be what the daemon has."""

from collections.abc import Sequence

import numpy as np
import pytest

from kvlease._calling import calls, steps, verbs
from kvlease._calling.grants import Grant
from kvlease._calling.session import Session
from kvlease.ids import LeaseId, WorkerId
from kvlease.replies import ReserveSpec
from kvlease.v1 import kvlease_pb2 as pb
from kvleased.core import Cache
from kvleased.core import commands as c
from kvleased.core.blocks.records import NULL
from kvleased.core.effects import Extended, Reserved, Stepped, Trimmed
from kvleased.verbs import replies
from tests.unit.client.played import Clock, Played, session_of
from tests.unit.service.core.builders import answer
from tests.unit.service.core.grouped import places


class Client:
    """A worker of a real core that reads no block table, and its one lease."""

    def __init__(
        self, cache: Cache, worker_id: WorkerId, num_tokens: int, engine: str = ""
    ) -> None:
        """Reserve the lease."""
        self.cache, self.worker_id = cache, worker_id
        self.clock = Clock()
        self.session: Session = session_of(self.clock, raises=False)
        self.session.groups, self.session.has_plain_leases = cache.shape.groups, False
        self.session.request.engine = engine
        command = c.Reserve(worker_id=worker_id, request_id="r", keys=b"", num_tokens=num_tokens)
        reply = answer(cache.handle(command, 0.0), Reserved)
        self.row = reply.row
        reserve = verbs.reserve(self.session, ReserveSpec(request_id="r", num_tokens=num_tokens), 0)
        self.grant: Grant = Played(self.session, self.clock, replies.reserved(reply)).run(reserve)

    @property
    def lease_id(self) -> LeaseId:
        """The lease's id."""
        return LeaseId(self.grant.lease_id)

    @property
    def tables(self) -> list[list[int]]:
        """The table of each group as the client knows it."""
        return [self.grant.blocks(at).tolist() for at in range(len(self.cache.shape.groups))]

    @property
    def rows(self) -> list[list[int]]:
        """The table of each group as the daemon has it."""
        parts = places(self.cache, self.row)
        return [[0 if block == NULL else block for block in part] for part in parts]

    def extend(self, *tokens: int, heard: Sequence[int] = (0,)) -> list[bool]:
        """Send extends at once, which the daemon carries out in turn, and take their answers in a given order."""
        flows = [verbs.extend(self.session, self.grant, one, 0) for one in tokens]
        answers = []
        for flow, num_tokens in zip(flows, tokens, strict=True):
            next(flow)
            command = c.Extend(
                worker_id=self.worker_id, lease_id=self.lease_id, num_tokens=num_tokens
            )
            reply = answer(self.cache.handle(command, 0.0), Extended)
            answers.append(replies.extended(reply))
        covers = []
        for at in heard:
            with pytest.raises(StopIteration) as ended:
                flows[at].send(answers[at])
            covers.append(ended.value.value)
        return covers

    def extend_by_step(self, num_tokens: int) -> list[bool]:
        """Extend in a step whose other operation commits nothing; return whether the lease covers the tokens."""
        codes = self.step((pb.STEP_VERB_COMMIT, 0), (pb.STEP_VERB_EXTEND, num_tokens))
        assert codes == [0, 0]
        return [self.grant.is_live and self.grant.refusal is None]

    def step(self, *operations: tuple[int, int]) -> list[int]:
        """Take a step of verbs and tokens, all for this lease and without keys; return its codes."""
        codes, num_tokens = zip(*operations, strict=True)
        ask = calls.step(
            verbs=np.array(codes, np.uint8),
            lease_ids=[self.lease_id] * len(operations),
            num_tokens=num_tokens,
            num_keys=None,
            first_blocks=None,
            keys=b"",
            reserves=(),
        )
        sent = ask.request
        assert isinstance(sent, pb.StepRequest)
        command = c.Step(
            worker_id=self.worker_id,
            verbs=sent.verbs,
            lease_ids=sent.lease_ids,
            num_tokens=sent.num_tokens,
        )
        reply = replies.stepped(answer(self.cache.handle(command, 0.0), Stepped))
        columns, _ = Played(self.session, self.clock, reply).run(steps.step(self.session, ask, ()))
        told: list[int] = columns.codes.tolist()
        return told

    def trim(self, num_tokens: int) -> None:
        """Give back what lies behind some tokens."""
        flow = verbs.trim(self.session, self.grant, num_tokens)
        command = c.Trim(worker_id=self.worker_id, lease_id=self.lease_id, num_tokens=num_tokens)
        reply = answer(self.cache.handle(command, 0.0), Trimmed)
        Played(self.session, self.clock, replies.trimmed(reply)).run(flow)
