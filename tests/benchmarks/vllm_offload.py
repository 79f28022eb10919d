"""Own the figures of offloading from vLLM: the cost of a new request's lookup, and a reload beside a memcpy loop.

`python vllm_offload.py` starts a daemon and then itself with the reference engine's Python, which has vLLM's own types.
"""

import ctypes
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any, Final

import numpy as np

ROOT: Final = Path(__file__).resolve().parents[2]
LOOKUP_BLOCKS: Final = {16: 0.2, 256: 1.0, 4096: 10.0, 8192: 20.0}
"""Blocks of a request, and the most milliseconds that its lookup and hold should take."""
RELOAD_TO_FLOOR_MAX: Final = 1.3
"""Most processor seconds of a reload, as a multiple of the loop's over the same pages."""
ROUNDS: Final = 21
LAYERS: Final = 16
BYTES_PER_PAGE: Final = 64 << 10
NUM_BLOCKS: Final = 512

_LOOP: Final = """
#include <stdint.h>
#include <string.h>
void copy_pages(const int64_t *to, const int64_t *from, long num, long bytes) {
    for (long i = 0; i < num; i++) memcpy((void *)to[i], (const void *)from[i], bytes);
}
"""


def measured(address: str) -> list[dict[str, Any]]:
    """Return all figures; runs with the reference engine's Python."""
    return [*lookups(address), reload_to_floor()]


def lookups(address: str) -> list[dict[str, Any]]:
    """Return the times of first lookups of fully cached requests, with all holds, and of the steps after them."""
    from vllm.v1.kv_offload.base import (  # noqa: PLC0415 - only there
        LookupResult,
        ReqContext,
        ScheduleEndContext,
        make_offload_key,
    )

    manager = opened(address)
    end = ScheduleEndContext((), ())
    keys = [make_offload_key(number.to_bytes(32, "big"), 0) for number in range(max(LOOKUP_BLOCKS))]

    def context(name: str, num_blocks: int) -> Any:
        made = ReqContext(req_id=name)
        for at, key in enumerate(keys[:num_blocks]):
            made.set_offload_key_position(key, 16 * (at + 1))
        return made

    storing = context("storing", len(keys))
    for first in range(0, len(keys), 512):
        manager.on_schedule_end(end)
        output = manager.prepare_store(keys[first : first + 512], storing)
        assert len(output.keys_to_store) == 512, output
        manager.complete_store(output.keys_to_store, storing)
    manager.on_request_finished(storing)
    manager.on_schedule_end(end)
    figures = []
    for num_blocks, most_ms in LOOKUP_BLOCKS.items():
        asking, ending = [], []
        for number in range(ROUNDS):
            request = context(f"{num_blocks}-{number}", num_blocks)
            manager.on_new_request(request)
            began = perf_counter()
            found = [manager.lookup(key, request) for key in keys[:num_blocks]]
            asking.append(perf_counter() - began)
            assert set(found) == {LookupResult.HIT}
            manager.prepare_load(keys[:num_blocks], request)
            manager.complete_load(keys[:num_blocks], request)
            manager.on_request_finished(request)
            began = perf_counter()
            manager.on_schedule_end(end)
            ending.append(perf_counter() - began)
        figures.append(
            {
                "figure": f"lookup and hold of {num_blocks} blocks",
                "ms": round(median(asking) * 1000, 3),
                "ms_least": round(min(asking) * 1000, 3),
                "ms_most": most_ms,
                "step_ms": round(median(ending) * 1000, 3),
            }
        )
    manager.shutdown()
    return figures


def opened(address: str) -> Any:
    """Return a manager over a pool of small rows."""
    from kvlease.integrations.vllm.identity.namespace import FIELDS, Identity  # noqa: PLC0415
    from kvlease.integrations.vllm.offload.desk import Desk  # noqa: PLC0415
    from kvlease.integrations.vllm.offload.manager import PoolManager  # noqa: PLC0415
    from kvlease.integrations.vllm.session.session import EngineSession, Terms  # noqa: PLC0415
    from kvlease.integrations.vllm.settings import ConnectorSettings  # noqa: PLC0415
    from kvlease.plan import PlanInputs  # noqa: PLC0415
    from kvlease.spec import FullAttention  # noqa: PLC0415

    layer = FullAttention(name="chunks", num_kv_heads=1, head_size=16, dtype="uint8")
    terms = Terms(
        identity=Identity(tuple("bench" for _ in FIELDS)),
        inputs=PlanInputs(layers=(layer,), tokens_per_block=16, device_blocks=20_000),
        cache="bench",
        magazine="bench",
    )
    session = EngineSession.open(ConnectorSettings(socket=address, deadline_ms=10_000), terms)
    manager = PoolManager()
    manager.open(Desk(session, manager.held), num_ranks=1, stock_rows=1024, has_events=False)
    return manager


def reload_to_floor() -> dict[str, Any]:
    """Return the processor seconds per GB of loads of scattered blocks, and those of the loop, in turns."""
    from vllm.v1.kv_offload.base import GPULoadStoreSpec  # noqa: PLC0415

    from kvlease.integrations.vllm.offload.copies import (  # noqa: PLC0415
        HEAD_BYTES,
        HostCopies,
        PageTensor,
        RowLayout,
        Rows,
        moves_of,
        pairs_of,
    )
    from kvlease.integrations.vllm.offload.specs import RowsSpec  # noqa: PLC0415
    from kvlease.integrations.vllm.offload.worker import MappedPool, PoolWorker  # noqa: PLC0415

    random = np.random.default_rng(1)
    stride_bytes = HEAD_BYTES + LAYERS * BYTES_PER_PAGE
    region = random.integers(0, 255, NUM_BLOCKS * stride_bytes, np.uint8)
    layers = [np.ones((NUM_BLOCKS, BYTES_PER_PAGE), np.uint8) for _ in range(LAYERS)]
    tensors = [
        PageTensor(address=one.ctypes.data, block_stride_bytes=BYTES_PER_PAGE) for one in layers
    ]
    layout = RowLayout.of_pages(
        [[(at, BYTES_PER_PAGE) for at in range(LAYERS)]],
        bytes_per_block=LAYERS * BYTES_PER_PAGE,
        blocks_per_chunk=1,
    )
    rows = Rows(region, NUM_BLOCKS, stride_bytes)
    worker = PoolWorker(layout, tensors, HostCopies(), verifies=True)
    worker.open(lambda: MappedPool(b"pool", rows), lambda: None)
    blocks = random.permutation(NUM_BLOCKS).astype(np.int32)
    row_ids = random.permutation(NUM_BLOCKS).astype(np.int32)
    names = random.integers(0, 255, 32 * NUM_BLOCKS, np.uint8).tobytes()
    rows.sign(row_ids, names)
    target = GPULoadStoreSpec(blocks.tolist(), [NUM_BLOCKS], [0])
    source = RowsSpec(b"pool", row_ids, names)
    pairs = pairs_of(
        rows, row_ids, tensors, moves_of(layout, blocks, [NUM_BLOCKS], [0], NUM_BLOCKS)
    )
    loop, kind = floor()

    def ours() -> None:
        worker.submit_load(1, source, target)
        (result,) = worker.get_finished()
        assert result.success
        assert not worker.failures.jobs

    def theirs() -> None:
        for pages, shares, num_bytes in pairs:
            loop(pages, shares, num_bytes)

    ours()
    seconds = [(spent(ours), spent(theirs)) for _ in range(ROUNDS)]
    gigabytes = NUM_BLOCKS * LAYERS * BYTES_PER_PAGE / 1e9
    return {
        "figure": f"reload of {NUM_BLOCKS} blocks of {LAYERS} pages of {BYTES_PER_PAGE >> 10} KiB",
        "cpu_seconds_per_gb": round(median(one for one, _ in seconds) / gigabytes, 4),
        "floor": round(median(other for _, other in seconds) / gigabytes, 4),
        "ratio": round(median(one / other for one, other in seconds), 3),
        "ratio_most": RELOAD_TO_FLOOR_MAX,
        "kind_of_floor": kind,
    }


def spent(work: Callable[[], None]) -> float:
    """Return the processor seconds of a piece of work."""
    began = process_time()
    work()
    return process_time() - began


def floor() -> tuple[Callable[[Any, Any, int], None], str]:
    """Return a memcpy loop over addresses, compiled if there is a compiler, and a note about it."""
    if (compiler := shutil.which("cc")) is None:

        def slow(targets: Any, sources: Any, num_bytes: int) -> None:
            for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
                ctypes.memmove(target, source, num_bytes)

        return slow, "a loop of ctypes.memmove, as there is no cc"
    folder = Path(tempfile.mkdtemp())
    (folder / "loop.c").write_text(_LOOP)
    subprocess.run(
        [
            compiler,
            "-O2",
            "-shared",
            "-fPIC",
            "-o",
            str(folder / "loop.so"),
            str(folder / "loop.c"),
        ],
        check=True,
    )
    copy = ctypes.CDLL(str(folder / "loop.so")).copy_pages
    copy.restype = None

    def fast(targets: Any, sources: Any, num_bytes: int) -> None:
        copy(
            ctypes.c_void_p(targets.ctypes.data),
            ctypes.c_void_p(sources.ctypes.data),
            ctypes.c_long(len(targets)),
            ctypes.c_long(num_bytes),
        )

    return fast, "a compiled loop of memcpy"


def main() -> None:
    """Measure, print a line for each figure, and fail if one is missed by far."""
    if len(sys.argv) > 1:
        for figure in measured(sys.argv[1]):
            sys.stdout.write(json.dumps(figure) + "\n")
        return
    sys.path.insert(0, str(ROOT))
    from tests.integrations.vllm.daemon import serving  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as folder, serving(Path(folder)) as daemon:
        command = [str(ROOT / ".venv-vllm" / "bin" / "python"), __file__, daemon.address]
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "client"), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=environment)


if __name__ == "__main__":
    main()
