"""Prove that `kvlease plan --vllm` prints the placement of `vllm serve` with the same arguments."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvlease.cli.plan.vllm import table
from tests.integrations.vllm.births import ran
from tests.integrations.vllm.engine import Job, living
from tests.integrations.vllm.models import POSITIONS_MAX, path_of

pytestmark = pytest.mark.vllm

PROGRAM = str(Path(sys.executable).with_name("kvlease"))
CASES = [
    pytest.param(
        "llama", "--kv-cache-memory-bytes 200M --port 8001 --enforce-eager", id="its defaults"
    ),
    pytest.param(
        "llama",
        "--dtype float32 --kv-cache-memory-bytes 3300k --block-size 32 --max_model_len=auto",
        id="a length that fits",
    ),
    pytest.param(
        "hybrid",
        "--dtype bfloat16 --kv-cache-memory-bytes 64M --num-gpu-blocks-override 700 --max-model-len 2K --block-size 64"
        " --kv-cache-dtype auto --max-num-batched-tokens 512",
        id="so many blocks",
    ),
    pytest.param(
        "hybrid",
        "--dtype float --kv-cache-memory-bytes 64M --max-model-len 4k --no-enable-prefix-caching"
        " --disable-hybrid-kv-cache-manager --seed 1 --gpu-memory-utilization 0.5",
        id="one group",
    ),
    pytest.param(
        "chunked",
        "--dtype float32 --kv-cache-memory-bytes 32M --max-model-len 2K --block-size 32 --max-num-batched-tokens 512",
        id="chunks",
    ),
]


@pytest.mark.parametrize(("model", "line"), CASES)
def test_plan_of_a_command_line_is_the_engines(model: str, line: str, tmp_path: Path) -> None:
    """A plan of vLLM's arguments has the blocks, groups, offsets and strides of the engine that they start."""
    arguments = [str(path_of(model)), *line.split()]
    plan = planned(arguments)
    # Compiling graphs takes minutes, and does not change where bytes lie.
    served = [*arguments, *([] if "--enforce-eager" in arguments else ["--enforce-eager"])]
    with living(Job(arguments=served), tmp_path) as life:
        found = life.placement()

    assert plan["num_blocks"] == found["num_blocks"]
    assert plan["layout"] == found["layout"]
    assert plan["longest_request_tokens"] == found["longest"]
    assert plan["hash_block_tokens"] == found["hash_block_tokens"]
    assert plan["hit_alignment_tokens"] == found["hit_alignment_tokens"]
    groups = [[one["tokens_per_block"], indexes(one["layer_names"])] for one in plan["groups"]]
    assert groups == [[tokens, indexes(names)] for tokens, names in found["groups"]]
    rank = plan["ranks"][0]
    runs = [
        [
            rank["device_bytes"],
            run["offset_bytes"],
            run["layer_stride_bytes"],
            run["block_stride_bytes"],
            indexes(run["layer_names"]),
        ]
        for run in rank["tensors"]
    ]
    assert runs == [[*numbers, indexes(names)] for *numbers, names in found["runs"]]


def planned(arguments: list[str]) -> dict[str, Any]:
    """Return the plan that the command line prints."""
    command = [PROGRAM, "plan", "--platform", "cpu", "--json", "--vllm", "serve", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    plan: dict[str, Any] = json.loads(run.stdout)["plan"]
    return plan


def indexes(names: list[str]) -> list[int]:
    """Return the indexes of layers, the only part that the names share."""
    return [int(re.findall(r"\d+", name)[0]) for name in names]


_ASK_LIMITS = """
import json
import sys

from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

def is_taken(tokens):
    try:
        EngineArgs(model=sys.argv[1], max_model_len=tokens).create_model_config()
    except ValueError as error:
        assert "VLLM_ALLOW_LONG_MAX_MODEL_LEN" in str(error), error
        return False
    return True

sizes = [one.base for one in CPUAttentionBackend.get_supported_kernel_block_sizes()]
print(json.dumps([sizes, [is_taken(int(tokens)) for tokens in sys.argv[2:]]]))
"""


def test_engine_refuses_what_is_not_planned(tmp_path: Path) -> None:
    """The plan has vLLM's limits on blocks on CPUs and on the longest request."""
    script = tmp_path / "ask_limits.py"
    script.write_text(_ASK_LIMITS)
    model, lengths = str(path_of("llama")), [POSITIONS_MAX, POSITIONS_MAX + 1]
    told = ran(script, model, *map(str, lengths), environment=Job().environ())
    assert told.returncode == 0, told.stderr
    multiples, taken = json.loads(told.stdout.splitlines()[-1])

    (multiple,) = multiples
    blocks = [multiple, multiple + multiple // 2]
    plans = [is_planned(model, "--block-size", tokens) for tokens in blocks]
    lengths_planned = [is_planned(model, "--max-model-len", tokens) for tokens in lengths]

    assert plans == [True, False]
    assert lengths_planned == taken == [True, False]


def is_planned(model: str, option: str, tokens: int) -> bool:
    """Tell whether a plan is printed for an engine with much memory on a CPU."""
    words = ["--platform", "cpu", "--vllm", model, "--kv-cache-memory-bytes", "8G"]
    command = [PROGRAM, "plan", *words, option, str(tokens)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0 or option in run.stderr, run.stderr
    return run.returncode == 0


_LIST_ARGUMENTS = """
import json
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

found = [
    (action.option_strings, action.nargs, type(action).__name__)
    for action in make_arg_parser(FlexibleArgumentParser())._actions
]
print(json.dumps(found))
"""


def test_table_has_every_argument_of_the_engine(tmp_path: Path) -> None:
    """The table has each argument of `vllm serve` once, with as many values as it takes."""
    script = tmp_path / "list_arguments.py"
    script.write_text(_LIST_ARGUMENTS)
    told = ran(script, environment=Job().environ())
    assert told.returncode == 0, told.stderr
    lists: dict[str, set[str]] = {"0": set(), "1": set(), "+": set()}
    aliases = {}
    for names, num_values, kind in json.loads(told.stdout.splitlines()[-1]):
        plain = [name for name in names if name.startswith("--") and name[:5] != "--no-"]
        if not plain or plain[0] == "--help":
            continue
        shape = (
            "+" if num_values == "+" else "0" if "StoreTrue" in kind or "Optional" in kind else "1"
        )
        lists[shape].add(plain[0][2:])
        short = [name for name in names if not name.startswith("--")]
        aliases.update(dict.fromkeys([*short, *plain[1:]], plain[0][2:]))

    assert lists["0"] - table.REFUSED == table.SWITCHES | table.IGNORED_SWITCHES
    assert lists["1"] - table.REFUSED == table.VALUES | table.IGNORED_VALUES
    assert lists["+"] - table.REFUSED == table.IGNORED_LISTS
    assert set.union(*lists.values()) >= table.REFUSED
    assert aliases == table.ALIASES
