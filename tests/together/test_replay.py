"""`dist_amp replay`: a run's steps again, on one process, and a look into one of them."""

import io
import json
import re
import shutil
import sys

import pytest
import torch
from PIL import Image
from ranks import on_ranks
from tiny import Tiny
from torch import nn

from dist_amp import train
from dist_amp.commands import replay

WORDS = ["--train.steps", "8", "--train.micro_batch_size", "2", "--checkpoint.every", "3"]
WORDS += ["--metrics.log_every", "2", "--eval.every", "off", "--use_amp", "false"]
WORDS += ["--train.global_batch_size", "8", "--checkpoint.keep", "100"]


class Dropping(Tiny):
    """With dropout."""

    def build_model(self):
        return nn.Sequential(super().build_model(), nn.Dropout(0.5))


class SometimesNan(Dropping):
    """NaN where the first number that a micro-batch draws is large."""

    def loss_sum(self, model, batch):
        drawn = torch.rand(())
        return super().loss_sum(model, batch) * (drawn if drawn < 0.9 else float("nan"))


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
    assert "step 5, after 32 samples" in output
    assert len(re.findall(r"micro-batch \d: loss \S+, weight 2, samples \d+, \d+", output)) == 4
    assert "float32 [2, 8], " in output  # x of the samples
    assert re.search(
        r"gradient norm \S+, clipped by norm \(factor \S+\), loss scale 1, applied", output
    )
    rows = re.findall(r"^  (\S+) +Linear +(\S+) +(\S+) +0 +(\S+)$", output, re.MULTILINE)
    assert [row[0] for row in rows] == ["0.0", "1.0", "2"]
    norm = float(re.search(r"gradient norm (\S+),", output)[1])
    total = sum(float(row[3]) ** 2 for row in rows) ** 0.5
    whole = re.search(r"^  the model +Sequential .* (\S+)$", output, re.MULTILINE)[1]
    for each in (total, float(whole)):
        assert each == pytest.approx(norm, rel=1e-3)  # printed with four digits
    assert re.search(r"^  0\.1 +Tanh ", output, re.MULTILINE), "layers without parameters, too"


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
    assert re.search(r"^step +4  loss \S+  within 0.001: ", output, re.MULTILINE)
    assert output.endswith("all within 0.001 of what was logged\n")


def test_random_numbers_of_other_ranks_are_no_fault(tmp_path, look):
    words = ["--task.target", f"{__file__}:Dropping", "--parallel.strategy", "ddp"]
    on_ranks(2, record, tmp_path / "run", *words)
    status, output, _ = look(tmp_path / "run", 4)
    assert status == 0, output
    assert "losses and norms are not judged: steps draw random numbers, which differ by" in output


def test_steps_without_a_logged_line_are_not_said_to_be_as_logged(recorded, look):
    status, output, _ = look(recorded, 7)
    assert status == 0
    assert "nothing was compared: settings differ, or metrics.jsonl has none of these" in output
    assert "as logged" not in output


def test_settings_that_change_the_numbers_are_named_and_nothing_is_compared(recorded, look):
    status, output, _ = look(recorded, 8, "--optim.lr", 0.5, "--metrics.log_every", 1)
    assert status == 0
    assert "expect other values than were logged, since you changed optim.lr=0.5 (it" in output
    assert "log_every" not in output
    assert "nothing was compared" in output


def test_a_compiled_run_is_replayed_uncompiled_within_a_tolerance(tmp_path, look):
    words = ["--task.target", "tiny:Tiny", "--compile.blocks", "true", "--compile.mode", "eager"]
    record(None, tmp_path / "run", *words)
    status, output, _ = look(tmp_path / "run", 4)
    assert status == 0, output
    assert "within 0.001 of what was logged, since the run was compiled, and its rep" in output


def test_a_run_under_fsdps_policy_is_replayed_within_a_tolerance(tmp_path, look):
    words = ["--task.target", "tiny:Tiny", "--parallel.strategy", "fsdp", "--use_amp", "true"]
    on_ranks(2, record, tmp_path / "run", *words, "--precision.cast_by", "policy")
    _, output, _ = look(tmp_path / "run", 2)
    assert "and FSDP2's policy rounded otherwise than autocast does" in output


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path, look):
    """Not bit-exact on two ranks up to step 4, then bit-exact."""
    folder = tmp_path / "run"
    words = ["--task.target", "tiny:Tiny", "--checkpoint.every", "2", "--run.resume", "auto"]
    on_ranks(2, record, folder, *words, "--train.steps", "4", "--optim.schedule", "constant")
    words += ["--parallel.bit_exact", "true", "--optim.schedule", "constant"]
    on_ranks(2, record, folder, *words)
    _, output, _ = look(folder, 4)
    assert "expect values within 0.001" in output
    status, output, _ = look(folder, 6)
    assert "expect the same bits, since it was bit-exact" in output
    assert status == 0
    shutil.rmtree(folder / "checkpoints/step_00000004")
    status, _, errors = look(folder, 5)
    assert status == 65
    assert "--step 5: the settings changed after step 4" in errors


@pytest.mark.bad_input("`replay` with a task's source file that was edited since the run")
def test_an_edited_task_is_the_first_line_and_the_verdict(tmp_path, look, monkeypatch):
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "edited_task.py"
    source.write_text("from tiny import Tiny\nclass Mine(Tiny):\n    pass\n")
    record(None, "run", "--task.target", "edited_task:Mine", "--train.steps", "2")
    assert "was edited" not in look("run", 2)[2]
    source.write_text(source.read_text() + "    x = 1\n")
    output = look("run", 2)[1]
    assert f"{source} was edited since run was started: these are" in output.splitlines()[0]
    source.write_text(source.read_text().replace("x = 1", "weight = lambda self, batch: 3.0"))
    del sys.modules["edited_task"]
    status, output, _ = look("run", 2)
    assert status == 1
    said = f"{source} was edited since run was started: so it differs from what was logged, step "
    assert output.splitlines()[-1].startswith(said)


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


def test_pictures_of_samples_that_are_none_are_missed_aloud(recorded, look):
    assert "no picture: the batch has no tensor of the shape" in look(recorded, 2, "--pictures")[1]


def test_a_nan_of_a_random_draw_is_found_again_with_the_same_numbers(tmp_path, look):
    words = ["--task.target", f"{__file__}:SometimesNan", "--debug.nonfinite", "step"]
    record(None, tmp_path / "run", *words)
    report = json.loads((tmp_path / "run/nonfinite/reports.jsonl").read_text().splitlines()[0])
    _, output, _ = look(tmp_path / "run", report["step"])
    assert f"rank 0, micro-batch {report['micro_batch']} " in output.split("skipped: ")[1]


def test_a_nan_that_the_replay_does_not_reproduce_is_said_to_be_so(recorded, look, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(recorded, folder)
    (folder / "nonfinite").mkdir()
    fault = {"phase": "loss", "module": "the loss", "module_class": "", "tensors": [], "step": 5}
    (folder / "nonfinite/reports.jsonl").write_text(json.dumps(fault) + "\n")
    _, output, _ = look(folder, 5)
    assert "the run skipped this step, and the replay did not reproduce it" in output


def test_leaving_the_debugger_ends_quietly_and_its_names_are_told(recorded, look, monkeypatch):
    words = io.StringIO("p run.step, len(batch['x']), samples\nq\n")
    typed = replay.pdb.Pdb(stdin=words, stdout=sys.stdout)  # pytest's own would read the terminal
    monkeypatch.setattr(replay.pdb, "set_trace", lambda: typed.set_trace(sys._getframe().f_back))
    status, output, errors = look(recorded, 4, "--pdb")
    assert status == 0
    assert "Traceback" not in errors
    assert "`batch` is what the task gets, `loss` what backward starts from" in output
    assert re.search(r"\(3, 2, [\[(]\d+, \d+[\])]\)", output)
    assert output.endswith("ended before step 4 was taken\n")


def test_pdb_stops_before_each_backward(recorded, look, monkeypatch):
    stops = []
    monkeypatch.setattr(replay.pdb, "set_trace", lambda: stops.append(None))
    look(recorded, 4, "--pdb")
    assert len(stops) == 4  # its micro-batches


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
    assert f"{tmp_path} is not the folder of a run: config.toml: No such file" in errors


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
def test_a_run_whose_data_changed_since_is_refused(recorded, look):
    status, _, errors = look(recorded, 5, "--task.args.seed", 7)
    assert status == 65
    assert "data" in errors
    status, _, errors = look(recorded, 5, "--task.args.depth", 3)
    assert status == 65


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


@pytest.mark.bad_input("`replay` of a run whose newest manifest is damaged")
def test_a_damaged_newest_manifest_gives_way_to_an_older_one(recorded, look, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    (folder / "checkpoints/step_00000008/manifest.json").write_text("{")
    status, output, errors = look(folder, 8)
    assert status == 0
    assert "from step_00000006" in output
    assert "step_00000008: manifest.json is damaged; another checkpoint says" in errors


@pytest.mark.bad_input("`replay` of a run with a damaged line in metrics.jsonl")
@pytest.mark.parametrize("line", ["5", "[1]", '{"step": ', '{"step": "x"}', "{}"])
def test_a_damaged_line_of_the_metrics_is_named(recorded, look, tmp_path, line):
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    path = folder / "metrics.jsonl"
    first, *rest = path.read_text().splitlines(keepends=True)
    path.write_text("".join([first, line + "\n", *rest]))
    status, _, errors = look(folder, 8)
    assert status == 65
    assert f"{path}, line 2: not a JSON object with a step; remove it" in errors


def test_a_last_line_that_a_kill_has_torn_is_left_out(recorded, look, tmp_path):
    folder = tmp_path / "torn"
    shutil.copytree(recorded, folder)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 9, "train/lo')
    assert look(folder, 8)[0] == 0


@pytest.mark.bad_input("`replay` of a run with a damaged config.toml")
def test_a_damaged_config_is_named(recorded, look, tmp_path):
    folder = tmp_path / "damaged"
    shutil.copytree(recorded, folder)
    (folder / "config.toml").write_text("[train\nsteps = 8\n")
    status, _, errors = look(folder, 8)
    assert status == 65
    assert "config.toml: it is not TOML" in errors


def test_a_run_that_was_killed_before_its_first_checkpoint_is_replayed(recorded, look, tmp_path):
    folder = tmp_path / "killed"
    shutil.copytree(recorded, folder)
    shutil.rmtree(folder / "checkpoints")
    (folder / "summary.json").unlink()
    status, output, _ = look(folder, 2)
    assert status == 0
    assert "from its start" in output
    assert output.endswith("all as logged\n")
