"""`python -m dist_amp.verify` checks a task on this machine, and names what is wrong with it."""

import os
import re
import sys
from contextlib import suppress
from functools import partial

import forked  # noqa: F401 (its server has imported torch)
import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT
from tiny import AlwaysNan, Tiny
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dist_amp import train
from dist_amp.config.load import load_config
from dist_amp.errors import ConfigError, DataError
from dist_amp.verify import __main__ as verify_main
from dist_amp.verify import cells
from dist_amp.verify.cells import check_cell
from dist_amp.verify.compare import Cell, Verdict
from dist_amp.verify.findings import WrongTask, inspect_task
from dist_amp.verify.reference import Reference
from dist_amp.world import World


@pytest.fixture
def verify(monkeypatch, capfd):
    """verify(words): (status, output, errors) of the command here; its ranks are forked."""
    ranks = partial(torch.multiprocessing.start_processes, start_method="forkserver")
    monkeypatch.setattr(cells, "spawn", ranks)

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


class Faulty(Tiny):
    """Right in one process; DDP breaks on a rank, FSDP is refused, HSDP has half the gradients."""

    def __init__(self):
        super().__init__(samples=300)

    def loss_sum(self, model, batch):
        if torch.is_autocast_enabled("cpu"):
            raise RuntimeError("could not create a primitive descriptor for the LSTM forward")
        if os.environ.get("RANK") == "1" and isinstance(model, DistributedDataParallel):
            raise RuntimeError("no luck on this rank")
        mesh = getattr(next(model.parameters()), "device_mesh", None)
        if mesh is not None and mesh.ndim == 1:
            raise ConfigError("no units for this one; use ddp")
        loss = super().loss_sum(model, batch)
        return loss if mesh is None else loss.detach() / 2 + loss / 2


FAULTY = "--task.target test_verify:Faulty --precisions"
PASSED = "compute the steps of one process with the whole batch"


@pytest.mark.bad_input("`verify` of a task that fails on one rank, or is refused, by its strategy")
@pytest.mark.bad_input("`verify` in a precision that plain torch can't compute on this device")
def test_each_row_has_its_result_and_its_cause_stands_below_the_table(verify):
    status, output, errors = verify(f"{FAULTY} fp32,bf16 --world_sizes 1,2")
    assert results_in(output) == ["pass", "FAIL", "refused", "FAIL"], output + errors
    assert status == 1
    assert f"\nfailed: 1 of 4 {PASSED}, 1 refused, as in training (" in output
    for cause in (
        r"2 ddp fp32:\n    rank 1: RuntimeError: no luck on this rank \(test_verify.py, line",
        r"2 fsdp fp32:\n    no units for this one; use ddp\n\n",
        r"2 hsdp fp32:\n.*all .* 0.5 times what they should be; .* by the number of ranks twice",
        r"note     bf16 is skipped: plain torch can't compute this task in it on this device \(cou",
    ):
        assert len(re.findall(cause, output)) == 1, output
    assert "Traceback" not in output + errors


REFUSED = "refused: use ddp"


@pytest.mark.parametrize(
    ("words", "results", "status", "said"),
    [
        ("fp32", [[Verdict()], REFUSED, REFUSED], 0, f"passed: 1 of 3 {PASSED}, 2 refused, as in"),
        ("fp32", [REFUSED] * 3, 1, f"failed: 0 of 3 {PASSED}, 3 refused, as in"),
        ("bf16", [], 1, f"failed: 0 of 0 {PASSED} ("),
    ],
)
def test_what_is_refused_or_skipped_does_not_fail_while_a_row_passes_and_a_cause_is_said_once(
    verify, monkeypatch, words, results, status, said
):
    monkeypatch.setattr(
        cells, "results_on_ranks", lambda _, rows, __: zip(rows, results, strict=True)
    )
    ended, output, _ = verify(f"{FAULTY} {words} --world_sizes 2")
    assert ended == status, output
    assert f"\n{said}" in output
    refused = ["2 ddp fp32"] * (results == [REFUSED] * 3) + ["2 fsdp fp32", "2 hsdp fp32"]
    assert output.count(f"\n{', '.join(refused)}:\n    use ddp\n") == bool(results)


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


def inspected(reference):
    """(the notes on a task, what is wrong with it)."""
    notes = []
    try:
        notes.extend(inspect_task(reference))
    except WrongTask as error:
        return notes, str(error)
    return notes, ""


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


def applies(function):
    """A task whose model does this in its middle."""
    return Task(lambda: nn.Sequential(nn.Linear(8, 8), Layer(function), nn.Linear(8, 1)))


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
    _, text = inspected(reference_of(task))
    assert re.search(said, text), text


class Drawn(Tiny):
    """Samples and augmentations are drawn at random, and collate takes the samples apart."""

    def build_dataset(self, split):
        return [{"x": torch.rand(8)} for _ in range(300)]

    def augment(self, sample, rng):
        return {"x": sample["x"] + torch.rand(8, generator=rng)}

    def collate(self, samples):
        return torch.stack([sample.pop("x") for sample in samples])


def test_samples_are_the_same_in_every_process_and_on_every_reading():
    batches = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        reference = reference_of(Drawn())
        batches += [reference.batch([3, 4]), reference.batch([3, 4])]
    assert all(torch.equal(batch, batches[0]) for batch in batches)


def test_a_wrong_task_is_not_compared(verify):
    status, output, _ = verify("--task.target tiny:AlwaysNan --task.args.samples 300")
    assert status == 1
    assert "\nfail     loss or gradients of the first samples are not finite" in output
    assert output.endswith("as one process would; fix the task first\n")


class Follower(nn.Linear):
    """A buffer follows the weights, by a step in each forward."""

    def __init__(self):
        super().__init__(8, 1)
        self.register_buffer("average", self.weight.detach().clone())

    def forward(self, x):
        with torch.no_grad():
            self.average.lerp_(self.weight, 0.5)
        return super().forward(x) + F.linear(x, self.average)


class Noted(Task):
    """Sound, with much that is worth a note."""

    def build_model(self):
        dropout = Layer(lambda self, x: F.dropout(x, 0.5, self.training))
        moded = Layer(lambda self, x: x * (1 + self.training))
        # As from_pretrained returns it, in evaluation mode.
        trunk = nn.Sequential(nn.Linear(8, 8), moded).eval()
        norms = nn.Sequential(nn.BatchNorm1d(8), nn.BatchNorm1d(8), nn.Dropout())
        return nn.Sequential(trunk, norms, dropout, nn.Linear(8, 1))

    def optimizer(self, groups, lr):
        raise AssertionError("not to be called")

    def schedule(self, step):
        return 0.0


@pytest.mark.parametrize(
    ("task", "said"),
    [
        # Weight decay must not make the comparison diverge where gradients are small.
        (Task(loss=lambda model, batch: squares(model, batch).sum() * 1e-4), []),
        (Task(recurrent), [r"Recurrent \(1 such\): dropout is off for the comparison"]),
        (Task(Follower), [r"forward changes average \(1 such\): each micro-batch, over all ranks"]),
        (Task(lambda: Tiny().build_model().bfloat16()), []),
        (
            Noted(),
            [
                r"not compared: the task's optimizer\(\) and schedule\(\); the steps",
                r"1.2 \(Dropout\) \(1 such\): dropout is off for the comparison$",
                r"1.0 \(BatchN.* depends on the whole batch.*d is compared in evaluation mode$",
                r"2 \(Layer\): .* drawn at random in training mode; every Layer is compared",
            ],
        ),
    ],
)
def test_a_sound_task_has_notes_at_most_and_its_steps_are_those_of_one_process(task, said):
    reference = reference_of(task)
    notes, failure = inspected(reference)
    assert failure == ""
    assert len(notes) == len(said), notes
    for words in said:
        assert any(re.match(words, note) for note in notes), notes
    # Batch statistics and dropout, which are off, would make it larger.
    assert reference.bound("fp32") < 1e-4
    for optimizer in ("adamw",) if said else ("sgd", "adamw"):
        assert check_cell(World(), reference, Cell("single", "fp32", optimizer)).cause == ""


def test_the_partial_step_of_an_epoch_is_compared_and_large_errors_are_judged_by_plain_torchs():
    reference = reference_of(Task(), "--data.drop_last", "true")  # a run would drop that step
    assert check_cell(World(), reference, Cell("single", "fp32")).cause == ""
    reference._bounds["fp32"] = 1e-12
    verdict = check_cell(World(), reference, Cell("single", "fp32"))
    assert verdict.cause == ""
    assert verdict.gradient_error <= verdict.gradient_bound < 1e-4


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
        inspected(reference_of(Tiny(samples=64)))
