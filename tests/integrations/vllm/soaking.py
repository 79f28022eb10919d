"""Own the engines of a soak: their questions, expected answers and deadlines, and their restarts.

Nothing here waits: engines are tended in turn, because some of them stand still.
"""

import contextlib
import json
import os
import random
import select
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.integrations.vllm.engine import Life, reference
from tests.integrations.vllm.jobs import Job, prompt
from tests.integrations.vllm.rounds import Round, Said, differences

REQUEST_SECONDS_MAX: Final = 120.0
"""Seconds within which an undisturbed request must be answered, also on a busy machine."""
START_SECONDS_MAX: Final = 240.0
ENGINE: Final[dict[str, Any]] = {
    "max_model_len": 512,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 4,
}
"""Prompts take several steps, and few requests run at once."""
_NUM_PROMPTS: Final = 96
_NUM_FAMILIES: Final = 8
_ROUNDS_MAX: Final = 6
_TOKENS_MAX: Final = 48


class Questions:
    """The prompts of a soak, with the engine's answer to each without any cache."""

    def __init__(self, model: str) -> None:
        """Ask the reference engine, whose answers are kept on disk."""
        chance = random.Random(model)  # noqa: S311 - nothing is secret
        self.prompts = []
        for at in range(_NUM_PROMPTS):
            family = at % _NUM_FAMILIES
            prefix = prompt(32 * (1 + family) + 7 * (family % 2), seed=9000 + family)
            num_tokens = len(prefix) + chance.randrange(1, 180)
            self.prompts.append(prompt(num_tokens, seed=at, prefix=prefix))
        self.num_said = [chance.randrange(1, 48) for _ in self.prompts]
        sampling = {"logprobs": None, "max_tokens": _TOKENS_MAX}
        asked = Job(model=model, engine=ENGINE, sampling=sampling)
        # Sampling is greedy, so a shorter answer is the beginning of a longer one.
        self.answers = [
            replace(said, tokens=said.tokens[:count])
            for said, count in zip(
                reference(asked, self.prompts).requests, self.num_said, strict=True
            )
        ]


@dataclass(slots=True)
class Tally:
    """The results of a soak."""

    requests: int = 0
    tokens: int = 0
    cached_tokens: int = 0
    aborted: int = 0
    lives: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    mismatches: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    hung: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return everything on one line."""
        faults = " ".join(f"{name}={count}" for name, count in sorted(self.faults.items()))
        return (
            f"{self.requests} requests, {self.aborted} aborted, {self.tokens} tokens compared, "
            f"{self.cached_tokens} prompt tokens found, {self.lives} lives; faults: {faults}; "
            f"{len(self.mismatches)} mismatches, {len(self.failed)} failed, {len(self.hung)} hung, "
            f"{len(self.leaked)} leaked"
        )

    @property
    def wrong(self) -> list[str]:
        """Return everything that should not have happened."""
        return [*self.mismatches, *self.failed, *self.hung, *self.leaked]


class Seat:
    """A place where one engine after the other lives, and gets questions without end."""

    def __init__(
        self,
        name: str,
        job_of: Callable[[random.Random], Job],
        questions: Questions,
        seed: object,
        folder: Path,
        tally: Tally,
    ) -> None:
        self.name = name
        self.life: Life | None = None
        self.random = random.Random(f"{name} {seed}")  # noqa: S311 - nothing is secret
        self._job_of = job_of
        self._questions = questions
        self._folder = folder
        self._tally = tally
        self._asked: dict[int, int] = {}
        """The question of each unanswered request of the round."""
        self._aborts: set[int] = set()
        self._state = "empty"
        self._due_at = 0.0
        self._round = 0
        self._rounds_left = 0
        self._stopped_at: float | None = None
        self._is_doomed = False
        self.logs: list[Path] = []

    def __repr__(self) -> str:
        """Show what the engine does, and which answers are open."""
        return f"<Seat {self.name}, {self._state}, round {self._round}, owes {sorted(self._asked)}>"

    @property
    def is_starting(self) -> bool:
        """Whether the seat's engine is being built."""
        return self._state == "starting"

    # Faults.

    def kill(self) -> None:
        """Kill the engine, in the middle of anything."""
        if self.life is not None:
            self.life.kill()
            self._bury()

    def stop(self) -> bool:
        """Stop the engine; return whether there was one running."""
        if self.life is None or self._stopped_at is not None:
            return False
        try:
            self.life.stop()
        except ProcessLookupError:  # doomed, and not found dead yet
            return False
        self._stopped_at = time.monotonic()
        return True

    def resume(self) -> None:
        """Continue the engine; the time that it stood still does not count."""
        if self.life is not None and self._stopped_at is not None:
            with contextlib.suppress(ProcessLookupError):  # it was stopped as it died
                self.life.resume()
            self._due_at += time.monotonic() - self._stopped_at
        self._stopped_at = None

    def doom(self) -> None:
        """Have the engine die before a forward pass of its next round."""
        self._is_doomed = True

    # Work.

    def tend(self, *, is_over: bool = False) -> bool:
        """Take the engine's answers, and ask more unless the soak is over; return whether anything is still to come."""
        if self._stopped_at is not None:
            return True
        if self.life is None:
            if not is_over:
                self._start()
            return self.life is not None
        heard, is_at_end = _heard(self.life)
        for words in heard:
            self._take(words)
        if is_at_end:
            self._end()
        elif self._state == "idle":
            if is_over or not self._rounds_left:
                self._leave()
            else:
                self._ask()
        elif time.monotonic() > self._due_at:
            self._tally.hung.append(f"{self!r} of {self.life.pid}: {self.life.told()[-1500:]}")
            self.kill()
        return True

    def _start(self) -> None:
        log = Path(tempfile.mkstemp(prefix=f"{self.name}-", suffix=".log", dir=self._folder)[1])
        self.logs.append(log)
        self.life = Life(self._job_of(self.random), log)
        self.life.start()
        self._tally.lives += 1
        self._rounds_left = self.random.randrange(1, _ROUNDS_MAX + 1)
        self._await("starting", START_SECONDS_MAX)

    def _ask(self) -> None:
        count = self.random.randrange(1, 9)
        chosen = [self.random.randrange(len(self._questions.prompts)) for _ in range(count)]
        self._asked = dict(enumerate(chosen))
        self._aborts = {at for at in self._asked if self.random.random() < 0.1}
        order: dict[str, Any] = {
            "tells": True,
            "arrivals": [self.random.randrange(12) for _ in chosen],
            "aborts": {str(at): self.random.randrange(2, 30) for at in sorted(self._aborts)},
            "sampling_of": {
                str(at): {"max_tokens": self._questions.num_said[one]}
                for at, one in self._asked.items()
            },
        }
        if self._is_doomed:
            order["die_before_forward"] = self.random.randrange(1, 25)
        assert self.life is not None
        self._round += 1
        self._rounds_left -= 1
        self.life.begin([self._questions.prompts[one] for one in chosen], **order)
        self._await("busy", REQUEST_SECONDS_MAX)

    def _leave(self) -> None:
        assert self.life is not None
        os.close(self.life._orders)
        self.life._orders = -1
        self._await("leaving", START_SECONDS_MAX)

    def _await(self, state: str, seconds: float) -> None:
        self._state, self._due_at = state, time.monotonic() + seconds

    def _take(self, words: dict[str, Any]) -> None:
        """Take one answer."""
        match words["event"]:
            case "ready":
                self._state = "idle"
            case "said":
                self._compare(words["index"], Said.of(words["request"]))
            case "round":
                for at in sorted(self._asked):
                    self._compare(at, Said.of(words["requests"][at]))
                self._state = "idle"
            case "ended":
                pass
            case other:
                self._fail(f"said {other}: {words}")

    def _compare(self, at: int, said: Said) -> None:
        one = self._asked.pop(at)
        wanted = self._questions.answers[one]
        name = f"{self.name}, round {self._round}, request {at} of question {one}"
        if said.finish_reason not in {"length", "stop", "abort"} or (
            said.finish_reason == "abort" and at not in self._aborts
        ):
            self._tally.failed.append(f"{name}: {said.finish_reason}")
        rounds = [
            Round(requests=(answer,), steps=0, seconds=0, spans={}) for answer in (said, wanted)
        ]
        if found := differences(*rounds):
            self._tally.mismatches.append(f"{name}, {said.num_cached_tokens} cached: {found[0]}")
        self._tally.requests += 1
        self._tally.aborted += said.finish_reason == "abort"
        self._tally.tokens += len(said.tokens)
        self._tally.cached_tokens += said.num_cached_tokens

    def _end(self) -> None:
        """Check that the engine ended as it should."""
        assert self.life is not None
        status = self.life.wait()
        if self._is_doomed and status == -signal.SIGKILL:
            self._tally.faults["died before a forward"] += 1
        elif self._state != "leaving" or status:
            self._fail(f"ended with {status}")
        self._bury()

    def _fail(self, what: str) -> None:
        assert self.life is not None
        self._tally.failed.append(f"{self!r} {what}: {self.life.told()[-3000:]}")

    def _bury(self) -> None:
        assert self.life is not None
        self.life.close()
        self._tally.failed += [f"{self.name}: {line}" for line in self.life.signs_of_bugs()]
        self.life, self._state, self._stopped_at = None, "empty", None
        self._asked, self._is_doomed = {}, False


def _heard(life: Life) -> tuple[list[dict[str, Any]], bool]:
    """Return, without waiting, the answers that have come, and whether no more can come."""
    is_at_end = False
    # A long soak has more descriptors open than `select.select` knows.
    answers = select.poll()
    answers.register(life._answers, select.POLLIN)
    while not is_at_end and answers.poll(0):
        got = os.read(life._answers, 1 << 16)
        life._buffer += got
        is_at_end = not got
    *lines, life._buffer = life._buffer.split(b"\n")
    return [json.loads(line) for line in lines], is_at_end
