"""One policy table: who computes in what, who casts, and what is refused."""

from dataclasses import replace

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from dist_amp.optim import build_optimizer
from dist_amp.precision import Scaler, build_precision
from dist_amp.settings import OptimConfig, PrecisionConfig, ScalerConfig
from dist_amp.world import World


def dtypes_inside(world, words):
    """What the first layer computes in, and what is stored, reduced and returned."""
    run = make_run(world, Tiny(), *words)
    seen = {}

    def note(name):
        return lambda module, inputs, output: seen.update({name: output.dtype})

    layer = next(m for m in run.parallel.module.modules() if isinstance(m, torch.nn.Linear))
    layer.register_forward_hook(note("computed"))
    run.parallel.module.register_forward_hook(note("returned"))
    take_steps(run, 1)
    seen["stored"] = run.parallel.parameters[0].dtype
    return {**seen, "cast_by": run.precision.cast_by, "scale": run.scaler.scale_tensor.item()}


FP32 = ["--use_amp", "false"]
FP16 = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 64]
BF16 = ["--precision.dtype", "bf16"]
STORED = [*BF16, "--parallel.param_dtype", "bf16", "--parallel.reduce_dtype", "bf16"]


@pytest.mark.parametrize(
    ("strategy", "words", "computed", "cast_by"),
    [
        ("single", FP32, torch.float32, "nothing"),
        ("single", BF16, torch.bfloat16, "autocast"),
        ("ddp", FP16, torch.float16, "autocast"),
        ("fsdp", FP32, torch.float32, "nothing"),
        ("fsdp", BF16, torch.bfloat16, "policy"),
        ("fsdp", FP16, torch.float16, "policy"),
        ("fsdp", [*BF16, "--precision.cast_by", "autocast"], torch.bfloat16, "autocast"),
        ("fsdp", STORED, torch.bfloat16, "policy"),
    ],
)
def test_each_precision_computes_in_its_dtype_and_stores_float32_unless_it_is_set(
    strategy, words, computed, cast_by
):
    ranks = 1 + (strategy != "single")
    for seen in on_ranks(ranks, dtypes_inside, [*words, "--parallel.strategy", strategy]):
        assert (seen["computed"], seen["cast_by"]) == (computed, cast_by)
        assert seen["returned"] == (torch.float32 if strategy == "fsdp" else computed)
        assert seen["stored"] == (torch.bfloat16 if words is STORED else torch.float32)
        assert seen["scale"] == (64.0 if words is FP16 else 1.0)


CPU = torch.device("cpu")


def update(scaler, found_inf):
    scaler.found_inf.fill_(found_inf)
    scaler.update()


def test_a_custom_loop_uses_the_scaler_as_torchs():
    scaler = Scaler(ScalerConfig(init_scale=8.0), True, CPU)
    assert isinstance(scaler, torch.amp.GradScaler)
    assert scaler.is_enabled()
    config = OptimConfig(name="sgd", lr=1.0, momentum=0.0, weight_decay=0.0)
    for fused in (True, False):
        model = torch.nn.Linear(2, 1)
        optimizer = build_optimizer(model, replace(config, fused=fused))
        before = model.weight.detach().clone()
        scaler.scale(model(torch.tensor([[0.5, 0.25]])).sum()).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(before - model.weight, torch.tensor([[0.5, 0.25]]))
        scaler.scale(model(torch.tensor([[torch.inf, 0.25]])).sum()).backward()
        before = model.weight.detach().clone()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(before, model.weight), "skipped"
        optimizer.zero_grad()
    assert scaler.get_scale() == 2.0, "two skips"


def test_the_scaler_has_all_four_settings_and_keeps_its_state():
    factors = {"growth_factor": 4.0, "backoff_factor": 0.25, "growth_interval": 2}
    config = ScalerConfig(init_scale=64.0, **factors)
    one = Scaler(config, True, CPU)
    scales = []
    for found_inf in (0, 0, 1, 0):
        update(one, found_inf)
        scales.append(one.get_scale())
    assert scales == [64.0, 256.0, 64.0, 64.0]
    other = Scaler(config, True, CPU)
    other.load_state_dict({name: tensor.clone() for name, tensor in one.state_dict().items()})
    update(other, found_inf=0)
    assert other.get_scale() == 256.0, "the count of finite steps came along"
    other.update(2.0**127)
    for _ in range(2):
        update(other, found_inf=0)
    assert other.get_scale() == 2.0**127, "it stays finite"
    assert other.growth_tracker == 0


def test_without_fp16_the_scale_is_1_and_all_tensors_are_on_the_device():
    scaler = Scaler(ScalerConfig(), False, CPU)
    update(scaler, found_inf=1)
    assert (scaler.get_scale(), scaler.state_dict()) == (1.0, {})
    scaler = Scaler(ScalerConfig(), True, torch.device("meta"))
    tensors = [value for value in vars(scaler).values() if isinstance(value, torch.Tensor)]
    assert {tensor.device.type for tensor in tensors} == {"meta"}


def test_tf32_is_set_for_matrix_products_and_convolutions():
    for on, name in ((True, "high"), (False, "highest")):
        build_precision(PrecisionConfig(tf32=on), False, World())
        assert torch.get_float32_matmul_precision() == name
        assert torch.backends.cudnn.allow_tf32 is on
