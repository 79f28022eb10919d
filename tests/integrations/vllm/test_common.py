"""What the connectors share, tested in the reference engine's own Python: hooks, names, statistics, identities."""

import json
from typing import Any, Final

import pytest

from tests.integrations.vllm.births import ran
from tests.integrations.vllm.jobs import Job

pytestmark = pytest.mark.vllm

HOOKS: Final = """
from kvlease.integrations.vllm import hooks
for mode in hooks.MODES:
    hooks.require_hooks(mode)
say({mode: hooks.missing_hooks(mode) for mode in hooks.MODES})
"""

MODULE_PATH: Final = """
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
name = "KVLeaseOffloadingConnector"
had_plugin = name in KVConnectorFactory._registry
KVConnectorFactory.get_connector_class(
    KVTransferConfig(kv_connector=name, kv_connector_module_path="kvlease.integrations.vllm", kv_role="kv_both"))
try:
    rebuilt = sorted(MultiConnector.build_kv_connector_stats({name: {}}).data)
except ValueError as error:
    rebuilt = str(error)
say([had_plugin, rebuilt])
"""

NAMES: Final = """
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from kvlease.integrations.vllm.plugin import register
register()
register()
names = sorted(name for name in KVConnectorFactory._registry if name.startswith("KVLease"))
say(names)
"""

STEPS: Final = """
import pickle
from kvlease.integrations.vllm.steps import StepsBack
ahead, behind = (pickle.loads(pickle.dumps(StepsBack(step))) for step in (7, 5))
say([ahead.aggregate(behind).step_id, behind.aggregate(ahead).step_id])
"""

IDENTITY: Final = """
import copy
from vllm.engine.arg_utils import EngineArgs
from vllm.config import KVTransferConfig
from transformers import LlamaConfig
from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity, magazine_name
small = dict(vocab_size=64, hidden_size=64, intermediate_size=64, num_hidden_layers=1,
             num_attention_heads=2, num_key_value_heads=2, head_dim=32)
LlamaConfig(**small, architectures=["LlamaForCausalLM"]).save_pretrained(MODEL)

def made(**changes):
    transfer = KVTransferConfig(kv_connector="OffloadingConnector", kv_role="kv_both")
    arguments = {"model": MODEL, "dtype": "float32", "skip_tokenizer_init": True, "kv_transfer_config": transfer,
                 "load_format": "dummy", **changes}
    return EngineArgs(**arguments).create_engine_config()

def text(config):
    return Identity.of(config).model_digest

one = made()
copied = copy.copy(one)
two = made()
other = Identity.of(made(dtype="bfloat16", prefix_caching_hash_algo="sha256_cbor", seed=7, block_size=64))
say({
    "equal": text(one) == text(copied) == text(two),
    "magazines": [magazine_name(one, "m") == magazine_name(copied, "m"), magazine_name(one, "m") == magazine_name(two, "m")],
    "differing": [said.partition(" ")[0] for said in Identity.of(one).differing(other.model_digest)],
    "known": [name for name, value in zip(FIELDS, Identity.of(one).values) if value not in ("", "None", "unknown")],
})
"""  # noqa: E501 - a script

ROLES: Final = """
from kvlease.errors import InvalidError
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
refused = []
for name in ("KVLeaseOffloadingConnector", "KVLeaseOwnedConnector", "KVLeaseSharedConnector"):
    for role in KVConnectorRole:
        transfer = KVTransferConfig(kv_connector=name, kv_connector_module_path="kvlease.integrations.vllm",
                                    kv_role="kv_producer")
        try:
            KVConnectorFactory.create_connector(made(kv_transfer_config=transfer), role, None)
        except InvalidError as error:
            refused.append(error.resource)
say(refused)
"""

OUTER: Final = """
from vllm.config import set_current_vllm_config
said = []
for name in ("KVLeaseOffloadingConnector", "KVLeaseOwnedConnector", "KVLeaseSharedConnector"):
    child = {"kv_connector": name, "kv_connector_module_path": "kvlease.integrations.vllm", "kv_role": "kv_both"}
    for own in ({"kv_role": "kv_producer", "kv_load_failure_policy": "recompute"}, {"kv_role": "kv_both"}):
        extra = {"connectors": [child]}
        transfer = KVTransferConfig(kv_connector="MultiConnector", kv_connector_extra_config=extra, **own)
        config = made(kv_transfer_config=transfer)
        with set_current_vllm_config(config):
            try:
                KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, None)
                said.append("")
            except InvalidError as error:
                said.append(error.resource)
say(said)
"""


EVENTS: Final = """
from vllm import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash, maybe_convert_block_hash
from vllm.v1.request import Request
from kvlease.integrations.vllm.fence import Fence
from kvlease.integrations.vllm.shared.magazine import Books
from kvlease.integrations.vllm.shared.orders import Order, Wish
from kvlease.integrations.vllm.shared.pool import SharedBlockPool

init_none_hash(sha256)
request = Request("r", list(range(64)), SamplingParams(max_tokens=1), None,
                  block_hasher=get_request_block_hasher(16, sha256))
names = [one + bytes(4) for one in request.block_hashes]
shown = [maybe_convert_block_hash(one) for one in request.block_hashes]
tokens = {name: 16 * (at + 1) for at, name in enumerate(names)}
pool = BlockPool(8, enable_caching=True, hash_block_size=16, enable_kv_cache_events=True)
books = Books(8, Fence())
SharedBlockPool.share(pool, books, lambda: None)
order = Order(publish=(), retract=(), drop=(), wish=Wish(names=names[1:]), forgotten=())
held = books.settle(order, published=[], retracted=[], held=[2, 3, 4], taken=[1]).held

def told():
    return [shown.index(one) for event in pool.take_events() for one in event.block_hashes]

def removed(block_ids):
    pool.forget(block_ids)
    return told()

pool.cache_full_blocks(request, pool.get_new_blocks(1), 0, 1, 16, 0)
pool.hold(held, tokens)
steps = {"written": told()}
pool.emit_cached_block_events(request, 3, 16, 0)
steps |= {"found": told(), "left": removed([1, 2, 3]), "left again": removed([1, 2]), "never used": removed([4])}
pool.hold(held[:1], tokens)
pool.emit_cached_block_events(request, 2, 16, 0)
told()
pool.evict_blocks({2})
steps["evicted"] = told()
pool.hold(held[:1], tokens)
steps["held anew"] = removed([2])
say(steps)
"""

TAKEN: Final = """
from kvlease.integrations.vllm.owned import pool as pools
from vllm.v1.core.block_pool import BlockPool

class Silent:
    num_private_free = 0
    is_on = True
    def watch(self, is_free, next_free): pass
    def require(self, num_blocks): return False

pools._WAIT_SECONDS = 0.0
pool = BlockPool(8, enable_caching=True, hash_block_size=16)
pools.OwnedPool.observe(pool, Silent(), lambda: None)
try:
    pool.get_new_blocks(2)
except ValueError as error:
    say([str(error), pool.free_block_queue.num_free_blocks])
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Run all scripts in one process of the reference engine's Python; return what each prints."""
    folder = tmp_path_factory.mktemp("common")
    script = f"import json\nMODEL = {str(folder / 'model')!r}\n"
    for name in (
        "HOOKS",
        "MODULE_PATH",
        "NAMES",
        "STEPS",
        "IDENTITY",
        "ROLES",
        "OUTER",
        "EVENTS",
        "TAKEN",
    ):
        script += f"def say(what):\n    print('SAID', json.dumps([{name!r}, what]))\n"
        script += globals()[name]
    path = folder / "said.py"
    path.write_text(script)
    environment = Job().environ()
    environment.pop("PYTHONHASHSEED", None)
    run = ran(path, environment=environment)
    assert run.returncode == 0, run.stderr[-4_000:]
    lines = [line for line in run.stdout.splitlines() if line.startswith("SAID ")]
    return dict(json.loads(line.removeprefix("SAID ")) for line in lines)


def test_supported_release_has_every_hook(said: dict[str, Any]) -> None:
    """The engine's release that these tests run is supported."""
    assert said["HOOKS"] == {"offload": [], "owned": [], "shared": []}


def test_connector_found_by_its_module_path_is_known_by_name(said: dict[str, Any]) -> None:
    """Without the entry point, as VLLM_PLUGINS may leave it out, MultiConnector still rebuilds its statistics."""
    assert said["MODULE_PATH"] == [False, ["KVLeaseOffloadingConnector"]]


def test_plugin_registers_each_connector_once(said: dict[str, Any]) -> None:
    """Loading the entry point again, as engines do, changes nothing."""
    assert said["NAMES"] == [
        "KVLeaseOffloadingConnector",
        "KVLeaseOwnedConnector",
        "KVLeaseSharedConnector",
    ]


def test_step_is_back_when_all_ranks_are(said: dict[str, Any]) -> None:
    """A step counts as back when the slowest rank has come back from it."""
    assert said["STEPS"] == [5, 5]


def test_identity_is_read_from_real_configurations(said: dict[str, Any]) -> None:
    """Engines of equal arguments have one identity and two magazines; arguments that matter change it."""
    found = said["IDENTITY"]

    assert found["equal"]
    assert found["magazines"] == [True, False]
    assert found["differing"] == ["load_format", "dtype", "block_tokens", "hash_algorithm"]
    assert set(found["known"]) >= {
        "format", "model", "weights", "load_format", "dtype", "kv_dtype", "block_tokens", "hash_algorithm", "hash_seed",
        "ranks", "device",
    }  # fmt: skip


def test_connectors_of_an_engine_that_only_produces_are_refused(said: dict[str, Any]) -> None:
    """Each connector refuses `kv_producer` at the start, in the scheduler and in ranks."""
    assert said["ROLES"] == ["kv_role"] * 6


def test_ranks_refuse_what_a_connector_above_would_do(said: dict[str, Any]) -> None:
    """Each connector refuses an outer `kv_producer`, and one that loads an outer policy that fails requests."""
    assert said["OUTER"] == ["kv_role", "kv_load_failure_policy", "kv_role", "", "kv_role", ""]


def test_events_tell_of_the_leaving_of_what_they_told_is_there(said: dict[str, Any]) -> None:
    """The leaving of every block that this engine wrote or found is told once, and of no other block."""
    assert said["EVENTS"] == {
        "written": [0],
        "found": [0, 1, 2],
        "left": [0, 1, 2],
        "left again": [],
        "never used": [],
        "evicted": [1],
        "held anew": [],
    }


def test_blocks_that_nobody_asked_for_are_not_waited_for_for_ever(said: dict[str, Any]) -> None:
    """A demand for more blocks than may be overwritten fails as in vLLM's own pool, and takes nothing."""
    message, num_free = said["TAKEN"]

    assert message.startswith("Cannot get 2 free blocks from the pool: 0 may be overwritten")
    assert num_free == 7
