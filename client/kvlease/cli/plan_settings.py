"""Own how settings of a plan are written as options of `kvlease plan`."""

import re
from typing import Final

from kvlease.units import show_bytes

_OPTIONS: Final = {
    "blocks_per_slot": "--blocks-per-slot",
    "context_ranks": "--context-ranks",
    "device_blocks": "--device-blocks",
    "device_bytes": "--device-memory",
    "disk_bytes": "--disk",
    "encoder_tokens_max": "--encoder-tokens",
    "host_bytes": "--host-memory",
    "kv_dtype": "--kv-dtype",
    "layout": "--layout",
    "longest_request_tokens": "--longest-request",
    "lookahead_tokens": "--lookahead-tokens",
    "match_tokens": "--match-tokens",
    "null_blocks": "--null-blocks",
    "pipeline_ranks": "--pipeline-ranks",
    "remote_bytes": "--remote",
    "state_mode": "--state-mode",
    "steps_in_flight": "--steps-in-flight",
    "tensor_ranks": "--tensor-ranks",
    "tokens_per_block": "--tokens-per-block",
    "tokens_per_step": "--tokens-per-step",
}
"""The option of every setting that takes a value."""
_SWITCHES: Final = {
    "fit_longest_request": ("--fit", "--no-fit"),
    "one_group": ("--one-group", "--no-one-group"),
    "prefix_caching": ("--prefix-caching", "--no-prefix-caching"),
}
"""The options of settings that are true or false."""
_SETTING: Final = re.compile(r"\b([a-z_]+)=([A-Za-z0-9_]+)")


def as_options(settings: str) -> str:
    """Return settings, each written name=value, as the command line takes them, with bytes as people say them."""
    written = [setting.partition("=") for setting in settings.split()]
    options = " ".join(_option(name, value) for name, _, value in written)
    sizes = [show_bytes(int(value)) for name, _, value in written if name.endswith("_bytes")]
    return f"{options}  ({', '.join(sizes)})" if sizes else options


def with_options(sentence: str) -> str:
    """Return a sentence with the settings in it as the command line takes them."""
    return _SETTING.sub(lambda found: _option(found[1], found[2]), sentence)


def _option(name: str, value: str) -> str:
    if name in _SWITCHES:
        return _SWITCHES[name][value != "true"]
    return f"{_OPTIONS[name]} {value}" if name in _OPTIONS else f"{name}={value}"
