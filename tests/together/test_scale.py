"""What a step sends is what docs/collectives.md says; more ranks are no more work for any."""

import math
from collections import Counter
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from optimizer_runs import Operations
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import log_step as log_step_bench
from benchmarks.collectives import Counting, measure
from dist_amp.commands.imagined import Collective
from dist_amp.commands.plan import compare, make_job, table
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.load import load_config
from dist_amp.precision import DTYPES
from dist_amp.supervise.lifecycle import add_observers
from dist_amp.supervise.stop import AgreedStop
from dist_amp.world import World

LOTS = 20_480  # samples: no epoch ends in ten steps of 1,024 ranks


class Rooted(Tiny):
    """Has parameters outside its blocks: the last layer, of one row, which every sharding pads."""

    def blocks(self, model):
        return list(model)[:-1]


@contextmanager
def imagined(size):
    """Rank 0 of so many, in this process: its collectives return at once, and nothing arrives."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    try:
        everyone = dist.group.WORLD
        groups = {"control": everyone, "background": everyone}
        yield World(0, 0, size, min(size, 8), torch.device("cpu"), **groups)
    finally:
        dist.destroy_process_group()


def run_of(world, strategy, *words):
    words = ("--train.micro_batch_size", 1, "--train.steps", 8, *words)
    return make_run(world, Rooted(samples=LOTS), "--parallel.strategy", strategy, *words)


def ways(strategy, micro_batches, precisions):
    """Command lines: each way in which it sums up gradients, and number of micro-batches."""
    for steps, precision in product(micro_batches, precisions):
        for reduce in ("last",) if strategy == "ddp" else ("last", "every"):
            words = [strategy, "--parallel.accumulate_reduce", reduce]
            yield [*words, "--train.accumulation_steps", steps, *precision]


BF16, FP32 = (), ("--use_amp", "false")
AUTOCAST = ("--precision.cast_by", "autocast")
HALF_SUMS = ("--parallel.reduce_dtype", "bf16")
HALF_STATE = ("--parallel.param_dtype", "bf16")
FP16 = ("--precision.dtype", "fp16", "--parallel.reduce_dtype", "fp16")
COMPRESSED = ("--precision.dtype", "fp16", "--parallel.comm_dtype", "fp16")


def by_formula(run):
    """{(kind, ranks): bytes} of a step, by docs/collectives.md; for models with a root."""
    task, parallel, world = run.task, run.parallel, run.world
    model = task.build_model()
    if parallel.strategy == "ddp":
        size = 4 if run.config.parallel.comm_dtype == "off" else 2
        total = size * sum(p.numel() for p in model.parameters())
        return {("allreduce", world.world_size): total + 4}
    replicas = parallel.replicas
    shards = world.world_size // replicas
    units = [list(block.parameters()) for block in task.blocks(model)]
    units.append(list(set(model.parameters()).difference(*units)))
    sizes = [
        sum(math.ceil(p.shape[0] / shards) * shards * p[0].numel() for p in unit) for unit in units
    ]
    in_policy = run.precision.cast_by == "policy"
    gathered = run.precision.dtype.itemsize if in_policy else 4
    reduced = DTYPES[run.config.parallel.reduce_dtype].itemsize if in_policy else 4
    micro_batches = accumulation_steps(run.config.train, world.world_size)
    times = micro_batches if run.config.parallel.accumulate_reduce == "every" else 1
    expected = Counter({("allreduce", world.world_size): 8})
    expected["allgather", shards] += micro_batches * gathered * sum([*sizes, *sizes[:-2]])
    expected["reduce_scatter", shards] += times * reduced * sum(sizes)
    expected["allreduce", replicas] += reduced * sum(sizes) // shards
    return {key: size for key, size in expected.items() if key[1] > 1}


def measured(world, command_lines):
    """Where the calls differ from the formula, and how."""
    apart = []
    for words in command_lines:
        run = run_of(world, *words)
        counted = Counter()
        for one, times in measure(run).items():
            counted[one.kind, one.ranks] += times * one.nbytes
        if (expected := by_formula(run)) != dict(counted):
            apart.append((words, expected, dict(counted)))
    return apart


def all_ways(strategy):
    precisions = [BF16, FP32, FP16, AUTOCAST]
    precisions += [COMPRESSED] if strategy == "ddp" else [HALF_SUMS, HALF_STATE]
    return [*ways(strategy, (1, 2, 4), precisions)]


@pytest.mark.parametrize(
    ("ranks", "command_lines"),
    [
        (2, [*ways("ddp", (3,), [BF16]), *ways("ddp", (1,), [FP32])]),
        (2, [*ways("fsdp", (3,), [BF16])]),
        pytest.param(2, all_ways("ddp"), marks=pytest.mark.slow),
        pytest.param(2, all_ways("fsdp"), marks=pytest.mark.slow),
        pytest.param(2, all_ways("hsdp"), marks=pytest.mark.slow),
        pytest.param(4, all_ways("hsdp"), marks=pytest.mark.slow),
    ],
)
def test_a_step_calls_the_collectives_of_the_formula_with_its_bytes(ranks, command_lines):
    assert on_ranks(ranks, measured, command_lines) == [[]] * ranks


@pytest.mark.parametrize(("size", "strategy"), [(3, "fsdp"), (1024, "hsdp")])
def test_the_formula_holds_for_any_number_of_ranks_whoever_casts(size, strategy):
    with imagined(size) as world:
        assert measured(world, [*ways(strategy, (2,), [BF16, AUTOCAST, FP32])]) == []


@pytest.mark.parametrize(("few", "strategy"), [(2, "fsdp"), (16, "hsdp")])
def test_a_step_takes_as_many_operations_on_a_thousand_ranks_as_on_few(few, strategy):
    counts = []
    for size in (few, 1024):
        with imagined(size) as world:
            run = run_of(world, strategy, "--train.accumulation_steps", 2)
            take_steps(run, 3)
            with Operations() as seen:
                run.metrics.after_step(*take_steps(run, 1))
        counts.append(Counter(seen.names))
    assert counts[0] == counts[1]


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--train.global_batch_size", "auto"]])
def test_the_page_has_the_numbers_of_its_command(words):
    page = (ROOT / "docs" / "collectives.md").read_text()
    config = load_config(["--config", str(ROOT / "configs" / "gpt_124m.toml"), *words], environ={})
    rows = table(compare(make_job(config, 8, 0))[0], 0)
    (line,) = [line for line in rows if line.startswith("sent per step")]
    assert line in page


def collectives_of_log_steps(world, folder):
    """What on_log and reading the metrics send while a checkpoint is being written, and later."""
    run = make_run(world, Tiny(), "--run.dir", folder, "--checkpoint.every", 1)

    def log_step():
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        with Counting() as counting:
            run.observers.tell("on_log", run.metrics.read(run.saver.is_done()))
        return counting.collectives.total()

    with AgreedStop(world) as stop:
        add_observers(run, stop)
        take_steps(run, 1)
        log_step()  # the first has checks of its own
        run.saver.save(wait=False)
        end = run.saver.pending.future
        pending = run.saver.pending.future = Future()  # ends on rank 1 later than on rank 0
        counted, waiting = [], []
        for done_on in ((), (0,), (0, 1)):
            if world.rank in done_on and not pending.done():
                pending.set_result(None)
            counted.append(log_step())
            waiting.append(run.saver.pending is not None)
        end.result()
        run.observers.close(None)
    with AgreedStop(world) as stop, Counting() as polling:
        stop.poll()
    assert polling.collectives == {Collective("allreduce", 2, 8): 1}
    return counted, waiting


def test_a_log_step_and_a_poll_are_one_collective_also_while_a_checkpoint_is_written(tmp_path):
    # Once it has ended, the ranks tell each other how.
    assert on_ranks(2, collectives_of_log_steps, tmp_path) == [([1, 1, 3], [True, True, False])] * 2


def test_the_benchmark_of_a_log_step_runs():
    with imagined(64), patch.object(log_step_bench, "ROUNDS", 3):
        assert all(seconds >= 0 for seconds in log_step_bench.measure(64))
