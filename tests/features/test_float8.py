"""Float8 matrix products (precision.matmul=fp8), emulated on CPUs: values, shards, checkpoints."""

import importlib.util
import sys

import pytest
import torch
from ranks import on_ranks
from tiny import Rows, Tiny, make_run, take_steps
from torch import nn
from torch.distributed.tensor import DTensor

from dist_amp.checkpoint.state import state_of
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError
from dist_amp.scaling.float8 import check_float8
from dist_amp.world import World

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("torchao") is None, reason="torchao is not installed"
)
FP8 = ["--precision.matmul", "fp8"]
GPT = "--task.target dist_amp.tasks.causal_lm:CausalLM --task.args.width 64".split()
GPT += "--task.args.context 32 --optim.lr 0.003 --data.shuffle false".split()


def curve(world, words, steps=30):
    run = make_run(world, None, *GPT, *words)
    reports = take_steps(run, steps)
    return [float(world.sum(report.loss_sum) / report.weight) for report in reports]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_in_float8_learn_as_one_does(strategy):
    words = [*FP8, "--parallel.strategy", strategy, "--train.micro_batch_size"]
    ranks = on_ranks(2, curve, [*words, 2], 3)[0]
    single = curve(World(), [*FP8, "--train.micro_batch_size", 4], 3)
    # A scale is of all values in a tensor, which is half a batch on each of two ranks: products
    # are rounded elsewhere, by 2^-4 of their operands, and losses move by less than 1 %.
    assert ranks == pytest.approx(single, rel=0.01)


def gathered(world, words):
    """(classes that the gathered weights of blocks have, elements as float8) in a forward."""
    run = make_run(world, None, *GPT, *FP8, "--parallel.strategy", "fsdp", *words)
    block = run.parallel.module.blocks[0]
    block.unshard()
    linears = [part for part in block.modules() if isinstance(part, nn.Linear)]
    kinds = {type(part.weight).__name__ for part in linears}
    dtypes = {part.weight._data.dtype for part in linears}
    block.reshard()
    return kinds, dtypes


def test_weights_are_gathered_in_float8():
    kinds, dtypes = on_ranks(2, gathered, [])[0]
    assert kinds == {"Float8TrainingTensor"}
    assert dtypes == {torch.float8_e4m3fn}


def saved_and_resumed(world, folder, words):
    """After two steps, a save, and two more; then the latter again from the checkpoint."""
    words = [*GPT, *FP8, "--run.dir", folder, *words]
    run = make_run(world, None, *words)
    take_steps(run, 2)
    run.save(wait=True)
    undisturbed = curve_of(run)
    again = make_run(world, None, *words, "--run.resume", "auto")
    plain = {type(part_of(tensor)) for tensor in state_of(again)["model"].values()}
    return undisturbed, curve_of(again), plain


def part_of(tensor):
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def curve_of(run):
    return [float(report.loss_sum) for report in take_steps(run, 2)]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
@pytest.mark.parametrize("more", [[], ["--optim.ema", 0.9]], ids=["plain", "ema"])
def test_a_run_in_float8_resumes_bit_for_bit_from_plain_tensors(strategy, more, tmp_path):
    ranks = 1 if strategy == "single" else 2
    words = ["--parallel.strategy", strategy, *more]
    for before, after, kinds in on_ranks(ranks, saved_and_resumed, tmp_path / "run", words):
        assert before == after
        assert kinds <= {torch.Tensor, nn.Parameter}


class Wide(Tiny):
    """Two blocks of 16, of which one has a hook; and a block whose weight is frozen."""

    def build_model(self):
        model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)), nn.Linear(16, 1))
        model[1].register_forward_hook(lambda part, args, output: output * 1.0)
        model[2].requires_grad_(False)
        model[3].weight = model[0].weight
        return model

    def blocks(self, model):
        return list(model[:4])

    def build_dataset(self, split):
        x = torch.randn(64, 16, generator=torch.Generator().manual_seed(0))
        return Rows(x=x, y=x[:, :1], counts=torch.ones(64))


class Free(Wide):
    def build_model(self):
        model = super().build_model()
        model[3] = nn.Linear(16, 16)
        return model


def test_layers_with_hooks_and_shared_or_frozen_weights_stay_as_they_are():
    module = make_run(World(), Free(), *FP8).parallel.module
    kinds = [type(part).__name__ for part in module]
    assert kinds == ["Float8Linear", "Linear", "Linear", "Float8Linear", "Linear"]


class Experts(nn.Module):
    """Two experts, of which a sample's first feature chooses one."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x):
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            chosen = (x[:, 0] > 0) == bool(number)
            result = result.index_put((chosen,), expert(x[chosen]).to(x.dtype))
        return x + result


class Mixture(Free):
    def build_model(self):
        return nn.Sequential(Experts(), Experts(), nn.Linear(16, 1))

    def blocks(self, model):
        return list(model[:2])


def mixture_losses(world, words):
    run = make_run(world, Mixture(), "--train.micro_batch_size", 1, *words)
    return [float(report.loss_sum) for report in take_steps(run, 6)]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_experts_without_a_sample_are_idle_in_float8_as_in_bf16(strategy):
    words = ["--parallel.strategy", strategy]
    ranks = 1 if strategy == "single" else 2
    bf16, fp8 = (on_ranks(ranks, mixture_losses, [*words, *more])[0] for more in ([], FP8))
    # e4m3 rounds by 2^-4, here of outputs of about 1: a square of 0.15^2 moves by up to 0.02.
    assert fp8 == pytest.approx(bf16, rel=0.1, abs=0.02)


@pytest.mark.bad_input("`precision.matmul=fp8` for a model without a layer that it can convert")
@pytest.mark.parametrize("task", [Tiny(), Wide()])
def test_a_model_without_convertible_layers_is_refused(task):
    with pytest.raises(ConfigError, match="none of the . linear layers .* multiples of 16, and"):
        make_run(World(), task, *FP8)


@pytest.mark.bad_input("`precision.matmul=fp8` in float32, in fp16 or bit-exact")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--use_amp", "false"], "use_amp=false computes in float32: use --use_amp true"),
        (["--precision.dtype", "fp16"], "float8 goes with bf16 alone: use precision.dtype=bf16"),
        (
            ["--parallel.bit_exact", "true", "--train.global_batch_size", 8],
            "bit_exact=true does not allow precision.matmul=fp8: a scale depends on all values",
        ),
    ],
)
def test_float8_is_refused_beside_settings_that_rule_it_out(words, said):
    with pytest.raises(ConfigError) as error:
        make_run(World(), Free(), *FP8, *words)
    assert said in str(error.value)


@pytest.mark.bad_input("`precision.matmul=fp8` on a GPU without float8 tensor cores")
def test_a_gpu_without_float8_tensor_cores_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    config = load_config(FP8, environ={})
    said = "needs compute capability 8.9 .* NVIDIA A100 has 8.0; or use precision.matmul=auto"
    with pytest.raises(ConfigError, match=said):
        check_float8(config, World(device=torch.device("cuda", 0)))


@pytest.mark.bad_input("`precision.matmul=fp8` without torchao")
def test_float8_without_torchao_is_refused_with_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(
        ConfigError, match=r"needs torchao .*: pip install 'dist_amp\[float8\]', or"
    ):
        make_run(World(), Free(), *FP8)
