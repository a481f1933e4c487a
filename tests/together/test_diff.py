"""`dist_amp diff` names where two runs part: the step, the metric, the module."""

import json
import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
from planted import AT

from dist_amp.commands import diff
from dist_amp.errors import ConfigError, DataError
from dist_amp.train import main as train

TASK = str(Path(__file__).parent / "planted.py") + ":Planted"
TINY = str(Path(__file__).parents[1] / "tiny.py") + ":Tiny"
IN_ONE = {"task__target": TINY, "train__micro_batch_size": 8}  # in one micro-batch, not in two
STEPS = 6
WORDS = {
    "task.target": TASK,
    "train.steps": STEPS,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
    "optim.lr": 1e-2,
    "metrics.log_every": 1,
    "metrics.fingerprint": 1,
    "precision.use_amp": "false",
    "eval.every": "off",
    "checkpoint.every": 2,
    "checkpoint.async_save": "false",
    "run.device": "cpu",
}


def train_in(folder, **settings):
    """Train in a folder; settings: as keys with __ for the dot. Returns the folder."""
    words = WORDS | {key.replace("__", "."): value for key, value in settings.items()}
    argv = [part for key, value in words.items() for part in (f"--{key}", *str(value).split())]
    assert train([*argv, "--run.dir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs with these settings, each trained once."""

    @cache
    def folder(**settings):
        return train_in(tmp_path_factory.mktemp("runs") / "run", **settings)

    return folder


def report_of(a, b):
    return diff.compare(diff.RunFiles(a), diff.RunFiles(b))


class Fault(NamedTuple):
    step: int  # the first whose numbers it changes
    module: str = ""  # where it is, if in a module
    settings: Mapping[str, object] = MappingProxyType({})
    reference: Mapping[str, object] = MappingProxyType({})
    cause: str = ""  # what the fingerprints say, where they can tell
    deep: str = ""  # what --deep says in place of `module`: the tensor that the fault is next to


FAULTS = {
    "initial_weights": Fault(1, "blocks.1.up", cause="blocks.1.up"),
    "scaled_twice": Fault(1, "blocks.1.up", cause="blocks.1.up"),
    "backward_scaled": Fault(1, "blocks.1.mix.out", cause="blocks.1.mix.out", deep="blocks.1.gain"),
    "detached": Fault(1, "blocks.0.down", cause="blocks.0.down", deep="of blocks.0"),
    "frozen": Fault(1, "blocks.1.up", cause="blocks.1.up"),
    "flipped_bit": Fault(AT + 1, "blocks.1.down", cause="blocks.1.down"),
    "flipped_gradient": Fault(AT + 1, "blocks.1.mix.out", cause="blocks.1.mix.out"),
    "kernel": Fault(1, "blocks.1.act"),
    "attention_order": Fault(1, "blocks.1.mix.attend"),
    "mask": Fault(1, "blocks.1.mix.attend"),
    "rounding": Fault(1, "blocks.1.up"),
    "dropout_off": Fault(1, "blocks.1.drop"),
    "dropout_left_off": Fault(AT + 1, "blocks.0.gain"),
    "stale_buffer": Fault(AT + 1, "blocks.1.gain"),
    "label_shift": Fault(1),
    "micro_batches": Fault(1),
    "dropped_sample": Fault(AT + 1),
    "swapped": Fault(1),
    "data": Fault(1),
    "local_weight": Fault(1),
    "lost_momentum": Fault(AT + 2),
    "decayed_biases": Fault(2),
    "local_norm": Fault(2, reference={"task__args__fault": "global_norm"}),
    "schedule": Fault(1, reference={"task__args__fault": "no_schedule"}),
    "seed": Fault(1, settings={"run__seed": 1}),
    "eps": Fault(2, settings={"optim__eps": 1e-6}),
    "betas": Fault(2, settings={"optim__betas": "0.9 0.99"}),
    "clip": Fault(1, settings={"train__max_grad_norm": 0.5}),
    "loss_scale": Fault(
        1,
        settings={"precision__use_amp": "true", "precision__scaler__init_scale": 256}
        | {"precision__dtype": "fp16"},
        reference={"precision__use_amp": "true", "precision__scaler__init_scale": 512}
        | {"precision__dtype": "fp16"},
    ),
}


QUICK = {"scaled_twice", "flipped_bit", "kernel", "eps"}
EACH = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in FAULTS]


@pytest.mark.parametrize("name", EACH)
def test_a_planted_fault_is_found_in_its_step(name, trained):
    fault = FAULTS[name]
    settings = fault.settings or {"task__args__fault": name}
    report = report_of(trained(**fault.reference), trained(**settings))
    parts = (report["metrics"], report["fingerprints"])
    found = min(part["step"] for part in parts if "step" in part)
    cause = report["fingerprints"].get("cause", "")
    print(f"PLANTED {name}: step {found} of {fault.step}, {cause or '-'} of {fault.module or '-'}")
    assert found == fault.step
    assert cause == fault.cause


OF_MODULES = [
    pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow)
    for name, fault in FAULTS.items()
    if fault.module
]


@pytest.mark.parametrize("name", OF_MODULES)
def test_deep_names_the_module_of_a_planted_fault(name, trained, capsys):
    fault = FAULTS[name]
    folders = [str(trained()), str(trained(task__args__fault=name))]
    capsys.readouterr()
    assert diff.main([*folders, "--deep"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "both replayed" in line]
    print(f"DEEP {name}: {line}")
    assert f"step {fault.step}" in line or f"the update of step {fault.step - 1}" in line
    assert (fault.deep or fault.module) in line


def test_deep_names_the_operation_of_another_kernel(trained, capsys):
    folders = [str(trained()), str(trained(task__args__fault="attention_order"))]
    assert diff.main([*folders, "--deep"]) == 1
    assert "step 1: the forward of blocks.1.mix.attend, aten.bmm" in capsys.readouterr().out


def test_deep_of_equal_runs_says_that_they_are_equal(trained, tmp_path, capsys):
    copy = shutil.copytree(trained(), tmp_path / "copy")
    capsys.readouterr()
    assert diff.main([str(trained()), str(copy), "--deep"]) == 0
    assert "not replayed: nothing differs through step 6" in capsys.readouterr().out


def test_equal_runs_are_equal_and_the_command_says_so_with_status_0(trained, tmp_path, capsys):
    again = train_in(tmp_path / "again", checkpoint__every=3)
    capsys.readouterr()
    assert diff.main([str(trained()), str(again)]) == 0
    text = capsys.readouterr().out
    assert "compared bit by bit: 6 logged steps" in text
    assert "metrics are equal up to step 6" in text
    assert "fingerprints are equal up to step 6" in text
    assert "checkpoint.every  2  3" in text
    assert "run.dir" not in text


def test_the_report_names_settings_step_metrics_and_module(trained, capsys):
    other = trained(task__args__fault="scaled_twice")
    capsys.readouterr()
    assert diff.main([str(trained()), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "  task.args.fault     scaled_twice" in lines
    assert "metrics part at step 1" in lines
    assert any(line.startswith("  train/grad_norm: 0.") for line in lines)
    assert lines[-3].endswith(
        "parameters are equal; blocks.1.up is the module nearest to the output"
    )
    assert lines[-2] == "  parameters differ in 0 of 18 modules"
    assert lines[-1] == "  gradients differ in 1 of 18 modules: blocks.1.up"


def test_json_has_the_whole_report(trained, capsys):
    runs = [str(trained()), str(trained(task__args__fault="scaled_twice"))]
    capsys.readouterr()
    assert diff.main([*runs, "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs"] == runs
    assert report["settings"] == {"task.args.fault": ["", "scaled_twice"]}
    assert report["fingerprints"]["cause"] == "blocks.1.up"
    assert report["data"][0] == report["data"][1] != ""


def test_a_resumed_run_is_equal_to_an_undisturbed_one(trained, tmp_path):
    resumed = tmp_path / "resumed"
    train_in(resumed, optim__schedule="constant", train__steps=4)
    train_in(resumed, optim__schedule="constant")
    report = report_of(trained(optim__schedule="constant"), resumed)
    assert not diff.parted(report)
    assert report["metrics"]["equal_until"] == report["fingerprints"]["equal_until"] == STEPS


def test_other_layouts_are_compared_within_rounding(trained):
    """Whole batches of 8 and two micro-batches of 4 round other sums."""
    report = report_of(trained(task__target=TINY), trained(**IN_ONE))
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not report["fingerprints"]
    assert "metrics are within 0.001 up to step 6" in diff.text_of(report)


def test_random_numbers_of_other_ranks_are_no_fault(trained, capsys):
    """The masks of dropout are others in micro-batches of another size."""
    report = report_of(trained(), trained(train__micro_batch_size=8))
    assert report["metrics"]["step"] == 1
    assert not diff.parted(report)
    assert "no fault is reported: the steps draw random numbers" in diff.text_of(report)
    other_rate = trained(train__micro_batch_size=8, optim__lr=0.1)
    report = report_of(trained(), other_rate)
    assert diff.parted(report)
    assert report["metrics"]["metrics"].keys() == {"train/lr"}
    folders = [str(trained()), str(trained(train__micro_batch_size=8))]
    assert diff.main([*folders, "--deep"]) == 0
    assert "both replayed: step 1: other samples" in capsys.readouterr().out


def test_another_layout_without_random_numbers_is_judged(trained):
    report = report_of(trained(task__target=TINY), trained(**IN_ONE, optim__lr=0.1))
    assert diff.parted(report)
    assert "no fault" not in diff.text_of(report)


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path):
    """Two layouts, which become bit-exact after the first four steps."""
    words = {"optim__schedule": "constant", "task__target": TINY}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, size in zip(folders, (4, 8), strict=True):
        train_in(folder, **words, train__micro_batch_size=size, train__steps=4)
        train_in(folder, **words, parallel__bit_exact="true")
    assert (folders[0] / "config_until_step_00000004.toml").is_file()
    report = report_of(*folders)
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not diff.parted(report)
    assert report["metrics"]["equal_until"] == STEPS


READS_ANOTHER_ROW = """import os
from tiny import Rows, Tiny

class Other(Rows):
    def __getitem__(self, index):
        is_other = os.environ["RANK"] == "1" and index % 4 == 1  # a start compares some others
        return super().__getitem__(index + is_other)

class Reads(Tiny):
    def __init__(self, other: bool):
        super().__init__()
        self.other = other

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        return Other(**rows.columns) if self.other else rows
"""


def test_the_one_rank_that_reads_other_rows_is_named(launch, tmp_path, capsys):
    (tmp_path / "reads.py").write_text(READS_ANOTHER_ROW)
    words = ["--task.target", "reads.py:Reads", "--metrics.log_every", "1", "--train.steps", "2"]
    for other in ("false", "true"):
        done = launch.each(2, *words, "--task.args.other", other, "--run.dir", other)
        assert [rank.returncode for rank in done] == [0, 0], done[0].stderr
    assert diff.main([str(tmp_path / "false"), str(tmp_path / "true")]) == 1
    said = "  only the losses of rank 1 differ: look at what it reads first\n"
    assert said in capsys.readouterr().out


def test_what_a_launcher_sets_is_no_difference_of_environments():
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK"]
    names += ["TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "ROLE_RANK", "PET_NNODES"]
    names += ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    names += ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "SLURM_JOB_ID", "DIST_AMP_LAUNCHER"]
    launched = {f"variables.{name}": "1" for name in names}
    assert diff.differences(launched, {}, diff.NOT_ENVIRONMENT) == {}
    assert diff.differences({"variables.NCCL_ALGO": "ring"}, {}, diff.NOT_ENVIRONMENT)


# --- wrong inputs


def error_of(argv, capsys):
    """(exit status, the one line) of a command."""
    capsys.readouterr()
    status = diff.main([str(word) for word in argv])
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return status, captured.err


@pytest.mark.bad_input("dist_amp diff of a folder that is no run, and of one that does not exist")
@pytest.mark.parametrize("name", ["empty", "missing"])
def test_a_folder_that_is_no_run_is_named(name, trained, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    status, line = error_of([trained(), tmp_path / name], capsys)
    assert status == DataError.exit_code
    assert f"{tmp_path / name} is not the folder of a run" in line
    assert "config.toml" in line


@pytest.mark.bad_input("dist_amp diff of the same folder twice")
def test_the_same_folder_twice_is_rejected(trained, capsys):
    folder = trained()
    status, line = error_of([folder, folder / ".." / folder.name], capsys)
    assert status == ConfigError.exit_code
    assert "are the same folder; give two runs" in line


@pytest.mark.bad_input("dist_amp diff of a run that has logged nothing yet")
@pytest.mark.parametrize("content", ["", '{"step": 1, "trai', None])
def test_a_run_without_a_logged_step_is_named(content, trained, tmp_path, capsys):
    copy = Path(shutil.copytree(trained(), tmp_path / "copy"))
    (copy / "metrics.jsonl").unlink()
    if content is not None:
        (copy / "metrics.jsonl").write_text(content)
    status, line = error_of([trained(), copy], capsys)
    assert status == DataError.exit_code
    assert f"{copy}/metrics.jsonl has no complete line; wait for the step" in line


@pytest.mark.bad_input("dist_amp diff of a run with a damaged line in metrics.jsonl")
@pytest.mark.parametrize("text", ["5", "[]", "{}", '{"step": 1, "trai'])
def test_a_damaged_line_is_named_by_its_number(text, trained, tmp_path, capsys):
    copy = Path(shutil.copytree(trained(), tmp_path / "copy"))
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    (copy / "metrics.jsonl").write_text("\n".join([*lines[:2], text, *lines[2:]]) + "\n")
    status, line = error_of([trained(), copy], capsys)
    assert status == DataError.exit_code
    assert f"{copy}/metrics.jsonl, line 3: not a JSON object with a step; remove it" in line


def test_a_last_line_that_a_kill_has_torn_is_left_out(trained, tmp_path):
    copy = Path(shutil.copytree(trained(), tmp_path / "copy"))
    with (copy / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    assert report_of(trained(), copy)["metrics"]["equal_until"] == STEPS


@pytest.mark.bad_input("dist_amp diff of a run with a damaged config.toml")
def test_a_damaged_config_is_named(trained, tmp_path, capsys):
    copy = Path(shutil.copytree(trained(), tmp_path / "copy"))
    (copy / "config.toml").write_text("[train\n")
    status, line = error_of([trained(), copy], capsys)
    assert status == DataError.exit_code
    assert "config.toml: it is not TOML" in line


@pytest.mark.bad_input("dist_amp diff of runs that have no logged step in common")
def test_runs_without_a_common_logged_step_are_rejected(trained, tmp_path, capsys):
    copy = Path(shutil.copytree(trained(), tmp_path / "copy"))
    lines = (copy / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    text = "".join(json.dumps({**row, "step": row["step"] + 100}) + "\n" for row in rows)
    (copy / "metrics.jsonl").write_text(text)
    status, line = error_of([trained(), copy], capsys)
    assert status == DataError.exit_code
    assert "no logged step in common" in line
    assert "logged 1 to 6" in line
    assert "logged 101 to 106" in line


@pytest.mark.bad_input("dist_amp diff of runs of other tasks and models")
def test_runs_of_other_models_are_compared_as_far_as_they_go(trained, tmp_path, capsys):
    other = train_in(tmp_path / "tiny", task__target=TINY)
    capsys.readouterr()
    assert diff.main([str(trained()), str(other)]) == 1
    text = capsys.readouterr().out
    assert "task.target" in text
    assert "the models have no module in common" in text
    assert "metrics part at step 1" in text


def test_a_log_interval_of_another_length_is_left_out(trained):
    report = report_of(trained(), trained(metrics__log_every=2, metrics__fingerprint=3))
    assert not diff.parted(report)
    assert report["metrics"]["steps"] == 3
    assert report["fingerprints"]["equal_until"] == STEPS


def test_without_fingerprints_the_first_logged_step_is_found(trained):
    words = {"metrics__fingerprint": "off", "metrics__log_every": 2}
    report = report_of(trained(**words), trained(**words, task__args__fault="dropout_left_off"))
    assert report["fingerprints"] == {}
    assert report["metrics"]["step"] == AT + 1
    assert report["metrics"]["equal_until"] == AT - 1
