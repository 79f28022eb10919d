"""Own one life of an engine: build it from a job, carry out orders from standard input, and answer each.

Runs as a script with the reference engine's Python, and imports nothing of the tests. The first line of standard input
is the job, each further line an order; every answer is one line of JSON on standard output. The end of standard input
ends the life; so does SIGKILL, at any moment.
"""

import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

Words = dict[str, Any]


class Life:
    """One engine, and its connection to the test."""

    def __init__(self, job: Words, answers: Any) -> None:
        self._job = job
        self._answers = answers
        self._num_requests = 0
        self._spans: dict[str, list[float]] = {}
        self._cpu_spans: dict[str, list[float]] = {}
        self._forwards_left: int | None = None

    def start(self) -> None:
        """Build the engine and report that it is ready."""
        # Standard output must be out of the engine's way before it is imported.
        from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415

        began = time.perf_counter()
        config = self._served() if self._job.get("arguments") else self._configured()
        # Ranks are forked as lives are; the configuration has chosen another method, which takes minutes.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        self.engine = LLMEngine.from_vllm_config(config)
        self._watch_forwards()
        cache = self.engine.vllm_config.cache_config
        self.say(
            "ready",
            seconds=time.perf_counter() - began,
            num_blocks=cache.num_gpu_blocks,
            tokens_per_block=cache.block_size,
        )

    def _configured(self) -> Any:
        """Return the configuration of the job's arguments."""
        from vllm.config import KVTransferConfig  # noqa: PLC0415
        from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415

        settings: Words = {"model": self._job["model"], **self._job["engine"]}
        if self._job.get("kv_transfer_config"):
            settings["kv_transfer_config"] = KVTransferConfig(**self._job["kv_transfer_config"])
        config = EngineArgs(**settings).create_engine_config()
        # The engine's platform switches these off at the end of its configuration.
        config.scheduler_config.async_scheduling = bool(self._job.get("is_async"))
        # What the engine's own process of a rank sets.
        config.parallel_config.data_parallel_index = self._job.get("data_parallel_index", 0)
        if self._job.get("caches_prefixes"):
            config.cache_config.enable_prefix_caching = True
        return config

    def _served(self) -> Any:
        """Return the configuration that `vllm serve` makes of its command line."""
        from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
        from vllm.entrypoints.launchers.cli_args import make_arg_parser  # noqa: PLC0415
        from vllm.usage.usage_lib import UsageContext  # noqa: PLC0415
        from vllm.utils.argparse_utils import FlexibleArgumentParser  # noqa: PLC0415

        words = make_arg_parser(FlexibleArgumentParser()).parse_args(self._job["arguments"])
        words.model = words.model_tag or words.model
        engine = AsyncEngineArgs.from_cli_args(words)
        return engine.create_engine_config(UsageContext.OPENAI_API_SERVER)

    def say(self, event: str, **words: Any) -> None:
        """Write one line to the test."""
        self._answers.write(json.dumps({"event": event, **words}) + "\n")
        self._answers.flush()

    def obey(self, order: Words) -> None:
        """Carry out one order."""
        match order["do"]:
            case "generate":
                self.generate(order)
            case "metrics":
                self.say("metrics", values=dict(self._metrics(order.get("prefixes", ["vllm:"]))))
            case "reset_prefix_cache":
                done = self.engine.reset_prefix_cache(
                    reset_running_requests=order.get("reset_running_requests", False),
                    reset_connector=order.get("reset_connector", True),
                )
                self.say("reset", done=bool(done))
            case "placement":
                self.say("placement", **self._placement())
            case other:
                self.say("error", message=f"there is no order {other!r}")

    def generate(self, order: Words) -> None:
        """Run a round of prompts to its end, or until it must stop."""
        round_ = _Round(order, self._num_requests)
        self._num_requests += len(order["prompts"])
        self._spans, self._cpu_spans = {}, {}
        self._forwards_left = order.get("die_before_forward")
        began, cpu_began = time.perf_counter(), time.process_time()
        step = 0
        while round_.is_open or self.engine.has_unfinished_requests():
            round_.arrive(self.engine, step, self._job.get("sampling", {}))
            for output in self.engine.step():
                said = round_.note(output)
                if order.get("tells") and said["finish_reason"]:
                    self.say("said", index=round_.index_of(output.request_id), request=said)
            step += 1
            round_.abort(self.engine, step)
            if step == order.get("pause_at_step"):
                self.say("paused", step=step)
                if not self._goes_on():
                    return
        self._forwards_left = None
        self.say(
            "round",
            requests=round_.told(),
            steps=step,
            seconds=time.perf_counter() - began,
            cpu_seconds=time.process_time() - cpu_began,
            spans=self._spans,
            cpu_spans=self._cpu_spans,
        )

    def _goes_on(self) -> bool:
        """Carry out orders during a pause of a round; return whether it goes on, or False if the life ends here."""
        for line in sys.stdin:
            order = json.loads(line)
            if order["do"] == "go":
                return True
            self.obey(order)
        return False

    def rest(self) -> None:
        """Step while connectors have work, as the loop of an engine in its own process does by itself."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:
            return
        scheduler = core.scheduler
        while scheduler.has_requests() and not select.select([sys.stdin], [], [], 0)[0]:
            self.engine.step()

    def _placement(self) -> Words:
        """Return what the scheduler knows of the cache, in plain numbers; in one process only."""
        config = self.engine.engine_core.engine_core.scheduler.kv_cache_config
        return {
            "num_blocks": config.num_blocks,
            "layout": config.kv_cache_layout,
            "longest": self.engine.vllm_config.model_config.max_model_len,
            "hash_block_tokens": config.hash_block_size,
            "hit_alignment_tokens": config.cache_hit_alignment_tokens,
            "groups": [
                [one.kv_cache_spec.block_size, one.layer_names] for one in config.kv_cache_groups
            ],
            "runs": [
                [run.size, run.offset, run.layer_stride, run.block_stride, run.layers]
                for run in config.kv_cache_tensors
            ],
        }

    def _metrics(self, prefixes: list[str]) -> Iterator[tuple[str, float]]:
        for metric in self.engine.get_metrics():
            if not metric.name.startswith(tuple(prefixes)):
                continue
            labels = {k: v for k, v in metric.labels.items() if k not in ("engine", "model_name")}
            name = metric.name + (json.dumps(labels, sort_keys=True) if labels else "")
            if hasattr(metric, "values"):
                yield name, sum(metric.values)
            else:
                yield name, metric.value if hasattr(metric, "value") else metric.sum

    def _watch_forwards(self) -> None:
        """Prepare to die before a forward pass, and time the scheduler's calls; in one process only."""
        core = getattr(self.engine.engine_core, "engine_core", None)
        if core is None:
            return
        execute = core.model_executor.execute_model

        def execute_or_die(*arguments: Any, **words: Any) -> Any:
            if self._forwards_left is not None:
                self._forwards_left -= 1
                if self._forwards_left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return execute(*arguments, **words)

        core.model_executor.execute_model = execute_or_die
        if self._job.get("is_hollow"):
            _hollow_out(core.model_executor.driver_worker.worker.model_runner.model)
        if self._job.get("times"):
            for name in ("schedule", "update_from_output", "add_request"):
                setattr(core.scheduler, name, self._timed(name, getattr(core.scheduler, name)))
            if guard := sys.modules.get("kvlease.integrations.vllm.session.guard"):
                guard.Guard.call = self._timed("control_call", guard.Guard.call)

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **words: Any) -> Any:
            began, cpu_began = time.perf_counter(), time.thread_time()
            try:
                return call(*arguments, **words)
            finally:
                self._cpu_spans.setdefault(name, []).append(time.thread_time() - cpu_began)
                self._spans.setdefault(name, []).append(time.perf_counter() - began)

        return timed


def _hollow_out(model: Any) -> None:
    """Make a model compute nothing, so that steps can be measured at lengths that would take hours."""
    import torch  # noqa: PLC0415

    width = model.config.hidden_size

    def forward(input_ids: Any, *_arguments: Any, **_words: Any) -> Any:
        return torch.zeros(len(input_ids), width)

    model.forward = forward


class _Round:
    """The requests of one order: when each arrives and is aborted, and its output."""

    def __init__(self, order: Words, first: int) -> None:
        self._order = order
        prompts = order["prompts"]
        self._ids = [f"r{first + index}" for index in range(len(prompts))]
        arrivals = order.get("arrivals") or [0] * len(prompts)
        self._due = sorted(range(len(prompts)), key=lambda index: (arrivals[index], index))
        self._arrivals = arrivals
        self._aborts = {int(index): step for index, step in order.get("aborts", {}).items()}
        self._said: dict[str, Words] = {}
        self._began: dict[str, float] = {}

    @property
    def is_open(self) -> bool:
        """Whether some requests have yet to arrive."""
        return bool(self._due)

    def arrive(self, engine: Any, step: int, defaults: Words) -> None:
        """Hand over the requests whose step has come, or all if the engine has nothing else to do."""
        from vllm import SamplingParams  # noqa: PLC0415
        from vllm.lora.request import LoRARequest  # noqa: PLC0415

        is_idle = not engine.has_unfinished_requests()
        while self._due and (is_idle or self._arrivals[self._due[0]] <= step):
            index = self._due.pop(0)
            is_idle = False
            more = (self._order.get("sampling_of") or {}).get(str(index), {})
            sampling = {**defaults, **self._order.get("sampling", {}), **more}
            prompt = {"prompt_token_ids": self._order["prompts"][index]}
            if salt := (self._order.get("salts") or {}).get(str(index)):
                prompt["cache_salt"] = salt
            adapter = (self._order.get("adapters") or {}).get(str(index))
            name = self._ids[index]
            self._said[name] = {"tokens": [], "logprobs": [], "finish_reason": None}
            self._began[name] = time.perf_counter()
            engine.add_request(
                name,
                prompt,
                SamplingParams(**sampling),
                lora_request=LoRARequest(**adapter) if adapter else None,
            )

    def index_of(self, name: str) -> int:
        """Return the index in the order of a request's prompt."""
        return self._ids.index(name)

    def note(self, output: Any) -> Words:
        """Keep a request's output so far, and return it."""
        said = self._said[output.request_id]
        best = output.outputs[0]
        if best.token_ids and "seconds_to_first_token" not in said:
            said["seconds_to_first_token"] = time.perf_counter() - self._began[output.request_id]
        said["tokens"] = list(best.token_ids)
        said["logprobs"] = [
            {str(token): entry.logprob for token, entry in at.items()} for at in best.logprobs or ()
        ]
        said["num_cached_tokens"] = output.num_cached_tokens
        said["finish_reason"] = best.finish_reason
        return said

    def abort(self, engine: Any, step: int) -> None:
        """Abort the requests that are due for it after this step."""
        for index, after in self._aborts.items():
            name = self._ids[index]
            if after <= step and name in self._said and not self._said[name]["finish_reason"]:
                engine.abort_request([name], internal=False)
                self._said[name]["finish_reason"] = "abort"

    def told(self) -> list[Words]:
        """Return each request's output, in the order of the prompts."""
        return [self._said[name] for name in self._ids]


def main() -> None:
    """Run the life from standard input to its end."""
    # Output of libraries goes to standard error; answers have a descriptor of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    life = Life(json.loads(sys.stdin.readline()), answers)
    life.start()
    for line in sys.stdin:
        life.obey(json.loads(line))
        life.rest()
    life.engine.engine_core.shutdown()
    life.say("ended")


if __name__ == "__main__":
    main()
