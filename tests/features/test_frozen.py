"""Partly frozen models: what a checkpoint holds of them, their dtypes and groups."""

import pytest
import torch
from ranks import on_ranks
from test_checkpoint import settings
from test_strangers import dtypes_after_a_step
from tiny import Tiny, make_run, parameters_of, save, take_steps
from torch import nn

from dist_amp.checkpoint.format import Reader
from dist_amp.errors import DataError
from dist_amp.scaling.frozen import checksum
from dist_amp.world import World


class Adapted(nn.Module):
    """A frozen base whose output matrix is tied to its input, and a small trained part."""

    def __init__(self, base):
        super().__init__()
        self.first, self.last = (nn.Linear(8, 64, bias=False) for _ in range(2))
        self.last.weight = self.first.weight
        self.base = nn.Linear(64, 64)
        self.requires_grad_(False)
        with torch.no_grad():
            self.base.weight.add_(base)
        self.adapter = nn.Linear(64, 1)

    def forward(self, x):
        return self.adapter(torch.tanh(self.base(self.first(x) + self.last(x))))


class AdapterTask(Tiny):
    def __init__(self, base=0.0, freeze=True, dtype="float32"):
        super().__init__()
        self.base, self.freeze, self.dtype = base, freeze, dtype

    def build_model(self):
        model = Adapted(self.base).to(getattr(torch, self.dtype))
        return model if self.freeze else model.requires_grad_(True)


def stored(folder):
    entries = Reader(folder).read_metadata().state_dict_metadata
    names = [name for name in entries if name.startswith(("model.", "frozen"))]
    return {name: list(entries[name].size) for name in names}


def trained_run(world, folder, strategy, steps, *words, task=None):
    """The parameters after so many steps, continued from the folder's checkpoint if it has one."""
    more = settings(folder, strategy, "fp32", "--run.resume", "auto", *words)
    run = make_run(world, task or AdapterTask(), *more)
    take_steps(run, steps - run.step)
    save(run)
    return parameters_of(run)


@pytest.mark.bad_input("a checkpoint with another number of frozen parameters")
def test_a_checkpoint_holds_an_adapter_and_a_number_per_frozen_parameter(tmp_path):
    trained_run(World(), tmp_path, "single", 1)
    trained = {"model.adapter.weight": [1, 64], "model.adapter.bias": [1]}
    assert stored(tmp_path / "checkpoints/step_00000001") == {**trained, "frozen": [3]}
    with pytest.raises(DataError, match="has 3 frozen parameters and this model 0; freeze"):
        trained_run(World(), tmp_path, "single", 2, task=AdapterTask(freeze=False))


def test_an_adapter_survives_another_strategy_and_number_of_ranks(tmp_path):
    same = ["--train.global_batch_size", 16, "--train.accumulation_steps", "auto"]
    whole = trained_run(World(), tmp_path / "whole", "single", 6, *same)
    for steps, ranks, strategy in ((2, 2, "fsdp"), (4, 1, "single"), (6, 2, "ddp")):
        results = on_ranks(ranks, trained_run, tmp_path / "parts", strategy, steps, *same)
    # Rounding of float32 sums in another order.
    torch.testing.assert_close(results[0], whole, rtol=0, atol=1e-6)


class Teacher(AdapterTask):
    """A frozen teacher that moves, behind autograd's back as such code often writes it."""

    def loss_sum(self, model, batch):
        module = getattr(model, "module", model)
        module.base.weight.data.mul_(0.99)
        return super().loss_sum(model, batch)


def test_a_frozen_parameter_that_changes_during_training_is_saved_and_restored(tmp_path):
    whole = trained_run(World(), tmp_path / "whole", "single", 4, task=Teacher())
    trained_run(World(), tmp_path / "parts", "single", 2, task=Teacher())
    assert "model.base.weight" in stored(tmp_path / "parts/checkpoints/step_00000002")
    resumed = trained_run(World(), tmp_path / "parts", "single", 4, task=Teacher())
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)
    assert "model.base.weight" in stored(tmp_path / "parts/checkpoints/step_00000004")


def test_a_checksum_depends_on_the_values_and_not_on_the_dtype_that_holds_them():
    tensor = torch.randn(3000).bfloat16()
    assert checksum(tensor) == checksum(tensor.float())
    assert checksum(tensor) != checksum(-tensor)
    assert checksum(tensor.to(torch.complex128)) != checksum(-tensor.to(torch.complex128))


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_a_frozen_base_keeps_its_bf16_unless_everything_is_computed_in_float32(ranks, strategy):
    task = AdapterTask(dtype="bfloat16")
    both, one = {torch.bfloat16, torch.float32}, {torch.float32}
    for amp, expected in (("true", both), ("false", one)):
        words = ["--parallel.strategy", strategy, "--use_amp", amp]
        assert on_ranks(ranks, dtypes_after_a_step, task, *words) == [expected] * ranks
