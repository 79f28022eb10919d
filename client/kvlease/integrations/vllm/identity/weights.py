"""Own what tells the weights of two engines apart: names, sizes, times and samples of files, and all configurations."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from blake3 import blake3

_ENDINGS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".tensors")
_CONFIGS: Final = frozenset(
    {
        "config.json",
        "params.json",
        "hf_quant_config.json",
        "quant_config.json",
        "quantization_config.json",
        "quantize_config.json",
        "torchao_config.json",
        "sparse_attention_config.json",
        "preprocessor_config.json",
        "processor_config.json",
        "video_preprocessor_config.json",
    }
)
"""Files that say what the weights are and compute, or what is made of an image before; code of the model does, too."""
_CONTENT_NAME: Final = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
"""How a store that names files by a digest of their content calls them."""
_NUM_SAMPLES: Final = 5
"""Of each file: a model has hundreds, perhaps behind a network, and other weights differ nearly everywhere."""
_SAMPLE_BYTES: Final = 4096


def digest_of_weights(model: str) -> str:
    """Return a digest of a model's weight files, its own code and what configures both; empty if `model` is no path.

    A link into a store that names files by content counts by that name alone. Any other file counts by its size, the
    time of its last change and samples of its bytes, so that other weights are told apart even if a copy kept the time.

    Raises:
        OSError: the files cannot be read.
    """
    path = Path(model)
    if path.is_file():
        files = [path]
    elif path.is_dir():
        files = sorted(path.iterdir())
    else:
        return ""
    digest = blake3()
    for told in filter(None, map(_told, files)):
        digest.update(len(told).to_bytes(8, "little") + told)
    return digest.hexdigest()


def _told(path: Path) -> bytes:
    """Return what a file tells of the weights; empty if it tells nothing."""
    if path.name in _CONFIGS or path.suffix == ".py":
        return path.name.encode() + path.read_bytes()
    if path.suffix not in _ENDINGS or not path.is_file():
        return b""
    stored = path.resolve().name
    if path.is_symlink() and _CONTENT_NAME.fullmatch(stored):
        return f"{path.name} {stored}".encode()
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns} {_sampled(path, stat.st_size)}".encode()


def _sampled(path: Path, num_bytes: int) -> str:
    """Return a digest of some pieces of a file, spread from its first byte to its last."""
    digest = blake3()
    with path.open("rb", buffering=0) as file:
        for start in _starts(num_bytes):
            file.seek(start)
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _starts(num_bytes: int) -> Iterator[int]:
    last = max(0, num_bytes - _SAMPLE_BYTES)
    return (last * number // (_NUM_SAMPLES - 1) for number in range(_NUM_SAMPLES))
