"""`python -m dist_amp.verify` checks a task on this machine, and names what is wrong with it."""

import os
import re
import sys
from contextlib import suppress
from functools import partial

import forked
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from tiny import AlwaysNan, Tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_amp import step, train
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.verify import __main__ as verify_main
from dist_amp.verify import cells
from dist_amp.verify.cells import check_cell
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


def results_in(output):
    return re.findall(r"^ +\d+  \w+ +\w+ .* (pass|FAIL|refused)$", output, re.MULTILINE)


@pytest.mark.slow
def test_verify_proves_the_readmes_task(verify, tmp_path):
    task = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    (tmp_path / "my_file.py").write_text(task)
    status, output, errors = verify(
        f"--task.target {tmp_path}/my_file.py:TinyRegression --world_sizes 1,2"
    )
    assert status == 0, output + errors
    assert results_in(output) == ["pass"] * 12


class Halves(Tiny):
    """On ranks, a step whose gradients are half as large as they should be."""

    def __init__(self, samples: int):
        super().__init__(samples)
        if "RANK" in os.environ:
            loss_of = step.loss_of

            def halved(*args):
                loss = loss_of(*args)
                return loss.detach() / 2 + loss / 2

            step.loss_of = halved


class Breaks(Tiny):
    """On one rank, under DDP alone."""

    def loss_sum(self, model, batch):
        if os.environ.get("RANK") == "1" and isinstance(model, DistributedDataParallel):
            raise RuntimeError("no luck on this rank")
        return super().loss_sum(model, batch)


class Refused(Tiny):
    def units(self, model):
        raise ConfigError("no units for this one; use ddp")


HALF = r"\n2 ddp fp32, 2 fsdp fp32:\n.*all of them are 0.5 times what they should be"
REFUSED_ONCE = "2 fsdp fp32:\n    no units for this one; use ddp\n\npassed: 1 .*, 1 refused, as in"


@pytest.mark.bad_input("`verify` of a task that fails on one rank, or is refused, by its strategy")
@pytest.mark.parametrize(
    ("task", "strategies", "results", "said"),
    [
        ("Halves", "ddp,fsdp", ["FAIL", "FAIL"], HALF),
        ("Breaks", "ddp,fsdp", ["FAIL", "pass"], r"RuntimeError: no luck on this rank \(test_v"),
        ("Refused", "ddp,fsdp", ["pass", "refused"], REFUSED_ONCE),
        ("Refused", "fsdp", ["refused"], "failed: 0 of 1 compute the steps"),
    ],
)
def test_each_row_has_its_result_and_each_cause_is_said_once_below_the_table(
    verify, task, strategies, results, said
):
    words = f"--task.target test_verify:{task} {TWO_RANKS} --strategies {strategies}"
    status, output, errors = verify(words)
    assert results_in(output) == results, output + errors
    assert status == ("FAIL" in results or "pass" not in results)
    assert len(re.findall(said, output)) == 1, output
    count = f"{'failed' if status else 'passed'}: {results.count('pass')} of {len(results)} compute"
    assert count in output
    assert "Traceback" not in output + errors


SINGLE, THREE = (1, "single"), [(3, "ddp"), (3, "fsdp")]


@pytest.mark.parametrize(
    ("device", "strategies", "note"),
    [
        ("cpu", [SINGLE, *THREE, (4, "ddp"), (4, "fsdp"), (4, "hsdp")], ""),
        ("cuda", [SINGLE, *THREE], "note     4 ranks are skipped: there are 3 GPUs\n"),
    ],
)
def test_each_number_of_ranks_has_its_strategies_and_each_rank_a_gpu(
    monkeypatch, capsys, device, strategies, note
):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    options, _ = verify_main.parse(["--world_sizes", "4,3,1", "--precisions", "fp32"])
    rows = verify_main.rows_of(options, torch.device(device))
    assert [row[:2] for row in rows] == strategies
    assert capsys.readouterr().out == note


# ---- findings: problems of the task itself ----


def reference_of(task, *words):
    return Reference(load_config(list(words), environ={}), torch.device("cpu"), task)


class Task(Tiny):
    """Tiny, or what the functions model(), loss(model, batch) and weight(batch) make of it."""

    def __init__(self, model=None, loss=None, weight=None, samples=300):
        super().__init__(samples=samples)
        self.model = model or super().build_model
        self.loss = loss or super().loss_sum
        self.weight = weight or super().weight

    def build_model(self):
        return self.model()

    def loss_sum(self, model, batch):
        return self.loss(model, batch)


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(self, x)


def around(layer):
    """A task whose model has this layer in its middle."""
    return Task(lambda: nn.Sequential(nn.Linear(8, 8), layer(), nn.Linear(8, 1)))


def applies(function):
    return around(partial(Layer, function))


def squares(model, batch):
    return (model(batch["x"]).float().squeeze(-1) - batch["y"]).pow(2)


class Recurrent(nn.LSTM):
    """A root that draws random numbers itself, by an argument of torch's layer."""

    def forward(self, x):
        return super().forward(x[:, None])[0].squeeze(1)


def recurrent():
    return Recurrent(8, 1, num_layers=2, dropout=0.5, batch_first=True)


def in_half(model, batch):
    return (model(batch["x"])[:, 0] - batch["y"].bfloat16()).pow(2).sum().float()


def noise_of_the_system(module, x):
    return x + torch.frombuffer(bytearray(os.urandom(8)), dtype=torch.uint8).float()


def faintly_balanced(model, batch):
    """A term of the whole batch that changes the loss by less than rounding would."""
    output = model(batch["x"]).float().squeeze(-1)
    balance = output.mean() - output.mean().detach()
    return squares(model, batch).sum() + 0.01 * len(output) * balance * output.mean().detach()


def scaled():
    """Its loss has a parameter of the task itself, which nothing trains."""
    task = Task(loss=lambda model, batch: squares(model, batch).sum() * task.temperature)
    task.temperature = nn.Parameter(torch.ones(()))
    return task


COUPLED = r"1 \(Layer\): the result depends on the whole batch \(batch stat.*, such as group norm"
NO_TERMS = "it must be a sum over samples, without terms of the whole batch, such as a mixture's"


@pytest.mark.bad_input(
    "`verify` of a task that can't be compared: random, a mean, coupled, untrained"
)
@pytest.mark.parametrize(
    ("task", "said"),
    [
        (applies(lambda _, x: x - x.mean(0)), COUPLED),
        (applies(noise_of_the_system), r"1 \(Layer\) is not deterministic: two identical runs"),
        (Task(loss=lambda m, b: squares(m, b).mean()), "it must be a sum over samples, not a mean"),
        (Task(loss=lambda m, b: squares(m, b).sum() * (1 + b["x"].mean() ** 2)), NO_TERMS),
        (Task(loss=faintly_balanced), NO_TERMS),
        (scaled(), "task's attribute temperature holds 1 trained parameters that are not in"),
        (Task(loss=in_half), "loss is computed in half precision"),
        (Task(weight=lambda batch: 1), "weight of 8 samples is 1, but its halves add up to 2"),
        (AlwaysNan(samples=300), "gradients of the first samples are not finite in float32"),
    ],
)
def test_a_wrong_task_fails_with_the_rule_that_it_breaks(task, said):
    (text,) = [finding.text for finding in inspect_task(reference_of(task)) if finding.fails]
    assert re.search(said, text), text


class Follower(nn.Linear):
    """A buffer follows the weights, by a step in each forward."""

    def __init__(self):
        super().__init__(8, 1)
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.5)
        return super().forward(x) + F.linear(x, self.average)


def moded():
    return Layer(lambda self, x: x * (1 + self.training))


def frozen_trunk():
    """As from_pretrained returns it, in evaluation mode, under a new head."""
    return nn.Sequential(nn.Sequential(nn.Linear(8, 8), moded()).eval(), nn.Linear(8, 1))


def batch_norm():
    return nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Dropout())


class OwnOptimizer(Task):
    def optimizer(self, groups, lr):
        raise AssertionError("not to be called")

    def schedule(self, step):
        return 0.0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (Task(), []),
        # Weight decay must not make the comparison diverge where gradients are small.
        (Task(loss=lambda model, batch: squares(model, batch).sum() * 1e-4), []),
        (
            around(batch_norm),
            [
                r"1.2 \(Dropout\) \(1 such\): dropout is off for the comparison$",
                r"1.0 \(BatchN.* depends on the whole batch.*d is compared in evaluation mode$",
            ],
        ),
        (
            applies(lambda self, x: F.dropout(x, 0.5, self.training)),
            [r"1 \(Layer\): .* drawn at random in training mode; every Layer is compared"],
        ),
        (Task(recurrent), [r"Recurrent \(1 such\): dropout is off for the comparison"]),
        (Task(frozen_trunk), [r"0 left evaluation mode at model.train\(\), as in any training"]),
        (Task(Follower), [r"forward changes average \(1 such\): each micro-batch, over all ranks"]),
        (Task(lambda: Tiny().build_model().bfloat16()), ["build_model gave 153 parameters in bfl"]),
        (OwnOptimizer(), [r"not compared: the task's optimizer\(\) and schedule\(\); the steps"]),
    ],
)
def test_a_sound_task_has_notes_at_most_and_its_steps_are_those_of_one_process(task, said):
    reference = reference_of(task)
    findings = inspect_task(reference)
    assert [finding for finding in findings if finding.fails] == []
    assert len(findings) == len(said), findings
    for finding, words in zip(findings, said, strict=True):
        assert re.match(words, finding.text), finding.text
    # Batch statistics and dropout, which are off, would make it larger.
    assert reference.bound("fp32") < 1e-4
    for optimizer in ("adamw",) if said else ("sgd", "adamw"):
        assert check_cell(World(), reference, Cell("single", "fp32", optimizer)).cause == ""


def test_a_step_that_exceeds_the_first_bound_is_judged_by_plain_torchs_error_at_its_parameters():
    reference = reference_of(Task())
    reference._bounds["fp32"] = 1e-12
    verdict = check_cell(World(), reference, Cell("single", "fp32"))
    assert verdict.cause == ""
    assert verdict.gradient_error <= verdict.gradient_bound < 1e-4


def test_the_partial_step_at_an_epochs_end_is_compared_where_a_run_would_drop_it():
    reference = reference_of(Task(), "--data.drop_last", "true")
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""


def has_no_kernel(module, x):
    if torch.is_autocast_enabled("cpu"):
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward")
    return x


class MissingInHalf(Task):
    def __init__(self):
        super().__init__(applies(has_no_kernel).model)


@pytest.mark.bad_input("`verify` in a precision that plain torch can't compute on this device")
def test_a_precision_that_plain_torch_can_not_compute_is_skipped_with_a_note(verify):
    words = "--task.target test_verify:MissingInHalf --world_sizes 1 --precisions"
    status, output, errors = verify(f"{words} fp32,bf16")
    assert status == 0, output + errors
    assert "note     bf16 is skipped: plain torch can't compute this task in it on this" in output
    assert "passed: 1 of 1 compute the steps of one process" in output
    status, output, _ = verify(f"{words} bf16")
    assert status == 1
    assert "failed: 0 of 0 compute the steps of one process" in output


@pytest.mark.bad_input("an output that nobody reads any more, as in `--help | head`")
@pytest.mark.parametrize("command", [train.main, verify_main.main])
def test_help_that_nobody_reads_to_its_end_ends_quietly(monkeypatch, capfd, command):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as nowhere:
        monkeypatch.setattr(sys, "stdout", nowhere)
        with suppress(SystemExit):
            assert command(["--help"]) == 1
    assert capfd.readouterr().err == ""


def test_a_dataset_too_short_to_compare_is_rejected():
    rule = r"has 64 samples; .* takes 5 steps of 48 \(not the config.s\) = 240"
    with pytest.raises(DataError, match=rule):
        inspect_task(reference_of(Tiny(samples=64)))
