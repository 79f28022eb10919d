"""Own the tests' side of real engines: their lives and their daemon, what is expected of them, and what stays behind.

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tests.integrations.vllm.births import BUILD, SECONDS_MAX, Popened, nursery, until
from tests.integrations.vllm.models import ROOT, path_of

LOGPROB_ERROR_MAX: Final = 1e-5
KV_BYTES: Final = 32 << 20
"""Bytes of an engine's cache where a test does not say."""

Prompts = Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What an engine is, as `life.py` takes it."""

    model: str = "llama"
    """A name of `models.MODELS`, or a path."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the engine beyond the defaults."""
    arguments: Sequence[str] = ()
    """The command line of `vllm serve`, in place of all that is above."""
    kv_transfer_config: Mapping[str, Any] | None = None
    """Which connector there is; None: none."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    is_one_process: bool = True
    """Whether scheduler and worker share the life's process; more ranks than one need their own."""
    is_async: bool = False
    """Whether steps are scheduled before the last one's tokens are known."""
    is_fresh: bool = False
    """Whether the life imports the engine itself; needed where the environment counts at import."""
    is_hollow: bool = False
    """Whether the model computes nothing, for figures of all the rest; in one process only."""
    times: bool = False
    """Whether rounds tell how long the scheduler took; in one process only."""

    def told(self) -> dict[str, Any]:
        """Return the words that `life.py` reads."""
        model = self.model if "/" in self.model else str(path_of(self.model))
        return {
            "model": model,
            "engine": {**_ENGINE, **self.engine},
            "arguments": list(self.arguments),
            "kv_transfer_config": dict(self.kv_transfer_config or {}),
            "sampling": {**_SAMPLING, **self.sampling},
            "is_async": self.is_async,
            "is_hollow": self.is_hollow,
            "times": self.times,
        }

    def environ(self) -> dict[str, str]:
        """Return the life's environment."""
        return {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join([str(ROOT / "client"), str(_plugin_folder()), str(ROOT)]),
            "VLLM_CACHE_ROOT": str(BUILD / "cache"),
            "VLLM_CPU_CI_ENV": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.is_one_process else "1",
            "VLLM_LOGGING_LEVEL": "INFO",
            "VLLM_NO_USAGE_STATS": "1",
            **self.environment,
        }

    def reference(self) -> "Job":
        """Return the same engine without a connector, without prefix caching and with room for all."""
        engine = {**self.engine, "enable_prefix_caching": False, "kv_cache_memory_bytes": KV_BYTES}
        engine.pop("num_gpu_blocks_override", None)
        return Job(model=self.model, engine=engine, sampling=self.sampling)


_ENGINE: Final[dict[str, Any]] = {
    "block_size": 32,
    "disable_log_stats": False,
    "dtype": "float32",
    "enable_prefix_caching": True,
    "enforce_eager": True,
    "kv_cache_memory_bytes": KV_BYTES,
    "max_model_len": 2048,
    "seed": 0,
}
_SAMPLING: Final[dict[str, Any]] = {
    "ignore_eos": True,
    "logprobs": 3,
    "max_tokens": 16,
    "temperature": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """What one request said."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    """Per token, the log-probabilities of the likeliest."""
    num_cached_tokens: int
    finish_reason: str | None
    """length, stop, abort or error."""
    seconds_to_first_token: float

    @classmethod
    def of(cls, words: Mapping[str, Any]) -> "Said":
        """Return what a life wrote."""
        logprobs = tuple({int(k): v for k, v in at.items()} for at in words["logprobs"])
        return cls(
            tokens=tuple(words["tokens"]),
            logprobs=logprobs,
            num_cached_tokens=words.get("num_cached_tokens") or 0,
            finish_reason=words["finish_reason"],
            seconds_to_first_token=words.get("seconds_to_first_token", float("nan")),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """What came of one order to generate."""

    requests: tuple[Said, ...]
    steps: int
    seconds: float
    spans: Mapping[str, Sequence[float]]
    """Seconds of every call of the scheduler, by the call's name; with `Job.times` only."""
    cpu_seconds: float = 0.0
    """Processor seconds of the life's process."""
    cpu_spans: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """The same as `spans`, in processor seconds of the thread that called."""

    @property
    def cached(self) -> list[int]:
        """Tokens of each request that were found."""
        return [said.num_cached_tokens for said in self.requests]


class Life:
    """One engine's life: a process of its own session that can be ordered about, stopped and killed."""

    def __init__(self, job: Job, log: Path) -> None:
        self.job = job
        self.log = log
        self.status: int | None = None
        """How it ended, as of a subprocess; None while it lives."""
        self._buffer = b""

    def start(self) -> None:
        """Begin the life; `ready` waits until the engine is there."""
        orders, self._orders = os.pipe()
        self._answers, answers = os.pipe()
        with self.log.open("ab") as errors:
            descriptors = [orders, answers, errors.fileno()]
            if self.job.is_fresh or not self.job.is_one_process:
                self._birth = Popened(self.job.environ(), descriptors)
            else:
                self._birth = nursery(Job().environ()).bear(self.job.environ(), descriptors)
        os.close(orders)
        os.close(answers)
        self.pid = self._birth.pid
        self._write(self.job.told())

    def ready(self) -> dict[str, Any]:
        """Wait until the engine is built; return its blocks and their tokens."""
        return self.read("ready")

    def generate(self, prompts: Prompts, **order: Any) -> Round:
        """Run a round of prompts to its end; what `order` may have, `life.py` says."""
        self.begin(prompts, **order)
        return self.result()

    def begin(self, prompts: Prompts, **order: Any) -> None:
        """Order a round and do not wait for it."""
        self._write({"do": "generate", "prompts": [list(one) for one in prompts], **order})

    def paused(self) -> int:
        """Wait until a round has come to its `pause_at_step`."""
        return int(self.read("paused")["step"])

    def go_on(self) -> None:
        """Have a paused round go on."""
        self._write({"do": "go"})

    def result(self) -> Round:
        """Wait for the end of a round."""
        words = self.read("round")
        return Round(
            requests=tuple(map(Said.of, words["requests"])),
            steps=words["steps"],
            seconds=words["seconds"],
            spans=words["spans"],
            cpu_seconds=words["cpu_seconds"],
            cpu_spans=words["cpu_spans"],
        )

    def metrics(self, *prefixes: str) -> dict[str, float]:
        """Return the engine's counters by name and labels."""
        self._write({"do": "metrics", "prefixes": list(prefixes) or ["vllm:"]})
        values: dict[str, float] = self.read("metrics")["values"]
        return values

    def reset_prefix_cache(self, *, reset_connector: bool = True) -> bool:
        """Have the engine forget all prefixes; return whether it did."""
        self._write({"do": "reset_prefix_cache", "reset_connector": reset_connector})
        return bool(self.read("reset")["done"])

    def placement(self) -> dict[str, Any]:
        """Return where the engine placed its cache, in plain numbers."""
        self._write({"do": "placement"})
        return self.read("placement")

    def stop(self) -> None:
        """Have every process of the life stand still."""
        os.killpg(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Have them go on."""
        os.killpg(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """Kill every process of the life at once, and wait until they have gone."""
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
        """Wait until the life's own process has ended, whoever ended it; return its status."""
        if self.status is None:
            self.status = self._birth.wait(SECONDS_MAX)
        return self.status

    def close(self) -> None:
        """Kill what lives still and give its descriptors back."""
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
    """Run a life whose engine is ready; it ends in good order, or with the test that fails."""
    log = Path(tempfile.mkstemp(prefix="life-", suffix=".log", dir=folder)[1])
    life = Life(job, log)
    life.start()
    try:
        life.ready()
        yield life
        if life.status is None:
            life.end()
    finally:
        life.close()


# What is right.


def reference(job: Job, prompts: Prompts, **order: Any) -> Round:
    """Return what the engine says with no cache at all; kept on disk, as it never changes."""
    bare = job.reference()
    question = {"job": bare.told(), "prompts": [list(one) for one in prompts], "order": order}
    digest = hashlib.blake2b(json.dumps(question, sort_keys=True).encode(), digest_size=16)
    kept = BUILD / "references" / f"{digest.hexdigest()}.json"
    if not kept.exists():
        kept.parent.mkdir(parents=True, exist_ok=True)
        words = _ask(bare, prompts, order)
        half = kept.with_suffix(f".{os.getpid()}")
        half.write_text(json.dumps(words))
        half.rename(kept)
    words = json.loads(kept.read_text())
    said = tuple(map(Said.of, words["requests"]))
    return Round(
        requests=said, steps=words["steps"], seconds=words["seconds"], spans=words["spans"]
    )


def _ask(job: Job, prompts: Prompts, order: Mapping[str, Any]) -> dict[str, Any]:
    """Return a round's words; the engine that says them lives for the next question, too."""
    global _asked  # noqa: PLW0603  # one reference at a time, as memory is short
    if _asked is None or _asked.job != job or _asked.status is not None:
        forget_reference()
        folder = BUILD / "logs"
        folder.mkdir(parents=True, exist_ok=True)
        _asked = Life(job, folder / f"reference-{os.getpid()}.log")
        _asked.start()
        _asked.ready()
    _asked.begin(prompts, **order)
    return _asked.read("round")


_asked: Life | None = None


def forget_reference() -> None:
    """End the engine that answers for `reference`."""
    global _asked  # noqa: PLW0603
    if _asked is not None:
        _asked.close()
    _asked = None


def differences(got: Round, wanted: Round) -> list[str]:
    """Return a sentence for each request that says something else: other tokens, or other log-probabilities."""
    found = []
    for index, (ours, theirs) in enumerate(zip(got.requests, wanted.requests, strict=True)):
        if ours.finish_reason == "abort":
            # What was said before is right as far as it goes.
            theirs_cut = theirs.tokens[: len(ours.tokens)]
            if ours.tokens != theirs_cut:
                found.append(f"request {index}: {ours.tokens} instead of {theirs_cut}")
        elif ours.tokens != theirs.tokens:
            found.append(f"request {index}: {ours.tokens} instead of {theirs.tokens}")
        elif (error := _logprob_error(ours, theirs)) > LOGPROB_ERROR_MAX:
            found.append(f"request {index}: log-probabilities differ by {error:.2e}")
    return found


def _logprob_error(ours: Said, theirs: Said) -> float:
    """Return the largest difference over tokens that both name; the likeliest few may swap at their end."""
    assert len(ours.logprobs) == len(theirs.logprobs)
    return max(
        (
            abs(here[token] - there[token])
            for here, there in zip(ours.logprobs, theirs.logprobs, strict=True)
            for token in here.keys() & there.keys()
        ),
        default=0.0,
    )


def prompt(num_tokens: int, *, seed: int = 0, prefix: Sequence[int] = ()) -> list[int]:
    """Return a prompt of random tokens behind a prefix; the same for a seed."""
    left = num_tokens - len(prefix)
    assert left >= 0
    made = hashlib.shake_128(f"prompt {seed}".encode()).digest(2 * left)
    rest = [int.from_bytes(made[2 * at : 2 * at + 2], "little") % 512 for at in range(left)]
    return [*prefix, *rest]


# What a life leaves.


def _plugin_folder() -> Path:
    """Return a folder by which a life finds the entry points of this tree, as if it were installed."""
    folder = BUILD / "plugin"
    info = folder / "kvlease-0.dist-info"
    if not info.exists():
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: kvlease\nVersion: 0\n")
        (info / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nkvlease = kvlease.integrations.vllm.plugin:register\n"
        )
    return folder


def _group_lives(pid: int) -> bool:
    """Tell whether any process of the session's group is there and is no zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = stat.read_text().rpartition(")")[2].split()
            if words[0] not in "ZX" and int(words[2]) == pid:
                return True
    return False
