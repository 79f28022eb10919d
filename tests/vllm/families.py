"""Own the families of models for live comparisons: their kinds of layers, in the golden vectors' words."""

from collections.abc import Callable
from random import Random
from typing import Any

Words = dict[str, Any]
Layers = list[tuple[str, str]]
Family = Callable[[Random], tuple[dict[str, Words], Layers]]

# Specs.


def _common(random: Random, block_size: int | None = None) -> Words:
    return {
        "block_size": block_size or random.choice((16, 32, 64, 128)),
        "num_kv_heads": random.choice((1, 2, 4, 8)),
        "head_size": random.choice((64, 80, 96, 128, 256)),
        "dtype": random.choice(("bfloat16", "bfloat16", "float16", "float32", "float8_e4m3fn")),
        "head_size_v": None,
        "kv_quant_mode": "NONE",
        "page_size_padded": None,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
        "max_tp_shards": None,
        "dcp_sharded": True,
        "block_stride_alignment": None,
    }


def _full(random: Random, block_size: int | None = None, **more: Any) -> Words:
    words = {
        "type": "full_attention",
        **_common(random, block_size),
        "sliding_window": None,
        "attention_chunk_size": None,
        "non_causal": False,
        **more,
    }
    if random.random() < 0.1:
        words["head_size_v"] = 32
    if random.random() < 0.1:
        words |= {"kv_quant_mode": "INT8_PER_TOKEN_HEAD", "dtype": "int8"}
        words["state_content_bytes"] = 2 * words["head_size"] + 8
        words["head_size_v"] = None
    if random.random() < 0.1:
        words["block_stride_alignment"] = random.choice((4096, {"multiple_of": 64}))
    return words


def _window(like: Words, window: int, **more: Any) -> Words:
    kept = {word: value for word, value in like.items() if word not in _OF_FULL}
    return {
        **kept,
        "type": "sliding_window",
        "sliding_window": window,
        "extra_retained_tokens": 0,
        **more,
    }


_OF_FULL = ("sliding_window", "attention_chunk_size", "non_causal")


def _chunk(like: Words, chunk: int) -> Words:
    kept = {word: value for word, value in like.items() if word not in _OF_FULL}
    return {**kept, "type": "chunked_local_attention", "attention_chunk_size": chunk}


def _latent(random: Random, block_size: int | None = None, **more: Any) -> Words:
    words = {
        **_full(random, block_size or random.choice((32, 64, 128))),
        "type": "mla_attention",
        "num_kv_heads": 1,
        "head_size": 576,
        "head_size_v": 0,
        "dtype": random.choice(("bfloat16", "uint8")),
        "kv_quant_mode": "NONE",
        "state_content_bytes": None,
        "block_stride_alignment": None,
        "max_tp_shards": 1,
        "cache_dtype_str": None,
        "alignment": None,
        "model_version": None,
        "cache_role": "sparse",
        "is_index_group_leader": False,
        "non_causal_multi_token_decode": False,
    }
    return {**words, **more}


def _latent_window(block_size: int, head_size: int, window: int, **more: Any) -> Words:
    return {
        "type": "sliding_window_mla",
        "block_size": block_size,
        "num_kv_heads": 1,
        "head_size": head_size,
        "dtype": "bfloat16",
        "head_size_v": 0,
        "kv_quant_mode": "NONE",
        "page_size_padded": None,
        "num_head_slots": None,
        "state_content_bytes": None,
        "tokens_per_state": 1,
        "max_tp_shards": 1,
        "dcp_sharded": True,
        "block_stride_alignment": None,
        "sliding_window": window,
        "extra_retained_tokens": 0,
        "cache_dtype_str": None,
        "alignment": None,
        "model_version": None,
        "bounded_replay": False,
        **more,
    }


def _state(random: Random, block_size: int, **more: Any) -> Words:
    mode = random.choice(("none", "align"))
    return {
        "type": "mamba",
        "block_size": block_size,
        "shapes": [[3, random.choice((64, 256))], [random.choice((2, 8)), 16, 16]],
        "dtypes": ["bfloat16", random.choice(("float32", "bfloat16"))],
        "page_size_padded": None,
        "mamba_cache_mode": mode,
        "num_speculative_blocks": random.choice((0, 0, 2)),
        "num_prefill_checkpoint_blocks": 0,
        "prefill_checkpoint_alignment": None,
        "tp_replicated": False,
        "dcp_sharded": False,
        "block_stride_alignment": None,
        **more,
    }


# Families of models.


def _runs(random: Random, *names: str) -> Layers:
    """Return layers in a repeating pattern, whose last period may be incomplete."""
    pattern = [name for name in names for _ in range(random.randint(1, 3))]
    count = random.randint(len(names), 24)
    picked = [pattern[index % len(pattern)] for index in range(count)]
    for index, name in enumerate(names):
        if name not in picked:
            picked[index] = name
    return [(f"layers.{index}.{name}", name) for index, name in enumerate(picked)]


def _one_full(random: Random) -> tuple[dict[str, Words], Layers]:
    return {"f": _full(random)}, _runs(random, "f")


def _two_full(random: Random) -> tuple[dict[str, Words], Layers]:
    first = _full(random)
    second = _full(random, random.choice((first["block_size"], 32)))
    return {"f": first, "g": second}, _runs(random, "f", "g")


def _full_and_window(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    return {"f": full, "s": _window(full, random.choice((64, 128, 1000, 4096)))}, _runs(
        random, "s", "f"
    )


def _two_windows(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    narrow, wide = _window(full, 128), _window(full, 1024)
    return {"s": narrow, "w": wide}, _runs(random, "s", "w")


def _full_and_other_window(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    window = _window(_full(random, full["block_size"]), 512)
    return {"f": full, "s": window}, _runs(random, "f", "s")


def _padded_window(random: Random) -> tuple[dict[str, Words], Layers]:
    full = {**_full(random, 64), "num_kv_heads": 1, "head_size": 288, "dtype": "bfloat16"}
    full |= {"kv_quant_mode": "NONE", "state_content_bytes": None, "head_size_v": None}
    window = _window({**full, "head_size": 256}, 128, page_size_padded=73728)
    return {"f": full, "s": window}, _runs(random, "f", "s")


def _chunk_and_full(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    return {"f": full, "c": _chunk(full, random.choice((64, 1000, 8192)))}, _runs(random, "c", "f")


def _three_kinds(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    specs = {"f": full, "s": _window(full, 256), "c": _chunk(full, 512)}
    return specs, _runs(random, "f", "s", "c")


def _one_latent(random: Random) -> tuple[dict[str, Words], Layers]:
    return {"m": _latent(random)}, _runs(random, "m")


def _latent_and_indexer(random: Random) -> tuple[dict[str, Words], Layers]:
    latent = _latent(
        random, 64, dtype="uint8", state_content_bytes=656, cache_dtype_str="fp8_ds_mla"
    )
    indexer = _latent(random, 64, head_size=132, dtype="uint8", cache_role="indexer")
    return {"m": latent, "i": indexer}, _runs(random, "m", "i")


def _latent_and_window(random: Random) -> tuple[dict[str, Words], Layers]:
    latent = _latent(random, 64)
    window = _window(_full(random, 64), 128)
    return {"m": latent, "s": window}, _runs(random, "m", "s")


def _compressed(random: Random) -> tuple[dict[str, Words], Layers]:
    """Return layers as of DeepSeek V4: windows, compressed states of two ratios, indexers and compressors."""
    packed = {"cache_dtype_str": "fp8_ds_mla", "alignment": 576, "model_version": "deepseek_v4"}
    fp8 = {
        **packed,
        "dtype": "uint8",
        "state_content_bytes": 584,
        "kv_quant_mode": "FP8_PER_TENSOR",
    }
    states = {"dtype": "float32", "alignment": 576, "model_version": "deepseek_v4"}
    specs = {
        "w": _latent_window(64, 512, 128, **fp8),
        "c4": _latent(random, 256, head_size=512, tokens_per_state=4, **fp8),
        "i4": _latent(random, 256, head_size=132, dtype="uint8", tokens_per_state=4, alignment=576),
        "t4": _latent_window(4, 2048, 8, **states),
        "j4": _latent_window(4, 512, 8, **states),
        "c128": _latent(random, 256, head_size=512, tokens_per_state=128, **fp8),
        "t128": _latent_window(8, 1024, 128, **states),
    }
    layers: Layers = []
    for index in range(random.randint(3, 10)):
        layers.append((f"layers.{index}.w", "w"))
        of_ratio = (("c4", "i4", "t4", "j4"), ("c128", "t128"), ())[random.randrange(3)]
        layers += [(f"layers.{index}.{name}", name) for name in of_ratio]
    used = {spec for _, spec in layers}
    return {name: spec for name, spec in specs.items() if name in used}, layers


def _state_and_full(random: Random) -> tuple[dict[str, Words], Layers]:
    full = {**_full(random), "block_stride_alignment": None}
    state = _state(random, full["block_size"])
    return {"f": full, "m": state}, _runs(random, "m", "f")


def _two_states_and_full(random: Random) -> tuple[dict[str, Words], Layers]:
    full = {**_full(random), "block_stride_alignment": None}
    one = _state(random, full["block_size"])
    other = {**one, "shapes": [[3, 128], [4, 16, 16]]}
    return {"f": full, "m": one, "n": other}, _runs(random, "m", "n", "f")


def _states_only(random: Random) -> tuple[dict[str, Words], Layers]:
    return {"m": _state(random, random.choice((64, 4096)))}, _runs(random, "m")


def _state_and_latent(random: Random) -> tuple[dict[str, Words], Layers]:
    latent = _latent(random, 128)
    return {"k": _state(random, 128), "m": latent}, _runs(random, "k", "m")


def _encoder_decoder(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    cross = {word: value for word, value in full.items() if word not in _OF_FULL}
    return {"f": full, "x": {**cross, "type": "cross_attention"}}, _runs(random, "f", "x")


def _sinks(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    specs = {"f": full, "z": {**full, "type": "sink_full_attention", "sink_len": 4}}
    return specs, _runs(random, *random.choice((("z",), ("f", "z"), ("z", "f"))))


def _retained(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    specs = {"f": full, "r": {**full, "type": "rswa", "rswa_window": 512}}
    return specs, _runs(random, *random.choice((("r",), ("r", "f"))))


def _hidden_states(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random)
    hidden = {**_latent(random, full["block_size"]), "type": "hidden_state", "num_kv_heads": 3}
    hidden |= {"head_size": random.choice((512, 4096)), "dtype": "bfloat16", "max_tp_shards": 1}
    specs = {"f": full, "s": _window(full, 512), "h": hidden}
    return specs, [*_runs(random, "f", "s"), ("hidden.0", "h")]


def _rings(random: Random) -> tuple[dict[str, Words], Layers]:
    latent = _latent(random, 64)
    ring = {**_common(random, 8), "type": "circular_buffer", "num_kv_heads": 1, "head_size": 512}
    ring |= {"head_size_v": 0, "dtype": "float32"}
    return {"m": latent, "b": ring}, _runs(random, "m", "b")


def _replicas(random: Random) -> tuple[dict[str, Words], Layers]:
    full = _full(random, max_tp_shards=random.choice((1, 2)))
    other = {**full, "dcp_sharded": False}
    return {"f": full, "u": other}, _runs(random, *random.choice((("f",), ("f", "u"))))


def _pooled(random: Random) -> tuple[dict[str, Words], Layers]:
    full = {**_full(random), "tokens_per_state": "1/4", "block_stride_alignment": None}
    return {"f": full, "s": _window(full, 500)}, _runs(random, *random.choice((("f",), ("s", "f"))))


def _slots(random: Random) -> tuple[dict[str, Words], Layers]:
    full = {**_full(random), "kv_quant_mode": "NVFP4", "dtype": "uint8", "head_size_v": None}
    full |= {"num_head_slots": 2 * full["num_kv_heads"], "block_stride_alignment": None}
    full["state_content_bytes"] = full["head_size"] // 2 + full["head_size"] // 16
    return {"f": full}, _runs(random, "f")


FAMILIES: dict[str, Family] = {
    "one-full": _one_full,
    "two-full": _two_full,
    "full-and-window": _full_and_window,
    "two-windows": _two_windows,
    "full-and-other-window": _full_and_other_window,
    "padded-window": _padded_window,
    "chunk-and-full": _chunk_and_full,
    "three-kinds": _three_kinds,
    "one-latent": _one_latent,
    "latent-and-indexer": _latent_and_indexer,
    "latent-and-window": _latent_and_window,
    "compressed": _compressed,
    "state-and-full": _state_and_full,
    "two-states-and-full": _two_states_and_full,
    "states-only": _states_only,
    "state-and-latent": _state_and_latent,
    "encoder-decoder": _encoder_decoder,
    "sinks": _sinks,
    "retained": _retained,
    "hidden-states": _hidden_states,
    "rings": _rings,
    "replicas": _replicas,
    "pooled": _pooled,
    "slots": _slots,
}
"""Kinds of models, by name."""
