"""Own the floor of the figures of hashing: vLLM's own keys of the same prompts, in this process; for .venv-vllm only.

Reads one line a round, `num_tokens num_calls`, and answers with one line: the median nanoseconds of a call.
"""

import gc
import sys
from statistics import median
from time import perf_counter_ns

import numpy as np

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

TOKENS_PER_BLOCK = 16
VOCABULARY = 128_000


def request_of(num_tokens: int) -> Request:
    """Return a request with the other side's tokens, whose keys are not yet computed."""
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, num_tokens, np.int32)
    return Request(
        request_id="prompt",
        prompt_token_ids=tokens.tolist(),
        sampling_params=SamplingParams(max_tokens=1),
        pooling_params=None,
    )


def main() -> None:
    """Answer round after round until standard input ends."""
    init_none_hash(sha256)
    hash_blocks = get_request_block_hasher(TOKENS_PER_BLOCK, sha256)
    requests: dict[int, Request] = {}
    for line in sys.stdin:
        num_tokens, num_calls = map(int, line.split())
        if num_tokens not in requests:
            requests[num_tokens] = request_of(num_tokens)
        gc.collect()
        gc.disable()
        taken = []
        for _ in range(num_calls):
            start = perf_counter_ns()
            keys = hash_blocks(requests[num_tokens])
            taken.append(perf_counter_ns() - start)
            assert len(keys) == num_tokens // TOKENS_PER_BLOCK
        gc.enable()
        sys.stdout.write(f"{median(taken)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
