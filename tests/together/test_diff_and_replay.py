"""`dist_amp diff` finds where two runs diverge, and `dist_amp replay` takes a run's steps again."""

import json
import re
import shutil
import sys
from collections import OrderedDict
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from ranks import on_ranks
from tiny import Rows, Tiny
from torch import nn

from dist_amp.commands import diff, replay
from dist_amp.errors import DataError
from dist_amp.record import Record
from dist_amp.train import main as train

WIDTH, LENGTH, SYMBOLS = 16, 8, 32
AT = 3  # the flipped bit changes what follows this step


class Mix(nn.Linear):
    """Adds two halves and the bias; with the fault in another order."""

    fault = ""

    def forward(self, x):
        parts = [*zip(x.chunk(2, dim=-1), self.weight.chunk(2, dim=1), strict=True)]
        if self.fault == "sum_order":
            parts.reverse()
        (first, weight), other = parts
        return F.linear(first, weight, self.bias) + F.linear(*other)


class Block(nn.Module):
    def __init__(self, fault):
        super().__init__()
        self.fault = fault
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Sequential(OrderedDict(tanh=nn.Tanh(), linear=Mix(WIDTH, WIDTH)))
        self.mix.linear.fault = fault
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        if fault == "scaled_twice":
            self.up.weight.register_hook(lambda gradient: 2 * gradient)

    def forward(self, x):
        x = x + self.mix(self.norm(x))
        if self.fault == "backward_scaled" and x.requires_grad:
            x.register_hook(lambda gradient: 2 * gradient)
        return x + self.down(self.drop(F.gelu(self.up(x))))


class Planted:
    """Predict the next symbol; the second of three blocks has the fault. Batch: tokens."""

    def __init__(self, fault: str = ""):
        self.fault = fault

    def build_model(self):
        blocks = [Block(self.fault * (number == 1)) for number in range(3)]
        parts = {"embedding": nn.Embedding(SYMBOLS, WIDTH), "blocks": nn.Sequential(*blocks)}
        return nn.Sequential(OrderedDict(parts, head=nn.Linear(WIDTH, SYMBOLS)))

    def blocks(self, model):
        return list(model.blocks)

    def build_dataset(self, split):
        generator = torch.Generator().manual_seed(5)
        return Rows(tokens=torch.randint(SYMBOLS, (64, LENGTH + 1), generator=generator))

    def loss_sum(self, model, batch):
        logits = model(batch["tokens"][:, :-1]).float()
        labels = batch["tokens"][:, 1:].flatten()
        return F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum") / LENGTH

    def weight(self, batch):
        return len(batch["tokens"])

    def on_step(self, run, report):
        if run.step == AT and self.fault == "flipped_bit":
            run.parallel.module.blocks[1].down.weight.data.view(torch.int32)[0, 0] ^= 1 << 20


STEPS = 6
WORDS = (
    "--task.target test_diff_and_replay:Planted --train.micro_batch_size 4 --eval.every off "
    f"--train.steps {STEPS} --train.global_batch_size 8 --optim.lr 0.01 --optim.schedule constant "
    "--metrics.log_every 1 --metrics.fingerprint 1 --use_amp false --checkpoint.every 2 "
    "--checkpoint.keep 9 --checkpoint.async_save false --run.device cpu"
)
TINY = "--task.target tiny:Tiny"
LARGER = "--train.micro_batch_size 8"
SLOW = pytest.mark.slow


def train_in(folder, words=""):
    """Train in a folder, with these words besides; returns the folder."""
    assert train(f"{WORDS} --run.dir {folder} {words}".split()) == 0
    return folder


def train_on_ranks(world, folder, words):
    train_in(folder, words)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(words): the folder of a run with them, which is trained once."""
    return cache(lambda words="": train_in(tmp_path_factory.mktemp("runs") / "run", words))


REPLAYED = f"{TINY} --train.steps 8 --train.micro_batch_size 2 --metrics.log_every 2"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A bit-exact run of two ranks: checkpoints at 3, 6 and 8, lines at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    exact = "--parallel.bit_exact true --parallel.strategy fsdp --checkpoint.every 3"
    on_ranks(2, train_on_ranks, folder, f"{REPLAYED} {exact}")
    return folder


@pytest.fixture
def copied(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "copy")


@pytest.fixture
def said_by(capsys):
    """said_by(command, word, ...): (status, output, errors)."""

    def run(command, *words):
        capsys.readouterr()
        return command.main([str(word) for word in words]), *capsys.readouterr()

    return run


# ---- diff


def edit_metrics(change, folder):
    path = folder / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(line | change(line)) + "\n" for line in lines))


@pytest.mark.parametrize(
    ("fault", "step", "fingerprints", "deep"),  # step: the first whose numbers the fault changes
    [
        ("scaled_twice", 1, "blocks.1.up is", "the gradient of the parameters of blocks.1.up"),
        ("flipped_bit", AT + 1, "in step 3 or", "step 3: parameters differ first in blocks.1.down"),
        ("sum_order", 1, "", "the forward of blocks.1.mix.linear, aten.mm"),
        pytest.param("backward_scaled", 1, "mix.linear is", "blocks.1, in AddB", marks=SLOW),
    ],
)
def test_a_planted_fault_is_found_in_its_step_and_its_module(
    fault, step, fingerprints, deep, trained, said_by
):
    status, text, _ = said_by(diff, trained(), trained(f"--task.args.fault {fault}"), "--deep")
    assert status == 1
    assert min(map(int, re.findall(r"diverge at step (\d+)", text))) == step
    assert fingerprints in text
    assert deep in text
    assert re.search(rf"step {step}:|the update of step {step - 1}:", text)


def test_equal_runs_one_of_them_resumed_are_equal_with_status_0(trained, said_by, tmp_path):
    resumed = shutil.copytree(trained(), tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints/step_00000006")
    train_in(resumed, "--checkpoint.every 3")
    status, text, _ = said_by(diff, trained(), resumed, "--deep")
    assert status == 0, text
    assert "checkpoint.every  2  3" in text
    assert "run.dir" not in text
    assert "compared bit by bit: 6 logged steps\nmetrics are equal up to step 6\n" in text
    assert "fingerprints are equal up to step 6\n" in text
    assert "not replayed: nothing differs up to step 6" in text


def test_the_report_names_settings_step_metrics_and_module(trained, said_by, tmp_path):
    first = shutil.copytree(trained(), tmp_path / "first")
    (first / "checkpoints/step_00000006/manifest.json").write_text("{")  # an older one is read
    _, text, _ = said_by(diff, first, trained("--task.args.fault scaled_twice"))
    lines = text.splitlines()
    assert "  task.args.fault     scaled_twice" in lines
    assert "metrics diverge at step 1" in lines
    assert "\n  train/grad_norm: 1." in text
    said = "parameters are equal; in backward order blocks.1.up is the first to differ"
    assert lines[-3].endswith(said)
    assert lines[-2] == "  parameters differ in 0 of 14 modules"
    assert lines[-1] == "  gradients differ in 1 of 14 modules: blocks.1.up"
    assert diff.relative_difference(1.0, 2.0) == diff.relative_difference(-4.0, -2.0) == 0.5
    assert "data: " not in text


def test_layouts_that_round_other_sums_are_judged_within_rounding(trained, said_by, tmp_path):
    status, text, _ = said_by(diff, trained(TINY), trained(f"{TINY} {LARGER}"))
    assert status == 0
    assert "metrics are within 0.001 up to step 6" in text
    assert "fingerprints" not in text.partition("compared across layouts")[2]
    status, _, _ = said_by(diff, trained(TINY), trained(f"{TINY} {LARGER} --optim.eps 1.0"))
    assert status == 1
    faster = shutil.copytree(trained(f"{TINY} {LARGER}"), tmp_path / "faster")
    edit_metrics(lambda line: {"train/lr": line["train/lr"] + 1e-9}, faster)
    _, text, _ = said_by(diff, trained(TINY), faster)
    assert "metrics diverge at step 1\n  train/lr: " in text, "which is not rounded"
    full, half = {"precision.use_amp": False}, {"precision.use_amp": True}
    for dtype in ("bf16", "fp16", "fp8"):
        assert diff.rounding([full, half | {"precision.dtype": dtype}]) > diff.rounding([full])


def test_dropout_of_other_layouts_differs_and_the_report_says_so(trained, said_by):
    status, output, _ = said_by(diff, trained(), trained(LARGER), "--deep")
    assert status == 1
    assert "dropout differs too, unless both are bit-exact: 6 logged steps\n" in output
    assert "both replayed: step 1: the samples differ" in output


class Misreads(Tiny):
    def build_dataset(self, split):
        rows = super().build_dataset(split)
        if dist.get_rank() == 1:
            rows.columns["x"][1::4] = 0.0  # a start compares some others
        return rows


def test_the_one_rank_that_reads_other_rows_is_named(tmp_path, said_by):
    words = f"{TINY} --train.steps 2 --train.global_batch_size auto"
    misreads = f"{words} --task.target test_diff_and_replay:Misreads"
    on_ranks(2, train_on_ranks, tmp_path / "a", words)
    on_ranks(2, train_on_ranks, tmp_path / "b", misreads)
    status, output, _ = said_by(diff, tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "  only the losses of rank 1 differ: check its data first\n" in output


def test_intervals_of_other_lengths_are_left_out_and_without_hashes_the_logged_step_is_found(
    trained, said_by
):
    every_second = trained("--metrics.log_every 2 --metrics.fingerprint 3")
    status, text, _ = said_by(diff, trained(), every_second)
    assert status == 0
    assert "bit by bit: 3 logged steps" in text
    assert f"fingerprints are equal up to step {STEPS}" in text
    words = "--metrics.log_every 2 --metrics.fingerprint off --task.args.fault flipped_bit"
    _, text, _ = said_by(diff, every_second, trained(words))
    assert "fingerprints " not in text
    assert f"metrics diverge at step {AT + 1}, equal up to step {AT - 1}" in text


def test_steps_that_are_taken_again_forget_the_settings_of_before(trained, tmp_path):
    copied = shutil.copytree(trained(), tmp_path / "run")
    for step in (6, 4):
        for later in (8, step + 2):
            shutil.rmtree(copied / f"checkpoints/step_0000000{later}", ignore_errors=True)
        words = f"--run.allow_config_change true --train.steps 8 --optim.lr {1.0 / step}"
        train_in(copied, words)
    kept = [path.name for path in copied.glob("config_until*")]
    assert kept == ["config_until_step_00000004.toml"]
    assert Record(copied).settings_at(4)["optim.lr"] == 1e-2
    assert Record(copied).settings_at(5)["optim.lr"] == 0.25
    with pytest.raises(DataError, match="replays the steps 4 to 6 with one config"):
        diff.compare_replays([copied, copied], 3, 6)


def test_runs_of_other_models_are_compared_as_far_as_they_go(trained, said_by):
    status, text, _ = said_by(diff, trained(), trained(TINY))
    assert status == 1
    for said in ("task.target", "the models have no module in common", "diverge at step 1"):
        assert said in text


# ---- replay


class Dropping(Tiny):
    def build_model(self):
        return nn.Sequential(super().build_model(), nn.Dropout(0.5))


class SometimesNan(Dropping):
    def loss_sum(self, model, batch):
        drawn = torch.rand(())
        return super().loss_sum(model, batch) * (drawn if drawn < 0.9 else float("nan"))


def test_a_bit_exact_run_of_two_ranks_is_replayed_to_the_same_bits_and_its_last_step_is_shown(
    recorded, said_by
):
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    status, output, _ = said_by(replay, recorded, "--step", 8)
    assert status == 0, output
    assert {path: path.stat().st_mtime_ns for path in recorded.rglob("*")} == before
    assert f"replay {recorded} from step_00000006: 2 steps on one process" in output
    assert "expect the same bits, since it was bit-exact or had one process" in output
    assert re.search(r"^step +8  loss \S+  the same bits$", output, re.MULTILINE)
    assert output.endswith("all as logged\n")
    assert "step 8, after 56 samples" in output
    assert len(re.findall(r"micro-batch \d: loss \S+, weight 2, samples \d+, \d+", output)) == 4
    did = r"gradient norm (\S+), clipped by norm \(factor \S+\), loss scale 1, applied"
    norm = float(re.search(did, output)[1])
    rows = re.findall(r"^  (\S+) +Linear +(\S+) +(\S+) +0 +(\S+)$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["0.0", "1.0", "2"]
    total = sum(float(row[3]) ** 2 for row in rows) ** 0.5
    whole = re.search(r"^  the model +Sequential .* (\S+)$", output, re.MULTILINE)[1]
    # They are printed with four digits.
    assert [total, float(whole)] == pytest.approx([norm, norm], rel=1e-3)
    assert re.search(r"^  0\.1 +Tanh ", output, re.MULTILINE), "layers without parameters, too"


def test_what_differs_from_the_log_is_named_and_what_can_not_be_compared_is_not_judged(
    copied, said_by
):
    is_sixth = {6: 1 + 1e-12}
    edit_metrics(
        lambda row: {"train/loss": row["train/loss"] * is_sixth.get(row["step"], 1)}, copied
    )
    status, output, _ = said_by(replay, copied, "--step", 6)
    assert status == 1
    assert "differs from what was logged, first at step 6: train/loss" in output
    nothing = "nothing was compared: settings differ, or metrics.jsonl has none of these"
    status, output, _ = said_by(replay, copied, "--step", 7)
    assert (status, output.count(nothing), output.count("as logged")) == (0, 1, 0)
    words = "--step 8 --optim.lr 0.5 --metrics.log_every 1".split()
    status, output, _ = said_by(replay, copied, *words)
    assert (status, output.count(nothing)) == (0, 1)
    assert "expect different values than were logged, since you set optim.lr\n" in output
    assert "log_every" not in output


@pytest.mark.parametrize(
    ("ranks", "words", "expected", "outcome"),
    [
        (2, "--parallel.strategy ddp", "drew other random numbers", "differs from what was logged"),
        (1, "--compile.blocks true --compile.mode eager", "was compiled", "all within 0.001 of"),
    ],
)
def test_where_bits_may_differ_the_tolerance_and_its_reason_are_said(
    tmp_path, said_by, ranks, words, expected, outcome
):
    task = "--task.target test_diff_and_replay:Dropping --train.steps 4"
    on_ranks(ranks, train_on_ranks, tmp_path / "run", f"{REPLAYED} {task} {words}")
    _, output, _ = said_by(replay, tmp_path / "run", "--step", 4)
    assert re.search(rf"expect values within [\d.]+ of what was logged, since .*{expected}", output)
    assert outcome in output.splitlines()[-1]
    (zeros,) = re.findall(r"^  \S+ +Dropout +\S+ +(\S+)", output, re.MULTILINE)
    assert float(zeros) > 10, "it is on"


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path, said_by):
    """Not bit-exact up to step 4, then bit-exact; on two ranks, and on one."""
    folder, single = tmp_path / "run", tmp_path / "single"
    for words in ("--train.steps 4", "--parallel.bit_exact true"):
        on_ranks(2, train_on_ranks, folder, f"{REPLAYED} {words}")
        train_in(single, f"{REPLAYED} {words}")
    status, output, _ = said_by(diff, folder, single)
    assert status == 0, output
    assert "metrics are within 0.001 up to step 8" in output
    assert "expect values within 0.001" in said_by(replay, folder, "--step", 4)[1]
    status, output, _ = said_by(replay, folder, "--step", 6)
    assert "expect the same bits, since it was bit-exact or had one process" in output
    assert status == 0, output
    shutil.rmtree(folder / "checkpoints/step_00000004")
    status, _, errors = said_by(replay, folder, "--step", 5)
    assert status == 65
    assert "--step 5: the settings changed since step 2" in errors


@pytest.mark.bad_input("`replay` with a task's source file that was edited since the run")
def test_an_edited_task_is_the_first_line(tmp_path, said_by, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "edited_task.py"
    source.write_text("from tiny import Tiny\nclass Mine(Tiny):\n    pass\n")
    train_in("run", f"{REPLAYED} --task.target edited_task:Mine --train.steps 2")
    assert "was edited" not in said_by(replay, "run", "--step", 2)[1]
    source.write_text(source.read_text().replace("pass", "weight = lambda self, batch: 3.0"))
    del sys.modules["edited_task"]
    status, output, _ = said_by(replay, "run", "--step", 2)
    assert status == 1
    assert output.startswith(f"{source} was edited since run was started: these steps run other")
    assert "differs from what was logged, first at step 2" in output


def test_a_nan_is_found_again_with_the_same_random_numbers(tmp_path, said_by):
    task = "--task.target test_diff_and_replay:SometimesNan"
    train_in(tmp_path / "run", f"{REPLAYED} {task} --debug.nonfinite step")
    reports = tmp_path / "run/nonfinite/reports.jsonl"
    report = json.loads(reports.read_text().splitlines()[0])
    _, output, _ = said_by(replay, tmp_path / "run", "--step", report["step"])
    why = output.split("skipped: the norm is not finite")[1]
    assert f"rank 0, micro-batch {report['micro_batch']} " in why


def continued(folder):
    """It began at a checkpoint, and its first one is of step 6."""
    shutil.rmtree(folder / "checkpoints/step_00000003")
    config = (folder / "config.toml").read_text()
    config, count = re.subn(r'resume = "\w+"', 'resume = "elsewhere/step_00000002"', config)
    assert count == 1, config
    (folder / "config.toml").write_text(config)


def later_by_100(folder):
    edit_metrics(lambda line: {"step": line["step"] + 100}, folder)


def cut_off(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "trai')


@pytest.mark.bad_input("dist_amp diff of what is no run, has logged nothing, or has no common step")
@pytest.mark.bad_input("`replay` of a step that was not taken, or of a folder that holds no run")
@pytest.mark.bad_input("`replay` of a step before the first checkpoint of a run that continued one")
@pytest.mark.bad_input("`replay` of a run whose data or task changed since")
@pytest.mark.parametrize(
    ("command", "change", "words", "status", "said"),
    [
        (diff, shutil.rmtree, "RUN COPY", 65, "COPY is not the folder of a run or checkpoint: "),
        (diff, cut_off, "RUN COPY", 65, "COPY logged no complete line; use"),
        (diff, later_by_100, "RUN COPY", 65, "no logged step in"),
        (diff, Path, "COPY/../copy COPY", 64, "are the same folder; give two runs"),
        (replay, shutil.rmtree, "COPY --step 3", 65, "COPY is not the folder of a run or checkpo"),
        (replay, Path, "COPY --step 9", 64, "--step 9: COPY took the steps 1 to 8; choose"),
        (replay, continued, "COPY --step 5", 65, "and has no checkpoint before this step; choose"),
        (replay, Path, "COPY --step 5 --task.args.seed 7", 65, "data"),
        (replay, Path, "COPY --step 5 --task.args.depth 3", 65, ""),
    ],
)
def test_what_cannot_be_compared_or_replayed_is_refused(
    command, change, words, status, said, recorded, copied, said_by
):
    change(copied)
    words = words.replace("RUN", str(recorded)).replace("COPY", str(copied)).split()
    found, _, errors = said_by(command, *words)
    assert found == status, errors
    assert said.replace("COPY", str(copied)) in errors
    assert errors.splitlines()[-1].startswith("error: ")


@pytest.mark.bad_input("`replay` of a run with a damaged checkpoint or newest manifest")
@pytest.mark.parametrize(
    ("file", "start", "warning"),
    [
        ("step_00000006/__0_0.distcp", "from step_00000003: 5 steps", "using step_00000003 inst"),
        ("step_00000008/manifest.json", "from step_00000006", ""),
    ],
)
def test_what_is_damaged_gives_way_to_what_is_older(copied, said_by, file, start, warning):
    damaged = copied / "checkpoints" / file
    damaged.write_bytes(damaged.read_bytes()[:-2])
    status, output, errors = said_by(replay, copied, "--step", 8)
    assert status == 0, output + errors
    assert start in output
    assert warning in errors
    assert output.endswith("all as logged\n")
