"""Micro-batches of any structure are copied to a GPU while the step before computes."""

from collections import UserDict
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from unittest.mock import MagicMock, call

import pytest
import torch
from tiny import Tiny, make_run
from torch.nn.utils.rnn import pack_sequence

from dist_amp.loading import nested
from dist_amp.loading.nested import tensors, to_device
from dist_amp.world import World

# Stands in for a GPU: a device without values, to which copies are made as to any other.
META = torch.device("meta")


def test_kernels_wait_for_their_steps_copies_and_copies_for_the_step_before_the_last(monkeypatch):
    gpu, events = MagicMock(), count()

    def copied(batch, device):
        gpu.copy()
        return to_device(batch, device)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: gpu.side)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: gpu.compute)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: getattr(gpu, f"event{next(events)}"))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: gpu.keep_for(stream))
    monkeypatch.setattr(nested, "to_device", copied)
    copies = nested.CopyStream(META)
    expected = []
    for step in range(3):
        (moved,) = copies([{"n": step, "x": torch.zeros(2), "nested": [torch.zeros(1)]}])
        assert moved["x"].device == moved["nested"][0].device == META
        gpu.kernels()
        if step:
            expected += [getattr(call, f"event{step - 1}").synchronize()]
        expected += [getattr(call, f"event{step}").record(gpu.compute), call.side.__enter__()]
        expected += [call.copy(), call.side.__exit__(None, None, None)]
        expected += [call.compute.wait_stream(gpu.side), *[call.keep_for(gpu.compute)] * 2]
        expected += [call.kernels()]
    assert gpu.mock_calls == expected


@pytest.mark.gpu
def test_the_batches_of_loader_workers_arrive_on_a_gpu():
    gpu = replace(World(), device=torch.device("cuda", 0))
    run, expected = (make_run(world, Tiny(), "--data.workers", 2) for world in (gpu, World()))
    for _ in range(6):
        (on_gpu,), (on_cpu,) = next(run.data), next(expected.data)
        assert on_gpu["x"].is_cuda
        assert torch.equal(on_gpu["x"].cpu(), on_cpu["x"])
    run.data.close()
    expected.data.close()


class Encoding(UserDict):
    """As transformers' BatchEncoding."""

    def to(self, device, non_blocking):
        self.data = {name: value.to(device) for name, value in self.data.items()}


class Movable:
    """As a graph library's batch, with a `to` that knows no non_blocking."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Movable(self.x.to(device))


def test_a_batch_of_any_structure_is_moved_and_keeps_its_classes():
    x = torch.zeros(2)
    before = {
        "tuple": (x, [x, 3]),
        "encoding": Encoding(input_ids=x),
        "movable": Movable(x),
        "packed": pack_sequence([torch.ones(3), torch.ones(2)]),
        "opaque": SimpleNamespace(text="no tensor"),
    }
    assert len(list(tensors(before))) == 6
    moved = to_device(before, META)
    assert list(map(type, moved.values())) == list(map(type, before.values()))
    (elsewhere,) = [tensor for tensor in tensors(moved) if tensor.device != META]
    assert elsewhere is moved["packed"].batch_sizes, "torch wants it on the CPU"


def test_a_gpu_copies_from_pinned_memory_whoever_read_the_batch(monkeypatch):
    class Pinned:
        def to(self, device, non_blocking):
            return device, non_blocking

    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned())
    gpu = torch.device("cuda")
    batch = {"x": torch.ones(2), "y": [torch.zeros(1)]}
    assert to_device(batch, gpu) == {"x": (gpu, True), "y": [(gpu, True)]}
