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
    """Tiny with a Layer as model[1]; its second sample is zeros there."""

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
        rows.columns["x"][1] = 0.0
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
            run.metrics.after_step(report)
        observer.on_log(log_row(run))
    return observer.faults, warnings


def replay(ranks, task, words, folder, *more):
    """The fault that all ranks agree on, and rank 0's warnings."""
    results = on_ranks(ranks, replayed, task, words, str(folder), *more)
    assert all(faults == results[0][0] for faults, _ in results)
    faults, warnings = results[0]
    assert len(faults) <= 1
    return (faults[0] if faults else None), warnings


def infinite_loss(run):
    loss_sum = run.task.loss_sum
    run.task.loss_sum = lambda model, batch: loss_sum(model, batch) * torch.inf


NANS = "output bf16 [2, 8] has {} nan and 0 inf, finite range "


@pytest.mark.parametrize(("ranks", "strategy"), LAYOUTS)
@pytest.mark.parametrize(
    ("task", "words", "spoil", "place", "values"),
    [
        (Overflow(bad=(1,)), [], None, "the batch itself", "batch['x'] fp32 [2, 8] has 0 nan and"),
        (Made("share"), [], None, "forward of 1 (Layer)", f"{NANS.format(8)}-"),
        (Made("log"), [], None, "forward of 1 (Layer)", f"{NANS.format(16)}none; input bf16 "),
        (Made("minus inf"), FP32, infinite_loss, "the task's loss_sum", "loss fp32 [] has 0 nan a"),
        (
            Made("root"),
            FP32,
            None,
            "backward of 1 (Layer), in SqrtBackward0",
            "gradient returned fp32 [2, 8] has 0 nan and 16 inf, finite range none; gradient rec",
        ),
    ],
)
def test_the_first_inf_or_nan_of_each_kind_is_named_with_its_rank_samples_and_values(
    tmp_path, ranks, strategy, task, words, spoil, place, values
):
    words = ["--parallel.strategy", strategy, *IN_ORDER, *words]
    fault, (warning,) = replay(ranks, task, words, tmp_path, 1, spoil)
    samples = {0: "0, 1" if ranks == 1 else "0, 2", 1: "1, 3"}
    rank, also = 0, "; also on ranks 1" * (ranks - 1)
    if values.startswith(("batch", NANS.format(8))):  # of sample 1 alone
        rank, also = ranks - 1, ""
        samples = {number: f"{text}; not finite: 1" for number, text in samples.items()}
    where = f"rank {rank}, micro-batch 0 (samples {samples[rank]}), {place}"
    assert warning.startswith(f"step 1 was skipped: on {where}: {values}")
    assert warning.endswith(f"{also}; see dist_amp replay {tmp_path} --step 1")
    is_finite = [tensor.is_finite for tensor in fault.tensors]
    assert is_finite == sorted(is_finite), "first what is not finite, then what it came from"
    line = json.loads((tmp_path / "nonfinite/reports.jsonl").read_text())
    assert (line["step"], line["rank"], line["phase"]) == (1, rank, fault.phase)


def test_a_rank_without_a_sample_takes_part_in_the_replay(tmp_path):
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    words += ["--train.micro_batch_size", 1, "--train.accumulation_steps", 2]
    fault, _ = replay(2, Overflow(bad=(4,), samples=7), words, tmp_path, 2)
    assert (fault.step, fault.rank, fault.micro_batch, fault.samples) == (2, 0, 0, [4])
    assert fault.other_ranks == [1], "padding repeats the same sample, and 0 x nan is nan"


def infinite_norm(run):
    global_grad_norm = run.parallel.global_grad_norm
    run.parallel.global_grad_norm = lambda *args: global_grad_norm(*args) * torch.inf


def test_a_gradient_that_goes_no_further_is_not_blamed_and_without_a_folder_none_is_made(tmp_path):
    folder = str(tmp_path / "never_opened")
    words = [*FP32, *IN_ORDER]
    faults, (warning,) = replayed(World(), Made("harmless root"), words, folder, 1, infinite_norm)
    assert faults == []
    assert "step 1 was skipped, but its replay is finite" in warning
    faults, (warning,) = replayed(World(), Made("log"), words, folder)
    assert len(faults) == 1
    assert "dist_amp replay" not in warning
    assert list(tmp_path.iterdir()) == []


@torch.no_grad()
def nan_in_the_last_parameter(run):
    if run.world.rank == 1:
        local(run.parallel.parameters[0])[-1] = torch.nan


def test_the_module_of_a_nan_parameter_is_named_wherever_its_shard_is(tmp_path):
    words = ["--parallel.strategy", "fsdp", *IN_ORDER]
    fault, (warning,) = replay(2, Tiny(), words, tmp_path, 1, nan_in_the_last_parameter)
    assert fault.rank == 0
    assert "forward of 0.0 (Linear): output bf16 [2, 8] has 2 nan" in warning


def test_fp16_that_overflows_by_the_loss_scale_alone_is_silent(tmp_path):
    words = ["--precision.dtype", "fp16", "--precision.scaler.init_scale", 2**40]
    words += ["--parallel.strategy", "fsdp", *IN_ORDER]
    assert replay(2, Tiny(), words, tmp_path, 3) == (None, [])
    assert not (tmp_path / "nonfinite").exists()


class Kept(Overflow):
    """Counts its losses in a list."""

    def __init__(self, lock=None):
        super().__init__()
        self.losses = []
        self.lock = lock

    def loss_sum(self, model, batch):
        self.losses.append(None)
        return super().loss_sum(model, batch)


@pytest.mark.parametrize("lock", [None, threading.Lock()])  # which can't be copied
def test_a_replay_moves_nothing_that_the_task_keeps_and_is_left_out_where_it_would(lock, tmp_path):
    task = Kept(lock)
    words = ["--train.micro_batch_size", 64, *FP32]
    faults, (warning,) = replayed(World(), task, words, str(tmp_path))
    assert len(task.losses) == 1
    assert bool(faults) == (lock is None)
    assert ("can't be replayed: the task can't be copied" in warning) == bool(lock)


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
