"""One step is the step that one process would take with the whole batch; a skipped step changes nothing."""

import itertools
import math

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from tiny import (
    DetachedLoss,
    HalfLoss,
    Overflow,
    Tiny,
    VectorLoss,
    log,
    make_run,
    moments_of,
    parameters_of,
    take_steps,
)
from torch.utils._python_dispatch import TorchDispatchMode

from dist_amp.bench.harness import HostReads
from dist_amp.config.validate import accumulation_steps
from dist_amp.diagnostics.consistency import Consistency
from dist_amp.errors import ConfigError, DataError, NumericsError
from dist_amp.fast.fused import local
from dist_amp.optim import learning_rate
from dist_amp.settings import TrainConfig
from dist_amp.step import train_step
from dist_amp.world import World

STRATEGIES = [(1, "single"), (2, "ddp"), (2, "fsdp"), (4, "hsdp")]


def steps_with_one_overflow(world, words, names):
    """Parameters, moments, counters and scale around a step that has an inf in one sample, on whichever rank it is."""
    run = make_run(world, Overflow(bad=(0,), samples=16), *words, "--data.shuffle", "false")
    before = (parameters_of(run), moments_of(run), run.schedule.counters.clone(), run.scaler.scale_tensor.clone())
    report = take_steps(run, 1)[0]
    lr = run.schedule.lr.clone()
    after = (parameters_of(run), moments_of(run), run.schedule.counters.clone(), run.scaler.scale_tensor.clone())
    good = take_steps(run, 1)[0]
    assert not report.applied
    assert good.applied
    assert run.schedule.last_lr == lr, "the schedule moved on a skipped step"
    for name in before[0]:
        assert torch.equal(before[0][name], after[0][name])
        assert not torch.equal(after[0][name], parameters_of(run)[name])
    assert all(torch.equal(a, torch.zeros_like(a)) for a in after[1])
    assert after[2].tolist() == [0, 1, 1]
    assert run.schedule.counters.tolist() == [1, 1, 0]
    return after[3].item() / before[3].item()


@pytest.mark.parametrize("fused", ["true", "false"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize(("ranks", "strategy"), [(2, "ddp"), (2, "fsdp")])
def test_inf_on_one_rank_skips_the_step_on_all_and_changes_nothing(ranks, strategy, dtype, optimizer, fused):
    words = ["--parallel.strategy", strategy, "--optim.name", optimizer, "--optim.fused", fused]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 2, "--optim.warmup_steps", 2]
    words += ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
    ratios = on_ranks(ranks, steps_with_one_overflow, words, None)
    assert ratios == [0.5 if dtype == "fp16" else 1.0] * ranks


def one_rank_corrupts_its_gradient_after_the_reduction(world, strategy):
    """(whether the step was applied, the scale after it, what the consistency check says) on this rank."""
    run = make_run(
        world, Tiny(), "--parallel.strategy", strategy, "--precision.dtype", "fp16", "--train.micro_batch_size", 2
    )
    checks = Consistency(run)
    global_grad_norm = run.parallel.global_grad_norm

    def corrupted(*args):
        if world.rank == 1:
            local(run.parallel.parameters[0].grad)[0] = math.inf
        return global_grad_norm(*args)

    run.parallel.global_grad_norm = corrupted
    report = take_steps(run, 1)[0]
    run.metrics.record(report)
    said = ""
    try:
        checks.on_log(log(run))
    except NumericsError as error:
        said = str(error)
    return report.applied.item(), run.scaler.get_scale(), said


def test_inf_on_one_rank_after_the_reduction_skips_on_all_under_fsdp():
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "fsdp")
    assert results == [(False, 32768.0, "")] * 2


def test_inf_on_one_rank_after_the_reduction_is_named_at_the_next_log_step_under_ddp():
    results = on_ranks(2, one_rank_corrupts_its_gradient_after_the_reduction, "ddp")
    assert [applied for applied, *_ in results] == [True, False], "DDP's norm is each rank's own: nothing is summed"
    assert all("on rank 1" in said and "on rank 0" in said for *_, said in results)


def recover_from_a_huge_scale(world, strategy, optimizer):
    words = ["--parallel.strategy", strategy, "--precision.dtype", "fp16", "--precision.scaler.init_scale", 2**40]
    words += ["--optim.name", optimizer, "--train.steps", 60, "--train.micro_batch_size", 2]
    run = make_run(world, Tiny(), *words)
    applied = []
    for _ in range(40):
        before = [*parameters_of(run).values(), *moments_of(run), run.schedule.applied_steps.clone()]
        applied.append(take_steps(run, 1)[0].applied.item())
        after = [*parameters_of(run).values(), *moments_of(run), run.schedule.applied_steps.clone()]
        if not applied[-1] and len(after) == len(before):  # AdamW makes its moments, zeros, at the first step
            assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    return applied, run.schedule.counters.tolist(), run.scaler.scale_tensor.item()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_fp16_with_a_scale_far_too_high_skips_recovers_and_loses_nothing(ranks, strategy, optimizer):
    results = on_ranks(ranks, recover_from_a_huge_scale, strategy, optimizer)
    assert all(result == results[0] for result in results)
    applied, (applied_steps, skipped_steps, in_a_row), scale = results[0]
    assert not applied[0]
    assert sum(applied[-8:]) >= 6, "at the edge of fp16's range a step overflows now and then"
    assert (applied_steps, skipped_steps) == (sum(applied), 40 - sum(applied))
    assert (in_a_row == 0) == applied[-1]
    assert scale == 2.0 ** (40 - skipped_steps)
    assert skipped_steps >= 20


def fused_against_textbook(world, strategy, clip_by):
    """The largest difference after five fp16 steps: the factor folded into the fused kernel, and torch's own calls.

    The textbook is written out here with torch's own GradScaler, on a copy of the run whose scaler it replaces.
    """
    words = ["--parallel.strategy", strategy, "--precision.dtype", "fp16", "--train.clip_by", clip_by]
    words += ["--train.max_grad_norm", 0.05, "--train.max_grad_value", 0.005, "--train.accumulation_steps", 3]
    words += ["--train.micro_batch_size", 2, "--data.shuffle", "false", "--precision.scaler.growth_interval", 2]
    words += ["--precision.scaler.init_scale", 256, "--optim.schedule", "constant", "--optim.lr", 0.01]
    task = Overflow(bad=(12,), samples=64)  # in the second step, on one rank
    ours = make_run(world, task, *words, "--train.steps", 5)
    theirs = make_run(world, task, *words, "--train.steps", 5)
    scaler = torch.amp.GradScaler("cpu", init_scale=256, growth_interval=2)
    scaler.scale(torch.zeros(()))  # makes its scale
    optim = theirs.config.optim
    optimizer = torch.optim.AdamW(theirs.model.parameters(), lr=optim.lr, betas=optim.betas, weight_decay=0)

    def textbook(_, norm, correction, clip):
        assert correction is None or correction == 1, "every sample counts for one here"
        scaler.unscale_(optimizer)
        if clip_by == "norm":
            torch.nn.utils.clip_grad_norm_(theirs.model.parameters(), 0.05)
        if clip_by == "value":
            torch.nn.utils.clip_grad_value_(theirs.model.parameters(), 0.005)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        theirs.scaler.scale_tensor.fill_(scaler.get_scale())
        return norm

    theirs.scaler.unscale_and_clip = textbook
    theirs.scaler.step = theirs.scaler.update = lambda *args: None
    for group in ours.optimizer.param_groups:
        group["weight_decay"] = 0.0
    take_steps(ours, 5)
    take_steps(theirs, 5)
    assert ours.schedule.skipped_steps == 1
    assert ours.scaler.get_scale() == scaler.get_scale()
    a, b = parameters_of(ours), parameters_of(theirs)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("clip_by", ["norm", "value", "off"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_the_fused_update_is_that_of_unscale_clip_step_update(ranks, strategy, clip_by):
    # One division in place of two moves the last bit of a gradient: lr 0.01 x 2^-23 x a few, over four steps.
    assert max(on_ranks(ranks, fused_against_textbook, strategy, clip_by)) < 1e-7


def fused_against_not_fused(world, strategy, words):
    """The largest difference of parameters after five steps with optim.fused true and false."""
    words = ["--parallel.strategy", strategy, "--data.shuffle", "false", "--optim.lr", 0.01, "--train.steps", 5, *words]
    words += ["--train.micro_batch_size", 2, "--train.accumulation_steps", 3, "--train.max_grad_norm", 0.05]
    runs = [
        make_run(world, Overflow(bad=(12,), samples=64), *words, "--optim.fused", fused) for fused in ("true", "false")
    ]
    reports = [take_steps(run, 5) for run in runs]
    assert [r.applied.item() for r in reports[0]] == [r.applied.item() for r in reports[1]]
    assert runs[0].schedule.skipped_steps == 1
    assert runs[0].schedule.counters.tolist() == runs[1].schedule.counters.tolist()
    assert runs[0].scaler.get_scale() == runs[1].scaler.get_scale()
    a, b = map(parameters_of, runs)
    return max((a[name] - b[name]).abs().max().item() for name in a)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
@pytest.mark.parametrize(
    "words",
    [["--precision.dtype", "fp16", "--precision.scaler.init_scale", 256], ["--use_amp", "false"]],
    ids=["fp16", "fp32"],
)
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp"), (2, "fsdp")])
def test_optim_fused_true_and_false_take_the_same_steps(ranks, strategy, words, optimizer):
    # The kernel and the loop of torch's operations round in another order: lr 0.01 x 2^-23 x a few, over four steps.
    assert max(on_ranks(ranks, fused_against_not_fused, strategy, [*words, "--optim.name", optimizer])) < 2e-7


def clipped_by_norm(world):
    run = make_run(world, Tiny(), "--precision.dtype", "fp16", "--optim.name", "sgd", "--optim.momentum", 0,
                   "--train.max_grad_norm", 0.01, "--optim.lr", 1.0, "--optim.schedule", "constant",
                   "--optim.weight_decay", 0)  # fmt: skip
    before = parameters_of(run)
    report = take_steps(run, 1)[0]
    after = parameters_of(run)
    moved = math.sqrt(sum((after[name] - before[name]).square().sum().item() for name in before))
    return report.norm.item(), moved


def test_clip_sees_unscaled_gradients():
    norm, moved = on_ranks(1, clipped_by_norm)[0]
    assert 0.01 < norm < 100, "a norm that was not unscaled would be in the thousands"
    assert moved == pytest.approx(0.01, rel=1e-4)  # lr 1: the step is the clipped gradient; 1e-6 / norm is torch's own


class Operations(TorchDispatchMode):
    """The names of all operations, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def collectives_in_backward(world, strategy, accumulate_reduce):
    """How often gradients travel in a step of four micro-batches."""
    words = ["--parallel.strategy", strategy, "--use_amp", "false", "--train.accumulation_steps", 4]
    words += ["--train.micro_batch_size", 1, "--parallel.accumulate_reduce", accumulate_reduce]
    run = make_run(world, Tiny(), *words)
    if strategy == "fsdp":
        with Operations() as seen:
            take_steps(run, 1)
        return sum("reduce_scatter" in name for name in seen.names)
    buckets = []

    def count(state, bucket):
        buckets.append(bucket.index())
        return dist.all_reduce(bucket.buffer().div_(2), async_op=True).get_future().then(lambda f: f.value()[0])

    run.model.register_comm_hook(None, count)
    take_steps(run, 1)
    return len(buckets)


def test_only_the_last_micro_batch_syncs_under_ddp():
    assert on_ranks(2, collectives_in_backward, "ddp", "last") == [1, 1]  # one bucket, once


def test_fsdp_reduces_after_the_last_micro_batch_or_after_every_one():
    once = on_ranks(2, collectives_in_backward, "fsdp", "last")
    always = on_ranks(2, collectives_in_backward, "fsdp", "every")
    assert once == [3, 3]  # the tiny model's three layers are its blocks
    assert always == [12, 12]


def host_reads(world, words):
    """(reads in an ordinary step, reads in logging)."""
    run = make_run(world, Tiny(uneven=True), "--train.accumulation_steps", 2, "--train.micro_batch_size", 2, *words)
    take_steps(run, 2)  # the first step makes buckets and states
    batches = next(run.data)
    with HostReads() as ordinary:
        run.metrics.record(train_step(run, batches))
    with HostReads() as logging:
        run.metrics.log(3, run.schedule, run.scaler, run.data)
    return ordinary.count, logging.count


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("ranks", "strategy"), STRATEGIES)
def test_a_step_reads_nothing_back_and_a_log_step_reads_once(ranks, strategy, dtype):
    words = ["--parallel.strategy", strategy]
    words += ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
    assert on_ranks(ranks, host_reads, words) == [(0, 1)] * ranks


@pytest.mark.parametrize("clip", ["norm", "value", "off"])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_no_clip_and_no_fused_optimizer_costs_a_read(optimizer, clip):
    words = ["--precision.dtype", "fp16", "--train.clip_by", clip, "--optim.name", optimizer]
    assert on_ranks(1, host_reads, words) == [(0, 1)]


def test_the_textbook_path_reads_the_decision_and_the_learning_rate():
    # sgd: torch's own AdamW looks at its step counts besides, which on a GPU it does without waiting.
    words = ["--precision.dtype", "fp16", "--optim.fused", "false", "--optim.name", "sgd"]
    assert on_ranks(1, host_reads, words) == [(2, 1)]


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (VectorLoss, "shape [8], not a float32 scalar"),
        (HalfLoss, "torch.bfloat16"),
        (DetachedLoss, "without a gradient"),
    ],
)
def test_a_loss_that_is_no_float32_scalar_with_a_gradient_is_refused(task, words):
    run = make_run(World(), task())
    with pytest.raises(DataError) as error:
        take_steps(run, 1)
    assert words in str(error.value)
    assert error.value.exit_code == 65


def test_a_step_without_micro_batches_is_refused():
    with pytest.raises(
        DataError, match=r"got no micro-batches; give it those of one step, as next\(run.data\) returns"
    ):
        train_step(make_run(World(), Tiny()), [])


def test_accumulation_and_global_batch_size_determine_one_another():
    assert accumulation_steps(TrainConfig(micro_batch_size=8), 4) == 1
    assert accumulation_steps(TrainConfig(micro_batch_size=8, accumulation_steps=3), 4) == 3
    assert accumulation_steps(TrainConfig(micro_batch_size=8, global_batch_size=96), 4) == 3
    assert accumulation_steps(TrainConfig(micro_batch_size=8, global_batch_size=96, accumulation_steps=3), 4) == 3


def test_contradicting_batch_sizes_are_refused_with_the_arithmetic():
    with pytest.raises(ConfigError) as error:
        accumulation_steps(TrainConfig(micro_batch_size=8, global_batch_size=512, accumulation_steps=3), 8)
    assert str(error.value) == (
        "train.global_batch_size=512 is not micro_batch_size 8 x 8 ranks x accumulation_steps 3 = 192; "
        "use accumulation_steps=8"
    )
    with pytest.raises(
        ConfigError, match="not a multiple of micro_batch_size 8 x 1 rank = 8; use global_batch_size=16"
    ):
        accumulation_steps(TrainConfig(micro_batch_size=8, global_batch_size=20), 1)


def test_the_schedule_warms_up_falls_and_ends_at_its_floor():
    config = make_run(World(), Tiny(), "--optim.lr", 1.0, "--optim.warmup_steps", 4, "--optim.min_lr_ratio", 0.1).config
    rates = [learning_rate(config.optim, step, 20) for step in range(21)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert all(a > b for a, b in itertools.pairwise(rates[4:]))
    assert rates[20] == pytest.approx(0.1)


class Pretrained(Tiny):
    def build_model(self):
        return super().build_model().eval()


class PartlyFrozen(Tiny):
    def build_model(self):
        model = super().build_model()
        model[0].eval()
        return model


def test_a_pretrained_model_trains_in_training_mode_and_a_part_left_in_evaluation_mode_stays_there():
    run = make_run(World(), Pretrained())
    assert all(module.training for module in run.model.modules())
    run = make_run(World(), PartlyFrozen())
    with run.parallel.evaluating():
        assert not any(module.training for module in run.model.modules())
    assert [module.training for module in run.model] == [False, True, True]


class Casts(TorchDispatchMode):
    """Which tensors are cast to another dtype, by their ids."""

    def __init__(self):
        super().__init__()
        self.sources = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._to_copy.default:
            self.sources.append(id(args[0]))
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_autocast_casts_each_weight_once_a_step_whatever_the_number_of_micro_batches(dtype):
    words = ["--precision.dtype", dtype, "--train.accumulation_steps", 4, "--train.micro_batch_size", 2]
    run = make_run(World(), Tiny(), *words)
    for _ in range(2):
        with Casts() as seen:
            take_steps(run, 1)
        assert [seen.sources.count(id(p)) for p in run.parallel.parameters] == [1] * len(run.parallel.parameters)
    assert not torch.is_autocast_enabled("cpu")


def uneven_steps(world, strategy):
    """Steps whose total weight is 0.3 to 3 times the last one's: (norms, weights), and the weights expected."""
    run = make_run(world, Tiny(uneven=True), "--parallel.strategy", strategy, "--train.micro_batch_size", 1,
                   "--use_amp", "false", "--train.max_grad_norm", 1e6)  # fmt: skip
    reports = take_steps(run, 8)
    expected = run.normalizer.state_dict()["weights"].max()
    return [r.norm.item() for r in reports], [r.weight.item() for r in reports], expected.item()


def test_a_weight_that_is_not_the_expected_one_is_divided_out():
    alone = on_ranks(1, whole_batches, 8)[0]
    for strategy in ("ddp", "fsdp"):
        for norms, weights, last in on_ranks(2, uneven_steps, strategy):
            assert weights == alone[1]
            assert len(set(weights)) > 2, "they differ from step to step"
            assert weights[-1] <= last <= max(weights)
            # float32 sums in another order
            assert norms == pytest.approx(alone[0], rel=1e-5)


def whole_batches(world, steps):
    """The same steps by one process that has the whole batch."""
    run = make_run(world, Tiny(uneven=True), "--train.micro_batch_size", 2, "--use_amp", "false",
                   "--train.max_grad_norm", 1e6)  # fmt: skip
    reports = take_steps(run, steps)
    return [r.norm.item() for r in reports], [r.weight.item() for r in reports]


def test_garbage_is_collected_at_its_steps_alone():
    import gc

    from dist_amp.runtime.garbage import scheduled_garbage

    collections = []
    gc.callbacks.append(lambda phase, info: collections.append(phase) if phase == "start" else None)
    try:
        with scheduled_garbage(10) as collect:
            collections.clear()
            for step in range(1, 26):
                _ = [[] for _ in range(3000)]  # enough for Python to look after it by itself
                collect(step)
            assert collections == ["start"] * 2
        assert gc.isenabled()
    finally:
        gc.callbacks.pop()
    with scheduled_garbage("off"):
        assert gc.isenabled()


class SaysWhetherItCollects(Tiny):
    def build_dataset(self, split):
        return CollectingRows(64)


class CollectingRows:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        import gc

        return {"x": torch.zeros(8), "y": torch.zeros(()), "counts": torch.tensor(float(gc.isenabled()))}


def test_a_loader_worker_collects_its_own_garbage():
    from dist_amp.runtime.garbage import scheduled_garbage

    run = make_run(World(), SaysWhetherItCollects(), "--data.workers", 1)
    with scheduled_garbage(50):
        (batch,) = next(run.data)
    run.data.close()
    assert batch["counts"].tolist() == [1.0] * len(batch["counts"])


def steps_of_uneven_windows(world):
    """fp16 with epochs of 33 samples, of which 32 make a step: (samples that count, whether it was applied)."""
    words = ["--precision.dtype", "fp16", "--train.global_batch_size", 32, "--precision.scaler.init_scale", 2.0**17]
    run = make_run(world, Tiny(samples=33), *words, "--train.micro_batch_size", 32 // world.world_size)
    return [(report.weight.item(), report.applied.item()) for report in take_steps(run, 12)]


def test_a_step_after_an_epochs_short_end_overflows_no_sooner_than_in_one_process():
    alone = on_ranks(1, steps_of_uneven_windows)[0]
    assert [weight for weight, _ in alone] == [32.0, 1.0] * 6
    for many in on_ranks(2, steps_of_uneven_windows):
        assert sum(applied for _, applied in many) >= sum(applied for _, applied in alone)
