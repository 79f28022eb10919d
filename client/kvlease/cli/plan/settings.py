"""Own how a plan's settings are written as options of `kvlease plan`, and as vLLM's arguments after --vllm."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlease.units import show_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """How settings are written on one command line."""

    options: Mapping[str, str]
    """The option of every setting that takes a value."""
    switches: Mapping[str, tuple[str, str]]
    """The options of settings that are true or false."""

    def has(self, settings: str) -> bool:
        """Tell whether the command line takes all of some settings, each written name=value."""
        names = {setting.partition("=")[0] for setting in settings.split()}
        return names <= self.options.keys() | self.switches.keys()


_TIERS: Final = {
    "blocks_per_slot": "--blocks-per-slot",
    "disk_bytes": "--disk",
    "host_bytes": "--host-memory",
    "layout": "--layout",
    "remote_bytes": "--remote",
}
"""The options that can also stand before --vllm."""
OWN: Final = Spelling(
    options={
        **_TIERS,
        "context_ranks": "--context-ranks",
        "device_blocks": "--device-blocks",
        "device_bytes": "--device-memory",
        "encoder_tokens_max": "--encoder-tokens",
        "kv_dtype": "--kv-dtype",
        "longest_request_tokens": "--longest-request",
        "lookahead_tokens": "--lookahead-tokens",
        "match_tokens": "--match-tokens",
        "null_blocks": "--null-blocks",
        "pipeline_ranks": "--pipeline-ranks",
        "state_mode": "--state-mode",
        "steps_in_flight": "--steps-in-flight",
        "tensor_ranks": "--tensor-ranks",
        "tokens_per_block": "--tokens-per-block",
        "tokens_per_step": "--tokens-per-step",
    },
    switches={
        "fit_longest_request": ("--fit", "--no-fit"),
        "one_group": ("--one-group", "--no-one-group"),
        "prefix_caching": ("--prefix-caching", "--no-prefix-caching"),
    },
)
VLLM: Final = Spelling(
    options={
        **_TIERS,
        "context_ranks": "--decode-context-parallel-size",
        "device_blocks": "--num-gpu-blocks-override",
        "device_bytes": "--kv-cache-memory-bytes",
        "kv_dtype": "--kv-cache-dtype",
        "longest_request_tokens": "--max-model-len",
        "match_tokens": "--prefix-match-unit",
        "pipeline_ranks": "--pipeline-parallel-size",
        "state_mode": "--mamba-cache-mode",
        "tensor_ranks": "--tensor-parallel-size",
        "tokens_per_block": "--block-size",
        "tokens_per_step": "--max-num-batched-tokens",
    },
    switches={
        "one_group": (
            "--disable-hybrid-kv-cache-manager",
            "--no-disable-hybrid-kv-cache-manager",
        ),
        "prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    },
)
"""It leaves out what vLLM chooses by itself, such as null blocks: no argument sets that."""
_SETTING: Final = re.compile(r"\b([a-z_]+)=([A-Za-z0-9_]+)")


def as_options(settings: str, spelling: Spelling = OWN) -> str:
    """Return settings, each written name=value, as command-line options, with readable numbers of bytes."""
    written = [setting.partition("=") for setting in settings.split()]
    options = " ".join(_option(name, value, spelling) for name, _, value in written)
    sizes = [show_bytes(int(value)) for name, _, value in written if name.endswith("_bytes")]
    return f"{options}  ({', '.join(sizes)})" if sizes else options


def with_options(sentence: str, spelling: Spelling = OWN) -> str:
    """Return a sentence with its settings written as command-line options."""
    return _SETTING.sub(lambda found: _option(found[1], found[2], spelling), sentence)


def _option(name: str, value: str, spelling: Spelling) -> str:
    if name in spelling.switches:
        return spelling.switches[name][value != "true"]
    written = spelling.options.get(name)
    return f"{name}={value}" if written is None else f"{written} {value}"
