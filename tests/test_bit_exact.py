"""`parallel.bit_exact`: the same bits on any number of ranks, under every strategy."""

import hashlib

import pytest
import torch
from bit_exact_models import Augmented, Blocks, Convolutions
from ranks import on_ranks
from tiny import log_row, make_run, moments_of, parameters_of, take_steps, whole

from dist_amp.step import evaluate

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
        everywhere = on_ranks(ranks, trace, task, strategy, steps, *words)
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
def test_every_layout_has_the_same_bits_after_200_steps(task, words):
    steps = int(__import__("os").environ.get("STEPS", 200))
    compare(task, ALL, steps, *words)
