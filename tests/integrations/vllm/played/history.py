"""Own the law that no step of vLLM reads what was not written for its request, whatever befalls engines and daemon.

Run as a module with the reference engine's Python, it plays the seeds of a mode: one, or FIRST-LAST.
"""

import argparse
import logging
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Final

from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.shared.magazine import Books
from tests.integrations.vllm.models import path_of
from tests.integrations.vllm.played.engine import PlayedEngine
from tests.integrations.vllm.played.node import Node
from tests.integrations.vllm.played.stamps import VOCABULARY_TOKENS

_BY_HAND: Final = (
    "PYTHONPATH=client .venv-vllm/bin/python -m tests.integrations.vllm.played.history"
)
MODES: Final = ("shared", "owned", "offload", "shared+offload", "owned+offload")
_ACTS: Final = 1_500
_ROUNDS_MAX: Final = 6_000
"""Rounds within which all requests end once no more are asked; the weather clears half-way."""
_REST_ROUNDS: Final = 60
_RUNNING_MAX: Final = 8
_FAMILY_TOKENS: Final = 400
_PREFIX_TOKENS_MAX: Final = 330


class History:
    """What happens on a node, decided by a seed."""

    def __init__(self, seed: int, mode: str, model: str) -> None:
        self._chance = chance = random.Random(f"{mode} {seed}")  # noqa: S311 - nothing is secret
        modes = tuple(mode.split("+"))
        self.node = Node(modes, model, chance)
        self._families = [self._tokens(_FAMILY_TOKENS) for _ in range(3)]
        for _ in range(1 if self.node.is_owned else chance.choice([1, 2, 3])):
            self.node.start()
        wipes = chance.choice([0, 0, 0.003])
        self._acts: list[tuple[float, Callable[[PlayedEngine], None]]] = [
            (chance.choice([0.1, 0.1, 0.25]), self._ask),
            (chance.choice([0.02, 0.02, 0.1]), self._abort),
            (chance.choice([0, 0.005, 0.005, 0.02]), self._reset),
            (chance.choice([0, 0.002, 0.02]), self._die),
        ]
        if self.node.is_owned or self.node.is_shared:
            self._acts.append((chance.choice([0, 0, 0.003]), self._cut_off))
        if self.node.is_shared:
            self._acts.append((wipes / 2, self._end_pool))
        if self.node.has_rows:
            self._acts.append((wipes, self._replace_rows))
            self._acts.append((chance.choice([0, 0, 0.005]), self._forget_rows))

    def play(self) -> None:
        """Let things happen, then let everybody come to rest.

        Raises:
            WrongTokenError: a step reads what was not written for its request.
        """
        weights = [weight for weight, _ in self._acts]
        acts = [*(act for _, act in self._acts), PlayedEngine.advance]
        weights.append(1 - sum(weights))
        for _ in range(_ACTS):
            engine = self._chance.choice(self.node.engines)
            (act,) = self._chance.choices(acts, weights)
            act(engine)
            self.node.check()
        self._finish()
        self._rest()

    # What may happen

    def _ask(self, engine: PlayedEngine) -> None:
        if engine.num_running >= _RUNNING_MAX:
            return
        chance = self._chance
        prefix = chance.choice(self._families)[: chance.randrange(1, _PREFIX_TOKENS_MAX)]
        engine.ask(
            prefix + self._tokens(chance.choice([0, 0, 3, 40])),
            chance.choice([1, 2, 5, 40, 70]),
            wants_logprobs=chance.random() < 0.05,
        )

    def _abort(self, engine: PlayedEngine) -> None:
        if running := engine.running():
            engine.abort(self._chance.choice(running))

    def _reset(self, engine: PlayedEngine) -> None:
        """Load other weights, for which nothing from before is right."""
        if engine.reset(is_running=self._chance.random() < 0.5):
            engine.rank.weights = self._chance.randrange(1, 1 << 30)

    def _die(self, engine: PlayedEngine) -> None:
        if self._chance.random() < 0.5:
            engine.die_amid_step()
        self._start_anew(engine)

    def _cut_off(self, engine: PlayedEngine) -> None:
        next(iter(engine.sessions.values())).is_cut_off = True

    def _end_pool(self, engine: PlayedEngine) -> None:
        del engine
        self.node.end_pool()

    def _replace_rows(self, engine: PlayedEngine) -> None:
        del engine
        self.node.replace_rows()

    def _forget_rows(self, engine: PlayedEngine) -> None:
        """Empty a magazine of rows, as a daemon that takes an engine for dead does."""
        session = engine.sessions["offload"]
        session.pool.empty(session.name)
        session.cast_doubt()

    # How it ends

    def _finish(self) -> None:
        """See that all requests end. Engines that have parted keep their blocks until they are restarted."""
        for at in range(_ROUNDS_MAX):
            if at == _ROUNDS_MAX // 2:
                self.node.weather.clear()
            engines = [*self.node.engines]
            if not any(engine.is_busy for engine in engines):
                return
            for engine in engines:
                if engine.has_parted and not engine.is_busy:
                    self._start_anew(engine)
                else:
                    self._reach(engine)
                    engine.advance()
        raise AssertionError(f"these never end: {self.node.engines}")

    def _rest(self) -> None:
        """Run empty steps as long as engines want any, and a few more."""
        self.node.weather.clear()
        for at in range(_REST_ROUNDS):
            for engine in self.node.engines:
                self._reach(engine)
                if at < 3 or engine.scheduler.connector.has_pending_push_work():
                    engine.advance()
                    engine.settle()
        self.node.check()

    def _reach(self, engine: PlayedEngine) -> None:
        for session in engine.sessions.values():
            session.reach()

    def _start_anew(self, engine: PlayedEngine) -> None:
        self.node.end(engine)
        self.node.start()

    def _tokens(self, count: int) -> list[int]:
        return [self._chance.randrange(VOCABULARY_TOKENS) for _ in range(count)]


def _publish_early() -> None:
    """Take every write for done as soon as it is scheduled."""
    Fence.note = Fence.note_written  # type: ignore[method-assign]


def _resend_after_reset() -> None:
    """Send publications whose answers were lost again after a reset, under their old keys."""

    def outdate(self: Books) -> None:
        """Note nothing."""
        del self

    Books.outdate = outdate  # type: ignore[method-assign]


_MISTAKES: Final = {
    "publishing-early": _publish_early,
    "resending-after-reset": _resend_after_reset,
}
"""Mistakes that the law must notice."""


def main(arguments: Sequence[str]) -> None:
    """Play histories of a mode; end with the first one that goes wrong, and say how it is played again."""
    parser = argparse.ArgumentParser(prog=_BY_HAND, description=__doc__)
    parser.add_argument("mode", choices=MODES)
    parser.add_argument(
        "seeds", nargs="+", type=_seeds, help="one seed, or FIRST-LAST", metavar="SEEDS"
    )
    parser.add_argument("--mistake", choices=sorted(_MISTAKES), help="make it in kvlease first")
    asked = parser.parse_args(arguments)
    if asked.mistake:
        _MISTAKES[asked.mistake]()
    logging.disable(logging.ERROR)
    model = str(path_of("llama"))
    started = time.monotonic()
    seeds = [seed for some in asked.seeds for seed in some]
    for seed in seeds:
        history = History(seed, asked.mode, model)
        try:
            history.play()
        except BaseException:
            sys.stderr.write(f"To play it again: {parser.prog} {asked.mode} {seed}\n")
            raise
        sys.stdout.write(f"seed {seed}: {history.node.engines}\n")
    sys.stdout.write(f"{len(seeds)} histories in {time.monotonic() - started:.1f} s\n")


def _seeds(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main(sys.argv[1:])
