"""Own what tests with Transformers share: prompts, a model's output without kvlease, and new caches."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvlease import PlanInputs
from kvlease.errors import KVLeaseError
from kvlease.integrations._models import cache_argument

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from transformers import PreTrainedModel

    from kvlease import Client, Worker
    from kvlease.integrations.transformers import LeasedCache

TOKENS_PER_BLOCK = 16
DEVICE_BLOCKS = 24
NUM_NEW = 40
START_SECONDS_MAX = 20.0


def taking(model: PreTrainedModel, cache: LeasedCache) -> Mapping[str, LeasedCache]:
    """Return the argument by which a model takes its cache in this version of Transformers."""
    return {cache_argument(model): cache}


@contextmanager
def attached(client: Client, inputs: PlanInputs) -> Iterator[Worker]:
    """Attach to a new cache, which is deleted at the end."""
    deadline = time.monotonic() + START_SECONDS_MAX
    while True:
        try:
            if client.register("tests", inputs).status == "ready":
                break
        except KVLeaseError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.01)
    try:
        with client.attach("tests") as worker:
            yield worker
    finally:
        client.delete_cache("tests")


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    """Return random tokens; a longer prompt of the same seed begins with the shorter."""
    return np.random.default_rng(seed).integers(0, 512, num_tokens).tolist()


def plain(model: PreTrainedModel, token_ids: list[int]) -> list[int]:
    """Return what the model generates without kvlease."""
    input_ids = torch.tensor([token_ids])
    output = model.generate(input_ids, max_new_tokens=NUM_NEW, do_sample=False)
    return output[0, len(token_ids) :].tolist()


def unnamed(model: PreTrainedModel) -> PlanInputs:
    """Return the inputs of a cache that any model of this shape may use."""
    return PlanInputs(
        model_config=model.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=DEVICE_BLOCKS,
    )
