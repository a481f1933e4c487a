"""Training in float8: the losses of bf16, shards, checkpoints, and settings that rule it out."""

import pytest
from byte_model import Bytes
from ranks import on_ranks
from tiny import make_run, take_steps

from benchmarks.amp import ROUNDINGS, drift_of
from dist_amp.checkpoint.compatibility import settings_of
from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml
from dist_amp.world import World

pytest.importorskip("torchao")
FP8 = ["--precision.dtype", "fp8"]
GPT = "--task.target dist_amp.tasks.causal_lm:CausalLM --task.args.width 64".split()
GPT += "--task.args.context 32 --data.shuffle false --optim.lr 0.001".split()


def curve(run, steps):
    reports = take_steps(run, steps)
    return [float(run.world.sum(report.loss_sum) / report.weight) for report in reports]


@pytest.mark.slow
def test_the_loss_in_float8_follows_that_in_bf16(capsys):
    fp32, bf16, fp8 = (
        curve(make_run(World(), None, *GPT, *words), 30)
        for words in (["--use_amp", "false"], [], FP8)
    )
    said = capsys.readouterr()
    assert "precision.dtype=fp8: 8 of 8 linear layers in blocks" in said.out
    assert "precision.dtype=fp8 is emulated on a CPU" in said.err
    # The AMP report's band for bf16: ten of its roundings of 2^-8, of what float32 learns.
    assert drift_of(bf16, fp32) < ROUNDINGS * 2**-8
    assert drift_of(fp8, fp32) < ROUNDINGS * 2**-8
    assert fp8 != bf16


def bytes_run(world, *words):
    return make_run(world, Bytes(), *FP8, "--optim.lr", 0.003, "--data.shuffle", "false", *words)


def saved_and_resumed(world, folder, *words):
    """The losses of two steps, and whether two more are the same again from a checkpoint."""
    words = ["--run.dir", folder, *words]
    run = bytes_run(world, *words)
    first = curve(run, 2)
    run.save(wait=True)
    undisturbed = curve(run, 2)
    return first, curve(bytes_run(world, *words, "--run.resume", "auto"), 2) == undisturbed


@pytest.mark.parametrize(("strategy", "more"), [("ddp", []), ("fsdp", ["--optim.ema", 0.9])])
def test_ranks_in_float8_learn_as_one_does_and_resume_bit_for_bit(strategy, more, tmp_path):
    single = curve(bytes_run(World(), "--train.micro_batch_size", 4), 2)
    words = ["--parallel.strategy", strategy, "--train.micro_batch_size", 2, *more]
    for first, is_resumed in on_ranks(2, saved_and_resumed, tmp_path / "run", *words):
        # A scale is of all values in a tensor, which is half a batch on each of two ranks: products
        # are rounded elsewhere, by 2^-4 of their operands, and losses move by less than 1 %.
        assert first == pytest.approx(single, rel=0.01)
        assert is_resumed


def test_float8_of_an_earlier_version_is_a_dtype_now(tmp_path):
    config = load_config(FP8, environ={})
    now = to_toml(config)
    before = now.replace('\ndtype = "fp8"', '\ndtype = "bf16"\nmatmul = "fp8"')
    assert before != now
    (tmp_path / "config.toml").write_text(before)
    assert settings_of(tmp_path, config) == flat(now)
    assert load_config(["--config", str(tmp_path / "config.toml")], environ={}) == config
