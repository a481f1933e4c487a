"""What test_float8.py tests, with other features."""

import pytest
import torch
from byte_model import Bytes
from ranks import on_ranks
from test_float8 import FP8, Wide
from tiny import make_run, take_steps
from torch import nn
from torch.distributed.tensor import DTensor

from benchmarks.amp import ROUNDINGS, drift_of
from dist_amp.checkpoint.compatibility import settings_of
from dist_amp.checkpoint.state import state_of
from dist_amp.config.load import load_config
from dist_amp.config.text import flat, to_toml
from dist_amp.errors import ConfigError
from dist_amp.world import World

GPT = "--task.target dist_amp.tasks.causal_lm:CausalLM --task.args.width 64".split()
GPT += "--task.args.context 32 --data.shuffle false".split()


def curve(run, steps):
    """The loss of each step, of all ranks."""
    reports = take_steps(run, steps)
    return [float(run.world.sum(report.loss_sum) / report.weight) for report in reports]


@pytest.mark.slow
def test_the_loss_in_float8_follows_that_in_bf16(capsys):
    calm = ["--optim.lr", 0.001]
    fp32, bf16, fp8 = (
        curve(make_run(World(), None, *GPT, *calm, *words), 30)
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
    return make_run(world, Bytes(), "--optim.lr", 0.003, "--data.shuffle", "false", *words)


def curve_of_bytes(world, *words):
    return curve(bytes_run(world, *words), 3)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_in_float8_learn_as_one_does(strategy):
    words = [*FP8, "--parallel.strategy", strategy, "--train.micro_batch_size"]
    ranks = on_ranks(2, curve_of_bytes, *words, 2)[0]
    single = curve_of_bytes(World(), *FP8, "--train.micro_batch_size", 4)
    # A scale is of all values in a tensor, which is half a batch on each of two ranks: products
    # are rounded elsewhere, by 2^-4 of their operands, and losses move by less than 1 %.
    assert ranks == pytest.approx(single, rel=0.01)


def gathered(world):
    """(classes that the gathered weights of blocks have, their dtypes) in a forward."""
    run = bytes_run(world, *FP8, "--parallel.strategy", "fsdp")
    block = run.parallel.module.blocks[0]
    block.unshard()
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    kinds = {type(part.weight).__name__ for part in linears}
    dtypes = {part.weight._data.dtype for part in linears}
    block.reshard()
    return kinds, dtypes


def test_weights_are_gathered_in_float8():
    assert on_ranks(2, gathered)[0] == ({"Float8TrainingTensor"}, {torch.float8_e4m3fn})


def saved_and_resumed(world, folder, words):
    """After two steps, a save, and two more; then the latter again from the checkpoint."""
    words = [*FP8, "--run.dir", folder, *words]
    run = bytes_run(world, *words)
    take_steps(run, 2)
    run.save(wait=True)
    undisturbed = curve(run, 2)
    again = bytes_run(world, *words, "--run.resume", "auto")
    plain = {type(part_of(tensor)) for tensor in state_of(again)["model"].values()}
    return undisturbed, curve(again, 2), plain


def part_of(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


@pytest.mark.parametrize(
    ("strategy", "more"),
    [("single", []), ("single", ["--optim.ema", 0.9]), ("ddp", []), ("fsdp", ["--optim.ema", 0.9])],
)
def test_a_run_in_float8_resumes_bit_for_bit_from_plain_tensors(strategy, more, tmp_path):
    ranks = 1 if strategy == "single" else 2
    words = ["--parallel.strategy", strategy, *more]
    for before, after, kinds in on_ranks(ranks, saved_and_resumed, tmp_path / "run", words):
        assert before == after
        assert kinds <= {torch.Tensor, nn.Parameter}


def test_layers_with_hooks_and_shared_or_frozen_weights_stay_as_they_are():
    module = make_run(World(), Wide(), *FP8).parallel.module
    kinds = [type(part).__name__ for part in module]
    assert kinds == ["Float8Linear", "Linear", "Linear", "Float8Linear", "Linear"]


@pytest.mark.bad_input("`precision.dtype=fp8` in float32 or bit-exact")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_amp", "false"], "use_amp=false computes in float32: use --use_amp true"),
        (
            ["--parallel.bit_exact", "true", "--train.global_batch_size", 8],
            "bit_exact=true does not allow precision.dtype=fp8: float8 scales by a whole",
        ),
    ],
)
def test_float8_is_refused_beside_settings_that_rule_it_out(words, said):
    with pytest.raises(ConfigError) as error:
        make_run(World(), Wide(), *FP8, *words)
    assert said in str(error.value)


def test_float8_of_an_earlier_version_is_a_dtype_now(tmp_path):
    config = load_config(FP8, environ={})
    now = to_toml(config)
    before = now.replace('\ndtype = "fp8"', '\ndtype = "bf16"\nmatmul = "fp8"')
    assert before != now
    (tmp_path / "config.toml").write_text(before)
    assert settings_of(tmp_path, config) == flat(now)
    assert load_config(["--config", str(tmp_path / "config.toml")], environ={}) == config
