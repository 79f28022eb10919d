"""Own one streaming session: an engine is given a prompt piece by piece, and says some tokens after each.

Runs as a script with the reference engine's Python: `streaming.py JOB`, where JOB is the JSON of a job with `pieces`,
the lists of token ids. The last line of standard output is the JSON list of all tokens that were said.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from typing import Any


async def session(job: dict[str, Any]) -> list[int]:
    """Return what the engine says to all pieces."""
    from vllm import SamplingParams  # noqa: PLC0415 - imported in the nursery
    from vllm.engine.arg_utils import AsyncEngineArgs  # noqa: PLC0415
    from vllm.engine.protocol import StreamingInput  # noqa: PLC0415
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: PLC0415

    arguments = {**job["engine"], "kv_transfer_config": job["kv_transfer_config"]}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=job["model"], **arguments))
    sampling = SamplingParams(**job["sampling"])
    was_said = asyncio.Event()

    async def pieces() -> AsyncIterator[StreamingInput]:
        for piece in job["pieces"]:
            was_said.clear()
            yield StreamingInput(prompt={"prompt_token_ids": piece}, sampling_params=sampling)
            await was_said.wait()

    said: list[int] = []
    async for output in engine.generate(pieces(), sampling, "session"):
        said = list(output.outputs[0].token_ids)
        if len(said) % sampling.max_tokens == 0:
            was_said.set()
    engine.shutdown()
    return said


if __name__ == "__main__":
    sys.stdout.write("\n" + json.dumps(asyncio.run(session(json.loads(sys.argv[1])))) + "\n")
