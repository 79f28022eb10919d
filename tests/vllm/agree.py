"""Check that the connectors' planning agrees with the reference's plans of random configurations, in each number.

Runs with .venv-vllm's interpreter: reads vectors from standard input and writes the differences of each.
"""

import copy
import json
import logging
import sys
from types import SimpleNamespace
from typing import Any

from record import config_of
from reference_words import spec_of

from kvlease.errors import KVLeaseError
from kvlease.integrations.vllm.planning import agreement, plan_inputs
from kvleased.planning import plan
from vllm.v1.core import kv_cache_utils as planner


def answer(given: dict[str, Any]) -> dict[str, Any]:
    """Return the answer about one configuration."""
    config = config_of(given["config"])
    workers = given["workers"]
    maps = [
        {
            name: spec_of(given["specs"][spec])
            for name, spec in workers[worker.get("layers_same_as", index)]["layers"]
        }
        for index, worker in enumerate(workers)
    ]
    try:
        found = planner.get_kv_cache_configs(
            config, copy.deepcopy(maps), [worker["available_memory_bytes"] for worker in workers]
        )
        scheduler = planner.generate_scheduler_kv_cache_config(found)
        config.cache_config.block_size = min(
            group.kv_cache_spec.block_size for group in scheduler.kv_cache_groups
        )
        tokens, hashed = planner.resolve_kv_cache_block_sizes(scheduler, config)
        hit = planner.resolve_cache_hit_alignment_tokens(scheduler, config, tokens, hashed)
    except Exception as error:  # noqa: BLE001  # what the reference refuses is another comparison's business
        return {"reference": type(error).__name__}
    for one in (*found, scheduler):
        one.hash_block_size, one.cache_hit_alignment_tokens = hashed, hit
        one.kv_cache_layout = given["config"]["kv_cache_layout"]
    _complete(config)
    return {"is_changed": _is_changed(maps, found), **_compared(config, found, scheduler)}


def _is_changed(maps: list[Any], found: list[Any]) -> bool:
    """Tell whether planning gave a layer another kind, block or page than its model did."""
    given = {name: spec for one in maps for name, spec in one.items()}
    for group in (group for one in found for group in one.kv_cache_groups):
        by_layer = getattr(group.kv_cache_spec, "kv_cache_specs", {})
        for name in group.layer_names:
            now, before = by_layer.get(name, group.kv_cache_spec), given[name]
            if type(now) is not type(before) or now.block_size != before.block_size:
                return True
            if now.page_size_bytes != before.page_size_bytes:
                return True
    return False


def _complete(config: SimpleNamespace) -> None:
    """Add the parts of the whole configuration that planning alone does not read."""
    config.parallel_config.prefill_context_parallel_size = 1
    config.cache_config.kv_cache_layout = None


def _compared(config: Any, found: list[Any], scheduler: Any) -> dict[str, Any]:
    inputs = []
    for rank, one in enumerate(found):
        try:
            inputs.append(plan_inputs(config, one))
            differing = agreement(plan(inputs[-1]), one, rank=rank)
        except KVLeaseError as error:
            return {"refused": error.rule or error.code, "message": error.message}
        if differing:
            return {"differences": [str(difference) for difference in differing]}
    try:
        inputs.append(plan_inputs(config, scheduler))
    except KVLeaseError as error:
        return {"scheduler": error.rule}
    return {"agreed": all(one == inputs[0] for one in inputs)}


def main() -> None:
    """Answer all vectors of standard input."""
    logging.disable(logging.CRITICAL)
    content = json.load(sys.stdin)
    json.dump({one["id"]: answer(one["input"]) for one in content["vectors"]}, sys.stdout)


if __name__ == "__main__":
    main()
