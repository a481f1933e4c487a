"""`parallel.bit_exact`: the same bits on any number of ranks, under every strategy."""

import hashlib
import re
from types import SimpleNamespace

import pytest
import torch
from bit_exact_models import Augmented, Blocks, Convolutions, Crossed
from ranks import on_ranks
from tiny import Tiny, log_row, make_run, moments_of, parameters_of, take_steps, whole
from torch import nn

from dist_amp.bit_exact import AllReduce, exact_config, row_squares, tree_sum
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
from dist_amp.step import evaluate
from dist_amp.world import World

QUICK = [(1, "single"), (2, "ddp"), (2, "fsdp")]
ALL = [(1, "single"), (2, "ddp"), (4, "ddp"), (8, "ddp")]
ALL += [(2, "fsdp"), (4, "fsdp"), (8, "fsdp"), (4, "hsdp"), (8, "hsdp"), (8, "hsdp replicas=4")]

# 75 samples: four steps of 16, and one of 11 that leaves ranks without a micro-batch.
SETTINGS = ["--parallel.bit_exact", "true", "--train.global_batch_size", 16]
SETTINGS += ["--train.micro_batch_size", 2, "--train.max_grad_norm", 0.3, "--optim.lr", 1e-2]
SETTINGS += ["--optim.ema", 0.9, "--eval.every", 1000, "--eval.batches", "all"]


def sha1(tensors):
    digest = hashlib.sha1()
    for tensor in tensors:
        digest.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def trace(world, task, strategy, steps, *words):
    """What each of `steps` steps logs, and hashes of all that the run holds then."""
    name, *replicas = strategy.split(" replicas=")
    words = [*SETTINGS, "--parallel.strategy", name, "--train.steps", steps, *words]
    if replicas:
        words += ["--parallel.replicas", *replicas]
    run = make_run(world, task, *words)
    logged = []
    for _ in range(steps):
        run.metrics.record(*take_steps(run, 1))
        row = log_row(run)
        names = ("grad_norm", "lr", "loss_scale", "skipped_steps", "weight_sum")
        logged.append((row.loss.hex(), *(row[name].hex() for name in names)))
    hashes = {
        "parameters": sha1(parameters_of(run).values()),
        "moments": sha1(moments_of(run)),
        "average": sha1(whole(one) for one in run.extra_states["ema"].tensors.values()),
        "evaluation": evaluate(run)["loss"].hex(),
    }
    run.close()
    return logged, hashes


def compare(task, layouts, steps, *words):
    results = {}
    for ranks, strategy in layouts:
        run = (trace, task, strategy, steps, *words)
        everywhere = on_ranks(ranks, *run, timeout_seconds=900)  # 8 ranks may share 2 cores
        assert all(one == everywhere[0] for one in everywhere)
        results[ranks, strategy] = everywhere[0]
    (first, expected), *others = results.items()
    for layout, (logged, hashes) in others:
        for step, (mine, its) in enumerate(zip(logged, expected[0], strict=True), start=1):
            assert mine == its, f"step {step}: {layout} differs from {first}"
        assert hashes == expected[1], f"{layout} differs from {first}"
    return expected


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_runs_of_one_and_two_ranks_have_the_same_bits(dtype):
    precision = ["--use_amp", "false"]
    if dtype != "fp32":
        precision = ["--precision.dtype", dtype]
    compare(Blocks(), QUICK, 12, *precision)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_gradients_with_several_uses_are_added_in_one_order(dtype):
    precision = ["--use_amp", "false"]
    if dtype != "fp32":
        precision = ["--precision.dtype", dtype]
    compare(Crossed(), QUICK, 4, *precision)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Blocks(), ["--use_amp", "false"]),
        (Blocks(), ["--precision.dtype", "bf16"]),
        (Augmented(), ["--use_amp", "false"]),
        (Convolutions(), ["--use_amp", "false"]),
        (Convolutions(), ["--precision.dtype", "bf16", "--optim.name", "sgd"]),
        (Blocks(), ["--use_amp", "false", "--optim.name", "muon"]),
        (Blocks(), ["--precision.dtype", "bf16", "--parallel.activation_checkpointing", "full"]),
        (Blocks(), ["--use_amp", "false", "--data.workers", 1, "--train.clip_by", "value"]),
        (Blocks(), ["--use_amp", "false", "--data.drop_last", "true"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_every_layout_has_the_same_bits_to_the_end(task, words):
    steps = 40
    if words in (["--use_amp", "false"], ["--precision.dtype", "bf16"]):
        steps = 200
    compare(task, ALL, steps, *words)


def continued(world, task, strategy, folder, steps, *words):
    """Resume from the folder's newest checkpoint, train up to `steps`, and save there."""
    more = ["--run.dir", folder, "--run.resume", "auto", "--checkpoint.every", 1000, *words]
    name, *replicas = strategy.split(" replicas=")
    if replicas:
        more += ["--parallel.replicas", *replicas]
    run = make_run(world, task, *SETTINGS, *more, "--train.steps", 24, "--parallel.strategy", name)
    logged = []
    while run.step < steps:
        run.metrics.record(*take_steps(run, 1))
        if run.step % 4 == 0:  # what is checkpointed in between is part of an interval
            row = log_row(run)
            logged.append((run.step, row.loss.hex(), row["grad_norm"].hex(), row["lr"].hex()))
    run.save()
    hashes = sha1(parameters_of(run).values()), sha1(moments_of(run))
    run.close()
    return logged, hashes


@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=pytest.mark.slow)])
def test_a_run_that_changes_ranks_and_strategy_ends_with_the_undisturbed_runs_bits(tmp_path, dtype):
    # The scale falls at first, so that steps are skipped, and grows later.
    words = ["--precision.dtype", dtype]
    if dtype == "fp16":
        words += ["--precision.scaler.init_scale", 2.0**40]
        words += ["--precision.scaler.growth_interval", 3, "--train.max_skips_in_a_row", 60]
    alone = on_ranks(1, continued, Blocks(), "single", str(tmp_path / "alone"), 24, *words)[0]
    changing = str(tmp_path / "changing")
    logged = []
    hashes = ()
    for ranks, strategy, steps in [
        (4, "ddp", 5),
        (2, "fsdp", 10),
        (1, "single", 15),
        (4, "hsdp", 19),
        (2, "ddp", 24),
    ]:
        more, hashes = on_ranks(ranks, continued, Blocks(), strategy, changing, steps, *words)[0]
        logged += more
    assert (logged, hashes) == alone


# ---- what can't be exact


@pytest.fixture(autouse=True)
def threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.bad_input("`parallel.bit_exact` with a number of ranks that is no power of two")
@pytest.mark.bad_input("`parallel.bit_exact` without `train.global_batch_size`")
@pytest.mark.bad_input("`parallel.bit_exact` with a setting whose sums can't be exact")
@pytest.mark.parametrize(
    ("ranks", "words", "error"),
    [
        (3, [], "needs a power of two of ranks, not 3: .*; use 2 or 4 ranks"),
        (12, [], "not 12: .*; use 8 or 16 ranks"),
        (2, ["--train.global_batch_size", "auto"], "use train.global_batch_size=16 or"),
        (2, ["--parallel.comm_dtype", "fp16"], r"parallel.comm_dtype=fp16: .*; use off"),
        (2, ["--parallel.param_dtype", "bf16"], "parallel.param_dtype=bf16: .*; use fp32"),
        (2, ["--parallel.reduce_dtype", "bf16"], "parallel.reduce_dtype=bf16: .*; use fp32"),
        (2, ["--parallel.cpu_offload", "true"], "parallel.cpu_offload=true: .*; use false"),
        (2, ["--precision.cast_by", "policy"], "precision.cast_by=policy: .*; use auto"),
        (2, ["--compile.mode", "max-autotune"], "compile.mode=max-autotune: .*; use default"),
    ],
)
def test_settings_that_cannot_be_exact_are_rejected_by_name(ranks, words, error):
    words = ["--train.global_batch_size", 96, "--parallel.bit_exact", "true", *words]
    config = load_config([str(word) for word in words], environ={})
    with pytest.raises(ConfigError, match=error):
        exact_config(config, World(world_size=ranks))


class Normed(Tiny):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))


class Coupled(Tiny):
    couples_samples = True


class Fused(Tiny):
    def optimizer(self, groups, lr):
        return torch.optim.AdamW(groups, lr=lr, fused=True)


@pytest.mark.bad_input("`parallel.bit_exact` with batch norm")
@pytest.mark.bad_input("`parallel.bit_exact` with a loss that couples samples of several ranks")
@pytest.mark.bad_input("`parallel.bit_exact` on a CPU with a fused optimizer of the task's")
@pytest.mark.parametrize(
    ("task", "error"),
    [
        (Normed(), r'module "1" \(BatchNorm1d\) keeps statistics of each rank.*; use GroupNorm'),
        (Coupled(), "the task has couples_samples=True"),
        (Fused(), "the task's optimizer is fused"),
    ],
)
def test_what_a_task_does_that_cannot_be_exact_is_rejected_by_name(task, error):
    words = [*SETTINGS, "--data.drop_last", "true"]
    with pytest.raises(ConfigError, match=error):
        make_run(World(), task, *words)


class Follows(Tiny):
    """A teacher that moves in each forward: twice as often with twice the micro-batches."""

    def __init__(self, buffer: bool = False):
        super().__init__()
        self.buffer = buffer

    def build_model(self):
        return Follower(self.buffer)


class Follower(nn.Module):
    def __init__(self, buffer):
        super().__init__()
        self.student = nn.Linear(8, 1)
        self.teacher = nn.Linear(8, 1).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.in_buffer = buffer

    def forward(self, x):
        with torch.no_grad():
            if self.in_buffer:
                self.mean.lerp_(x.mean(0), 0.1)
            else:
                self.teacher.weight.lerp_(self.student.weight, 0.1)
        return self.student(x) - self.teacher(x) + self.mean.sum()


@pytest.mark.bad_input("`parallel.bit_exact` with a model whose forward changes a state")
@pytest.mark.parametrize(("buffer", "name"), [(False, "teacher.weight"), (True, "mean")])
def test_a_state_that_the_forward_changes_is_named(buffer, name):
    run = make_run(World(), Follows(buffer), *SETTINGS)
    with pytest.raises(ConfigError, match=f"forward changes {name}, once per micro-batch"):
        take_steps(run, 1)


@pytest.mark.bad_input("`parallel.bit_exact` in a run that resumes one without it")
def test_a_run_that_becomes_exact_says_from_which_step_on(tmp_path, capsys):
    words = ["--train.global_batch_size", 16, "--run.dir", tmp_path, "--run.resume", "auto"]
    run = make_run(World(), Tiny(), *words)
    take_steps(run, 3)
    run.save()
    run.close()
    make_run(World(), Tiny(), *words, "--parallel.bit_exact", "true").close()
    assert "exact  from step 3 on: the steps before were not" in capsys.readouterr().out


# ---- sums


@pytest.mark.parametrize("count", [1, 3, 6, 7, 13])
def test_padding_with_zeros_does_not_change_the_sum_of_a_tree(count):
    values = torch.randn(count, 5, generator=torch.Generator().manual_seed(count))
    padded = torch.cat([values, torch.zeros(16 - count, 5)])
    assert tree_sum(values).equal(tree_sum(padded))
    whole_parts = torch.stack([tree_sum(part) for part in padded.split(4)])
    assert tree_sum(whole_parts).equal(tree_sum(padded))  # as ranks and rounds divide it


@pytest.mark.parametrize("columns", [1, 2, 7, 64, 1000])
def test_a_rows_sum_of_squares_does_not_depend_on_its_shard(columns):
    rows = torch.randn(9, columns, generator=torch.Generator().manual_seed(columns))
    together = row_squares(rows)
    assert together.equal(torch.cat([row_squares(row[None].clone()) for row in rows]))
    # Sums of 1,000 squares in pairs: 10 roundings.
    assert together.allclose(rows.double().square().sum(1).float(), rtol=1e-6, atol=0)


def sums_of_buckets(world, lengths):
    """What the hook makes of a bucket of each length whose elements are 0, 1, ... + the rank."""
    buckets = [torch.arange(length) + float(world.rank) for length in lengths]
    for bucket in buckets:
        AllReduce(world).hook(SimpleNamespace(buffer=lambda bucket=bucket: bucket)).wait()
    return [bucket.tolist() for bucket in buckets]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_bucket_is_summed_in_place_whether_ranks_divide_it_or_not(ranks):
    expected = [[ranks * i + sum(range(ranks)) for i in range(length)] for length in (8, 9, 3)]
    assert on_ranks(ranks, sums_of_buckets, (8, 9, 3)) == [expected] * ranks


def test_the_bench_compares_time_bytes_and_memory_with_the_ordinary_step(launch):
    words = ["--task.target", "tiny:Tiny", "--train.global_batch_size", "8"]
    words += ["--train.micro_batch_size", "2", "--train.steps", "1000", "--use_amp", "false"]
    done = launch.module("benchmarks.bit_exact", *words)
    assert done.returncode == 0, done.stderr
    assert "single on 1 x cpu, fp32, 4 micro-batches per rank" in done.stdout
    assert re.search(r"^processor ms +[\d.]+ +[\d.]+  [\d.]+ \[", done.stdout, re.MULTILINE)
    assert re.search(r"^bytes made in a step +\d+ +\d+  [\d.]+$", done.stdout, re.MULTILINE)
    assert re.search(r"^bytes kept for sums +0 +\d+ +2.00 x the", done.stdout, re.MULTILINE)
