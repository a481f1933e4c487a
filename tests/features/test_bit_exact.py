"""`parallel.bit_exact`: the same bits on any number of ranks, under every strategy."""

import hashlib
from types import SimpleNamespace

import pytest
import torch
from bit_exact_models import Augmented, Blocks, Convolutions
from ranks import on_ranks
from tiny import Tiny, average_of, log_row, make_run, moments_of, parameters_of, take_steps, whole

from dist_amp.bit_exact import all_reduce, row_squares, tree_sum
from dist_amp.step import evaluate
from dist_amp.world import World

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


def hashes_of(run):
    """Of all that a run holds."""
    return {
        "parameters": sha1(parameters_of(run).values()),
        "moments": sha1(moments_of(run)),
        "average": sha1(whole(one) for one in average_of(run).values()),
        "evaluation": evaluate(run)["loss"].hex(),
    }


def trace(world, task, strategy, steps, *words):
    """What each of `steps` steps logs, and hashes of all that the run holds then."""
    name, *replicas = strategy.split(" replicas=")
    words = [*SETTINGS, "--parallel.strategy", name, "--train.steps", steps, *words]
    if replicas:
        words += ["--parallel.replicas", *replicas]
    run = make_run(world, task, *words)
    logged = []
    for _ in range(steps):
        run.metrics.after_step(*take_steps(run, 1))
        row = log_row(run)
        names = ("grad_norm", "lr", "loss_scale", "skipped_steps", "weight_sum")
        logged.append((row.loss.hex(), *(row[name].hex() for name in names)))
    hashes = hashes_of(run)
    run.close()
    return logged, hashes


def compare(task, layouts, steps, *words):
    results = {}
    for ranks, strategy in layouts:
        run = (trace, task, strategy, steps, *words)
        everywhere = on_ranks(ranks, *run, timeout_seconds=900)  # 8 ranks may share 2 cores
        assert everywhere == [everywhere[0]] * ranks
        results[ranks, strategy] = everywhere[0]
    (first, expected), *others = results.items()
    for layout, result in others:
        assert result == expected, f"{layout} differs from {first}"


FP32, BF16 = ["--use_amp", "false"], ["--precision.dtype", "bf16"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Blocks(), FP32),
        (Blocks(), BF16),
        (Augmented(), FP32),
        (Convolutions(), FP32),
        (Convolutions(), [*BF16, "--optim.name", "sgd"]),
        (Blocks(), [*FP32, "--optim.name", "muon"]),
        (Blocks(), [*BF16, "--parallel.activation_checkpointing", "full"]),
        (Blocks(), [*FP32, "--data.workers", 1, "--train.clip_by", "value"]),
        (Blocks(), [*FP32, "--data.drop_last", "true"]),
    ],
)
def test_every_layout_has_the_same_bits_to_the_end(task, words):
    compare(task, ALL, 40, *words)  # eight epochs


# ---- what can't be exact


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
        all_reduce(world, SimpleNamespace(buffer=lambda bucket=bucket: bucket)).wait()
    return [bucket.tolist() for bucket in buckets]


def test_a_bucket_is_summed_in_place_whether_ranks_divide_it_or_not():
    ranks = 4
    expected = [[ranks * i + sum(range(ranks)) for i in range(length)] for length in (8, 9, 3)]
    assert on_ranks(ranks, sums_of_buckets, (8, 9, 3)) == [expected] * ranks
