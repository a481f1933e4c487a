"""What a step and a sample read back and send, and models that change in their forward."""

import io
from collections import Counter
from contextlib import contextmanager, nullcontext, redirect_stderr
from unittest.mock import patch

import pytest
import torch
from byte_model import Bytes
from ranks import on_ranks
from test_end_units import BOTH, FEW, VOCABULARY, WIDTH, Task, called
from test_step import DTYPES
from test_strangers import message_of_a_step, with_forward
from tiny import Tiny, log, make_run, take_steps, variant
from torch import nn

from benchmarks.collectives import Counting, measure
from benchmarks.harness import HostReads
from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay
from dist_amp.step import train_step
from dist_amp.supervise import sampling
from dist_amp.world import World


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
        run.metrics.after_step(report)
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
        (1, "single", "fp16", TEXTBOOK, 2),  # the decision and the rate
    ],
)
def test_a_step_reads_nothing_back_and_a_log_step_reads_once(ranks, strategy, dtype, words, reads):
    words = ["--parallel.strategy", strategy, *words, *DTYPES[dtype]]
    assert on_ranks(ranks, host_reads, words) == [(reads, 1)] * ranks


# Kernels that torch has for CPUs and GPUs alone. What they compute does not matter here.
FUSED = ("_fused_adamw_", "_fused_adamw_.tensor_lr", "_fused_sgd_", "_fused_sgd_.tensor_lr")


@contextmanager
def meta_kernels():
    """Inside, the meta device has the fused optimizers, and an autocast that does nothing."""
    library = torch.library.Library("aten", "IMPL", "Meta")
    for name in FUSED:
        library.impl(name, lambda *args, **kwargs: None, allow_override=True)  # torch 2.11 has some
    try:
        with (
            patch("torch.autocast", lambda *args, **kwargs: nullcontext()),
            patch("torch.is_autocast_enabled", lambda device: False),
            patch("torch.optim.optimizer._get_fused_kernels_supported_devices", lambda: ["meta"]),
            patch("dist_amp.config.validate.check_precision", lambda *args: None),
            patch("dist_amp.precision.check_precision", lambda *args: None),
        ):
            yield
    finally:
        library._destroy()


# Each pair of two values once.
@pytest.mark.parametrize(
    ("optimizer", "clips"),
    [
        ("adamw", ("norm", "value", "off")),
        ("sgd", ("value", "off", "norm")),
        ("muon", ("off", "norm", "value")),
    ],
)
def test_a_step_on_the_meta_device_where_a_read_raises_ends(optimizer, clips):
    tokens = torch.zeros(4, 17, dtype=torch.int64, device="meta")
    batch = {"input_ids": tokens, "labels": tokens, "counted": 64, "tokens": 68}
    common = ["--optim.name", optimizer, "--optim.ema", 0.99, "--train.accumulation_steps", 2]
    for dtype, clip in zip(("fp32", "bf16", "fp16"), clips, strict=True):
        words = [*common, *DTYPES[dtype], "--train.clip_by", clip, "--compile.blocks", "false"]
        with meta_kernels():
            world = World(device=torch.device("meta"))
            run = make_run(world, Bytes(loss_chunk=40, layers=1), *words)
            if optimizer == "muon":
                for group in run.optimizer.param_groups:
                    group["fused"] = True  # on meta it is not, for dist_amp.plan
            for _ in range(2):
                report = train_step(run, [batch, batch])
                run.metrics.after_step(report)
        assert report.norm.is_meta


def collectives_of_a_step(world, task, *words):
    """{(kind, bytes): calls} under FSDP2."""
    run = make_run(world, task, "--parallel.strategy", "fsdp", "--use_amp", "false", *words)
    counted = Counter()
    for one, calls in measure(run).items():
        counted[one.kind, one.nbytes] += calls
    return counted


def calls_of(kind, counted):
    return sum(calls for (each, _), calls in counted.items() if each == kind)


def test_an_embedding_that_is_a_unit_is_gathered_once_and_a_head_reduced_by_itself():
    head = 4 * (VOCABULARY * WIDTH + VOCABULARY)
    embedding = 4 * VOCABULARY * WIDTH
    block = 4 * (WIDTH * WIDTH + WIDTH)
    units = on_ranks(2, collectives_of_a_step, Task(called, BOTH), *FEW)[0]
    assert units["reduce_scatter", head] == 1
    assert calls_of("reduce_scatter", units) == 6
    assert units["allgather", embedding] == 2, "the forwards of two micro-batches"
    assert units["allgather", block] == 3 * 2 * 2, "three blocks, forward and backward"
    without = on_ranks(2, collectives_of_a_step, Task(called), *FEW)[0]
    assert without["reduce_scatter", head] == 0
    assert calls_of("reduce_scatter", without) == 4


class Sampled(Tiny):
    def sample(self, model):
        out = [model(torch.full((1, 8), float(n))).item() for n in range(10)]
        return " ".join(f"{value:.4f}" for value in out)


def gathers_of(call):
    """How many collectives of the call gather parameters."""
    with Counting() as counting:
        call()
    found = counting.collectives.items()
    return sum(times for one, times in found if one.kind == "allgather" and one.nbytes > 16)


def sampled(world, strategy, free=1e12):
    """(the sample, how many gathers it took, what was printed as warnings)."""
    words = ("--use_amp", "false", "--optim.ema", 0.5, "--train.global_batch_size", 16)
    run = make_run(world, Sampled(), "--parallel.strategy", strategy, *words)
    take_steps(run, 2)
    found = []
    run.metrics.write_sample = lambda step, sample, about: found.append(sample)
    before = gathers_of(lambda: take_steps(run, 1))
    has_room = patch.object(sampling, "capacity_of", lambda world: (free, 0))
    with has_room, redirect_stderr(io.StringIO()) as output:
        gathers = gathers_of(sampling.Sampling(run).after_evaluation)
    assert gathers_of(lambda: take_steps(run, 1)) == before, "units reshard as before"
    return found, gathers, output.getvalue()


@pytest.mark.bad_input("a `sample(model)` of a sharded model that does not fit on one device")
def test_a_sharded_model_is_gathered_once_per_sample_unless_it_does_not_fit():
    ((expected, _, _),) = on_ranks(1, sampled, "single")
    for found, gathers, _ in on_ranks(2, sampled, "fsdp"):
        assert found == expected
        assert gathers == 4  # two blocks, the head, and the ranks' free memory; ten tokens
    (found, gathers, output), _ = on_ranks(2, sampled, "fsdp", 100.0)
    assert (found, gathers) == ([], 1)
    assert "the whole model takes 612 bytes besides its shards, and " in output
    assert "; python -m dist_amp.sample unused tries again" in output


def follow_in_forward(model, x):
    with torch.no_grad():
        model.teacher.weight.lerp_(model.student.weight, 0.1)
    return (model.student(x) - model.teacher(x).detach()).sum(-1, keepdim=True)


def student_and_teacher():
    """Each has a row on each of two ranks, so that both see that the teacher moves."""
    student, teacher = nn.Linear(8, 2), nn.Linear(8, 2).requires_grad_(False)
    return with_forward(follow_in_forward, student=student, teacher=teacher)


@pytest.mark.bad_input("a teacher that the forward changes, under fsdp")
def test_a_teacher_that_moves_in_forward_is_refused_under_fsdp():
    for message in on_ranks(2, message_of_a_step, variant(build_model=student_and_teacher), "fsdp"):
        assert "forward changes its parameter teacher.weight, but under FSDP2" in message
