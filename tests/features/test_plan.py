"""What `dist_amp.plan` says is what runs hold and send; it needs neither GPUs nor memory."""

import json
import math
import re

import pytest
import torch
from conftest import ROOT
from tiny import Rows, Tiny
from torch import nn

from dist_amp.commands.devices import find_device
from dist_amp.commands.plan import main, make_plan
from dist_amp.config.load import load_config
from dist_amp.distributed import machine
from dist_amp.errors import DataError

SETTINGS = "--train.micro_batch_size 2 --train.steps 8 --checkpoint.every off --eval.every off"


class Uneven(Tiny):
    """Three blocks whose rows two ranks can't share evenly, a layer before them, a root head."""

    def __init__(self):
        super().__init__(samples=4096)

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
        return Rows(words=torch.arange(1280).view(256, 5) % 11)

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

    def blocks(self, model):
        return list(model)[1:-1]

    def tokens(self, batch):
        return batch["words"].numel()


class Medium(Tiny):
    """Of 16.8 M parameters, whose activations are most of what a step with many samples takes."""

    def build_dataset(self, split):
        x, ones = torch.zeros(1, 8), torch.ones(1)
        return Rows(x=x.expand(2**20, -1), y=ones.expand(2**20), counts=ones.expand(2**20))

    def build_model(self):
        blocks = [
            nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(2)
        ]
        return nn.Sequential(nn.Linear(8, 1024), *blocks, nn.Linear(1024, 1))

    def blocks(self, model):
        return list(model)[1:-1]


class Taught(Tiny):
    """Keeps a teacher of 4 MiB beside its model."""

    def __init__(self):
        super().__init__(samples=4096)
        self.teacher = nn.Linear(8, 2**17)

    def loss_sum(self, model, batch):
        with torch.no_grad():
            taught = self.teacher(batch["x"]).mean(1)
        return (model(batch["x"]).squeeze(-1) - taught).float().square().sum()


class ScalarGain(Tiny):
    def build_model(self):
        model = super().build_model()
        model.register_parameter("gain", nn.Parameter(torch.ones(())))
        return model


class ReadsParameters(Tiny):
    def build_model(self):
        model = super().build_model()
        assert model[-1].weight.mean().item() < 1
        return model


class ReadingSGD(Tiny):
    def optimizer(self, groups, lr):
        assert groups[0]["params"][0].norm().item() > 0
        return torch.optim.SGD(groups, lr=lr, momentum=0.9)


class CountsPositives(Tiny):
    """Its forward depends on values."""

    def loss_sum(self, model, batch):
        positive = batch["x"][batch["x"].sum(1) > 0]
        return model(positive).sum()


class NoData(Tiny):
    def build_dataset(self, split):
        raise DataError("no such table")


class Prints(Tiny):
    def build_model(self):
        print("building")
        return super().build_model()


MEDIUM = "--task.target test_plan:Medium"
LARGE = "--task.target test_plan:Large"
UNEVEN = "--task.target test_plan:Uneven"


def planned(task, words, ranks, module="test_plan"):
    """The plan of a module's task under its chosen strategy, for processes on a CPU."""
    words = f"--task.target {module}:{task} --run.device cpu {SETTINGS} {words}"
    return strategies(words, ranks)[0]


def strategies(words, ranks, memory=0, device=None, only_chosen=True):
    config = load_config(words.split(), environ={})
    return make_plan(config, ranks, memory, device, only_chosen).strategies


def shown(capsys, words):
    """(exit status, standard output, standard error) of the command."""
    status = main(words.split())
    return status, *capsys.readouterr()


def facts(capsys, words):
    status, out, _ = shown(capsys, f"--json {words}")
    assert status == 0
    return json.loads(out)


LIMITED = """
import sys

from dist_amp.commands.plan import main
from dist_amp.telemetry.metrics import resident_bytes

status = main(sys.argv[1:])
print(resident_bytes()[0])
sys.exit(status)
"""


def test_a_large_model_is_planned_in_one_gibibyte(launch):
    (launch.folder / "limited.py").write_text(LIMITED)
    words = f"{LARGE} --world_size 64 --device_memory_GiB 80 --json"
    words = f"{words} --train.micro_batch_size 1 --parallel.activation_checkpointing full"
    run = launch.module("limited.py", *words.split())
    assert run.returncode == 0, run.stderr
    plan, peak = run.stdout.rsplit("\n", 2)[:2]
    plan = json.loads(plan)
    assert int(peak) < 2**30, "the parameters alone would take 11 GiB"
    assert plan["facts"]["model"] == "Sequential, 3,040,944,128 parameters; 2 x Sequential"
    assert plan["facts"]["ranks"] == "64 x cuda, 80.00 GiB each, 8 to a machine (assumed)"
    batch = "64 samples per step = 64 ranks x 1 x micro-batch of 1; 524,288 tokens per step"
    assert plan["facts"]["batch"] == batch
    fitting = [one["name"] for one in plan["strategies"] if one["fits"]]
    assert fitting == ["ddp", "fsdp", "hsdp of 8"]


def test_auto_is_resolved_by_the_memory_of_a_device_that_is_not_here(capsys):
    small = facts(capsys, f"{UNEVEN} --world_size 4 --device_memory_GiB 80")["strategies"]
    assert [one["chosen"] for one in small] == [True, False, False]
    large = facts(capsys, f"{MEDIUM} --world_size 8 --device_memory_GiB 0.175")["strategies"]
    assert [one["name"] for one in large if one["chosen"]] == ["fsdp"]
    assert [one["fits"] for one in large] == [False, True, False]
    unknown = facts(capsys, f"{UNEVEN} --world_size 8")
    assert not any(one["chosen"] for one in unknown["strategies"])
    reason = "parallel.strategy=auto depends on the GPU's memory; give --device or --device_mem"
    assert any(note.startswith(reason) for note in unknown["notes"])


def test_the_largest_micro_batch_fits_and_a_sixteenth_more_does_not(capsys):
    words = f"{MEDIUM} --parallel.strategy fsdp"
    options = "--world_size 8 --device_memory_GiB 0.1631 --largest_micro_batch"
    size = facts(capsys, f"{words} {options}")["largest_micro_batch"]
    assert size > 16
    for tried, fits in ((size, True), (math.ceil(size * 17 / 16), False)):
        more = f"{words} --train.micro_batch_size {tried}"
        (one,) = strategies(more, 8, round(0.1631 * 2**30))
        assert one.fits == fits
    _, out, _ = shown(capsys, f"{words} {options} --device_memory_GiB 0.05")
    assert "nothing fits into 95 % of the device; use more ranks" in out
    assert out.count("too large") == 3
    assert "largest train.micro_batch_size that fits: 0" in out


OVER_RANKS = f"{MEDIUM} --parallel.strategy fsdp --device h100-80gb --over_ranks"


@pytest.mark.parametrize(
    "ranks", [(8, 64), pytest.param((8, 64, 512, 4096), marks=pytest.mark.slow)]
)
def test_a_table_over_ranks_has_a_column_or_the_problem_of_each_number(capsys, monkeypatch, ranks):
    monkeypatch.setattr("dist_amp.commands.plan.MANY_RANKS", ranks)
    _, out, _ = shown(capsys, OVER_RANKS)
    assert re.findall(r"([\d,]+) x fsdp", out) == [f"{count:,}" for count in ranks]
    table = out.partition(" x fsdp")[2]
    assert "too large" not in table
    shards = re.search("optimizer state(.*)", table)[1]
    sizes = [float(size) for size in re.findall(r"([\d.]+) [MK]iB", shards)[:2]]
    assert sizes[0] > sizes[1]
    batch = "--train.micro_batch_size 128 --train.global_batch_size 1024"
    rows = facts(capsys, f"{OVER_RANKS} {batch}")["over_ranks"]
    assert [row["problem"] != "" for row in rows] == [count > 8 for count in ranks]
    assert "train.global_batch_size=1024 is not a multiple" in rows[1]["problem"]


def test_time_is_that_of_arithmetic_memory_or_sending():
    words = f"{MEDIUM} --train.micro_batch_size 2048 --parallel.strategy fsdp"
    words = f"{words} --parallel.activation_checkpointing full"
    (one,) = strategies(words, 8, device=find_device("h100-80gb"))
    # A forward of the blocks and one more, at 60 % of 989.4 TFLOP/s, and a backward of twice it.
    blocks = 2 * 2 * 2 * 1024 * 4096 * 2048
    assert one.seconds["forward"] > blocks / (0.6 * 989.4e12)
    assert one.seconds["backward"] > 3 * blocks / (0.6 * 989.4e12)
    computing = one.seconds["forward"] + one.seconds["backward"] + one.seconds["optimizer"]
    assert one.seconds["step"] == max(computing, one.seconds["sending"])


def test_a_teacher_beside_the_model_is_counted():
    peaks = [planned(task, "", 1).peaks["optimizer"] for task in ("Uneven", "Taught")]
    assert peaks[1] - peaks[0] == pytest.approx(4 * 9 * 2**17, rel=0.01)  # Uneven is of 2 KiB


def test_under_cpu_offload_the_state_is_the_hosts():
    words = f"{MEDIUM} --parallel.strategy fsdp --parallel.cpu_offload"
    (kept,) = strategies(f"{words} false", 64, 80 * 2**30)
    (offloaded,) = strategies(f"{words} true", 64, 80 * 2**30)
    # Of the same peak in forward or backward; the gradients' shards are on their way.
    state = kept.memory["parameters, buffers"] + kept.memory["optimizer state"]
    assert kept.on_device - offloaded.on_device == state


@pytest.mark.bad_input("`plan` of a task's optimizer whose step reads values")
def test_the_state_of_a_tasks_optimizer_is_counted():
    memory = planned("ReadingSGD", "--parallel.strategy ddp", 2).memory
    assert memory["optimizer state"] == memory["gradients"], "its momentum"


def test_a_gpu_that_is_not_here_is_not_asked_what_it_can_do(capsys, monkeypatch):
    monkeypatch.setattr(machine, "is_native", pytest.fail)
    words = f"{UNEVEN} --world_size 4 --parallel.strategy fsdp --compile.blocks true"
    words += " --parallel.bit_exact true --train.global_batch_size 32"
    plan = facts(capsys, f"{words} --precision.scaler.growth_factor 4")
    assert "planned without compile.blocks, parallel.bit_exact and float8" in plan["notes"]
    warning = "precision.scaler has no effect in bf16: only fp16 needs a loss scaler"
    assert f"warning: {warning}" in plan["notes"]
    precisions = [one["precision"] for one in plan["strategies"]]
    assert precisions == ["bf16, autocast", "bf16, policy", "bf16, policy"]


@pytest.mark.bad_input("`plan` of a strategy that the model rules out")
@pytest.mark.bad_input("`plan` of a model that needs its parameters to be built")
def test_a_strategy_or_a_way_to_build_the_model_that_it_rules_out_is_explained(capsys):
    words = "--task.target test_plan:ScalarGain --world_size 4 --parallel.strategy ddp"
    _, out, _ = shown(capsys, words)
    assert "ddp *" in out
    assert re.search("fsdp: not possible: fsdp can't shard .*gain.*, which is a scalar", out)
    words = "--task.target test_plan:ReadsParameters --world_size 4 --run.device cpu"
    _, out, _ = shown(capsys, words)
    assert "warning: each of the 4 ranks holds the whole model, 0.00 GiB, in host memory" in out


NEEDS_VALUES = "a plan runs the step on tensors without values, and this one can't run so: Dynamic"


@pytest.mark.bad_input("`plan` for a device that is not in the table, or without a device")
@pytest.mark.bad_input("`plan` with `--world_size 0`, or a setting that training would refuse")
@pytest.mark.bad_input(
    "`plan` with data that is missing, fails, or is smaller than a global batch on so many ranks"
)
@pytest.mark.bad_input("`plan` of a step whose shapes depend on values")
@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("--device h100", 64, "--device=h100 is not in the table; use one of a100-40gb, a100-80gb"),
        ("--device l4 --run.device cpu", 64, "--device=l4 is a GPU, and run.device=cpu plans for"),
        ("--largest_micro_batch", 64, "--largest_micro_batch needs --device or --device_memory_G"),
        ("--world_size 0", 64, "--world_size=0 must be at least 1"),
        ("--world_size 3 --train.global_batch_size 16", 64, "of micro_batch_size 8 x world size 3"),
        ("--worldsize 8", 64, "unknown key worldsize on the command line; --help lists e"),
        ("--world_size 1024 --data.drop_last true", 65, "has 4096 samples, fewer than one global"),
        ("--task.target test_plan:NoData", 65, "no such table"),
        ("--task.target test_plan:CountsPositives", 65, NEEDS_VALUES),
    ],
)
def test_a_wrong_plan_is_one_line_with_its_status(capsys, words, status, message):
    found, out, err = shown(capsys, f"{UNEVEN} --world_size 2 {words}")
    assert (found, out) == (status, "")
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


def test_json_is_json_whatever_the_task_prints(capsys):
    words = "--json --world-size 4 --task.target test_plan:Prints"
    status, out, err = shown(capsys, f"{words} {SETTINGS}")
    assert (status, json.loads(out)["facts"]["ranks"]) == (0, "4 x cuda")
    assert "building" in err
