"""Own a played engine: vLLM's own scheduler and our connectors over a played rank, with steps that overtake hearing."""

import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch

from kvlease.integrations.vllm.owned.memory import Claim
from kvlease.integrations.vllm.shared.memory import Mapped
from kvlease.integrations.vllm.steps import StepsBack
from tests.integrations.vllm.played import connectors
from tests.integrations.vllm.played.copies import Copier, Results
from tests.integrations.vllm.played.rank import Rank
from tests.integrations.vllm.played.session import PlayedSession
from tests.integrations.vllm.played.stamps import BLOCK_TOKENS
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
    MultiKVConnectorWorkerMetadata,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

REQUEST_TOKENS_MAX: Final = 512
_CONNECTORS: Final = {
    "shared": connectors.PlayedSharedConnector,
    "owned": connectors.PlayedOwnedConnector,
    "offload": connectors.PlayedOffloadingConnector,
}
_HEAD: Final[dict[str, Any]] = {
    "block_size": BLOCK_TOKENS,
    "num_kv_heads": 1,
    "head_size": 16,
    "dtype": torch.float32,
}
_BYTES_PER_BLOCK: Final = BLOCK_TOKENS * 16 * 4 * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Build:
    """What an engine is started with."""

    modes: tuple[str, ...]
    """One mode, or those that vLLM's MultiConnector joins."""
    model: str
    num_blocks: int
    windows: tuple[int, ...]
    is_async: bool
    step_tokens_max: int
    requests_max: int
    retention_interval: int | None
    policy: Literal["fcfs", "priority"] = "fcfs"
    chunk_tokens_max: int = 0
    """The most tokens of a prompt that one step computes of a request; 0 for no such bound."""

    def config(self, sockets: Sequence[str]) -> VllmConfig:
        """Return vLLM's configuration, in which each mode's connector finds its session by a socket."""
        config = EngineArgs(
            model=self.model,
            dtype="float32",
            enforce_eager=True,
            max_model_len=REQUEST_TOKENS_MAX,
            enable_prefix_caching=True,
            max_num_batched_tokens=self.step_tokens_max,
            max_num_seqs=self.requests_max,
            long_prefill_token_threshold=self.chunk_tokens_max,
            block_size=BLOCK_TOKENS,
            enable_chunked_prefill=True,
            skip_tokenizer_init=True,
            scheduling_policy=self.policy,
            kv_transfer_config=self._transfer(sockets),
        ).create_engine_config()
        config.scheduler_config.async_scheduling = self.is_async
        config.cache_config.num_gpu_blocks = self.num_blocks
        return config

    def cache(self) -> KVCacheConfig:
        """Return the layout of the engine's cache: one layer in each group."""
        groups = [
            KVCacheGroupSpec([f"layer.{at}"], _spec(window))
            for at, window in enumerate(self.windows)
        ]
        tensor = KVCacheTensor(
            size=self.num_blocks * _BYTES_PER_BLOCK,
            layers=[group.layer_names[0] for group in groups],
            layer_stride=0,
            block_stride=0,
        )
        return KVCacheConfig(
            num_blocks=self.num_blocks,
            kv_cache_tensors=[tensor],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=self.retention_interval,
        )

    def _transfer(self, sockets: Sequence[str]) -> KVTransferConfig:
        children = [
            {
                "kv_connector": _CONNECTORS[mode].__name__,
                "kv_connector_module_path": connectors.__name__,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "recompute",
                "kv_connector_extra_config": {"socket": socket},
            }
            for mode, socket in zip(self.modes, sockets, strict=True)
        ]
        if len(children) == 1:
            return KVTransferConfig(**children[0])
        return KVTransferConfig(
            kv_connector="MultiConnector",
            kv_role="kv_both",
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"connectors": children},
        )


@dataclass(slots=True)
class Step:
    """A step that was scheduled."""

    output: Any
    said: dict[str, list[int]] | None = None
    """What each request said; None until the step is carried out."""
    is_apart: bool = False
    results: Results | None = None


class PlayedEngine:
    """One life of an engine; `sessions` are those of its modes, in their order."""

    def __init__(
        self,
        build: Build,
        sessions: Sequence[PlayedSession],
        rank: Rank,
        copier: Copier | None,
        chance: random.Random,
    ) -> None:
        self.sessions = dict(zip(build.modes, sessions, strict=True))
        self.rank = rank
        self.copier = copier
        self.num_preemptions = 0
        self.num_done = 0
        self._build = build
        self._chance = chance
        self._steps: deque[Step] = deque()
        self._requests: dict[str, Request] = {}
        self._num_requests = 0
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        self.scheduler = self._start()

    def __repr__(self) -> str:
        return f"<PlayedEngine {self.num_done} done, {self.num_running} running, {[*self.sessions.values()]}>"

    @property
    def num_running(self) -> int:
        """Count the requests that have not ended."""
        return len(self._requests)

    @property
    def is_busy(self) -> bool:
        """Whether requests or steps have not ended."""
        return bool(self._requests or self._steps)

    @property
    def has_parted(self) -> bool:
        """Whether the engine has lost its daemon for good, and has made its memory private or will."""
        return self.rank.is_apart or not all(one.is_returning for one in self.sessions.values())

    def ask(
        self, prompt: Sequence[int], num_tokens: int, *, wants_logprobs: bool, priority: int = 0
    ) -> None:
        """Add a request; one that wants its prompt's log-probabilities reads no cached prefix."""
        self._num_requests += 1
        name = f"{next(iter(self.sessions.values())).name}-{self._num_requests}"
        sampling = SamplingParams(
            max_tokens=num_tokens, ignore_eos=True, prompt_logprobs=1 if wants_logprobs else None
        )
        request = Request(
            name, list(prompt), sampling, None, block_hasher=self._hasher, priority=priority
        )
        self._requests[name] = request
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        """Abort a request."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        del self._requests[name]

    def break_off(self, name: str) -> None:
        """End a request by an error."""
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ERROR)
        del self._requests[name]

    def running(self) -> list[str]:
        """Return the names of the requests that have not ended."""
        return list(self._requests)

    def advance(self) -> None:
        """Do what an engine may do next: schedule a step, carry one out, or hear of one."""
        depth = 2 if self._build.is_async else 1
        if len(self._steps) < depth and (not self._steps or self._chance.random() < 0.7):
            self._schedule()
            return
        if self._carry_out_next() and self._chance.random() < 0.5:
            return
        if self._steps[0].said is not None:
            self._hear()

    def die_amid_step(self) -> None:
        """Carry out the next step, if there is one, of which nobody will hear."""
        self._carry_out_next()

    def settle(self) -> None:
        """Carry out and hear of all steps."""
        while self._steps:
            self._carry_out_next()
            if self._steps[0].said is not None:
                self._hear()

    def reset(self, *, is_running: bool) -> bool:
        """Reset the cache, with requests running on or aborted before; return whether it was done.

        As in vLLM, it is refused while a running request waits for a load.
        """
        self.settle()
        if not is_running:
            for name in self.running():
                self.abort(name)
        try:
            return bool(
                self.scheduler.reset_prefix_cache(
                    reset_running_requests=is_running, reset_connector=True
                )
            )
        except RuntimeError:
            return False

    # How steps go

    def _schedule(self) -> None:
        output = self.scheduler.schedule()
        self.num_preemptions += len(output.preempted_req_ids or ())
        self._steps.append(Step(output))

    def _carry_out_next(self) -> bool:
        """Carry out the first step that was not; return whether there was one."""
        step = next((one for one in self._steps if one.said is None), None)
        if step is None:
            return False
        metas = dict(self._metas(step.output))
        if self.copier is not None:
            self.copier.before(metas["offload"])
        for mode, meta in metas.items():
            if mode != "offload" and (meta.parts or self._rank_hears_end(mode)):
                self.rank.part()
        step.said = self.rank.forward(step.output)
        step.is_apart = self.rank.is_apart
        if self.copier is not None:
            step.results = self.copier.after(metas["offload"])
        return True

    def _rank_hears_end(self, mode: str) -> bool:
        """Tell whether a rank that shares its memory hears by itself that its pool has ended."""
        return mode == "shared" and self.sessions[mode].is_gone and self._chance.random() < 0.3

    def _hear(self) -> None:
        step = self._steps.popleft()
        assert step.said is not None, "steps are heard of after they were carried out"
        names = list(step.output.num_scheduled_tokens)
        told = KVConnectorOutput(kv_connector_worker_meta=self._told(step))
        if (results := step.results) is not None:
            told.finished_recving = results.loaded_requests or None
            told.invalid_block_ids = results.unwritten_blocks
            told.failed_recving = results.failed_requests
        said = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[step.said[name] for name in names],
            kv_connector_output=told,
        )
        self.scheduler.update_from_output(step.output, said)
        for name in [name for name, request in self._requests.items() if request.is_finished()]:
            del self._requests[name]
            self.num_done += 1

    def _metas(self, output: Any) -> Iterator[tuple[str, Any]]:
        meta = output.kv_connector_metadata
        metas = [meta] if len(self._build.modes) == 1 else meta.metadata
        return zip(self._build.modes, metas, strict=True)

    def _told(self, step: Step) -> Any:
        told: list[Any] = []
        for mode, meta in self._metas(step.output):
            if mode == "offload":
                told.append(None if step.results is None else step.results.report)
            elif meta.step_id:
                told.append(StepsBack(meta.step_id, is_apart=step.is_apart))
            else:
                told.append(None)
        if len(told) == 1 or told == [None] * len(told):
            return told[0]
        return MultiKVConnectorWorkerMetadata(tuple(told))

    # How it starts

    def _start(self) -> Any:
        sockets = [f"/{mode}/{session.name}" for mode, session in self.sessions.items()]
        found = dict(zip(sockets, self.sessions.values(), strict=True))
        connectors.SESSIONS.update(found)
        scheduling = AsyncScheduler if self._build.is_async else Scheduler
        config = self._build.config(sockets)
        grammars = StructuredOutputManager(config)
        scheduler = scheduling(config, self._build.cache(), grammars, BLOCK_TOKENS, log_stats=False)
        parts = getattr(scheduler.connector, "_connectors", [scheduler.connector])
        for (mode, session), connector in zip(self.sessions.items(), parts, strict=True):
            if mode == "shared":
                connector._scheduler.begin([Mapped(0, session.memory)])
            elif mode == "owned":
                plan: Any = None
                connector._scheduler.begin([Claim(plan=plan, memory=session.memory)], is_whole=True)
        for socket in found:
            del connectors.SESSIONS[socket]
        return scheduler


def _spec(window: int) -> FullAttentionSpec | SlidingWindowSpec:
    return (
        SlidingWindowSpec(**_HEAD, sliding_window=window) if window else FullAttentionSpec(**_HEAD)
    )
