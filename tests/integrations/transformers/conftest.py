"""Own a daemon, and small models with caches registered for them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from kvlease import Client, EngineInputs, PlanInputs  # noqa: E402
from kvlease.integrations.transformers import model_digest  # noqa: E402
from tests.integrations.transformers.leasing import (  # noqa: E402
    DEVICE_BLOCKS,
    TOKENS_PER_BLOCK,
    attached,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from transformers import Gemma3ForCausalLM, LlamaForCausalLM

    from kvlease import Worker


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    """Build a small model whose every token depends on all tokens before it."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        dtype="float32",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """Run a daemon and connect to it."""
    directory: Path = tmp_path_factory.mktemp("kvlease")
    options = ["--runtime-dir", str(directory), "--no-listen-tcp", "--no-serve-grpc"]
    with subprocess.Popen([sys.executable, "-m", "kvleased", "serve", *options]) as daemon:
        with Client(f"unix://{directory}/kvlease.sock") as connected:
            yield connected
        daemon.terminate()


@pytest.fixture
def worker(client: Client, model: LlamaForCausalLM) -> Iterator[Worker]:
    """Attach to a new cache."""
    inputs = PlanInputs(
        model_config=model.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=DEVICE_BLOCKS,
        host_bytes=1 << 22,
        model_digest=model_digest(model),
    )
    with attached(client, inputs) as worker:
        yield worker


WINDOW_TOKENS = 24
"""A window that neither begins nor ends with a block."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(["sliding_attention", "full_attention"] * 2, id="windows and full layers"),
        pytest.param(["sliding_attention"] * 3, id="windows alone"),
    ],
)
def windowed(request: pytest.FixtureRequest) -> Gemma3ForCausalLM:
    """Build a small model with sliding window layers."""
    torch.manual_seed(0)
    config = transformers.Gemma3TextConfig(
        dtype="float32",
        vocab_size=512,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=len(request.param),
        layer_types=request.param,
        sliding_window=WINDOW_TOKENS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        query_pre_attn_scalar=16,
        initializer_range=0.15,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    return transformers.Gemma3ForCausalLM(config).eval()


@pytest.fixture
def window_worker(client: Client, windowed: Gemma3ForCausalLM) -> Iterator[Worker]:
    """Attach to a cache whose windows have room for two blocks of new tokens at once."""
    inputs = PlanInputs(
        model_config=windowed.config.to_json_string(),
        kv_dtype="float32",
        tokens_per_block=TOKENS_PER_BLOCK,
        device_blocks=2 * DEVICE_BLOCKS,
        null_blocks=1,
        host_bytes=1 << 22,
        longest_request_tokens=192,
        engine=EngineInputs(tokens_per_step=2 * TOKENS_PER_BLOCK),
        model_digest=model_digest(windowed),
    )
    with attached(client, inputs) as worker:
        yield worker
