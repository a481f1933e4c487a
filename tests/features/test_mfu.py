"""MFU is the model's arithmetic over the device's peak, where both are known; else not shown."""

import math
from types import SimpleNamespace

import numpy
import pytest
import torch
from messages import message_of
from tiny import Tiny, make_run, variant

from dist_amp.telemetry.mfu import count_flops, find_mfu, known_peak
from dist_amp.world import World


class Counted(Tiny):
    def flops_per_item(self, model):
        return 6 * sum(p.numel() for p in model.parameters())


FLOPS = 6 * (2 * (64 + 8) + 8 + 1)  # of Counted


@pytest.fixture
def on_a_gpu(monkeypatch):
    """on_a_gpu(name, task, ...): the MFU at one item per second on a GPU of that name, or None."""

    def mfu_of(name, task, *words):
        run = make_run(World(), task, *words)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
        world = World(device=torch.device("cuda:0"))
        if (mfu := find_mfu(world, run.config, run.task, run.parallel)) is None:
            return None
        one_per_second = SimpleNamespace(per_second=lambda name: numpy.ones(1))
        return mfu.rank_tags(one_per_second)["throughput/mfu"].item()

    return mfu_of


@pytest.mark.parametrize(
    ("words", "peak"),
    [
        ("", 312e12),
        ("--use_amp false", 19.5e12),
        ("--use_amp false --precision.tf32 true", 156e12),
        ("--precision.tf32 true", 312e12),
        ("--metrics.peak_flops 1e12", 1e12),
    ],
)
def test_on_a_gpu_the_peak_is_that_of_the_dtype_that_is_computed_in(on_a_gpu, words, peak):
    assert on_a_gpu("NVIDIA A100-SXM4-40GB", Counted(), *words.split()) == FLOPS / peak


def test_on_a_gpu_what_is_missing_is_said_with_the_fix(on_a_gpu, capsys):
    assert on_a_gpu("NVIDIA Foo", Tiny()) is None
    said = capsys.readouterr().out
    assert "mfu    not shown: the task has no flops_per_item(model); dist_amp.telemetry." in said
    assert on_a_gpu("Tesla T4", Counted()) is None
    said = "not shown: the peak of Tesla T4 in bf16 is not known; set metrics.peak_flops, in FLOP/s"
    assert said in capsys.readouterr().out


BF16_PEAKS = {
    "NVIDIA H100 80GB HBM3": 989.4,
    "A100-SXM4-40GB": 312,  # an old driver's
    "AMD Instinct MI300X OAM": 1307.4,
    "NVIDIA GeForce RTX 4090 Laptop GPU": 0,
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb": 0,
    "": 0,
}


def test_a_device_is_known_by_its_whole_name():
    peaks = {name: known_peak(name, "bf16") for name in BF16_PEAKS}
    assert peaks == {name: tflops * 1e12 for name, tflops in BF16_PEAKS.items()}


@pytest.mark.bad_input("a `flops_per_item` that fails or does not return a number above 0")
@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (0, "returned 0; it must be a finite number above 0"),
        (math.inf, "returned inf; it must"),
        (math.nan, "returned nan; it must"),
        (torch.ones(2), "failed: ValueError: only one"),
    ],
)
def test_flops_that_are_no_number_of_operations_are_named(answer, said):
    task = variant(flops_per_item=lambda model: answer)
    run = make_run(World(), task, "--metrics.peak_flops", "1e12")
    message = message_of(65, find_mfu, run.world, run.config, run.task, run.parallel)
    assert message.startswith(f"the task's flops_per_item(model) {said}")


class Runs(Tiny):
    """Counts by running its model, which draws random numbers."""

    def build_model(self):
        return torch.nn.Sequential(super().build_model(), torch.nn.Dropout())

    def flops_per_item(self, model):
        rows = self.build_dataset("train")
        return count_flops(self, model, {name: column[:1] for name, column in rows.columns.items()})


def test_a_task_that_counts_by_running_its_model_does_not_change_the_run():
    run = make_run(World(), Runs(), "--metrics.peak_flops", "1e12")
    before = torch.get_rng_state()
    assert find_mfu(run.world, run.config, run.task, run.parallel) is not None
    assert torch.equal(torch.get_rng_state(), before)
    assert [p for p in run.parallel.parameters if p.grad is not None] == []
