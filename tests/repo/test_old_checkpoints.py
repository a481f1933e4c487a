"""Checkpoints of earlier versions still resume.

old_checkpoints/checkpoints.tar.xz holds, for commits 64a9aea and 02a55fe, a checkpoint of step 5 on
two ranks, of DDP in fp16 and of FSDP2 in bf16. expected.pt beside each: what that version had at
the checkpoint, and 20 steps later without a stop.
"""

import tarfile
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, parameters_of, take_steps

ARCHIVE = Path(__file__).parent / "old_checkpoints" / "checkpoints.tar.xz"
WORDS = [
    *("--train.micro_batch_size", 2, "--train.accumulation_steps", 2, "--train.steps", 40),
    *("--optim.lr", 1e-5, "--data.workers", 0, "--run.resume", "auto"),
]
FP16 = [
    *("--precision.dtype", "fp16", "--precision.scaler.growth_interval", 8),
    *("--precision.scaler.init_scale", 1e9, "--precision.scaler.backoff_factor", 5e-7),
]
RUNS = {
    "ddp_fp16": ["--parallel.strategy", "ddp", *FP16],
    "fsdp_bf16": ["--parallel.strategy", "fsdp", "--precision.dtype", "bf16"],
}


def facts_of(run):
    return {
        "scale": float(run.scaler.scale_tensor),
        "counters": run.schedule.counters.tolist(),
        "position": run.data.position,
        "parameters": parameters_of(run),
    }


def resume_and_take_20_steps(world, folder, words):
    run = make_run(world, Tiny(samples=50, uneven=True), *WORDS, *words, "--run.dir", folder)
    at_checkpoint = facts_of(run)
    take_steps(run, 20)
    return at_checkpoint, facts_of(run)


@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("commit", ["64a9aea", "02a55fe"])
def test_a_checkpoint_of_an_earlier_version_resumes(tmp_path, commit, name):
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / commit / name
    expected = torch.load(folder / "expected.pt")
    for facts in on_ranks(2, resume_and_take_20_steps, folder, RUNS[name]):
        torch.testing.assert_close(facts[0], expected["at_checkpoint"], rtol=0, atol=0)
        # The loss is divided by its weight earlier than then, so that bf16 and fp16 round gradients
        # differently; without its moments, Adam would move a parameter by 1e-5 in the first step.
        torch.testing.assert_close(facts[1], expected["after_20_steps"], rtol=0, atol=1e-6)
