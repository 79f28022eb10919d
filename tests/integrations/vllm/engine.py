"""Own the tests' side of real engines: their lives, and their expected answers.

A life is a process that `life.py` describes. Nothing here imports the engine.
"""

import contextlib
import hashlib
import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tests.integrations.vllm.births import BUILD, SECONDS_MAX, nursery, until
from tests.integrations.vllm.jobs import KV_BYTES, Job, Prompts, beside_offload, prompt
from tests.integrations.vllm.rounds import Round, contrasts, differences

__all__ = [
    "KV_BYTES",
    "Job",
    "Life",
    "Prompts",
    "Round",
    "beside_offload",
    "contrasts",
    "differences",
    "forget_reference",
    "living",
    "prompt",
    "reference",
]

_SECONDS_BETWEEN_SIGNALS: Final = 60.0
_SIGNS_OF_BUGS: Final = ("An error of kvlease", "no longer belong to this engine")
"""Log lines of an engine that was shielded from a bug of ours, or that cannot trust its own blocks."""


class Life:
    """One engine's life: a process in a session of its own that takes orders and can be stopped and killed."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self.log = log
        self.status: int | None = None
        """The life's exit status, as a subprocess has it; None while it lives."""
        self._buffer = b""

    def start(self) -> None:
        """Begin the life; `ready` waits until the engine is there."""
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        with self.log.open("ab") as errors:
            descriptors = [orders, answers, errors.fileno()]
            self._birth = nursery(Job().environ()).bear(self.job.environ(), descriptors)
        os.close(orders)
        os.close(answers)
        self.pid = self._birth.pid
        self._write(self.job.told())

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is built; return its blocks and their tokens."""
        return self.read("ready")

    def generate(self, prompts: Prompts, **order: Any) -> Round:
        """Run a round of prompts to its end; `life.py` says what `order` may contain."""
        self.begin(prompts, **order)
        return self.result()

    def begin(self, prompts: Prompts, **order: Any) -> None:
        """Order a round without waiting for it."""
        self._write({"do": "generate", "prompts": [list(one) for one in prompts], **order})

    def paused(self) -> int:
        """Wait until a round has come to its `pause_at_step`."""
        return int(self.read("paused")["step"])

    def go_on(self) -> None:
        """Continue a paused round."""
        self._write({"do": "go"})

    def result(self) -> Round:
        """Wait for the end of a round, and return it."""
        return Round.of(self.read("round"))

    def metrics(self, *prefixes: str) -> dict[str, float]:
        """Return the engine's counters by name and labels."""
        self._write({"do": "metrics", "prefixes": list(prefixes) or ["vllm:"]})
        values: dict[str, float] = self.read("metrics")["values"]
        return values

    def reset_prefix_cache(
        self, *, reset_connector: bool = True, reset_running_requests: bool = False
    ) -> bool:
        """Have the engine forget all prefixes, and in a pause those of its requests, too; return whether it did."""
        words = {
            "reset_connector": reset_connector,
            "reset_running_requests": reset_running_requests,
        }
        self._write({"do": "reset_prefix_cache", **words})
        return bool(self.read("reset")["done"])

    def placement(self) -> dict[str, Any]:
        """Return where the engine placed its cache, in plain numbers."""
        self._write({"do": "placement"})
        return self.read("placement")

    def stop(self) -> None:
        """Stop every process of the life."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Continue every process of the life."""
        os.killpg(self.pid, signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send every process of the life a signal, as a terminal does, and wait until all have ended.

        The signal is repeated, because vLLM's front end may lose the first one in a call that swallows exceptions.
        """
        end = time.monotonic() + SECONDS_MAX
        while self.status is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)
            with contextlib.suppress(TimeoutError):
                self.status = self._birth.wait(_SECONDS_BETWEEN_SIGNALS)
            assert self.status is not None or time.monotonic() < end, self.told()
        until(lambda: not _group_lives(self.pid), "the processes of a signalled life stay")

    def kill(self) -> None:
        """Kill every process of the life at once, and wait until all have ended."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self.wait()
        until(lambda: not _group_lives(self.pid), "the processes of a killed life stay")

    def end(self) -> None:
        """End the life in good order."""
        os.close(self._orders)
        self._orders = -1
        self.read("ended")
        self.wait()
        assert self.status == 0, self.told()

    def wait(self) -> int:
        """Wait until the life's own process has ended for any reason; return its status."""
        if self.status is None:
            self.status = self._birth.wait(SECONDS_MAX)
        return self.status

    def close(self) -> None:
        """Kill the remaining processes and close the descriptors."""
        if self.status is None or _group_lives(self.pid):
            self.kill()
        for descriptor in (self._orders, self._answers):
            if descriptor >= 0:
                os.close(descriptor)
        self._orders = self._answers = -1

    def read(self, event: str) -> dict[str, Any]:
        """Wait for the next answer, which must be of this kind."""
        words: dict[str, Any] = json.loads(self._line())
        assert words["event"] == event, (words, self.told())
        return words

    def told(self) -> str:
        """Return the end of the life's log."""
        return self.log.read_text(errors="replace")[-6000:]

    def signs_of_bugs(self) -> list[str]:
        """Return all lines of the log that mean a bug of ours, whatever was done to the engine."""
        lines = self.log.read_text(errors="replace").splitlines()
        return [line for line in lines if any(sign in line for sign in _SIGNS_OF_BUGS)]

    def _write(self, words: Mapping[str, Any]) -> None:
        content = json.dumps(words).encode() + b"\n"
        while content:
            content = content[os.write(self._orders, content) :]

    def _line(self) -> bytes:
        end = time.monotonic() + SECONDS_MAX
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers, selectors.EVENT_READ)
            while b"\n" not in self._buffer:
                left = end - time.monotonic()
                assert left > 0, f"no answer within {SECONDS_MAX} s: {self.told()}"
                if selector.select(left):
                    got = os.read(self._answers, 1 << 16)
                    assert got, f"the engine ended: {self.told()}"
                    self._buffer += got
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


@contextlib.contextmanager
def living(job: Job, folder: Path) -> Iterator[Life]:
    """Run a life whose engine is ready; it ends in good order, or is killed if the test fails."""
    log = Path(tempfile.mkstemp(prefix="life-", suffix=".log", dir=folder)[1])
    life = Life(job, log)
    life.start()
    try:
        life.ready()
        yield life
        if life.status is None:
            life.end()
        assert not life.signs_of_bugs(), life.told()
    finally:
        life.close()


# The expected answers.


def reference(job: Job, prompts: Prompts) -> Round:
    """Return what the engine says without any cache; each prompt's answer, which never changes, is kept on disk."""
    bare = job.reference()
    kept = [_kept(bare, job.sampling, one) for one in prompts]
    missing = {
        path: list(one) for path, one in zip(kept, prompts, strict=True) if not path.exists()
    }
    if missing:
        BUILD.joinpath("references").mkdir(parents=True, exist_ok=True)
        words = _ask(bare, list(missing.values()), job.sampling)
        for path, said in zip(missing, words["requests"], strict=True):
            half = path.with_suffix(f".{os.getpid()}")
            half.write_text(json.dumps(said))
            half.rename(path)
    said = [json.loads(path.read_text()) for path in kept]
    return Round.of({"requests": said, "steps": 0, "seconds": 0.0, "spans": {}})


def _kept(bare: Job, sampling: Mapping[str, Any], one: Sequence[int]) -> Path:
    """Return the file of the answer to a prompt."""
    question = {"job": bare.told(), "sampling": dict(sampling), "prompt": list(one)}
    digest = hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16)
    return BUILD / "references" / f"{digest.hexdigest()}.json"


def _ask(job: Job, prompts: Prompts, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round as the life wrote it; the engine stays alive for the next question."""
    global _asked  # noqa: PLW0603  # one reference at a time, as memory is short
    if _asked is None or _asked.job != job or _asked.status is not None:
        forget_reference()
        folder = BUILD / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        _asked = Life(job, folder / f"reference-{os.getpid()}.log")
        _asked.start()
        _asked.ready()
    _asked.begin(prompts, sampling=dict(sampling))
    return _asked.read("round")


_asked: Life | None = None


def forget_reference() -> None:
    """End the engine that answers for `reference`."""
    global _asked  # noqa: PLW0603
    if _asked is not None:
        _asked.close()
    _asked = None


def _group_lives(pid: int) -> bool:
    """Tell whether any process of the session's group is there and is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if words[0] not in "ZX" and int(words[2]) == pid:
                return True
    return False
