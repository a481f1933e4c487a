"""`dist_amp replay`: a run's steps again, on one process, and a look into one of them."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny
from torch import nn

from dist_amp import train
from dist_amp.commands import replay

WORDS = """
    --task.target tiny:Tiny --train.steps 8 --train.micro_batch_size 2 --train.global_batch_size 8
    --checkpoint.every 3 --checkpoint.keep 100 --metrics.log_every 2 --eval.every off
    --use_amp false
""".split()


class Dropping(Tiny):
    def build_model(self):
        return nn.Sequential(super().build_model(), nn.Dropout(0.5))


class SometimesNan(Dropping):
    """NaN where the first number that a micro-batch draws is large."""

    def loss_sum(self, model, batch):
        drawn = torch.rand(())
        return super().loss_sum(model, batch) * (drawn if drawn < 0.9 else float("nan"))


def record(world, folder, *words):
    return train.main([*WORDS, "--run.dir", str(folder), *words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A bit-exact run of two ranks: checkpoints at 3, 6 and 8, lines at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--parallel.bit_exact", "true", "--parallel.strategy", "fsdp"]
    assert on_ranks(2, record, folder, *words) == [0, 0]
    return folder


@pytest.fixture
def copied(recorded, tmp_path):
    return shutil.copytree(recorded, tmp_path / "copy")


@pytest.fixture
def look(capsys):
    """look(folder, step, ...): (status, output, errors) of the command."""

    def run(folder, step, *words):
        capsys.readouterr()
        status = replay.main([str(folder), "--step", str(step), *map(str, words)])
        return status, *capsys.readouterr()

    return run


def test_a_bit_exact_run_of_two_ranks_is_replayed_to_the_same_bits_and_its_last_step_is_shown(
    recorded, look
):
    before = {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}
    status, output, _ = look(recorded, 8)
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
    copied, look
):
    rows = [json.loads(line) for line in (copied / "metrics.jsonl").read_text().splitlines()]
    rows[2]["train/loss"] *= 1 + 1e-12
    (copied / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output, _ = look(copied, 6)
    assert status == 1
    assert "differs from what was logged, first at step 6: train/loss" in output
    nothing = "nothing was compared: settings differ, or metrics.jsonl has none of these"
    status, output, _ = look(copied, 7)
    assert (status, output.count(nothing), output.count("as logged")) == (0, 1, 0)
    status, output, _ = look(copied, 8, "--optim.lr", 0.5, "--metrics.log_every", 1)
    assert (status, output.count(nothing)) == (0, 1)
    assert "expect other values than were logged, since you set optim.lr\n" in output
    assert "log_every" not in output


DROPPING = f"--parallel.strategy ddp --task.target {__file__}:Dropping"
COMPILED = "--compile.blocks true --compile.mode eager"


@pytest.mark.parametrize(
    ("ranks", "words", "expected", "outcome"),
    [
        (2, DROPPING, "and drew other random numbers", "differs from what was logged, "),
        (1, COMPILED, "the run was compiled, and its replay is not", "all within 0.001 of what"),
    ],
    ids=["dropout", "compiled"],
)
def test_where_bits_may_differ_the_tolerance_and_its_reason_are_said(
    tmp_path, look, ranks, words, expected, outcome
):
    words = [*words.split(), "--train.steps", "4"]
    assert on_ranks(ranks, record, tmp_path / "run", *words) == [0] * ranks
    _, output, _ = look(tmp_path / "run", 4)
    assert re.search(rf"expect values within [\d.]+ of what was logged, since .*{expected}", output)
    assert outcome in output.splitlines()[-1]
    zeros = re.findall(r"^  \S+ +Dropout +\S+ +(\S+)", output, re.MULTILINE)
    assert [float(share) > 10 for share in zeros] == [True] * (ranks == 2)


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path, look):
    """Not bit-exact on two ranks up to step 4, then bit-exact."""
    folder = tmp_path / "run"
    words = ["--checkpoint.every", "2", "--run.resume", "auto", "--optim.schedule", "constant"]
    on_ranks(2, record, folder, *words, "--train.steps", "4")
    on_ranks(2, record, folder, *words, "--parallel.bit_exact", "true")
    assert "expect values within 0.001" in look(folder, 4)[1]
    status, output, _ = look(folder, 6)
    assert "expect the same bits, since it was bit-exact or had one process" in output
    assert status == 0, output
    shutil.rmtree(folder / "checkpoints/step_00000004")
    status, _, errors = look(folder, 5)
    assert status == 65
    assert "--step 5: the settings changed since step 2" in errors


@pytest.mark.bad_input("`replay` with a task's source file that was edited since the run")
def test_an_edited_task_is_the_first_line(tmp_path, look, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "edited_task.py"
    source.write_text("from tiny import Tiny\nclass Mine(Tiny):\n    pass\n")
    record(None, "run", "--task.target", "edited_task:Mine", "--train.steps", "2")
    assert "was edited" not in look("run", 2)[1]
    source.write_text(source.read_text().replace("pass", "weight = lambda self, batch: 3.0"))
    del sys.modules["edited_task"]
    status, output, _ = look("run", 2)
    assert status == 1
    assert output.startswith(f"{source} was edited since run was started: these are the steps of")
    assert "differs from what was logged, first at step 2" in output


def test_a_nan_is_found_again_with_the_same_random_numbers(tmp_path, look):
    words = ["--task.target", f"{__file__}:SometimesNan", "--debug.nonfinite", "step"]
    record(None, tmp_path / "run", *words)
    reports = tmp_path / "run/nonfinite/reports.jsonl"
    report = json.loads(reports.read_text().splitlines()[0])
    _, output, _ = look(tmp_path / "run", report["step"])
    why = output.split("skipped: the norm is not finite")[1]
    assert f"rank 0, micro-batch {report['micro_batch']} " in why


def continued(folder):
    """It began at a checkpoint, and its first one is of step 6."""
    shutil.rmtree(folder / "checkpoints/step_00000003")
    config = (folder / "config.toml").read_text()
    config, count = re.subn(r'resume = "\w+"', 'resume = "elsewhere/step_00000002"', config)
    assert count == 1, config
    (folder / "config.toml").write_text(config)


@pytest.mark.bad_input("`replay` of a step that was not taken, or of a folder that holds no run")
@pytest.mark.bad_input("`replay` of a step before the first checkpoint of a run that continued one")
@pytest.mark.bad_input("`replay` of a run whose data or task changed since")
@pytest.mark.parametrize(
    ("change", "words", "status", "said"),
    [
        (Path, "9", 64, "--step 9: {} has taken the steps 1 to 8; choose one"),
        (shutil.rmtree, "3", 65, "{} is not the folder of a run: config.toml: No such file"),
        (
            continued,
            "5",
            65,
            "and has no checkpoint before this step; choose a step after its first one",
        ),
        (Path, "5 --task.args.seed 7", 65, "data"),
        (Path, "5 --task.args.depth 3", 65, ""),
    ],
)
def test_what_cannot_be_replayed_is_refused(copied, look, change, words, status, said):
    change(copied)
    done = look(copied, *words.split())
    assert done[0] == status, done
    assert said.format(copied) in done[2]


def shard_is_damaged(folder):
    shard = next((folder / "checkpoints/step_00000006").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])


def manifest_is_damaged(folder):
    (folder / "checkpoints/step_00000008/manifest.json").write_text("{")


@pytest.mark.bad_input("`replay` of a run with a damaged checkpoint or newest manifest")
@pytest.mark.parametrize(
    ("change", "start", "warning"),
    [
        (shard_is_damaged, "from step_00000003: 5 steps", "using step_00000003 instead"),
        (manifest_is_damaged, "from step_00000006", ""),
    ],
)
def test_what_is_damaged_gives_way_to_what_is_older(copied, look, change, start, warning):
    change(copied)
    status, output, errors = look(copied, 8)
    assert status == 0, output + errors
    assert start in output
    assert warning in errors
    assert output.endswith("all as logged\n")
