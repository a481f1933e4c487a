"""Every planted fault is caught, with its cause and its rank; the same run without it is silent."""

from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from tiny import Rows, Tiny, make_run
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.data import Padding
from dist_amp.diagnostics import consistency
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.errors import Failure
from dist_amp.optim import build_optimizer, learning_rate
from dist_amp.step import loss_of, mark_last, train_step, weights_of
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.train import train
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.reference import Reference
from dist_amp.world import local

# ---- faults in the loop: verify's comparison finds them ----


def loop(run, micro_batches, share=None, backward=None, before=None, after=None):
    """A copy of train_step, with the places in which a fault is planted, as around its update."""
    task = run.task
    device = run.world.device
    weight = run.world.sum(weights_of(task, micro_batches, device).sum())
    losses = []
    for is_last, batch in mark_last(micro_batches):
        with run.parallel.gradient_sync(is_last):
            with run.precision.autocast():
                loss = loss_of(task, run.model, batch, device)
            losses.append(loss.detach())
            part = loss / (weight / run.world.world_size)
            if share is not None:
                wrong = share(run, micro_batches, batch, weight)
                part = part + loss * wrong - loss * (run.world.world_size / weight)
            if backward is None:
                run.scaler.scale(part).backward()
        if backward is not None:
            backward(run, part)
    if before is not None:
        before(run)
    norm = run.parallel.global_grad_norm()
    norm = run.scaler.unscale_and_clip(run.optimizer, norm, run.clip)
    run.scaler.step(run.optimizer)
    run.scaler.update()
    run.schedule.step(run.scaler.applied)
    run.optimizer.zero_grad(set_to_none=True)
    if after is not None:
        with torch.no_grad():
            after(run)
    return StepReport(losses, weight, norm, run.scaler.applied)


def number_of(task, batch):
    return 0.0 if isinstance(batch, Padding) else float(task.weight(batch))


def without_division(run, all, batch, weight):
    return run.world.world_size * len(all) / weight


def mean_of_means(run, all, batch, weight):
    return 1 / (max(number_of(run.task, batch), 1e-9) * len(all))


def clip_too_early(run):
    """The limit is meant for gradients that the loss scale has been taken out of."""
    norm = torch.nn.utils.get_total_norm([p.grad for p in run.parallel.parameters])
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    for p in run.parallel.parameters:
        local(p.grad).mul_((run.config.train.max_grad_norm / norm).clamp(max=1))


def sync_in_the_backward(run, loss):
    run.model.set_requires_gradient_sync(True)
    run.scaler.scale(loss).backward()


def no_sync_in_backward_only(run, micro_batches):
    sync, run.parallel.gradient_sync = run.parallel.gradient_sync, lambda on: nullcontext()

    def backward(run, loss):
        with sync(False):
            run.scaler.scale(loss).backward()

    try:
        return loop(run, micro_batches, backward=backward)
    finally:
        run.parallel.gradient_sync = sync


def count_a_skip(run):
    run.schedule.applied_steps += ~run.scaler.applied


def scale_on_one_rank(run):
    if run.world.rank == 1:
        run.scaler.scale_tensor.mul_(0.5)


def clear_before_each(run, loss):
    run.model.zero_grad()
    run.scaler.scale(loss).backward()


def update_scaler(run):
    run.scaler.update()


def lose_moments(run):
    for state in run.optimizer.state.values():
        for moment in state.values():
            local(moment).zero_()


def change_rate_on_a_skip(run):
    if not run.scaler.applied:
        run.schedule.lr.mul_(0.9)


@cache  # in each rank's process: measured once for all faults
def reference_of(device):
    return Reference(load_config([], environ={}), device, Tiny(samples=300, uneven=True))


def verdict_of(world, cell, step):
    strategy, precision, *optimizer = cell.split()
    cell = Cell(strategy, precision, *optimizer, accumulation=(4,) * 5)
    return check_cell(world, reference_of(world.device), cell, step).cause


NO_SYNC = "no_sync around its forward and its backward"
DIVISOR = "not by one factor: each micro-batch must be divided by the weight of all"
UPDATE = "are right, the parameters after it are not: check clipping, learning rate,"
ONE_SCALE = "on rank 1 it left the loss scale at 512,"
LOOP_FAULTS = [
    ("ddp fp32", {"share": without_division}, "division by accumulation_steps is missing"),
    ("fsdp fp32", {"share": mean_of_means}, DIVISOR),
    ("fsdp fp16", {"before": clip_too_early}, "they were clipped before they were unscaled"),
    ("ddp fp16", {"after": update_scaler}, "update() must run once per step"),
    ("fsdp fp16", {"after": scale_on_one_rank}, ONE_SCALE),
    ("ddp bf16", {"after": count_a_skip}, "on ranks 0, 1 it counted as 1 applied, 1 skipped"),
    ("ddp fp32", {"backward": clear_before_each}, "not by one factor"),
    # FSDP2 reads its flag in the backward alone, DDP in the forward alone.
    ("fsdp fp32", {"backward": sync_in_the_backward}, NO_SYNC),
    ("ddp fp32", no_sync_in_backward_only, NO_SYNC),
    ("ddp bf16 sgd", {"after": lose_moments}, UPDATE),
    ("fsdp fp32 sgd", {"after": change_rate_on_a_skip}, "it changed the learning"),
]


@pytest.mark.parametrize(("cell", "fault", "cause"), LOOP_FAULTS)
def test_a_fault_in_the_loop_is_named_by_the_comparison(cell, fault, cause):
    step = partial(loop, **fault) if isinstance(fault, dict) else fault
    message = on_ranks(2, verdict_of, cell, step)[0]
    assert cause in message, message


@pytest.mark.parametrize("cell", ["ddp fp16", "fsdp fp32"])
def test_the_loop_as_it_is_and_its_copy_without_a_fault_are_silent(cell):
    assert on_ranks(2, verdict_of, cell, train_step)[0] == ""
    assert on_ranks(2, verdict_of, cell, loop)[0] == ""


# ---- faults in a run: the main job's consistency checks find them ----


class Noisy(Tiny):
    """Dropout and batch statistics, so that there is more to go wrong."""

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))


class OneBadRow(Noisy):
    def build_dataset(self, split):
        rows = super().build_dataset(split)
        rows.columns["x"][0] = float("inf")
        return rows


class Remembers(nn.Module):
    """Keeps a mean of what it saw, each rank its own."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x):
        self.seen.lerp_(x.detach().mean(0), 0.1)
        return x


class RanksRemember(Tiny):
    def __init__(self, averages=False):
        super().__init__()
        self.averages = averages

    def build_model(self):
        return nn.Sequential(Remembers(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def on_step(self, run, report):
        if self.averages:
            seen = run.parallel.module[0].seen
            seen.copy_(run.world.sum(seen) / run.world.world_size)


class RandomRows(Rows):
    """Augmented as they are read: by the global generator, and by one of its own."""

    def __init__(self, **columns):
        super().__init__(**columns)
        self.own = torch.Generator()

    def __getitem__(self, index):
        row = super().__getitem__(index)
        noise = torch.rand(8) if index % 2 else torch.rand(8, generator=self.own)
        return {**row, "x": row["x"] + noise}


class Augmented(Noisy):
    """Each comparison of samples or buffers could draw a number that the run then lacks."""

    def build_dataset(self, split):
        return RandomRows(**super().build_dataset(split).columns)


def failure_of(world, plant, task, *words):
    """What stops 8 steps of the main job after `plant(run)`; "" if they end well."""
    small = ["--train.steps", 8, "--metrics.log_every", 2, "--train.micro_batch_size", 2]
    small += ["--debug.nonfinite", "off"]  # it would write into the run's folder
    run = make_run(world, task, *small, *words)
    plant(run)
    try:
        with patch.object(consistency, "CHECK_EVERY", 2), AgreedStop(world) as stop:
            train(run, stop)
    except Failure as error:
        return str(error)
    finally:
        run.data.close()
    return ""


def after_three_steps(run, fault):
    """Do `fault` once, between two steps."""
    record = run.metrics.record

    def recorded(report):
        record(report)
        if run.step == 3:
            with torch.no_grad():
                fault()

    run.metrics.record = recorded


def nothing(run):
    pass


def optimizer_built_before_sharding(run):
    run.optimizer = build_optimizer(run.task.build_model(), run.config.optim)


def same_shard_on_all_ranks(run):
    run.data.plan = replace(run.data.plan, rank=0)


def parameter_differs(run):
    parameter = local(run.parallel.parameters[0])
    is_last = run.world.rank == run.world.world_size - 1
    after_three_steps(run, lambda: parameter.view(-1)[0].add_(1e-6 * is_last))


def buffers_are_never_averaged(run):
    run.parallel.average_batch_statistics = lambda: None


def schedule_follows_all_steps(run):
    step = run.schedule.step

    def moved(applied):
        step(applied)
        run.schedule.lr.fill_(learning_rate(run.config.optim, run.step + 1, run.config.train.steps))

    run.schedule.step = moved


def scaler_differs(run):
    after_three_steps(run, lambda: run.scaler.scale_tensor.mul_(0.5 if run.world.rank else 1))


def same_dropout_everywhere(run):
    torch.manual_seed(1)


def shorter_data_on_one_rank(run):
    run.data.plan = replace(run.data.plan, length=64 - run.world.rank)


def each_rank_has_a_shard(run):
    columns = run.data.fetch.dataset.columns
    share = torch.arange(64) // 2 * 2 + run.world.rank
    run.data.fetch.dataset.columns = {name: column[share] for name, column in columns.items()}


def one_rank_evaluates_on_other_rows(run):
    if run.world.rank:
        run.validation.fetch.dataset.columns["y"][63] = 7.0


def ranks_draw_other_noise(run):
    run.data.fetch.dataset.own.manual_seed(run.world.rank)


EVALUATED = ("--eval.every", "4")
AUTOCAST = ("--precision.cast_by", "autocast")
ORDERED = ("--data.shuffle", "false")
FP16 = ("--precision.dtype", "fp16")
GROWING = (*FP16, "--precision.scaler.init_scale", "256", "--precision.scaler.growth_interval", "2")
DIFFERS = "is not the same on ranks 0 and 1"
OTHER_ROW = "sample 63 of the validation split is not the same on rank 1 as on rank 0; build_dat"
RUN_FAULTS = [
    (optimizer_built_before_sharding, "fsdp", Tiny(), (), "check that the optimizer got the para"),
    (optimizer_built_before_sharding, "ddp", Tiny(), (), "changed no parameter; check that the op"),
    (same_shard_on_all_ranks, "ddp", Tiny(), ("--train.steps", "24"), "were fed the same samples"),
    (parameter_differs, "ddp", Tiny(), (), f"parameter 0.0.weight {DIFFERS} after step 3"),
    (
        parameter_differs,
        "hsdp",
        Tiny(),
        (),
        "parameter 0.0.weight is not the same on ranks 1 and 3",
    ),
    (buffers_are_never_averaged, "ddp", Noisy(), EVALUATED, f"buffer 1.running_mean {DIFFERS}"),
    (nothing, "ddp", RanksRemember(), (), f"the buffer 0.seen {DIFFERS} after step 3"),
    (schedule_follows_all_steps, "ddp", OneBadRow(), ORDERED, "the schedule moved on a skipped"),
    (scaler_differs, "ddp", Tiny(), GROWING, "loss_scale is 512.0 on rank 1 and 1024.0 on rank 0"),
    (same_dropout_everywhere, "ddp", Noisy(), (), "ranks 0 and 1 draw the same random numbers"),
    (shorter_data_on_one_rank, "ddp", Tiny(), (), "the length of the training split is not the sa"),
    (each_rank_has_a_shard, "ddp", Tiny(), (), "sample 0 of the training split is not the same on"),
    (one_rank_evaluates_on_other_rows, "ddp", Tiny(), EVALUATED, OTHER_ROW),
]


@pytest.mark.parametrize(("fault", "strategy", "task", "words", "cause"), RUN_FAULTS)
def test_a_fault_in_a_run_stops_it_with_rank_and_cause(fault, strategy, task, words, cause):
    ranks = 4 if strategy == "hsdp" else 2
    for message in on_ranks(
        ranks, failure_of, fault, task, "--parallel.strategy", strategy, *words
    ):
        assert cause in message, message


@pytest.mark.parametrize(
    ("plant", "strategy", "task", "words"),
    [
        (nothing, "hsdp", Tiny(), ()),
        (nothing, "fsdp", Tiny(), FP16),
        (nothing, "ddp", Noisy(), (*AUTOCAST, *EVALUATED)),
        (nothing, "fsdp", OneBadRow(), (*AUTOCAST, *ORDERED, *EVALUATED)),
        (nothing, "ddp", Tiny(), GROWING),
        (nothing, "ddp", RanksRemember(averages=True), ()),
        (ranks_draw_other_noise, "ddp", Augmented(), ()),
    ],
)
def test_a_run_without_a_fault_is_silent(plant, strategy, task, words):
    words = ("--parallel.strategy", strategy, *words)
    assert on_ranks(2, failure_of, plant, task, *words) == ["", ""]


def state_after_training(world, checked):
    words = ["--train.steps", 7, "--metrics.log_every", 1, "--debug.nonfinite", "off"]
    run = make_run(world, Augmented(), *words)
    with ExitStack() as contexts:
        contexts.enter_context(patch.object(consistency, "CHECK_EVERY", 2))
        if not checked:
            contexts.enter_context(patch.object(Consistency, "on_log"))
        train(run, contexts.enter_context(AgreedStop(world)))
    return [value.tolist() for value in run.parallel.module.state_dict().values()]


def test_a_run_that_is_checked_is_bit_identical_to_one_that_is_not():
    assert on_ranks(2, state_after_training, True) == on_ranks(2, state_after_training, False)
