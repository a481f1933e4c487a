"""`python -m dist_amp.verify` checks a task on this machine, and names what is wrong with the task
or the step.
"""

import os
import queue
import re
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import forked
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from test_step import Detector, PretrainedTrunk
from tiny import AlwaysNan, Tiny
from torch import nn

from dist_amp import run as run_module
from dist_amp import train
from dist_amp.commands import __main__ as commands
from dist_amp.config import native_precision
from dist_amp.config.load import load_config
from dist_amp.errors import DataError
from dist_amp.supervise.command_line import exit_status
from dist_amp.verify import __main__ as verify_main
from dist_amp.verify import cells
from dist_amp.verify.cells import check_cell, config_of
from dist_amp.verify.compare import Cell
from dist_amp.verify.findings import inspect_task
from dist_amp.verify.reference import Reference
from dist_amp.world import World

TWO_RANKS = "--task.args.samples 300 --world_sizes 2 --precisions fp32"


@pytest.fixture
def verify(monkeypatch, capfd):
    """verify(words): (status, output, errors) of the command here; its ranks are forked."""
    monkeypatch.setattr(cells.multiprocessing, "get_context", lambda method: forked.context)

    def run(words):
        capfd.readouterr()
        return verify_main.main(words.split()), *capfd.readouterr()

    return run


def rows_of(output):
    """[(ranks, strategy, precision, result)]"""
    return re.findall(r"^ +(\d+)  (\w+) +(\w+) .* (pass|FAIL|refused)$", output, re.MULTILINE)


@pytest.mark.slow
def test_verify_proves_the_readmes_task_from_the_users_own_folder(tmp_path):
    task = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "my_file.py").write_text(task)
    words = "-m dist_amp.verify --task.target my_file:TinyRegression --world_sizes 1,2"
    environment = os.environ | {"PYTHONPATH": f"{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row[3] for row in rows_of(done.stdout)] == ["pass"] * 12


KILLED = """
import multiprocessing
import os

from tiny import Tiny

class Task(Tiny):
    def build_model(self):
        # As tqdm's lock; kept by the module, and lost with a rank that is killed.
        globals()["lock"] = multiprocessing.get_context("spawn").RLock()
        return super().build_model()

    def loss_sum(self, model, batch):
        if multiprocessing.parent_process():
            os.kill(os.getpid(), 9)
        return super().loss_sum(model, batch)
"""


@pytest.mark.slow
def test_ranks_that_are_killed_leave_no_warning_of_their_semaphores(tmp_path):
    (tmp_path / "killed.py").write_text(KILLED)
    words = f"-m dist_amp.verify --task.target killed:Task {TWO_RANKS} --strategies ddp"
    paths = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'tests/features'}"
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *words.split()]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    assert [row[3] for row in rows_of(done.stdout)] == ["FAIL"]
    assert "semaphore" not in done.stderr, done.stderr


# On more than one rank, a step whose gradients are a world's size too small.
HALVES = """
import os
from dist_amp import step
from tiny import Tiny as Task

if "RANK" in os.environ:
    real = step.loss_of
    def halved(*args):
        loss = real(*args)
        return loss.detach() / 2 + loss / 2
    step.loss_of = halved
"""
# On one rank, under DDP alone.
BREAKS = """
import os
from tiny import Tiny
from torch.nn.parallel import DistributedDataParallel

class Task(Tiny):
    def loss_sum(self, model, batch):
        if os.environ.get("RANK") == "1" and isinstance(model, DistributedDataParallel):
            raise RuntimeError("no luck on this rank")
        return super().loss_sum(model, batch)
"""
REFUSED = """
from dist_amp.errors import ConfigError
from tiny import Tiny

class Task(Tiny):
    def units(self, model):
        raise ConfigError("no units for this one; use ddp")
"""


@pytest.fixture
def verify_code(verify, tmp_path, monkeypatch):
    """verify_code(code): of a file with a class Task, on two ranks with ddp and fsdp."""

    def run(code):
        name = f"task_{abs(hash(code))}"
        (tmp_path / f"{name}.py").write_text(code)
        monkeypatch.syspath_prepend(tmp_path)
        return verify(f"--task.target {name}:Task {TWO_RANKS} --strategies ddp,fsdp")

    return run


def test_every_row_of_a_faulty_step_fails_and_what_is_wrong_is_said_once_below_the_table(
    verify_code,
):
    status, output, _ = verify_code(HALVES)
    assert status == 1
    assert [row[3] for row in rows_of(output)] == ["FAIL"] * 2
    assert output.count("(1 micro-batch) are off: all of them are 0.5 times what they should") == 1
    assert "2 ddp fp32, 2 fsdp fp32:" in output
    assert "failed: 0 of 2 compute the steps" in output


@pytest.mark.bad_input("`verify` of a task that fails on one rank, under one strategy")
def test_a_row_in_which_a_rank_fails_stops_no_other_and_shows_its_cause_in_one_line(verify_code):
    status, output, errors = verify_code(BREAKS)
    assert status == 1
    assert [row[3] for row in rows_of(output)] == ["FAIL", "pass"]
    assert re.search(r"rank 1: RuntimeError: no luck on this rank \(task_\d+.py, line 9\)", output)
    assert "Traceback" not in output + errors
    assert "failed: 1 of 2 compute the steps" in output


@pytest.mark.bad_input("`verify` of a task that training refuses under one strategy")
def test_what_training_refuses_is_refused_while_another_strategy_passes(verify_code):
    status, output, errors = verify_code(REFUSED)
    assert status == 0, output + errors
    assert [row[3] for row in rows_of(output)] == ["pass", "refused"]
    assert "no units for this one; use ddp" in output
    assert "passed: 1 of 2 compute the steps" in output
    assert "1 refused, as in training" in output


@pytest.mark.bad_input("`verify` of a task that training refuses under every strategy")
def test_numbers_of_ranks_on_which_nothing_passes_fail(verify, tmp_path, monkeypatch):
    (tmp_path / "refused_all.py").write_text(REFUSED)
    monkeypatch.syspath_prepend(tmp_path)
    status, output, _ = verify(f"--task.target refused_all:Task {TWO_RANKS} --strategies fsdp")
    assert status == 1
    assert "failed: 0 of 1 compute the steps" in output


def test_each_number_of_ranks_has_the_strategies_that_exist_on_it():
    on_cpu = torch.device("cpu")
    rows = verify_main.rows_of([1, 3, 4], verify_main.STRATEGIES, ["fp32"], on_cpu)
    strategies = [(1, "single"), (3, "ddp"), (3, "fsdp"), (4, "ddp"), (4, "fsdp"), (4, "hsdp")]
    assert [row[:2] for row in rows] == strategies


# ---- findings: problems of the task itself ----


def reference_of(task, *words):
    return Reference(load_config(list(words), environ={}), torch.device("cpu"), task)


class Task(Tiny):
    def __init__(self, samples=300):
        super().__init__(samples=samples)


class Around(Task):
    """A network with one of these modules in its middle."""

    def __init__(self, middle):
        super().__init__()
        self.middle = middle

    def build_model(self):
        return nn.Sequential(nn.Linear(8, 8), self.middle(), nn.Linear(8, 1))


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), nn.Dropout())


def test_batch_statistics_and_dropout_are_named_and_turned_off_not_failed():
    reference = reference_of(Around(batch_norm))
    dropout, statistics = inspect_task(reference)
    assert dropout.text == "1.3 (Dropout) (1 such): dropout is off for the comparison"
    assert statistics.text.startswith("1.0 (BatchNorm1d): the result depends on the whole batch")
    assert statistics.text.endswith("; every BatchNorm1d is compared in evaluation mode")
    assert not any(finding.fails for finding in inspect_task(reference))
    assert reference.bound("fp32") < 1e-4, "measured in evaluation mode"


class Centred(nn.Module):
    def forward(self, x):
        return x - x.mean(0)


class Drops(nn.Module):
    def forward(self, x):
        return F.dropout(x, 0.5, self.training)


class Unseeded(nn.Module):
    def forward(self, x):
        return x + torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).float()


@dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Recurrent(nn.LSTM):
    """A root that draws random numbers itself, by an argument of torch's layer."""

    def __init__(self):
        super().__init__(8, 1, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x):
        return super().forward(x[:, None])[0].squeeze(1)


class DropsAtItsRoot(nn.Sequential):
    """A root that draws random numbers itself, by a function."""

    def __init__(self):
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 1))

    def forward(self, x):
        return self[1](F.dropout(self[0](x), 0.5, self.training))


class Frequent(nn.Module):
    """Looks up each sample's bucket; by_layer: by an embedding, else by torch's function."""

    def __init__(self, by_layer):
        super().__init__()
        self.table = nn.Embedding(3, 1, scale_grad_by_freq=by_layer)
        self.by_layer = by_layer

    def forward(self, x):
        index = x[:, 0].mul(2).long().clamp(0, 2)
        if self.by_layer:
            return self.table(index)
        return F.embedding(index, self.table.weight, scale_grad_by_freq=True)


class Returned(Task):
    """The model that `make` returns."""

    def __init__(self, make):
        super().__init__()
        self.make = make

    def build_model(self):
        return self.make()


class ReturnsItsLoss(nn.Module):
    """Like the models of the Hugging Face library, it returns its loss, a mean."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)

    def forward(self, x, y):
        logits = self.inner(x).squeeze(-1)
        return Output(loss=F.mse_loss(logits.float(), y), logits=logits)


class ModelWithLoss(Task):
    def build_model(self):
        return ReturnsItsLoss()

    def loss_sum(self, model, batch):
        return model(batch["x"], batch["y"]).loss * len(batch["y"])

    def weight(self, batch):
        return len(batch["y"])


class HalfLossOfOutput(ModelWithLoss):
    def loss_sum(self, model, batch):
        logits = model(batch["x"], batch["y"]).logits
        return (logits - batch["y"].to(torch.bfloat16)).pow(2).sum().float()


class MeanLoss(Task):
    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) / len(batch["y"])


class Balanced(Task):
    """Adds a term that is computed of the whole batch, as experts' load-balancing loss."""

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * (1 + batch["x"].mean() ** 2)


class ConstantWeight(Task):
    def weight(self, batch):
        return 1


class LossInHalf(Task):
    def loss_sum(self, model, batch):
        return (model(batch["x"]).squeeze(-1) - batch["y"].to(torch.bfloat16)).pow(2).sum().float()


WHOLE_BATCH = "1 (Centred): the result depends on the whole batch (batch statistics)"


class Draws(nn.Module):
    """In evaluation mode too."""

    def forward(self, x):
        return x + torch.randn_like(x)


class DrawnLoss(Task):
    def loss_sum(self, model, batch):
        noise = torch.randn_like(batch["x"])
        return (model(batch["x"] + noise).float().squeeze(-1) - batch["y"]).pow(2).sum()


class FaintlyBalanced(Task):
    """Adds a term of the whole batch that changes the loss by less than rounding would."""

    def loss_sum(self, model, batch):
        out = model(batch["x"]).float().squeeze(-1)
        balance = out.mean() - out.mean().detach()
        return super().loss_sum(model, batch) + 0.01 * len(out) * balance * out.mean().detach()


class Scaled(Task):
    """Its loss has a parameter of the task itself, which nothing trains."""

    def __init__(self):
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(()))

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * self.temperature


class Distilled(Task):
    """A teacher beside the model, which the loss uses without gradients."""

    def build_model(self):
        self.teacher = nn.Linear(8, 1)
        return super().build_model()

    def loss_sum(self, model, batch):
        with torch.no_grad():
            target = self.teacher(batch["x"])
        return (model(batch["x"]).float() - target).pow(2).sum()


class Shared(Task):
    """Contrasts each sample with the others of its micro-batch, without a word."""

    def loss_sum(self, model, batch):
        out = model(batch["x"]).float()
        return F.cross_entropy(-(out - out.T).abs(), torch.arange(len(out)), reduction="sum")


class MeanOfOutput(ModelWithLoss):
    def loss_sum(self, model, batch):
        return model(batch["x"], batch["y"]).loss


@pytest.mark.bad_input(
    "`verify` of a task that can't be compared: random, a mean, coupled, untrained"
)
@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Around(Draws), "1 (Draws): the result is drawn at random in training mode, in evaluation"),
        (Around(Draws), "draw the numbers of each sample in the task's augment(sample, rng)"),
        (DrawnLoss(), "the task's loss_sum: the result is drawn at random in training mode, so it"),
        (FaintlyBalanced(), "it must be a sum over samples, without terms of the whole batch"),
        (Scaled(), "the task's attribute temperature holds 1 trained parameters that are not in"),
        (Shared(), "a contrastive loss (docs/recipes.md shows one that verify can compare)"),
        (MeanOfOutput(), "it must be a sum over samples, not a mean"),
        (Around(Centred), "use a layer that treats each sample for itself, such as group norm"),
        (Around(Centred), WHOLE_BATCH),
        (Around(Unseeded), "1 (Unseeded) is not deterministic: two identical runs differ"),
        (HalfLossOfOutput(), "the loss is computed in half precision"),
        (LossInHalf(), "the loss is computed in half precision"),
        (MeanLoss(), "it must be a sum over samples, not a mean"),
        (Balanced(), "without terms of the whole batch, such as a mixture's load-balancing loss"),
        (Returned(partial(Frequent, True)), "the layer table has scale_grad_by_freq=True"),
        (Returned(partial(Frequent, False)), "most at table.weight: it must be a sum over samples"),
        (ConstantWeight(), "the task's weight of 8 samples is 1, but its halves add up to 2"),
        (
            AlwaysNan(samples=300),
            "loss or gradients of the first samples are not finite in float32",
        ),
    ],
)
def test_a_wrong_task_fails_with_the_rule_that_it_breaks(task, words):
    (text,) = [finding.text for finding in inspect_task(reference_of(task)) if finding.fails]
    assert words in text


class Followed(nn.Module):
    """A buffer follows the weights, by a step in each forward."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 1)
        self.register_buffer("average", self.inner.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.inner.weight, 0.5)
        return self.inner(x) + F.linear(x, self.average)


class Follows(Task):
    def build_model(self):
        return Followed()


class Unused(Task):
    def build_model(self):
        model = super().build_model()
        model.register_parameter("forgotten", nn.Parameter(torch.zeros(3)))
        return model


class Bf16(Task):
    def build_model(self):
        return super().build_model().bfloat16()


class OwnOptimizer(Task):
    def optimizer(self, groups, lr):
        raise AssertionError("not to be called")

    def schedule(self, step):
        return 0.0


class Small(Task):
    """Weight decay must not make the comparison diverge where gradients are small."""

    def loss_sum(self, model, batch):
        return super().loss_sum(model, batch) * 1e-4


DRAWN = "1 (Drops): the result is drawn at random in training mode; every Drops is compared in"


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Task(), ""),
        (ModelWithLoss(), ""),
        (Small(), ""),
        (Around(Drops), DRAWN),
        (
            Returned(DropsAtItsRoot),
            "DropsAtItsRoot: the result is drawn at random in training mode",
        ),
        (Returned(Recurrent), "Recurrent (1 such): dropout is off for the comparison"),
        (
            PretrainedTrunk(samples=300),
            "0 left evaluation mode at model.train(), as in any training",
        ),
        (Detector(samples=300), ""),
        (
            Follows(),
            "forward changes average (1 such): each micro-batch, over all ranks, is compared",
        ),
        (Distilled(), "the task's attribute teacher holds 2 trained parameters that are not in"),
        (Unused(), "forgotten (1 such) gets no gradient from 8 samples, which counts as zero"),
        (Bf16(), "build_model gave 153 parameters in bfloat16: they are stored in float32"),
        (OwnOptimizer(), "not compared: the task's optimizer() and schedule(); the steps are"),
    ],
)
def test_a_sound_task_has_notes_at_most_and_its_steps_are_those_of_one_process(task, words):
    reference = reference_of(task)
    findings = inspect_task(reference)
    assert [finding.text[: len(words)] for finding in findings] == [words] * bool(words)
    assert not any(finding.fails for finding in findings)
    for optimizer in ("sgd", "adamw"):
        assert check_cell(World(), reference, Cell("single", "fp32", optimizer)).cause == ""


def test_a_run_in_other_modes_than_a_plain_loop_is_found(monkeypatch):
    monkeypatch.setattr(run_module, "training_mode", lambda module: "")
    reference = reference_of(PretrainedTrunk(samples=300))
    assert "are off" in check_cell(World(), reference, Cell("single", "fp32")).cause


def test_replicas_that_do_not_divide_a_world_size_are_left_to_auto():
    reference = reference_of(Task(), "--parallel.replicas", "4")
    cell = Cell("hsdp", "fp32")
    configs = [config_of(reference, cell, World(world_size=ranks)) for ranks in (2, 4)]
    assert [config.parallel.replicas for config in configs] == ["auto", 4]


def test_a_step_that_exceeds_the_first_bound_is_judged_by_plain_torchs_error_at_its_parameters():
    reference = reference_of(Task())
    reference._bounds["fp32"] = 1e-12
    verdict = check_cell(World(), reference, Cell("single", "fp32"))
    assert verdict.cause == ""
    assert verdict.gradient_error <= verdict.gradient_bound < 1e-4


def test_the_partial_step_at_an_epochs_end_is_compared_where_a_run_would_drop_it():
    reference = reference_of(Task(), "--data.drop_last", "true")
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""


def test_settings_that_are_not_compared_are_notes():
    config = load_config(["--optim.name", "muon"], environ={})
    assert verify_main.ignored_settings(config) == ["optim.name=muon"]


class WrongInHalf(nn.Module):
    def forward(self, x):
        return x * 3 if torch.is_autocast_enabled("cpu") else x


@pytest.mark.bad_input("`verify` in a precision in which plain torch is wrong on this device")
def test_a_precision_in_which_plain_torch_itself_is_wrong_is_skipped_with_a_note(capsys):
    reference = reference_of(Around(WrongInHalf))
    assert verify_main.is_supported(reference, "fp32")
    assert not verify_main.is_supported(reference, "bf16")
    note = "note     bf16 is skipped: plain torch can't compute this task in it on this device"
    assert note in capsys.readouterr().out


class HalfIsWrong(Around):
    def __init__(self):
        super().__init__(WrongInHalf)


def test_what_compares_nothing_does_not_pass(verify):
    words = "--task.target test_verify:HalfIsWrong --world_sizes 1 --precisions bf16"
    status, output, _ = verify(words)
    assert status == 1
    assert "failed: 0 of 0 compute the steps of one process" in output


class NoKernel(nn.Module):
    def forward(self, x):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward")
        return x


class HalfIsMissing(Around):
    def __init__(self):
        super().__init__(NoKernel)


def test_a_model_that_the_device_computes_in_float32_alone_passes_in_float32(verify):
    words = "--task.target test_verify:HalfIsMissing --world_sizes 1 --precisions fp32,bf16"
    status, output, _ = verify(words)
    assert status == 0
    assert "passed: 1 of 1 compute the steps of one process" in output
    assert "note     bf16 is skipped: plain torch can't compute" in output


def test_an_emulated_precision_is_announced_once(monkeypatch, capsys):
    monkeypatch.setattr(native_precision, "cpu_slowdown", lambda dtype: 30.0)
    native_precision.warn_if_emulated.cache_clear()
    reference = reference_of(Task())
    assert verify_main.is_supported(reference, "bf16")
    assert "warning: this CPU only emulates bf16" in capsys.readouterr().err
    monkeypatch.setattr(os, "environ", dict(os.environ))
    argv = ["--task.target", "tiny:Tiny", "--task.args.samples", "300"]
    rank, rows, results = {"RANK": "0", "WORLD_SIZE": "1"}, [(1, "single", "bf16")], queue.Queue()
    prepare = partial(cells.prepare_comparison, frozenset(), reference.measured(["bf16"]))
    cells.run_rows(rank, argv, rows, prepare, results)
    row, verdicts = results.get()
    assert row == rows[0]
    assert [verdict.cause for verdict in verdicts] == ["", ""]
    shown = capsys.readouterr()
    assert "emulates" not in shown.out + shown.err


def test_the_error_of_a_rank_that_is_a_row_ahead_is_that_rows():
    first, second = [(2, "ddp", precision) for precision in ("fp32", "bf16")]
    results, given = queue.Queue(), {}
    results.put((second, "rank 1: no kernel"))
    results.put((first, []))
    while first not in given:
        cells.wait_for_result(results, [], first, given)
    assert given == {second: "rank 1: no kernel", first: []}


def commands_main(argv):
    sys.argv, before = ["dist_amp", *argv], sys.argv
    try:
        return commands.main()
    finally:
        sys.argv = before


@pytest.mark.bad_input("an output that nobody reads any more, as in `--help | head`")
@pytest.mark.parametrize("command", [train.main, verify_main.main, commands_main])
def test_help_that_nobody_reads_to_its_end_ends_quietly(monkeypatch, capfd, command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        with suppress(SystemExit):
            assert command(["--help"]) == 1
    assert capfd.readouterr().err == ""


def test_another_broken_pipe_is_an_error():
    def worker_died(argv):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        exit_status(worker_died, [])


def test_a_dataset_too_short_to_compare_is_rejected():
    rule = r"has 64 samples; .* takes 5 steps of 48 \(not the config.s\) = 240"
    with pytest.raises(DataError, match=rule):
        inspect_task(reference_of(Tiny(samples=64)))


def test_the_bench_of_the_tripwires_prints_their_share(launch):
    words = ["--task.target", "tiny:Tiny", "--train.steps", "20"]
    done = launch.module("benchmarks.tripwires", *words)
    assert done.returncode == 0, done.stderr
    line = r"20 steps, single on 1 x cpu: tripwires took [\d.]+ s of [\d.]+ s, [\d.]+%\n"
    assert re.fullmatch(line, done.stdout)


def test_bit_exact_skips_more_ranks_than_gpus_and_says_so(monkeypatch, capsys):
    compared = []
    gpu = World(device=torch.device("cuda", 0))
    monkeypatch.setattr(verify_main, "locate", lambda config: gpu)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        "dist_amp.verify.bit_exact.verify_bits", lambda rest, rows: compared.extend(rows) or 0
    )
    words = ["--bit_exact", "--world_sizes", "1,2,4", "--precisions", "fp32"]
    assert verify_main.main(words) == 0
    assert {size for size, _, _ in compared} == {1, 2}
    assert "more than 2 ranks are skipped: that is the number of GPUs" in capsys.readouterr().out
