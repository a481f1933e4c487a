"""Models that nobody designed the code around: idle experts, branches, wrappers called."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from messages import message_of
from ranks import on_ranks
from tiny import Changed, Rows, Tiny, make_run, parameters_of, save, take_steps, variant
from torch import nn

from dist_amp.errors import Failure
from dist_amp.scaling.float32 import to_float32
from dist_amp.world import World


def with_forward(forward, **parts):
    """A model of these parts, computed by forward(model, *inputs)."""
    model = nn.Module()
    for name, part in parts.items():
        setattr(model, name, part)
    model.forward = partial(forward, model)
    return model


class Experts(nn.Module):
    """A block whose experts each see the samples that were routed to them, if there are any."""

    def __init__(self, experts=4):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(experts))

    def forward(self, x, chosen):
        out, normed = x.clone(), self.norm(x)
        for number in chosen.unique().tolist():
            mine = chosen == number
            out[mine] += self.experts[number](normed[mine]).to(out.dtype)
        return out


def mix(model, x, chosen):
    x = model.first(x)
    for block in model.blocks:
        x = block(x, chosen)
    return model.head(x)


class Mixture(Tiny):
    """Each micro-batch leaves some experts without a sample; expert 3 never has one."""

    def build_model(self):
        blocks = nn.ModuleList(Experts() for _ in range(2))
        return with_forward(mix, first=nn.Linear(8, 8), blocks=blocks, head=nn.Linear(8, 1))

    def blocks(self, model):
        return model.blocks

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        return Rows(**rows.columns, chosen=torch.arange(self.samples) // 3 % 3)

    def loss_sum(self, model, batch):
        return F.mse_loss(
            model(batch["x"], batch["chosen"]).float().squeeze(-1), batch["y"], reduction="sum"
        )


def mixture_run(world, task, strategy, *words):
    words = [*words, "--parallel.strategy", strategy, "--optim.lr", 1e-2, "--data.shuffle", "false"]
    size = 8 // world.world_size // 2  # two micro-batches, in which other experts are idle
    words += ["--train.micro_batch_size", size, "--train.accumulation_steps", 2]
    return make_run(world, task, *words)


class TwoNames(Tiny):
    def build_model(self):
        model = super().build_model()
        return with_forward(lambda both, x: both.teacher(x), encoder=model, teacher=model)


def saved_and_resumed(world, task, strategy, folder, *words):
    """The parameters after four steps, and of a run that is resumed after two."""
    words = [strategy, *words, "--run.dir", folder]
    through = mixture_run(world, task, *words)
    take_steps(through, 2)
    save(through)
    resumed = mixture_run(world, task, *words, "--run.resume", "auto")
    for run in (through, resumed):
        take_steps(run, 2)
    return parameters_of(through), parameters_of(resumed)


@pytest.mark.bad_input("a parameter without a gradient in some steps, or on some ranks")
@pytest.mark.parametrize(
    ("task", "ranks", "strategy", "optimizer"),
    [
        (Mixture(samples=24), 2, "ddp", "sgd"),
        (Mixture(samples=24), 2, "fsdp", "adamw"),
        (Mixture(samples=24), 4, "hsdp", "sgd"),
        (TwoNames(), 2, "ddp", "adamw"),
        (TwoNames(), 2, "fsdp", "adamw"),
    ],
)
def test_idle_experts_and_modules_of_two_names_take_the_step_of_one_process_and_resume(
    tmp_path, task, ranks, strategy, optimizer
):
    words = ["--use_amp", "false", "--optim.name", optimizer]
    alone, _ = saved_and_resumed(World(), task, "single", tmp_path / "alone", *words)
    for ended, resumed in on_ranks(
        ranks, saved_and_resumed, task, strategy, tmp_path / "ranks", *words
    ):
        # Rounding of float32 sums in another order, which four steps of Adam add up.
        torch.testing.assert_close(ended, alone, rtol=0, atol=2e-6)
        torch.testing.assert_close(ended, resumed, rtol=0, atol=0)


@pytest.mark.bad_input("weights that come in bf16, fp16 or float64")
@pytest.mark.parametrize(
    ("ranks", "strategy", "amp"), [(1, "single", "true"), (2, "fsdp", "false")]
)
def test_weights_that_come_in_bf16_are_trained_in_float32_and_a_line_says_so(
    capsys, ranks, strategy, amp
):
    words = ["--parallel.strategy", strategy, "--use_amp", amp]
    task = Changed(model=nn.Module.bfloat16)
    results = on_ranks(ranks, dtypes_after_a_step, task, *words)
    assert results == [{torch.float32}] * ranks
    make_run(World(), task)
    said = "build_model returned 153 parameters in bfloat16: stored in float32"
    assert said in capsys.readouterr().out


def dtypes_after_a_step(world, task, *words):
    run = make_run(world, task, *words)
    take_steps(run, 1)
    return {p.dtype for p in run.parallel.module.parameters()}


def test_tied_weights_stay_tied_when_they_become_float32():
    layers = nn.Embedding(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 8, bias=False)
    model = nn.Sequential(*layers).to(torch.float16)
    model[2].weight = model[0].weight
    assert "40 parameters in float16" in to_float32(model, frozen_too=False)
    assert model[2].weight is model[0].weight
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float32, torch.int64}


class CallsAPart(Tiny):
    def loss_sum(self, model, batch):
        return super().loss_sum(lambda x: model[2](model[1](model[0](x))), batch)


class CanNotBeCalled(Tiny):
    def build_model(self):
        return nn.ModuleDict({"net": super().build_model()})

    def loss_sum(self, model, batch):
        return super().loss_sum(model["net"], batch)


def message_of_a_step(world, task, strategy, *words):
    with pytest.raises(Failure) as error:
        take_steps(make_run(world, task, "--parallel.strategy", strategy, *words), 1)
    return str(error.value)


@pytest.mark.bad_input("a loss that uses more of the model than its call, over several ranks")
@pytest.mark.bad_input("a model that can't be called (ModuleDict), over several ranks")
@pytest.mark.parametrize(("task", "strategy"), [(CallsAPart(), "fsdp"), (CanNotBeCalled(), "ddp")])
def test_a_loss_that_uses_more_of_the_model_than_its_call_is_told_to_call_it(task, strategy):
    for message in on_ranks(2, message_of_a_step, task, strategy):
        assert message.startswith("the task's loss_sum did more with its model than call it (")
        assert "call model(...) once per batch" in message


def hook_parameter(model):
    model[0][0].weight.register_hook(lambda gradient: gradient * 2)


def first_weight_after(world, task, strategy):
    words = ["--use_amp", "false", "--data.shuffle", "false", "--parallel.strategy", strategy]
    size = 8 // world.world_size
    run = make_run(world, task, *words, "--train.micro_batch_size", size)
    take_steps(run, 2)
    return parameters_of(run)


@pytest.mark.bad_input("a hook on a parameter, from build_model, under fsdp")
def test_a_hook_on_a_parameter_works_under_ddp_and_is_refused_where_sharding_would_lose_it():
    task = Changed(hook_parameter)
    alone = first_weight_after(World(), task, "single")
    without = first_weight_after(World(), Tiny(), "single")
    assert not torch.equal(alone["0.0.weight"], without["0.0.weight"])
    for parameters in on_ranks(2, first_weight_after, task, "ddp"):
        # Rounding of float32 sums in another order, which two steps of Adam add up.
        torch.testing.assert_close(parameters, alone, rtol=0, atol=2e-6)
    for message in on_ranks(2, message_of_a_step, task, "fsdp"):
        assert "would lose the hook on the parameter 0.0.weight of build_model; " in message


class Coupled(Tiny):
    couples_samples = True


@pytest.mark.bad_input("coupled samples and a last batch that is not full, on several ranks")
@pytest.mark.parametrize(
    ("words", "split"), [([], "training"), (["--data.drop_last", "true"], "validation")]
)
def test_coupled_samples_with_a_last_batch_that_ranks_share_unequally_are_refused(words, split):
    words = ["--train.micro_batch_size", 4, "--eval.every", 1, *words]
    for message in on_ranks(2, message_of_a_step, Coupled(samples=60), "auto", *words):
        assert f"of 60 samples the last {split} batch has 4, not 8, so ranks" in message
    on_ranks(2, dtypes_after_a_step, Coupled(samples=64))
    take_steps(make_run(World(), Coupled(samples=62), *words), 1)


@pytest.mark.bad_input("a model that build_model has compiled")
def test_a_compiled_model_is_refused():
    model = torch.compile(nn.Linear(8, 1), backend="eager")
    said = message_of(65, make_run, World(), variant(build_model=lambda: model))
    assert "returned a compiled model; return the model as it is" in said
