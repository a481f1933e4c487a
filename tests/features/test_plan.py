"""What `dist_amp.plan` says is what runs hold and send; it needs neither GPUs nor memory."""

import math
import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from tiny import Rows, Tiny
from torch import nn

from dist_amp.commands.devices import DEVICES
from dist_amp.commands.plan import main, make_job
from dist_amp.commands.simulation import simulate
from dist_amp.config.load import load_config
from dist_amp.distributed import machine
from dist_amp.errors import DataError
from dist_amp.telemetry.metrics import resident_bytes

SETTINGS = "--train.micro_batch_size 2 --train.steps 8 --checkpoint.every off --eval.every off"


class Uneven(Tiny):
    """Three blocks whose rows two ranks can't share evenly, a layer before them, a root head."""

    def __init__(self):
        super().__init__(samples=2**15)

    def build_model(self):
        blocks = [nn.Sequential(nn.Linear(9, 9), nn.Tanh()) for _ in range(3)]
        return nn.Sequential(nn.Linear(8, 9), *blocks, nn.Linear(9, 1))

    def blocks(self, model):
        return list(model)[1:-1]


class TiedWords:
    """Batch: words [B, 5] int64. The embedding's weight is the head's too."""

    def build_model(self):
        hidden = [nn.Linear(6, 6) for _ in range(2)]
        model = nn.Sequential(nn.Embedding(11, 6), *hidden, nn.Linear(6, 11, bias=False))
        model[-1].weight = model[0].weight
        return model

    def blocks(self, model):
        return [model[1], model[2]]

    def build_dataset(self, split):
        return Rows(words=torch.arange(20_480).view(4096, 5) % 11)

    def loss_sum(self, model, batch):
        logits = model(batch["words"]).float().flatten(0, 1)
        return nn.functional.cross_entropy(logits, batch["words"].flatten(), reduction="sum")

    def weight(self, batch):
        return batch["words"].numel()


class Large(TiedWords):
    """Of 3.0 B parameters. Batch: words [B, 8192] int64."""

    def build_model(self):
        layers = [nn.Sequential(nn.Linear(8192, 28672), nn.Linear(28672, 8192)) for _ in range(2)]
        head = nn.Linear(8192, 128_256, bias=False)
        return nn.Sequential(nn.Embedding(128_256, 8192), *layers, head)

    def build_dataset(self, split):
        return Rows(words=torch.zeros(1, 8192, dtype=torch.int64).expand(20_000, -1))

    def tokens(self, batch):
        return batch["words"].numel()


class Medium(Uneven):
    """Of 16.8 M parameters, whose activations are most of what a step with many samples takes."""

    width = 1024

    def build_model(self):
        width, wider = self.width, 4 * self.width
        layers = ((nn.Linear(width, wider), nn.GELU(), nn.Linear(wider, width)) for _ in range(2))
        blocks = [nn.Sequential(*each) for each in layers]
        return nn.Sequential(nn.Linear(8, width), *blocks, nn.Linear(width, 1))


class Taught(Tiny):
    """Keeps a teacher of 4 MiB beside its model, and builds an optimizer that reads values."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Linear(8, 2**17)

    def loss_sum(self, model, batch):
        with torch.no_grad():
            taught = self.teacher(batch["x"]).mean(1)
        return (model(batch["x"]).squeeze(-1) - taught).float().square().sum()

    def optimizer(self, groups, lr):
        assert groups[0]["params"][0].norm().item() > 0
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)


class ScalarGain(Tiny):
    """Its model needs values to be built."""

    def build_model(self):
        model = super().build_model()
        model.register_parameter("gain", nn.Parameter(torch.ones(())))
        assert model[-1].weight.mean().item() < 1
        return model


class CountsPositives(Tiny):
    """Its forward depends on values."""

    def loss_sum(self, model, batch):
        positive = batch["x"][batch["x"].sum(1) > 0]
        return model(positive).sum()


class Empty(Tiny):
    def build_dataset(self, split):
        return []


class NoData(Tiny):
    def build_dataset(self, split):
        raise DataError("no such table")


MEDIUM = "--task.target test_plan:Medium"
UNEVEN = "--task.target test_plan:Uneven"


def planned(task, words, ranks, module="test_plan"):
    """The plan of a module's task under its chosen strategy, for processes on a CPU."""
    words = f"--task.target {module}:{task} --run.device cpu {SETTINGS} {words}"
    return chosen(words, ranks)


def chosen(words, ranks, memory=0, device=None):
    return simulate(make_job(load_config(words.split(), {}), ranks, memory, device))


def shown(capsys, words):
    """(exit status, standard output, standard error) of the command."""
    status = main(words.split())
    return status, *capsys.readouterr()


def test_a_large_model_is_planned_for_gpus_that_are_not_here_in_half_a_gibibyte(
    capsys, monkeypatch
):
    monkeypatch.setattr(machine, "is_native", pytest.fail)
    words = "--task.target test_plan:Large --world_size 64 --device_memory_GiB 80"
    words += " --train.micro_batch_size 1 --parallel.activation_checkpointing full"
    words += " --parallel.bit_exact true --train.global_batch_size 64 --compile.blocks true"
    Path("/proc/self/clear_refs").write_text("5")  # the peak of memory is what it is now
    before = resident_bytes()[1]
    status, out, _ = shown(capsys, words)
    assert resident_bytes()[0] < before + 2**29, "the parameters alone would take 11 GiB"
    assert status == 0
    expected = [
        "model       Sequential, 3,040,944,128 parameters",
        "ranks       64 x cuda, 80.00 GiB each",
        "step        64 ranks x 1 x micro-batch of 1 = 64 samples, 524,288 tokens",
    ]
    assert [line for line in expected if line not in out.splitlines()] == []
    assert re.search(r"on each rank +ddp +fsdp +hsdp of 8 \*\n", out)


def test_the_strategy_and_the_largest_micro_batch_are_those_that_fit(capsys):
    words = f"{MEDIUM} --world_size 8 --device_memory_GiB 0.1631 --largest_micro_batch"
    _, out, _ = shown(capsys, words)
    assert re.search(r"ddp +fsdp \* +hsdp of 2\n", out)
    assert re.search(r"left of .*  too large  .*MiB +too large\n", out)
    size = int(re.search(r"largest train.micro_batch_size that fits: (\d+)", out)[1])
    assert size > 16
    for tried, fits in ((size, True), (math.ceil(size * 17 / 16), False)):
        more = f"{MEDIUM} --parallel.strategy fsdp --train.micro_batch_size {tried}"
        assert chosen(more, 8, round(0.1631 * 2**30)).fits == fits
    assert make_job(load_config(UNEVEN.split(), {}), 8, 80 * 2**30).strategy == "ddp"
    words = f"{UNEVEN} --world_size 1 --device_memory_GiB 0.05 --largest_micro_batch"
    _, out, _ = shown(capsys, words)
    assert "nothing fits into 95 % of the device; use more ranks" in out
    assert out.count("too large") == 1
    assert "largest train.micro_batch_size that fits: 0" in out


@pytest.mark.parametrize(
    "ranks", [(2, 8, 64), pytest.param((8, 64, 512, 4096), marks=pytest.mark.slow)]
)
def test_a_table_over_ranks_has_a_column_or_the_problem_of_each_number(capsys, monkeypatch, ranks):
    monkeypatch.setattr("dist_amp.commands.plan.MANY_RANKS", ranks)
    words = f"{MEDIUM} --parallel.strategy fsdp --device h100-80gb --over_ranks"
    batch = 8 * ranks[-2]
    _, out, _ = shown(capsys, f"{words} --world_size 2 --train.global_batch_size {batch}")
    assert re.findall(r"([\d,]+) x fsdp", out) == [f"{count:,}" for count in ranks[:-1]]
    problem = f"{ranks[-1]:,} ranks: not possible: train.global_batch_size={batch} is not a mult"
    assert problem in out
    shards = re.search("optimizer state(.*)", out.partition(" x fsdp")[2])[1]
    sizes = [float(size) for size in re.findall(r"([\d.]+) [MK]iB", shards)[:2]]
    assert sizes[0] > sizes[1]


def test_time_is_that_of_the_arithmetic_and_under_cpu_offload_the_state_is_the_hosts():
    words = f"{MEDIUM} --train.micro_batch_size 2048 --parallel.strategy fsdp"
    words = f"{words} --parallel.activation_checkpointing full --parallel.cpu_offload"
    kept, offloaded = (
        chosen(f"{words} {is_on}", 8, device=DEVICES["h100-80gb"]) for is_on in (False, True)
    )
    # A forward of the blocks and one more, at 60 % of 989.4 TFLOP/s, and a backward of twice it.
    blocks = 2 * 2 * 2 * 1024 * 4096 * 2048
    assert kept.seconds["computing"] > 4 * blocks / (0.6 * 989.4e12)
    assert kept.seconds["step"] == max(kept.seconds["computing"], kept.seconds["sending"])
    # Of the same peak in forward or backward; the gradients' shards are on their way.
    state = kept.memory["parameters, buffers"] + kept.memory["optimizer state"]
    assert kept.on_device - offloaded.on_device == state


@pytest.mark.bad_input("`plan` of a task's optimizer whose step reads values")
def test_a_teacher_beside_the_model_and_the_state_of_a_tasks_optimizer_are_counted():
    uneven, taught = (planned(task, "", 1) for task in ("Uneven", "Taught"))
    growth = taught.peaks["optimizer"] - uneven.peaks["optimizer"]
    assert growth == pytest.approx(4 * 9 * 2**17, rel=0.01)  # Uneven is of 2 KiB
    assert taught.memory["optimizer state"] == taught.memory["gradients"], "its momentum"


@pytest.mark.bad_input("`plan` of a model that rules out a strategy, or needs values to be built")
def test_what_a_model_or_an_unknown_device_rules_out_is_explained(capsys):
    _, out, _ = shown(capsys, "--task.target test_plan:ScalarGain --world_size 4")
    assert " *" not in out, "none is chosen"
    reason = "parallel.strategy=auto depends on the GPU's memory; give --device or --device_mem"
    assert reason in out
    assert re.search("fsdp: not possible: .*doesn't support scalar parameters. Change gain", out)


NEEDS_VALUES = "on tensors without values, which this step does not allow: Dynamic"


@pytest.mark.bad_input("`plan` for an unknown device, or with a setting that training would refuse")
@pytest.mark.bad_input("`plan` with data that fails, or shapes that need values")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--device h100", 64, "argument --device: invalid choice: 'h100' (choose from 'a100-40gb"),
        ("--largest_micro_batch", 64, "--largest_micro_batch needs --device or --device_memory_G"),
        ("--world_size 0", 64, "--world_size=0 must be at least 1"),
        ("--world_size 3 --train.global_batch_size 16", 64, "of micro_batch_size 8 x world size 3"),
        (
            "--device a10g --use_amp false",
            64,
            "plan knows no float32 rate of A10G; use --precision",
        ),
        ("--task.target test_plan:NoData", 65, "no such table"),
        ("--task.target test_plan:Empty", 65, "the training dataset is empty; check data.name, da"),
        ("--task.target test_plan:CountsPositives", 65, NEEDS_VALUES),
    ],
)
def test_a_wrong_plan_is_one_line_with_its_status(capsys, words, status, message):
    found, _, err = shown(capsys, f"{UNEVEN} --world_size 2 {words}")
    assert found == status
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.slow
def test_the_page_shows_what_its_command_prints(capsys):
    page = (ROOT / "docs" / "recipes.md").read_text()
    words, *lines = page.split("$ python -m dist_amp.plan ")[1].split("```")[0].splitlines()
    status, out, _ = shown(capsys, words.replace("configs/", f"{ROOT}/configs/"))
    assert status == 0
    assert [line for line in lines if line not in out.splitlines()] == []
