"""Every planted fault is caught, with its cause and its rank; the same run without it is silent."""

from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from tiny import Changed, Overflow, Tiny, make_run
from torch import nn

from dist_amp import step
from dist_amp.config.load import load_config
from dist_amp.diagnostics import consistency
from dist_amp.errors import Failure
from dist_amp.optim import build_optimizer
from dist_amp.settings import DataConfig
from dist_amp.step import loss_of, train_step
from dist_amp.supervise.stop import AgreedStop
from dist_amp.tasks.image_classification import ImageClassification
from dist_amp.train import train
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell
from dist_amp.verify.reference import Reference
from dist_amp.world import World, local

# ---- faults in the loop: verify's comparison finds them ----


def without_division(run, micro_batches):
    with patch.object(step, "loss_of", lambda *args: loss_of(*args) * len(micro_batches)):
        return train_step(run, micro_batches)


def mean_of_means(run, micro_batches):
    def mean(task, model, batch, device):
        return loss_of(task, model, batch, device) / task.weight(batch)

    with patch.object(step, "loss_of", mean):
        return train_step(run, micro_batches)


def clip_too_early(run, micro_batches):
    """The limit is meant for gradients that the loss scale has been taken out of."""
    norm_of = run.parallel.global_grad_norm

    def clipped():
        factor = (run.config.train.max_grad_norm / norm_of()).clamp(max=1)
        for p in run.parallel.parameters:
            local(p.grad).mul_(factor)
        return norm_of()

    with patch.object(run.parallel, "global_grad_norm", clipped):
        return train_step(run, micro_batches)


def sync_every_micro_batch(run, micro_batches):
    sync = run.parallel.gradient_sync
    with patch.object(run.parallel, "gradient_sync", lambda on: sync(True)):
        return train_step(run, micro_batches)


@torch.no_grad()
def after_each(fault, run, micro_batches):
    with torch.enable_grad():
        report = train_step(run, micro_batches)
    fault(run)
    return report


def count_a_skip(run):
    run.schedule.applied_steps += ~run.scaler.applied


def scale_on_one_rank(run):
    if run.world.rank == 1:
        run.scaler.scale_tensor.mul_(0.5)


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
    return Reference(load_config([], environ={}), device, Tiny(samples=300, uneven=True, depth=1))


def verdict_of(world, cell, step):
    strategy, precision, *optimizer = cell.split()
    cell = Cell(strategy, precision, *optimizer, accumulation=(4,) * 5)
    return check_cell(world, reference_of(world.device), cell, step).cause


NO_SYNC = "no_sync around their forward and backward"
DIVISOR = "not by one factor: each micro-batch must be divided by the weight of all"
UPDATE = "are right, the parameters after it are not: check clipping, learning rate,"
COUNTED = "on rank 0 it counted as 1 applied, 1 skipped"


@pytest.mark.parametrize(
    ("cell", "fault", "cause"),
    [
        ("ddp fp32", without_division, "division by accumulation_steps is missing"),
        ("ddp fp32", mean_of_means, DIVISOR),
        ("ddp fp16", clip_too_early, "they were clipped before they were unscaled"),
        ("ddp fp16", partial(after_each, update_scaler), "update() must run once per step"),
        ("ddp fp16", partial(after_each, scale_on_one_rank), "on rank 1 it left the loss scale at"),
        ("ddp bf16", partial(after_each, count_a_skip), COUNTED),
        ("fsdp fp32", sync_every_micro_batch, NO_SYNC),
        ("ddp fp32", sync_every_micro_batch, NO_SYNC),
        ("ddp bf16 sgd", partial(after_each, lose_moments), UPDATE),
        ("ddp fp32 sgd", partial(after_each, change_rate_on_a_skip), "it changed the learning"),
        ("ddp fp16", train_step, ""),
        ("fsdp fp16", train_step, ""),
    ],
)
def test_a_fault_in_the_loop_is_named_by_the_comparison_and_without_one_it_is_silent(
    cell, fault, cause
):
    message = on_ranks(2, verdict_of, cell, fault)[0]
    assert cause in message, message
    assert bool(message) == bool(cause), message


def test_verify_computes_the_steps_of_images_with_augmentation():
    pytest.importorskip("sklearn")
    task = ImageClassification(DataConfig(), width=4)
    reference = Reference(load_config([], environ={}), torch.device("cpu"), task)
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""


# ---- faults in a run: the main job's consistency checks find them ----


def remember(model):
    """The model keeps a mean of what it saw, each rank its own."""
    model.register_buffer("seen", torch.zeros(8))
    model.register_forward_pre_hook(lambda _, args: model.seen.lerp_(args[0].mean(0), 0.1))


class Noisy(Overflow):
    """Dropout, batch statistics, and an infinite row that skips steps: more to go wrong."""

    def build_model(self):
        layers = [nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.1)]
        return nn.Sequential(*layers, nn.Linear(8, 1))


def failure_of(world, plant, task, *words):
    """What stops 8 steps of the main job after `plant(run)`; "" if they end well."""
    small = "--train.steps 8 --metrics.log_every 2 --train.micro_batch_size 2".split()
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
    after_step = run.metrics.after_step

    def with_fault(*step):
        after_step(*step)
        if run.step == 3:
            with torch.no_grad():
                fault()

    run.metrics.after_step = with_fault


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
    run.parallel.evaluating = replace(run.parallel, world=World()).evaluating


def scaler_differs(run):
    after_three_steps(run, lambda: run.scaler.scale_tensor.mul_(0.5 if run.world.rank else 1))


def each_rank_has_a_shard(run):
    columns = run.data.fetch.dataset.columns
    share = torch.arange(64) // 2 * 2 + run.world.rank
    run.data.fetch.dataset.columns = {name: column[share] for name, column in columns.items()}


def one_rank_evaluates_on_other_rows(run):
    if run.world.rank:
        run.validation.fetch.dataset.columns["y"][63] = 7.0


EVALUATED = ("--eval.every", "4")
ORDERED = ("--data.shuffle", "false")
AUTOCAST = ("--precision.cast_by", "autocast", *EVALUATED)
GROWING = ("--precision.dtype", "fp16", "--precision.scaler.init_scale", "256")
GROWING += ("--precision.scaler.growth_interval", "2")
DIFFERS = "is not the same on ranks 0 and 1"
OTHER_ROW = "sample 63 of the validation split is not the same on rank 1 as on rank 0; build_dat"
LAST_REPLICA = "parameter 0.0.weight is not the same on ranks 1 and 3 after step 3"


@pytest.mark.bad_input("an applied step that changes no parameter")
@pytest.mark.parametrize(
    ("fault", "strategy", "task", "words", "cause"),
    [
        (optimizer_built_before_sharding, "fsdp", Tiny(), (), "changed no parameter; check that t"),
        (same_shard_on_all_ranks, "ddp", Tiny(), ("--train.steps", 24), "were fed the same sampl"),
        (parameter_differs, "hsdp", Tiny(), (), LAST_REPLICA),
        (buffers_are_never_averaged, "ddp", Noisy(()), EVALUATED, f"r 1.running_mean {DIFFERS}"),
        (nothing, "ddp", Changed(remember), (), f"the buffer seen {DIFFERS} after step"),
        (scaler_differs, "ddp", Tiny(), GROWING, "loss_scale is 512.0 on rank 1 and 1024.0 on r"),
        (each_rank_has_a_shard, "ddp", Tiny(), (), "sample 0 of the training split is not the sa"),
        (one_rank_evaluates_on_other_rows, "ddp", Tiny(), EVALUATED, OTHER_ROW),
        (nothing, "ddp", Noisy(), (*ORDERED, *GROWING), ""),
        (nothing, "fsdp", Noisy(), (*ORDERED, *AUTOCAST), ""),
    ],
)
def test_a_fault_in_a_run_stops_it_with_rank_and_cause_and_without_one_it_is_silent(
    fault, strategy, task, words, cause
):
    words = ("--parallel.strategy", strategy, *words)
    for message in on_ranks(4 if strategy == "hsdp" else 2, failure_of, fault, task, *words):
        assert cause in message, message
        assert bool(message) == bool(cause), message
