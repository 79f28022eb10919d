"""Own which layers each pipeline stage keeps."""

import re
from collections.abc import Sequence
from typing import Final

from kvlease.errors import InvalidError
from kvlease.geometry import floor_div
from kvlease.spec import LayerSpec

_INDEX: Final = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


def pipeline_stages(
    layers: Sequence[LayerSpec], pipeline_ranks: int, *, num_layers: int | None = None
) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return what each stage keeps: equally many layers, and those left over go one each to stages before the last.

    The first number in a layer's name is its place in the model, so all that one layer of the model keeps stays
    together. A name without a number is a layer of its own. `num_layers` counts the model's layers, because some may
    keep nothing; with None, the highest place gives their number.

    Raises:
        InvalidError: there are more stages than layers.
    """
    places = _places(layers)
    known = max(places, default=-1) + 1
    total = max(known, num_layers or 0)
    if not 0 < pipeline_ranks <= max(1, total):
        message = (
            f"{total} layers cannot be shared by {pipeline_ranks} pipeline stages; "
            f"set pipeline_ranks {f'from 1 to {total}' if total > 1 else 'to 1'}"
        )
        raise InvalidError(
            message,
            resource="pipeline_ranks",
            rule="more_stages_than_layers",
            need=pipeline_ranks,
            limit=total,
        )
    stages = []
    start = 0
    for count in _counts(total, pipeline_ranks):
        end = start + count
        stages.append(
            tuple(
                layer for layer, place in zip(layers, places, strict=True) if start <= place < end
            )
        )
        start = end
    return tuple(stages)


def _places(layers: Sequence[LayerSpec]) -> list[int]:
    """Return each layer's place in the model."""
    found = [_INDEX.search(layer.name) for layer in layers]
    if not all(found):
        return list(range(len(layers)))
    return [int(match[1]) for match in found if match]


def _counts(total: int, stages: int) -> list[int]:
    """Return the layers of each stage; those left over go one each to the stages before the last, backwards."""
    each = floor_div(total, stages)
    counts = [each] * stages
    for stage in range(total - each * stages):
        counts[max(0, stages - 2 - stage)] += 1
    return counts
