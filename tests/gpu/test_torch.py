"""Tensors over a pool on a GPU are views of it: other processes of the cache see what torch writes."""

import pytest
import torch

from kvlease import Worker
from kvlease.views import layer_views
from tests.gpu.contents import read
from tests.gpu.test_daemon import serving, worker

__all__ = ["serving", "worker"]


def test_tensors_are_views_of_the_pool(worker: Worker) -> None:
    """A layer's keys are on the GPU where the plan says, and stay there without the worker's memory object."""
    if not torch.cuda.is_available():
        pytest.skip("this torch has no CUDA, or no GPU")
    assert worker.gpu is not None
    (layer,) = layer_views(worker.plan, worker.gpu)
    assert layer.keys is not None

    layer.keys[3].fill_(1.0)
    torch.cuda.synchronize()

    assert layer.keys.is_cuda
    block = read(worker.gpu).reshape(worker.plan.num_blocks, -1)[3].view("float32")
    assert set(block.tolist()) == {0.0, 1.0}
