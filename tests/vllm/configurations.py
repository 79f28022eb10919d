"""Own random configurations for planning, in the golden vectors' words and without answers, repeatable by seed."""

from collections.abc import Callable
from random import Random
from typing import Any

from tests.vllm.families import FAMILIES, Layers, Words

LAYOUTS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_MEMORY_BYTES = (2**20, 2**23, 2**26, 2**30, 2**33)


def vectors(count: int, seed: int) -> dict[str, Any]:
    """Return vectors of so many models, of the families in turn, one vector for every operation."""
    random = Random(seed)  # noqa: S311  # for variety, not for secrets
    families = list(FAMILIES.items())
    made = []
    for index in range(count):
        name, family = families[index % len(families)]
        specs, layers = family(random)
        for op, build in _BUILDERS.items():
            made.append(
                {
                    "id": f"live-{index:04d}-{op}",
                    "op": op,
                    "tags": ["live", name],
                    "input": build(random, specs, layers),
                    "expected": {},
                }
            )
    return {"schema_version": 1, "suite": "live", "count": len(made), "vectors": made}


def _plan_input(random: Random, specs: dict[str, Words], layers: Layers) -> Words:
    config = _config(random, specs)
    return {"config": config, "specs": specs, "workers": _workers(random, config, layers)}


def _metrics_input(random: Random, specs: dict[str, Words], _layers: Layers) -> Words:
    return {"config": _config(random, specs), "spec": random.choice(list(specs.values()))}


def _merge_input(random: Random, specs: dict[str, Words], _layers: Layers) -> Words:
    """Return the model's kinds of layers in any order, or one of them and a copy that differs in one field."""
    found = list(specs.values())
    random.shuffle(found)
    if len(found) > 1 and random.random() < 0.6:
        return {"specs": found}
    other = dict(found[0])
    words = other.keys() & _CHANGES.keys()
    if other["type"] == "mamba":
        words -= {"dcp_sharded", "tokens_per_state"}
    word = random.choice(sorted(words))
    other[word] = random.choice(_CHANGES[word])
    return {"specs": [found[0], other]}


_CHANGES: dict[str, tuple[Any, ...]] = {
    "num_kv_heads": (1, 16),
    "head_size": (64, 512),
    "block_size": (16, 32),
    "sliding_window": (128, 512),
    "dcp_sharded": (True, False),
    "max_tp_shards": (None, 1),
    "non_causal": (True, False),
    "num_speculative_blocks": (0, 1),
    "extra_retained_tokens": (0, 2),
    "tokens_per_state": (1, 4),
    "cache_role": ("sparse", "indexer"),
}


def _strides_input(random: Random, specs: dict[str, Words], _layers: Layers) -> Words:
    spec = random.choice(list(specs.values()))
    tokens = random.choice((None, spec["block_size"], 16, 64)) if spec["type"] != "mamba" else None
    return {
        "spec": spec,
        "num_blocks": random.randint(1, 9),
        "num_layers": random.randint(1, 4),
        "kv_cache_layout": random.choice(LAYOUTS),
        "kernel_block_size": tokens,
        "fixed_strides": [None] * 5,
    }


def _views_input(random: Random, specs: dict[str, Words], layers: Layers) -> Words:
    """Return groups of equal layers, at most three of each, read in whole blocks or in parts."""
    used = list(dict.fromkeys(spec for _, spec in layers))
    groups = [[[name, spec] for name, spec in layers if spec == wanted][:3] for wanted in used]
    tokens = [_kernel_tokens(random, specs[spec]) for spec in used]
    return {
        "kv_cache_layout": random.choice(LAYOUTS),
        "num_blocks": random.randint(1, 6),
        "specs": specs,
        "groups": groups,
        "kernel_block_sizes": tokens,
    }


def _kernel_tokens(random: Random, spec: Words) -> int:
    whole: int = spec["block_size"]
    return whole if spec["type"] == "mamba" else random.choice((whole, whole, whole, 16, 32))


_BUILDERS: dict[str, Callable[[Random, dict[str, Words], Layers], Words]] = {
    "plan": _plan_input,
    "spec_metrics": _metrics_input,
    "merge_specs": _merge_input,
    "layout_strides": _strides_input,
    "allocate_views": _views_input,
}
"""Builders of the input of every operation, by its name; the reference answers each for every model."""


def _config(random: Random, specs: dict[str, Words]) -> Words:
    types = {spec["type"] for spec in specs.values()}
    modes = {spec["mamba_cache_mode"] for spec in specs.values() if spec["type"] == "mamba"}
    context_ranks = random.choice((1, 1, 1, 1, 2, 4)) if "sliding_window" not in types else 1
    return {
        "max_model_len": random.choice((64, 500, 1000, 4096, 8192, 32768, 131072)),
        "auto_fit_max_model_len": random.random() < 0.25,
        "num_gpu_blocks_override": random.choice((None,) * 6 + (2, 3, 33, 500, 4000)),
        "block_size": random.choice((16, 32, 64)),
        "kv_cache_layout": random.choice(
            LAYOUTS if random.random() < 0.4 else LAYOUTS[:2] + LAYOUTS[3:5]
        ),
        "max_num_batched_tokens": random.choice((256, 512, 2048, 8192)),
        "max_concurrent_batches": random.choice((1, 1, 2, 3)),
        "tensor_parallel_size": random.choice((1, 1, 1, 2, 4))
        if context_ranks == 1
        else context_ranks,
        "pipeline_parallel_size": random.choice((1, 1, 1, 2, 3)) if context_ranks == 1 else 1,
        "decode_context_parallel_size": context_ranks,
        "disable_hybrid_kv_cache_manager": random.random() < 0.1,
        "mamba_cache_mode": modes.pop() if modes else "none",
        "max_num_encoder_input_tokens": random.choice((0, 100, 1500))
        if "cross_attention" in types
        else 0,
        "num_prefill_lookahead_tokens": random.choice((0, 0, 0, 1, 3)),
        "enable_prefix_caching": random.random() < 0.85,
        "prefix_match_unit": random.choice((None,) * 8 + (8, 16, 48)),
        "kv_connector": random.random() < 0.2,
        "mtp_speculative": random.random() < 0.1,
    }


def _workers(random: Random, config: Words, layers: Layers) -> list[Words]:
    """Return tensor ranks for every pipeline stage, each with a consecutive part of the layers."""
    stages = min(config["pipeline_parallel_size"], len(layers))
    cuts = sorted(random.sample(range(1, len(layers)), stages - 1))
    bounds = list(zip([0, *cuts], [*cuts, len(layers)], strict=True))
    memory = random.choice(_MEMORY_BYTES) * random.randint(1, 8) + random.randint(0, 2**16)
    workers: list[Words] = []
    for start, end in bounds:
        first = len(workers)
        for rank in range(config["tensor_parallel_size"]):
            available = int(memory * random.choice((1, 1, 1, 0.9, 1.1)))
            of_layers: Words = {"layers": [list(pair) for pair in layers[start:end]]}
            source = of_layers if rank == 0 else {"layers_same_as": first}
            workers.append({"available_memory_bytes": available, **source})
    return workers
