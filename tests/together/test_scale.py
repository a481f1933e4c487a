"""What a step sends is what docs/collectives.md says; more ranks are no more work for any."""

import gc
import math
import sys
from collections import Counter
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import product
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from conftest import ROOT
from ranks import on_ranks
from test_step import Operations
from tiny import Tiny, make_run, take_steps
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks import log_step as log_step_bench
from benchmarks.collectives import Counting, measure
from dist_amp.commands.plan import make_plan, table
from dist_amp.commands.simulation import Collective
from dist_amp.config.auto import accumulation_steps
from dist_amp.config.load import load_config
from dist_amp.diagnostics import consistency
from dist_amp.precision import DTYPES
from dist_amp.scaling import reduction
from dist_amp.step import train_step
from dist_amp.supervise.lifecycle import add_observers
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import train
from dist_amp.world import World

LOTS = 20_480  # samples: no epoch ends in ten steps of 1,024 ranks


class Rooted(Tiny):
    """Has parameters outside its blocks: the last layer, of one row, which every sharding pads."""

    def blocks(self, model):
        return list(model)[:-1]


class Wide(Tiny):
    """32 MiB of gradients: more than one of DDP's buckets."""

    def build_model(self):
        wide = [nn.Linear(1024, 1024, bias=False) for _ in range(8)]
        return nn.Sequential(nn.Linear(8, 1024), *wide, nn.Linear(1024, 1))


TASKS = {"tiny": Tiny, "rooted": Rooted, "wide": Wide}


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


def run_of(world, task, *words):
    """A run; in an imagined world DDP's reductions are called from Python: they bring no result."""
    words = ("--train.micro_batch_size", 1, "--train.steps", 8, *words)
    with ExitStack() as patches:
        if dist.get_backend() == "fake":  # it reduces nothing, before the hook below too
            patches.enter_context(patch.object(reduction, "fix_buckets"))
        run = make_run(world, TASKS[task](samples=LOTS), *words)
    if run.parallel.strategy == "ddp" and dist.get_backend() == "fake":

        def reduce(state, bucket):
            dist.all_reduce(bucket.buffer())
            done = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        run.model.register_comm_hook(None, reduce)
    return run


def ways(strategies, micro_batches, precisions):
    """Command lines: each strategy, as it sums up gradients, and number of micro-batches."""
    for strategy, steps, precision in product(strategies, micro_batches, precisions):
        for reduce in ("last",) if strategy == "ddp" else ("last", "every"):
            words = ["--parallel.strategy", strategy, "--parallel.accumulate_reduce", reduce]
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
        return {("all_reduce", world.world_size): total + 4}
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
    expected = Counter({("all_reduce", world.world_size): 8})
    expected["all_gather", shards] += micro_batches * gathered * sum([*sizes, *sizes[:-2]])
    expected["reduce_scatter", shards] += times * reduced * sum(sizes)
    expected["all_reduce", replicas] += reduced * sum(sizes) // shards
    return {key: size for key, size in expected.items() if key[1] > 1}


def measured(world, tasks, command_lines):
    """Where the calls differ from the formula, and how; the number of collectives."""
    apart, calls = [], 0
    for task in tasks:
        for words in command_lines:
            run = run_of(world, task, *words)
            counted = Counter()
            for one, times in measure(run).items():
                counted[one.kind, one.ranks] += times * max(one.bytes_in, one.bytes_out)
                calls += times
            if (expected := by_formula(run)) != dict(counted):
                apart.append((task, words, expected, dict(counted)))
    return apart, calls


def rows_of_formula():
    """Ranks, strategy, micro-batches and precisions; all of them in the slow rows."""
    for ranks, strategy in ((2, "ddp"), (2, "fsdp"), (4, "hsdp"), (2, "hsdp")):
        precisions = [BF16, FP32, FP16, AUTOCAST]
        precisions += [COMPRESSED] if strategy == "ddp" else [HALF_SUMS, HALF_STATE]
        command_lines = [*ways([strategy], (1, 2, 4), precisions)]
        yield pytest.param(ranks, strategy, command_lines, marks=pytest.mark.slow)
        if (ranks, strategy) != (2, "hsdp"):
            yield (
                ranks,
                strategy,
                [*ways([strategy], (3,), [BF16]), *ways([strategy], (1,), [FP32])],
            )


@pytest.mark.parametrize(("ranks", "strategy", "command_lines"), [*rows_of_formula()])
def test_a_step_calls_the_collectives_of_the_formula_with_its_bytes(ranks, strategy, command_lines):
    tasks = ["tiny", "rooted"] if strategy == "ddp" else ["rooted"]
    for apart, calls in on_ranks(ranks, measured, tasks, command_lines):
        assert apart == []
        assert calls > 0


def buckets_of_wide(world):
    return measure(run_of(world, "wide", "--parallel.strategy", "ddp"))


def test_ddp_sends_a_bucket_when_it_is_full():
    for counted in on_ranks(2, buckets_of_wide):
        # The first is full at 1 MiB, with a layer of 4 MiB; the second at 25 MiB, with seven.
        assert sum(one.bytes_in > 2**20 for one in counted) == 2


@pytest.mark.parametrize("size", [3, 1024])
def test_the_formula_holds_for_any_number_of_ranks_whoever_casts(size):
    strategies = ["ddp", "fsdp"] if size == 3 else ["ddp", "fsdp", "hsdp"]
    command_lines = [*ways(strategies, (2,), [BF16, AUTOCAST])]
    with imagined(size) as world:
        apart, calls = measured(world, ["rooted"], command_lines)
    assert apart == []
    assert calls > 0


def work_of_a_step(size, strategy):
    """{operation: times}, {function in Python or C: times} of a step of rank 0 of so many."""
    with imagined(size) as world:
        words = ["--parallel.strategy", strategy, "--train.accumulation_steps", 2]
        run = run_of(world, "rooted", *words)
        stop = AgreedStop(world)
        stop.every_poll = True  # else it depends on the time that the steps take

        def step():
            run.metrics.record(train_step(run, next(run.data)))
            stop.poll()

        for _ in range(3):
            step()
        with Operations() as seen:
            step()
        calls = Counter()

        def called(frame, event, argument):
            if event == "call":
                calls[f"{frame.f_code.co_filename}: {frame.f_code.co_name}"] += 1
            elif event == "c_call":
                calls[argument.__qualname__] += 1

        gc.disable()
        sys.setprofile(called)
        try:
            step()
        finally:
            sys.setprofile(None)
            gc.enable()
    return Counter(seen.names), calls


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp"])
def test_a_step_takes_as_many_operations_and_calls_on_a_thousand_ranks_as_on_two(strategy):
    few, calls_of_few = work_of_a_step(16 if strategy == "hsdp" else 2, strategy)
    operations, calls = work_of_a_step(1024, strategy)
    assert operations == few
    # By chance torch compares a few specs whose hashes collide in its caches; a call per rank would
    # be 62 and more.
    apart = (calls - calls_of_few) + (calls_of_few - calls)
    assert apart.total() < 30, apart


def exchanges_of_a_run(world):
    """{step: collectives of Python objects} of a run with logs, evaluations and checks."""
    words = ["--train.steps", 30, "--metrics.log_every", 5, "--eval.every", 12]
    run = make_run(world, Tiny(), "--train.micro_batch_size", 2, *words)
    exchanges = Counter()

    def noted(function):
        def call(*args, **kwargs):
            exchanges[run.step] += 1
            return function(*args, **kwargs)

        return call

    names = ("all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list")
    names += ("send_object_list", "recv_object_list")
    with (
        AgreedStop(world) as stop,
        patch.object(consistency, "CHECK_EVERY", 12),
        patch.multiple(dist, **{name: noted(getattr(dist, name)) for name in names}),
    ):
        train(run, stop)
    return dict(exchanges)


def test_objects_are_exchanged_only_at_the_start_and_where_the_state_is_checked():
    for exchanges in on_ranks(2, exchanges_of_a_run):
        # The datasets with a few samples, the task's tensors, and the generators.
        assert exchanges.pop(0) == 3
        # Whether the first step changed a parameter. The generators at the first log step and
        # every 12 from there, at the next log step, and at the last, and there whether an observer
        # failed at its end. Metrics are read a step later.
        assert exchanges == {1: 1, 6: 1, 21: 1, 30: 2}


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--train.global_batch_size", "auto"]])
def test_the_page_has_the_numbers_of_its_command(words):
    page = (ROOT / "docs" / "collectives.md").read_text()
    config = load_config(["--config", str(ROOT / "configs" / "gpt_124m.toml"), *words], environ={})
    rows = table(make_plan(config, 8, 0).strategies, 0)
    (line,) = [line for line in rows if line.startswith("sent per step")]
    assert line in page


def collectives_of_log_steps(world, folder):
    """What on_log and reading the metrics send while a checkpoint is being written, and later."""
    run = make_run(world, Tiny(), "--run.dir", folder, "--checkpoint.every", 1)
    saver = run.saver
    with AgreedStop(world) as stop:
        add_observers(run, stop)
        take_steps(run, 1)
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
        row = run.metrics.read(saver.is_done())
        run.observers.tell("on_log", row)  # the first has checks of its own
        saver.save(wait=False)
        end = run.saver.pending.future
        pending = run.saver.pending.future = Future()  # ends on rank 1 later than on rank 0
        counted, waiting = [], []
        for done_on in ((), (0,), (0, 1)):
            if world.rank in done_on and not pending.done():
                pending.set_result(None)
            run.metrics.begin(run.step, run.schedule, run.scaler, run.data)
            with Counting() as counting:
                row = run.metrics.read(saver.is_done())
                run.observers.tell("on_log", row)
            counted.append(counting.collectives.total())
            waiting.append(run.saver.pending is not None)
        end.result()
        run.observers.close(None)
    with AgreedStop(world) as stop, Counting() as polling:
        stop.poll()
    assert polling.collectives == {Collective("all_reduce", 2, 8, 8): 1}
    return counted, waiting


def test_a_log_step_and_a_poll_are_one_collective_also_while_a_checkpoint_is_written(tmp_path):
    # Once it has ended, the ranks tell each other how.
    assert on_ranks(2, collectives_of_log_steps, tmp_path) == [([1, 1, 3], [True, True, False])] * 2


def test_the_benchmark_of_a_log_step_runs():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=64)
    try:
        with patch.object(log_step_bench, "ROUNDS", 3):
            assert all(seconds >= 0 for seconds in log_step_bench.measure(64))
    finally:
        dist.destroy_process_group()
