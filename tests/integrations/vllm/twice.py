"""Build an engine beside a living one in one process, as a test's child.

`twice.py JOB` takes the job as JSON, and prints a line of it: how the second engine is refused, and whether the first
one, and another after its end, say the same.
"""

import gc
import json
import sys
from typing import Any

from tests.integrations.vllm.jobs import prompt
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

PREFIX = prompt(320, seed=1)
PROMPTS = [
    {"prompt_token_ids": prompt(400 + 7 * index, seed=index, prefix=PREFIX)} for index in range(4)
]


def main() -> None:
    """Build, refuse, generate, end, build again."""
    job = json.loads(sys.argv[1])
    first = made(job)
    wanted = tokens(first, job)
    try:
        made(job)
        refusal = ""
    except Exception as error:  # noqa: BLE001 -- the test looks at what it is
        refusal = f"{type(error).__name__}: {error}"
    goes_on = tokens(first, job) == wanted
    first.llm_engine.engine_core.shutdown()
    del first
    gc.collect()
    is_right_after = tokens(made(job), job) == wanted
    sys.stdout.write(f"TOLD {json.dumps([refusal, goes_on, is_right_after])}\n")
    sys.stdout.flush()


def made(job: dict[str, Any]) -> LLM:
    """Return a new engine."""
    transfer = KVTransferConfig(**job["kv_transfer_config"])
    return LLM(model=job["model"], **job["engine"], kv_transfer_config=transfer)


def tokens(engine: LLM, job: dict[str, Any]) -> list[list[int]]:
    """Return what an engine says to all prompts."""
    sampling = SamplingParams(**{**job["sampling"], "max_tokens": 16})
    said = engine.generate(PROMPTS, sampling, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in said]


if __name__ == "__main__":
    main()
