"""A skipped step is replayed, and its first inf or nan is named."""

import json
import threading
from unittest.mock import patch

import pytest
import torch
from ranks import on_ranks
from tiny import Overflow, Tiny, log_row, make_run, take_steps
from torch import nn

from dist_amp.diagnostics.nonfinite_replay import NonfiniteReplay
from dist_amp.world import World, local

LAYOUTS = [(1, "single"), (2, "ddp"), (2, "fsdp")]
FP32 = ["--use_amp", "false"]
IN_ORDER = ["--data.shuffle", "false", "--train.micro_batch_size", 2]


KINDS = {
    # Finite in, nan out, before a layer that is not to blame.
    "log": lambda x, linear: linear(x.log()),
    # Finite forward; at zero the root's gradient is infinite.
    "root": lambda x, linear: (linear(x) * 0.0).sqrt_(),
    # nan for a sample of zeros.
    "share": lambda x, linear: x / x.abs().sum(-1, keepdim=True),
    # Its infinite gradient becomes zero in the ReLU before it, and spoils nothing.
    "harmless root": lambda x, linear: (x * 0.0).relu_().sqrt(),
    # Intended: it goes no further than the softmax that follows.
    "minus inf": lambda x, linear: x.masked_fill(torch.arange(8) > 3, -torch.inf),
}


class Layer(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return KINDS[self.kind](x, self.linear)


class Made(Tiny):
    """Tiny with a Layer as model[1]; its third sample is zeros there."""

    def __init__(self, kind: str = "log"):
        super().__init__(samples=32)
        self.kind = kind

    def build_model(self):
        first = nn.Linear(8, 8)
        nn.init.zeros_(first.bias)
        middle = Layer(self.kind)
        if self.kind == "minus inf":
            middle = nn.Sequential(middle, nn.Softmax(-1))
        return nn.Sequential(first, middle, nn.Linear(8, 1))

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        rows.columns["x"][2] = 0.0
        return rows


def replayed(world, task, words, folder, steps=1, spoil=None):
    """(what each rank found, its warnings) after `steps` steps and a log step."""
    run = make_run(world, task, *words, "--run.dir", folder)
    warnings = []
    observer = NonfiniteReplay(run)
    run.observers.add(observer)
    if spoil:
        spoil(run)
    with patch.object(World, "warn", lambda world, text: warnings.append(text)):
        for report in take_steps(run, steps):
            run.metrics.record(report)
        observer.on_log(log_row(run))
    return observer.faults, warnings


def replay(ranks, task, words, folder, *more):
    """The fault that all ranks agree on, and rank 0's warnings."""
    results = on_ranks(ranks, replayed, task, words, str(folder), *more)
    assert all(faults == results[0][0] for faults, _ in results)
    faults, warnings = results[0]
    assert len(faults) <= 1
    return (faults[0] if faults else None), warnings


def replayed_each(world, strategy, folder):
    """Of a batch, a forward and a backward that are not finite."""
    words = ["--parallel.strategy", strategy, *IN_ORDER]
    bad_batch = Overflow(bad=(world.world_size - 1,))
    return [
        replayed(world, bad_batch, words, f"{folder}/batch"),
        replayed(world, Made("log"), words, f"{folder}/forward"),
        replayed(world, Made("root"), [*words, *FP32], f"{folder}/backward"),
    ]


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
def test_the_first_inf_or_nan_of_each_kind_is_named(tmp_path, ranks, strategy):
    for name in ("batch", "forward", "backward"):
        (tmp_path / name).mkdir()
    results = on_ranks(ranks, replayed_each, strategy, str(tmp_path))
    for of_rank in results:
        assert [faults for faults, _ in of_rank] == [faults for faults, _ in results[0]]
    batch, forward, backward = ((faults[0], warnings) for faults, warnings in results[0])

    fault, warnings = batch
    assert (fault.phase, fault.step, fault.rank, fault.micro_batch) == ("batch", 1, ranks - 1, 0)
    assert fault.samples == ([0, 1] if ranks == 1 else [1, 3])
    assert str(fault.tensors[0]).startswith(
        "batch['x'] fp32 [2, 8] has 0 nan and 8 inf, finite part -"
    )
    command = f"dist_amp replay {tmp_path / 'batch'} --step 1"
    assert warnings == [f"step 1 was skipped: on {fault}; see {command}"]
    assert ", the batch itself: batch['x'] fp32" in warnings[0]
    line = json.loads((tmp_path / "batch/nonfinite/reports.jsonl").read_text())
    assert (line["step"], line["rank"], line["phase"]) == (1, ranks - 1, "batch")

    fault, warnings = forward
    assert (fault.phase, fault.module, fault.module_class) == ("forward", "1", "Layer")
    assert (fault.rank, fault.other_ranks) == (0, list(range(1, ranks)))
    output, given = fault.tensors
    assert (output.what, output.dtype, output.shape, output.nan) == ("output", "bf16", [2, 8], 16)
    assert (given.what, given.dtype, given.finite) == ("input", "bf16", True)
    assert given.span[0] < 0 < given.span[1]
    said = "forward of 1 (Layer): output bf16 [2, 8] has 16 nan and 0 inf, finite part nothing; "
    said += "input bf16"
    assert said in warnings[0]

    fault, warnings = backward
    assert (fault.phase, fault.module, fault.operation) == ("backward", "1", "SqrtBackward0")
    finite = {tensor.what: tensor.finite for tensor in fault.tensors}
    assert [what for what in finite if not finite[what]] == ["gradient returned"]
    assert len(finite) > 1
    assert "backward of 1 (Layer), in SqrtBackward0: gradient returned fp32" in warnings[0]


def test_the_sample_whose_row_is_not_finite_is_named(tmp_path):
    words = ["--data.shuffle", "false", "--train.micro_batch_size", 4]
    fault, (warning,) = replay(1, Made("share"), words, tmp_path)
    assert (fault.module_class, fault.tensors[0].rows) == ("Layer", [2])
    assert "micro-batch 0 (samples 0, 1, 2, 3; not finite: 2), forward of 1 (Layer)" in warning


def test_a_rank_without_a_sample_takes_part_in_the_replay(tmp_path):
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    words += ["--train.micro_batch_size", 1, "--train.accumulation_steps", 2]
    fault, _ = replay(2, Overflow(bad=(4,), samples=7), words, tmp_path, 2)
    assert (fault.step, fault.rank, fault.micro_batch, fault.samples) == (2, 0, 0, [4])
    assert fault.other_ranks == [1], "padding repeats the same sample, and 0 x nan is nan"


def infinite_loss(run):
    loss_sum = run.task.loss_sum
    run.task.loss_sum = lambda model, batch: loss_sum(model, batch) * torch.inf


def infinite_norm(run):
    global_grad_norm = run.parallel.global_grad_norm
    run.parallel.global_grad_norm = lambda *args: global_grad_norm(*args) * torch.inf


def test_an_infinity_that_goes_no_further_is_not_blamed_and_without_a_folder_none_is_made(tmp_path):
    words = [*FP32, *IN_ORDER]
    folder = str(tmp_path / "never_opened")
    (fault,), (warning,) = replayed(World(), Made("minus inf"), words, folder, 1, infinite_loss)
    assert (fault.phase, fault.module) == ("loss", "the task's loss_sum")
    assert "the task's loss_sum: loss fp32 [] has 0 nan and 1 inf, " in warning
    assert "dist_amp replay" not in warning
    task = Made("harmless root")
    faults, (warning,) = replayed(World(), task, words, folder, 1, infinite_norm)
    assert faults == []
    assert "step 1 was skipped, but its replay is finite" in warning
    assert list(tmp_path.iterdir()) == []


def nan_in_the_last_parameter(run):
    part = local(run.parallel.parameters[0])
    if run.world.rank == run.world.world_size - 1:
        with torch.no_grad():
            part[-1] = torch.nan


def test_the_module_of_a_nan_parameter_is_named_wherever_its_shard_is(tmp_path):
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    fault, warnings = replay(2, Tiny(), words, tmp_path, 1, nan_in_the_last_parameter)
    assert (fault.phase, fault.module, fault.rank) == ("forward", "0.0", 0)
    assert "forward of 0.0 (Linear): output bf16 [2, 8] has 2 nan" in warnings[0]


def test_fp16_that_overflows_by_the_loss_scale_alone_is_silent(tmp_path):
    words = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 2**40]
    words += ["--parallel.strategy", "fsdp", *IN_ORDER]
    assert replay(2, Tiny(), words, tmp_path, 3) == (None, [])
    assert not (tmp_path / "nonfinite").exists()


class Kept(Overflow):
    """Counts its losses in a list; locked: and can't be copied."""

    def __init__(self, locked=False):
        super().__init__()
        self.losses = []
        self.lock = threading.Lock() if locked else None

    def loss_sum(self, model, batch):
        self.losses.append(None)
        return super().loss_sum(model, batch)


@pytest.mark.parametrize("locked", [False, True])
def test_a_replay_moves_nothing_that_the_task_keeps_and_is_left_out_where_it_would(
    locked, tmp_path
):
    task = Kept(locked)
    words = ["--train.micro_batch_size", 64, "--use_amp", "false"]
    faults, warnings = replayed(World(), task, words, str(tmp_path))
    assert len(task.losses) == 1
    assert len(faults) == (not locked)
    assert ("is not taken again: the task can't be copied" in warnings[0]) == locked


def test_each_skip_is_recorded_and_the_error_that_ends_the_run_names_where_they_began(
    launch, tmp_path
):
    words = ["--task.target", "test_nonfinite_replay:Made", *map(str, IN_ORDER)]
    words += ["--metrics.log_every", "2", "--train.max_skips_in_a_row", "4", "--eval.every", "off"]
    done = launch(0, *words, "--run.dir", "run", "--debug.nonfinite", "step")
    place = "first: step 1, rank 0, micro-batch 0 (samples 0, 1), forward of 1 (Layer)"
    assert place in done.stderr
    summary = json.loads((tmp_path / "run/summary.json").read_text())
    assert summary["exit_code"] == done.returncode == 70
    assert summary["cause"].endswith(place)
    assert done.stderr.count("warning: step 1 was skipped: on rank 0") == 1
    assert " was skipped" not in done.stderr.replace("step 1 was skipped", ""), "the same again"
    reports = (tmp_path / "run/nonfinite/reports.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in reports][:4] == [1, 2, 3, 4]
