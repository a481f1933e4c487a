"""A background save copies each byte of its rank's state once, into the memory of earlier saves."""

from contextlib import closing
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, make_run, take_steps
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dist_amp.checkpoint.background import Staging
from dist_amp.checkpoint.format import Reader, checkpoint_folder
from dist_amp.world import local

CPU = torch.device("cpu")
LAYOUTS = [(2, "ddp"), (2, "fsdp"), (4, "hsdp")]


def words(folder, strategy, *more):
    words = ["--run.dir", folder, "--parallel.strategy", strategy, "--checkpoint.keep", 99]
    return [*words, "--train.micro_batch_size", 2, "--use_amp", "false", *more]


class Counted(TorchDispatchMode):
    """Counts the bytes that are copied, by any operation that makes or fills a copy."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        name = function.overloadpacket._qualified_op_name
        if name in ("aten::copy_", "aten::clone", "aten::_to_copy"):
            self.bytes += local(result).nbytes
        return result


def bytes_copied_and_written(world, folder, strategy):
    """The bytes that all ranks copy when they stage their state, and those of the checkpoint."""
    run = make_run(world, Tiny(), *words(folder, strategy))
    take_steps(run, 2)
    counted = Counted()
    stage = Staging.copy

    def counting(staging, state):
        with counted:
            return stage(staging, state)

    with patch.object(Staging, "copy", counting), closing(run.saver) as saver:
        saver.save(wait=False)
    copied = sum(world.gather(counted.bytes))
    metadata = Reader(checkpoint_folder(run.folder, run.step)).read_metadata().state_dict_metadata
    tensors = [entry for entry in metadata.values() if isinstance(entry, TensorStorageMetadata)]
    return copied, sum(entry.size.numel() * entry.properties.dtype.itemsize for entry in tensors)


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_each_byte_of_a_checkpoint_is_copied_once_by_one_rank(tmp_path, ranks, strategy):
    for copied, written in on_ranks(ranks, bytes_copied_and_written, tmp_path, strategy):
        assert copied == written > 0


def memory_over_saves(world, folder):
    """Where saves copy to: before an applied step, after one, and after another."""
    more = ("--data.shuffle", "false", "--optim.fused", "false")
    run = make_run(world, Overflow(bad=(0,)), *words(folder, "fsdp", *more))
    saver, addresses = run.saver, []
    for _ in range(3):
        take_steps(run, 1)
        with closing(saver):
            saver.save(wait=False)
        kept = saver._staging._kept.values()
        addresses.append({tensor.data_ptr() for tensor in kept if tensor.numel()})
    return addresses


def test_a_save_fills_the_memory_of_the_save_before_and_grows_when_moments_appear(tmp_path):
    for without, first, second in on_ranks(2, memory_over_saves, tmp_path):
        assert first == second
        assert len(first) > len(without)


class Scaled(torch.Tensor):
    """A tensor made of two others, as torchao's 8-bit moments are; torch can't copy it."""

    @staticmethod
    def __new__(cls, codes, scale):
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes, scale):
        self.codes, self.scale = codes, scale

    def __tensor_flatten__(self):
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(**inner)

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        raise NotImplementedError(f"{function} of {cls}")


def strange_state():
    shared = torch.randn(6)
    return {
        "channels last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "with gaps": torch.randn(8, 8)[::2, ::2],
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "sparse": torch.eye(3).to_sparse(),
        "whole": shared,
        "part": shared[2:4],
        "nested": {"count": 7, "list": [1, 2], "both": [shared, (torch.ones(2), 5)]},
    }


def assert_same(one, other):
    for a, b in zip(tree_leaves(one), tree_leaves(other), strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.to_dense(), b.to_dense())
            assert a.dtype == b.dtype
        else:
            assert a == b


def test_what_is_staged_equals_the_state_and_shares_nothing_with_it():
    state, staging = strange_state(), Staging(CPU)
    before = staging.copy(state)
    assert_same(state, before)
    assert before["channels last"].stride() == state["channels last"].stride()
    state["nested"]["list"].append(3)
    state["whole"].add_(1)
    assert before["nested"]["list"] == [1, 2]
    assert torch.equal(before["whole"] + 1, state["whole"])
    # torch's writer clones a tensor whose storage holds more than it.
    part = before["part"]
    assert part.untyped_storage().size() == part.nbytes


def test_a_tensor_made_of_others_is_staged_though_torch_can_not_copy_it():
    state = {"moment": Scaled(torch.arange(4, dtype=torch.uint8), torch.tensor(0.5))}
    staged = Staging(CPU).copy(state)["moment"]
    state["moment"].codes.zero_()
    assert type(staged) is Scaled
    assert (staged.codes.tolist(), staged.scale.item()) == ([0, 1, 2, 3], 0.5)


# --- plans


def plans_of_two_saves(world, folder):
    """Which saves, after each of three steps, used the plan of the one before."""
    run = make_run(world, Tiny(), *words(folder, "fsdp"))
    planner = run.saver._planner
    create_local_plan, reused = planner.create_local_plan, []

    def watched():
        plan = create_local_plan()
        reused.append(not plan.usable)
        return plan

    planner.create_local_plan = watched
    for step in range(3):
        take_steps(run, 1)
        if step == 2 and world.rank == 1:
            run.optimizer.state[run.parallel.parameters[0]]["note"] = "new"
        with closing(run.saver):
            run.saver.save(wait=False)
    return reused


def test_a_save_of_the_same_structure_is_not_planned_again(tmp_path):
    first, second = on_ranks(2, plans_of_two_saves, tmp_path)
    assert first == [False, True, True]
    assert second == [False, True, False], "planned anew where it changed"
