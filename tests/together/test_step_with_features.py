"""What a step reads back and sends with features, and models that change in their forward."""

from collections import defaultdict
from functools import partial

import pytest
import torch
from ranks import on_ranks
from test_end_units import BOTH, FEW, VOCABULARY, WIDTH, Task, called
from test_hooks import BranchedModel
from test_step import DTYPES
from test_strangers import Mixture, first_weight_after, message_of_a_step
from tiny import Rows, Tiny, log, make_run, parameters_of, take_steps
from torch import nn

from benchmarks.collectives import Counting
from benchmarks.harness import HostReads
from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay
from dist_amp.scaling import hooks
from dist_amp.step import train_step
from dist_amp.world import World

# ---- reads


def host_reads(world, words):
    """(reads in an ordinary step, reads in logging), with the replay of skipped steps."""
    words = ["--train.accumulation_steps", 2, "--train.micro_batch_size", 2, *words]
    # A scale at which no step is skipped.
    run = make_run(world, Tiny(uneven=True), *words, "--precision.scaler.init_scale", 64)
    observer = NonfiniteReplay(run)
    take_steps(run, 2)  # the first step makes buckets and states
    batches = next(run.data)
    with HostReads() as ordinary:
        report = train_step(run, batches)
        run.metrics.record(report)
        observer.after_step(report, batches)
    with HostReads() as logging:
        observer.on_log(log(run))
    return ordinary.count, logging.count


# sgd: torch's AdamW looks at its step counts besides, which on a GPU it does without waiting.
TEXTBOOK = ["--optim.fused", "false", "--optim.name", "sgd"]


@pytest.mark.parametrize(
    ("ranks", "strategy", "dtype", "words", "reads"),
    [
        (1, "single", "fp32", ["--optim.name", "sgd"], 0),
        (2, "ddp", "fp16", [], 0),
        (2, "fsdp", "bf16", [], 0),
        (4, "hsdp", "fp16", ["--optim.name", "sgd"], 0),
        (1, "single", "fp16", ["--train.clip_by", "value"], 0),
        (1, "single", "fp16", ["--train.clip_by", "off"], 0),
        (1, "single", "fp16", TEXTBOOK, 2),  # the decision and the rate
    ],
)
def test_a_step_reads_nothing_back_and_a_log_step_reads_once(ranks, strategy, dtype, words, reads):
    words = ["--parallel.strategy", strategy, *words, *DTYPES[dtype]]
    assert on_ranks(ranks, host_reads, words) == [(reads, 1)] * ranks


# ---- collectives


class Sizes(Counting):
    """The bytes of each collective of a kind, in their order."""

    def __init__(self):
        super().__init__()
        self.sizes = defaultdict(list)

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        before = self.collectives.copy()
        result = super().__torch_dispatch__(function, types, args, kwargs)
        for one in self.collectives - before:
            self.sizes[one.kind].append(one.nbytes)
        return result


def sizes_in_a_step(world, task, *words):
    run = make_run(world, task, "--parallel.strategy", "fsdp", "--use_amp", "false", *words)
    take_steps(run, hooks.COMPARED_FORWARDS)  # in which the ranks compare their blocks
    with Sizes() as counting:
        take_steps(run, 1)
    return counting.sizes["reduce_scatter"], counting.sizes["allgather"]


def test_an_embedding_that_is_a_unit_is_gathered_once_and_a_head_reduced_before_the_blocks():
    head = 4 * (VOCABULARY * WIDTH + VOCABULARY)
    embedding = 4 * VOCABULARY * WIDTH
    block = 4 * (WIDTH * WIDTH + WIDTH)
    reduced, gathered = on_ranks(2, sizes_in_a_step, Task(called, BOTH), *FEW)[0]
    assert (reduced[0], len(reduced)) == (head, 6)
    assert gathered.count(embedding) == 2, "the forwards of two micro-batches"
    assert gathered.count(block) == 3 * 2 * 2, "three blocks, forward and backward"
    reduced, _ = on_ranks(2, sizes_in_a_step, Task(called), *FEW)[0]
    assert reduced[-1] > head
    assert len(reduced) == 4


class FrozenTrunk(Tiny):
    def __init__(self, frozen):
        super().__init__(depth=3)
        self.frozen = frozen

    def build_model(self):
        model = super().build_model()
        model[: self.frozen].requires_grad_(False)
        return model


def test_blocks_below_everything_that_is_trained_are_gathered_for_the_forward_alone():
    # The root and the last block stay gathered; torch fetches the block below the last one ahead.
    for frozen, gathers in ((0, 4 + 2), (2, 4 + 1)):
        _, gathered = on_ranks(2, sizes_in_a_step, FrozenTrunk(frozen))[0]
        assert len(gathered) == gathers


# ---- models that change in their forward


class Branched(Mixture):
    def build_model(self):
        return BranchedModel()

    def build_dataset(self, split):
        chosen = torch.tensor([0, 1, 2, 3, 1, 0, 3, 3]).repeat(self.samples // 8)
        return Rows(**Tiny.build_dataset(self, split).columns, chosen=chosen)


def steps_with_branches(world, strategy, *words):
    words = [*words, "--parallel.strategy", strategy, "--data.shuffle", "false"]
    words += ["--train.micro_batch_size", 1, "--train.global_batch_size", 8]
    run = make_run(world, Branched(samples=32), *words)
    take_steps(run, 4)
    return parameters_of(run)


@pytest.mark.parametrize(("reduce", "checkpointing"), [("last", "none"), ("every", "full")])
def test_branches_that_only_some_ranks_depend_on_take_the_step_of_one_process_under_ddp(
    reduce, checkpointing
):
    words = ["--use_amp", "false", "--parallel.accumulate_reduce", reduce]
    words += ["--parallel.activation_checkpointing", checkpointing]
    alone = steps_with_branches(World(), "single", *words)
    for parameters in on_ranks(2, steps_with_branches, "ddp", *words):
        # Rounding of float32 sums in another order, which the steps of Adam add up.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=2e-6)


class FollowsInForward(Tiny):
    """A student, and a teacher that follows it in each forward, by one of two ways to write."""

    def __init__(self, through_data: bool):
        super().__init__()
        self.through_data = through_data

    def build_model(self):
        model = nn.Module()
        model.student = nn.Linear(8, 2)  # a row on each of two ranks, so that both see the change
        model.teacher = nn.Linear(8, 2).requires_grad_(False)
        model.forward = partial(self.forward, model)
        return model

    def forward(self, model, x):
        pairs = zip(model.teacher.parameters(), model.student.parameters(), strict=True)
        with torch.no_grad():
            for old, new in pairs if model.training else ():
                if self.through_data:
                    old.data = old.data * 0.9 + new.data * 0.1
                else:
                    old.mul_(0.9).add_(new, alpha=0.1)
        return (model.student(x) - model.teacher(x).detach()).sum(-1, keepdim=True)


@pytest.mark.bad_input("a teacher that the forward changes, under fsdp")
@pytest.mark.parametrize("through_data", [False, True])
def test_a_teacher_that_moves_in_forward_moves_under_ddp_and_is_refused_under_fsdp(through_data):
    task = FollowsInForward(through_data)
    alone = first_weight_after(World(), task, "single")
    for parameters in on_ranks(2, first_weight_after, task, "ddp"):
        # Rounding of float32 sums in another order, which two steps of Adam add up.
        torch.testing.assert_close(
            parameters["teacher.weight"], alone["teacher.weight"], rtol=0, atol=2e-6
        )
    for message in on_ranks(2, message_of_a_step, task, "fsdp"):
        assert "forward changes its parameter teacher.weight, which is" in message
