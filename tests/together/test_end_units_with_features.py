"""Core as test_end_units.py tests it, with several features."""

from ranks import on_ranks
from test_end_units import BOTH, FEW, VOCABULARY, WIDTH, Task, called
from tiny import make_run, take_steps
from torch.distributed.fsdp import FSDPModule

from benchmarks.collectives import Counting


class Sizes(Counting):
    """The bytes that go into each collective of a kind, in their order."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self.collectives.copy()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        self.sizes += [one.bytes_in for one in self.collectives - before if one.kind == self.kind]
        return result


def reductions(world, task):
    """The bytes of each reduce-scatter of the second step, in order; the names of the units."""
    run = make_run(world, task, "--parallel.strategy", "fsdp", *FEW, "--train.micro_batch_size", 8)
    take_steps(run, 1)
    with Sizes("reduce_scatter") as counting:
        take_steps(run, 1)
    names = [
        name for name, part in run.parallel.module.named_modules() if isinstance(part, FSDPModule)
    ]
    return counting.sizes, names


def test_a_head_that_is_a_unit_is_reduced_before_the_blocks_and_else_after_them():
    head = 4 * (VOCABULARY * WIDTH + VOCABULARY)
    sizes, names = on_ranks(2, reductions, Task(called, BOTH))[0]
    assert sizes[0] == head
    assert names == ["", "embedding", "layers.0", "layers.1", "layers.2", "head"]
    sizes, names = on_ranks(2, reductions, Task(called))[0]
    assert sizes[-1] > head
    assert names == ["", "layers.0", "layers.1", "layers.2"]


def gathers(world):
    run = make_run(world, Task(called, BOTH), "--parallel.strategy", "fsdp", *FEW)
    take_steps(run, 1)
    with Sizes("all_gather") as counting:
        take_steps(run, 1)
    return counting.sizes


def test_an_embedding_that_is_a_unit_is_not_gathered_again_for_backward():
    sizes = on_ranks(2, gathers)[0]
    shard_of_embedding = 4 * VOCABULARY * WIDTH // 2
    shard_of_block = 4 * (WIDTH * WIDTH + WIDTH) // 2
    assert sizes.count(shard_of_embedding) == 2, "the forwards of two micro-batches"
    assert sizes.count(shard_of_block) == 3 * 2 * 2, "three blocks, forward and backward"
