"""Copies between a vLLM engine's tensors on a GPU and the pool in memory of the host, with torch's own streams."""

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from kvlease.integrations.vllm.offload.copies import (
    HEAD_BYTES,
    PageTensor,
    RowLayout,
    Rows,
    StreamCopies,
    moves_of,
    pairs_of,
)
from kvlease.integrations.vllm.offload.pinning import Pinning
from kvlease.memory.cuda import checked, load_driver

NUM_BLOCKS, PAGE_BYTES, NUM_ROWS = 64, 32 << 10, 32
LAYOUT = RowLayout.of_pages(
    [[(0, PAGE_BYTES), (1, PAGE_BYTES)]], bytes_per_block=2 * PAGE_BYTES, blocks_per_chunk=2
)
STRIDE_BYTES = HEAD_BYTES + 2 * 2 * PAGE_BYTES


def submit(sources: torch.Tensor, targets: torch.Tensor, num_bytes: torch.Tensor) -> None:
    """Copy on the current stream in one batch, as vLLM's operation does."""
    driver, stream = load_driver(), torch.cuda.current_stream().cuda_stream
    attributes = driver.CUmemcpyAttributes()
    attributes.srcAccessOrder = driver.CUmemcpySrcAccessOrder.CU_MEMCPY_SRC_ACCESS_ORDER_STREAM
    columns = ([driver.CUdeviceptr(one) for one in each.tolist()] for each in (targets, sources))
    batch = driver.cuMemcpyBatchAsync(
        *columns, num_bytes.tolist(), len(num_bytes), [attributes], [0], 1, driver.CUstream(stream)
    )
    checked("cuMemcpyBatchAsync", batch)


@pytest.fixture
def copies(device: str) -> Iterator[StreamCopies]:
    """Give copies of a GPU that torch can use."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA, or no GPU")
    there = torch.device(device)
    copies = StreamCopies(torch, there, submit, Pinning(torch, there))
    yield copies
    copies.close()


def new_rows() -> Rows:
    """Return a new pool, which begins off a page's boundary."""
    region = np.zeros(NUM_ROWS * STRIDE_BYTES + HEAD_BYTES, np.uint8)[HEAD_BYTES:]
    return Rows(region, NUM_ROWS, STRIDE_BYTES)


def described(tensors: list[torch.Tensor]) -> list[PageTensor]:
    """Return what the copies know of the tensors."""
    return [PageTensor(address=one.data_ptr(), block_stride_bytes=one.stride(0)) for one in tensors]


def until(is_so: Any) -> None:
    """Wait until something is so."""
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_pages_that_are_still_computed_are_stored_whole_and_loaded_elsewhere(
    copies: StreamCopies,
) -> None:
    """A store waits for the kernels that write its pages; a load brings them to other blocks and changes no others."""
    rows, ids = new_rows(), np.arange(16, dtype=np.int32)
    until(lambda: copies.takes(rows))
    tensors = [torch.zeros(NUM_BLOCKS, PAGE_BYTES, dtype=torch.uint8, device="cuda") for _ in "ab"]
    wide = torch.rand(4096, 4096, device="cuda")
    for _ in range(20):
        wide = torch.nn.functional.normalize(wide @ wide)
    for number, tensor in enumerate(tensors):
        tensor[:16] = torch.arange(16, device="cuda", dtype=torch.uint8)[:, None] + 1 + 100 * number

    stored = moves_of(LAYOUT, ids, [16], [0], 8)
    copies.store(1, pairs_of(rows, np.arange(8, dtype=np.int32), described(tensors), stored))
    until(lambda: copies.finished() == [1])
    loaded = moves_of(LAYOUT, ids + 32, [16], [0], 8)
    pairs = pairs_of(rows, np.arange(8, dtype=np.int32), described(tensors), loaded)
    copies.load(2, [(theirs, ours, size) for ours, theirs, size in pairs])
    copies.wait({2})

    assert copies.finished() == [2]
    for number, tensor in enumerate(tensors):
        found = tensor.cpu().numpy()
        values = np.arange(16)[:, None] + 1 + 100 * number
        assert (found[:16] == values).all()
        assert (found[32:48] == values).all()
        assert not found[16:32].any()
        assert not found[48:].any()


def test_another_pool_is_pinned_in_place_of_the_first(copies: StreamCopies) -> None:
    """When the daemon's memory is another, the new pool is pinned and the old one is not any more."""
    first, second = new_rows(), new_rows()
    until(lambda: copies.takes(first))
    until(lambda: copies.takes(second))
    copies.close()

    runtime: Any = torch.cuda
    result = runtime.cudart().cudaHostRegister(first.address, len(first.region), 0)

    assert int(result) == 0
    assert int(runtime.cudart().cudaHostUnregister(first.address)) == 0
