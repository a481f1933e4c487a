"""What test_float8.py tests, with other features."""

import pytest
from ranks import on_ranks
from test_float8 import FP8, GPT, curve
from tiny import make_run, take_steps

from benchmarks.amp import ROUNDINGS, drift_of
from dist_amp.verify.cells import full
from dist_amp.world import World


@pytest.mark.slow
def test_the_loss_in_float8_follows_that_in_bf16(capsys):
    calm = ["--optim.lr", 0.001]
    single = [curve(World(), [*words, *calm]) for words in (["--use_amp", "false"], [], FP8)]
    said = capsys.readouterr()
    assert "precision.matmul=fp8: 8 of 8 linear layers in blocks" in said.out
    assert "precision.matmul=fp8 is emulated on a CPU" in said.err
    fp32, bf16, fp8 = single
    # The AMP report's band for bf16: ten of its roundings of 2^-8, of what float32 learns.
    assert drift_of(bf16, fp32) < ROUNDINGS * 2**-8
    assert drift_of(fp8, fp32) < ROUNDINGS * 2**-8
    assert fp8 != bf16


def weights(world, folder, words, save):
    run = make_run(world, None, *GPT, "--run.dir", folder, "--run.resume", "auto", *words)
    if save:
        take_steps(run, 2)
        run.save(wait=True)
    else:
        assert run.step == 2
    return {name: full(p).tolist() for name, p in run.parallel.module.named_parameters()}


def test_a_checkpoint_in_float8_is_resumed_in_bf16_on_one_process(tmp_path):
    words = [*FP8, "--parallel.strategy", "fsdp", "--train.micro_batch_size", 4]
    saved = on_ranks(2, weights, tmp_path / "run", words, True)[0]
    change = ["--run.allow_config_change", "true"]
    assert weights(World(), tmp_path / "run", change, False) == saved
