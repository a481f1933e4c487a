"""`dist_amp replay`: a run's steps again, on one process, and a look into one of them."""

import bdb
import json
import re
import shutil

import pytest
import torch
from PIL import Image
from ranks import on_ranks
from tiny import Overflow, Tiny  # noqa: F401 (tasks by their names)

from dist_amp import train
from dist_amp.commands import replay

WORDS = ["--train.steps", "8", "--train.micro_batch_size", "2", "--checkpoint.every", "3"]
WORDS += ["--metrics.log_every", "2", "--eval.every", "off", "--use_amp", "false"]
WORDS += ["--train.global_batch_size", "8", "--checkpoint.keep", "100"]


def record(world, folder, *words):
    """Train a task of this file, or of tiny, into the folder."""
    return train.main([*WORDS, "--run.dir", str(folder), *words])


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """A bit-exact run of two ranks: checkpoints at 3, 6 and 8, lines at 2, 4, 6 and 8."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    words = ["--task.target", "tiny:Tiny", "--parallel.bit_exact", "true"]
    assert on_ranks(2, record, folder, *words, "--parallel.strategy", "fsdp") == [0, 0]
    return folder


@pytest.fixture
def look(capsys):
    """look(folder, step, ...): (status, output, errors) of the command."""
    before = torch.get_num_threads()

    def run(folder, step, *words):
        capsys.readouterr()
        status = replay.main([str(folder), "--step", str(step), *map(str, words)])
        return status, *capsys.readouterr()

    yield run
    torch.set_num_threads(before)


def test_a_bit_exact_run_of_two_ranks_is_replayed_to_the_same_bits(recorded, look):
    status, output, _ = look(recorded, 8)
    assert status == 0, output
    assert f"replay {recorded} from step_00000006: 2 steps on one process" in output
    assert "expect the same bits, since it was bit-exact" in output
    assert re.search(r"^step +8  loss \S+  the same bits$", output, re.MULTILINE)
    assert output.endswith("all as logged\n")


def test_the_step_is_shown_with_samples_losses_layers_and_what_clip_and_scaler_did(recorded, look):
    _, output, _ = look(recorded, 5)
    assert "step 5, at sample 32" in output
    assert len(re.findall(r"micro-batch \d: loss \S+, weight 2, samples \d+, \d+", output)) == 4
    assert "float32 [2, 8], " in output  # x of the samples
    assert re.search(
        r"gradient norm \S+, clipped by norm \(factor \S+\), loss scale 1, applied", output
    )
    rows = re.findall(r"^  (\S+) +Linear +(\S+) +(\S+) +0 +(\S+)$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["0.0", "1.0", "2"]
    norm = float(re.search(r"gradient norm (\S+),", output)[1])
    total = sum(float(row[3]) ** 2 for row in rows) ** 0.5
    assert total == pytest.approx(norm, rel=1e-3)  # printed with four digits


def test_nothing_is_written_into_the_runs_folder(recorded, look):
    def state():
        return {path: path.stat().st_mtime_ns for path in recorded.rglob("*")}

    before = state()
    look(recorded, 4)
    assert state() == before


def test_a_logged_value_that_the_replay_does_not_repeat_is_named(recorded, look, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(recorded, folder)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    rows[2]["train/loss"] *= 1 + 1e-12
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, output, _ = look(folder, 8)
    assert status == 0  # from step 6 on
    status, output, _ = look(folder, 6)
    assert status == 1
    assert "differs from what was logged, first at step 6: train/loss" in output


def test_another_layout_is_compared_within_a_tolerance_that_is_said(tmp_path, look):
    words = ["--task.target", "tiny:Tiny", "--parallel.strategy", "ddp"]
    on_ranks(2, record, tmp_path / "run", *words)
    status, output, _ = look(tmp_path / "run", 4)
    assert status == 0, output
    assert "expect values within 0.001 of what was logged, since 2 ranks added" in output


def test_a_skipped_step_is_explained(tmp_path, look):
    words = ["--task.target", "tiny:Overflow", "--debug.nonfinite", "off", "--train.steps", "7"]
    record(None, tmp_path / "run", *words)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    skipped = next(row["step"] for row in rows if row.get("amp/skipped_steps"))
    outputs = [look(tmp_path / "run", step)[1] for step in (skipped - 1, skipped)]
    [output] = [one for one in outputs if "skipped: the norm is not finite" in one]
    assert "batch" in output.split("skipped: ")[1]
    assert "batch['x']" in output


def test_profile_writes_a_trace_here_and_prints_the_longest_operations(
    recorded, look, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    _, output, _ = look(recorded, 4, "--profile")
    assert "Self CPU time total" in output
    assert "traceEvents" in json.loads((tmp_path / "replay_step_4.json").read_text())


def test_pictures_are_written_where_samples_are_images(tmp_path, look, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record(None, "run", "--task.target", "bit_exact_models:Convolutions", "--train.steps", "2")
    _, output, _ = look("run", 2, "--pictures")
    picture = tmp_path / "replay_step_2_micro_batch_0.png"
    assert str(picture) in output
    assert Image.open(picture).size == (2 * 9, 9)


def test_pdb_stops_before_each_backward(recorded, look, monkeypatch):
    stops = []
    monkeypatch.setattr(replay.pdb, "set_trace", lambda: stops.append(None))
    look(recorded, 4, "--pdb")
    assert len(stops) == 4  # its micro-batches


def test_q_in_the_debugger_ends_the_replay_quietly(recorded, look, monkeypatch):
    def quit_debugger():
        raise bdb.BdbQuit

    monkeypatch.setattr(replay.pdb, "set_trace", quit_debugger)
    status, output, errors = look(recorded, 4, "--pdb")
    assert status == 0
    assert "see batch, samples, loss and run" in output
    assert "Traceback" not in errors


def test_a_step_that_was_not_logged_is_not_called_equal(recorded, look, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(recorded, folder)
    (folder / "metrics.jsonl").write_text("")
    status, output, _ = look(folder, 5)
    assert status == 0
    assert output.endswith("nothing was compared: the run logged none of these steps\n")


def test_random_numbers_of_several_ranks_are_no_difference_to_report(tmp_path, look):
    words = ["--task.target", "bit_exact_models:Blocks", "--parallel.strategy", "ddp"]
    on_ranks(2, record, tmp_path / "run", *words, "--task.args.dropout", "0.5")
    status, output, _ = look(tmp_path / "run", 2)
    assert status == 0, output
    assert "the model draws random numbers, and the ranks drew other ones" in output


def test_a_compiled_run_is_replayed_without_compilation_within_a_tolerance(tmp_path, look):
    words = ["--task.target", "bit_exact_models:Blocks", "--task.args.dropout", "0"]
    record(None, tmp_path / "run", *words, "--compile.blocks", "true", "--compile.mode", "eager")
    status, output, _ = look(tmp_path / "run", 2)
    assert status == 0, output
    assert "since its blocks were compiled, and round otherwise than the ones here" in output
    assert "first.1.out" in output  # inside a block


def test_a_batch_without_pictures_is_said_to_have_none(recorded, look):
    assert "no picture: no tensor of the batch is" in look(recorded, 4, "--pictures")[1]


@pytest.mark.bad_input("`replay` with a setting that changes the steps")
@pytest.mark.parametrize("word", ["optim.lr", "run.seed", "train.micro_batch_size"])
def test_a_setting_that_changes_the_steps_is_refused(recorded, look, word):
    status, _, errors = look(recorded, 4, f"--{word}", 4)
    assert status == 64
    assert f"{word}=4 on the command line: the run had " in errors.replace("4.0", "4")


@pytest.mark.bad_input("`replay` of a run whose newest manifest is damaged")
def test_a_damaged_manifest_gives_way_to_an_older_checkpoint(recorded, look, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    (folder / "checkpoints/step_00000008/manifest.json").write_text("{")
    status, output, _ = look(folder, 8)
    assert status == 0, output
    assert "from step_00000006" in output


@pytest.mark.bad_input("`replay` of a step before the first or after the last one")
@pytest.mark.parametrize("step", [0, -3, 9])
def test_a_step_that_was_not_taken_is_refused(recorded, look, step):
    status, _, errors = look(recorded, step)
    assert status == 64
    assert f"--step {step}: {recorded} has taken the steps 1 to 8; choose one" in errors


@pytest.mark.bad_input("`replay` of a step that is no number, or of none")
def test_a_step_that_is_no_number_is_refused(recorded, look):
    status, _, errors = look(recorded, "last")
    assert status == 64
    assert "--step: invalid int value: 'last'" in errors


@pytest.mark.bad_input("`replay` of a folder that holds no run")
def test_a_folder_that_is_no_run_is_refused(look, tmp_path):
    status, _, errors = look(tmp_path, 3)
    assert status == 65
    assert "is not a run's folder: it has no config.toml" in errors


@pytest.mark.bad_input("`replay` of a run that took no step")
def test_a_run_without_a_step_is_refused(recorded, look, tmp_path):
    shutil.copy(recorded / "config.toml", tmp_path)
    status, _, errors = look(tmp_path, 3)
    assert status == 65
    assert f"{tmp_path} has logged no step and saved none" in errors


@pytest.mark.bad_input("`replay` of a step before the first checkpoint of a run that continued one")
def test_a_step_before_the_first_checkpoint_of_a_continued_run_is_refused(recorded, look, tmp_path):
    words = [
        "--task.target",
        "tiny:Tiny",
        "--run.resume",
        str(recorded / "checkpoints/step_00000003"),
    ]
    record(None, tmp_path / "run", *words, "--parallel.bit_exact", "true")
    status, _, errors = look(tmp_path / "run", 5)
    assert status == 65
    assert "and has no checkpoint before this step; choose a step from 7 on" in errors


@pytest.mark.bad_input("`replay` of a run whose data or task changed since")
@pytest.mark.parametrize(
    ("name", "error"), [("seed = 0", "data"), ("depth = 2", "does not fit this model")]
)
def test_a_run_whose_data_or_model_changed_since_is_refused(name, error, recorded, look, tmp_path):
    folder = tmp_path / "changed"
    shutil.copytree(recorded, folder)
    text = (folder / "config.toml").read_text()
    before, of_task = text.split("[task.args]")
    assert name in of_task
    of_task = of_task.replace(name, f"{name[:-1]}7", 1)
    (folder / "config.toml").write_text(f"{before}[task.args]{of_task}")
    status, _, errors = look(folder, 5)
    assert status == 65
    assert error in errors


@pytest.mark.bad_input("`replay` of a run with a damaged checkpoint")
def test_a_damaged_checkpoint_gives_way_to_an_older_one(recorded, look, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    shard = next((folder / "checkpoints/step_00000006").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1])
    status, output, errors = look(folder, 8)
    assert status == 0
    assert "using step_00000003 instead" in errors
    assert "from step_00000003: 5 steps" in output
