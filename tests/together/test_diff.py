"""`dist_amp diff` names where two runs part: the step, the metric, the module."""

import json
import shutil
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pytest
import torch.distributed as dist
from planted import AT
from ranks import on_ranks
from tiny import Rows, Tiny

from dist_amp.commands import diff
from dist_amp.errors import DataError
from dist_amp.record import Record
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


@pytest.fixture
def copied(trained, tmp_path):
    return shutil.copytree(trained(), tmp_path / "copy")


@pytest.fixture
def diff_of(capsys):
    """diff_of(a, b, ...): (status, output, errors) of the command."""

    def run(*argv):
        capsys.readouterr()
        return diff.main([str(word) for word in argv]), *capsys.readouterr()

    return run


def report_of(a, b):
    return diff.compare(Record(a), Record(b))


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
    "backward_scaled": Fault(
        1, "blocks.1.mix.out", cause="blocks.1.mix.out", deep="of blocks.1, in AddBackward0"
    ),
    "detached": Fault(
        1, "blocks.0.down", cause="blocks.0.down", deep="of blocks.1, in AddBackward0"
    ),
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


QUICK = {"scaled_twice", "flipped_bit"}


def each(names):
    return [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", each(FAULTS))
def test_a_planted_fault_is_found_in_its_step(name, trained):
    fault = FAULTS[name]
    settings = fault.settings or {"task__args__fault": name}
    report = report_of(trained(**fault.reference), trained(**settings))
    parts = (report["metrics"], report["fingerprints"])
    found = min(part["step"] for part in parts if "step" in part)
    cause = report["fingerprints"].get("cause", "")
    print(f"PLANTED {name}: step {found} of {fault.step}, {cause or '-'} of {fault.module or '-'}")
    assert (found, cause) == (fault.step, fault.cause)


@pytest.mark.parametrize("name", each(name for name, fault in FAULTS.items() if fault.module))
def test_deep_names_the_module_of_a_planted_fault(name, trained, diff_of):
    fault = FAULTS[name]
    status, output, _ = diff_of(trained(), trained(task__args__fault=name), "--deep")
    assert status == 1
    [line] = [line for line in output.splitlines() if "both replayed" in line]
    print(f"DEEP {name}: {line}")
    assert f"step {fault.step}" in line or f"the update of step {fault.step - 1}" in line
    assert (fault.deep or fault.module) in line


def test_deep_names_the_operation_of_another_kernel(trained, diff_of):
    other = trained(task__args__fault="attention_order")
    status, output, _ = diff_of(trained(), other, "--deep")
    assert status == 1
    assert "step 1: the forward of blocks.1.mix.attend, aten.bmm" in output


def test_equal_runs_are_equal_and_the_command_says_so_with_status_0(trained, tmp_path, diff_of):
    again = train_in(tmp_path / "again", checkpoint__every=3)
    status, text, _ = diff_of(trained(), again, "--deep")
    assert status == 0, text
    assert "compared bit by bit: 6 logged steps" in text
    assert "metrics are equal up to step 6" in text
    assert "fingerprints are equal up to step 6" in text
    assert "checkpoint.every  2  3" in text
    assert "run.dir" not in text
    assert "not replayed: nothing differs through step 6" in text


def test_the_report_names_settings_step_metrics_and_module(trained, diff_of):
    runs = [str(trained()), str(trained(task__args__fault="scaled_twice"))]
    status, text, _ = diff_of(*runs)
    assert status == 1
    lines = text.splitlines()
    assert "  task.args.fault     scaled_twice" in lines
    assert "metrics part at step 1" in lines
    assert "\n  train/grad_norm: 0." in text
    said = "parameters are equal; blocks.1.up is the module nearest to the output"
    assert lines[-3].endswith(said)
    assert lines[-2] == "  parameters differ in 0 of 18 modules"
    assert lines[-1] == "  gradients differ in 1 of 18 modules: blocks.1.up"
    status, text, _ = diff_of(*runs, "--json")
    assert status == 1
    report = json.loads(text)
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


def test_other_layouts_are_judged_within_rounding(trained):
    """Whole batches of 8 and two micro-batches of 4 round other sums."""
    report = report_of(trained(task__target=TINY), trained(**IN_ONE))
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not report["fingerprints"]
    assert "metrics are within 0.001 up to step 6" in diff.text_of(report)
    report = report_of(trained(task__target=TINY), trained(**IN_ONE, optim__lr=0.1))
    assert diff.parted(report)
    assert "no fault" not in diff.text_of(report)


def test_random_numbers_of_other_layouts_are_no_fault(trained, diff_of):
    """The masks of dropout are others in micro-batches of another size."""
    other = trained(train__micro_batch_size=8)
    report = report_of(trained(), other)
    assert report["metrics"]["step"] == 1
    assert not diff.parted(report)
    assert "no fault is reported: the steps draw random numbers" in diff.text_of(report)
    report = report_of(trained(), trained(train__micro_batch_size=8, optim__lr=0.1))
    assert diff.parted(report)
    assert report["metrics"]["metrics"].keys() == {"train/lr"}
    status, output, _ = diff_of(trained(), other, "--deep")
    assert status == 0
    assert "both replayed: step 1: other samples" in output


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path):
    """Two layouts, which become bit-exact after the first four steps."""
    words = {"optim__schedule": "constant", "task__target": TINY}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, size in zip(folders, (4, 8), strict=True):
        train_in(folder, **words, train__micro_batch_size=size, train__steps=4)
        train_in(folder, **words, parallel__bit_exact="true")
    report = report_of(*folders)
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not diff.parted(report)
    assert report["metrics"]["equal_until"] == STEPS


class ReadsAnotherRow(Rows):
    def __getitem__(self, index):
        is_other = dist.get_rank() == 1 and index % 4 == 1  # a start compares some others
        return super().__getitem__(index + is_other)


class Reads(Tiny):
    def __init__(self, other: bool):
        super().__init__()
        self.other = other

    def build_dataset(self, split):
        rows = super().build_dataset(split)
        return ReadsAnotherRow(**rows.columns) if self.other else rows


def train_on_ranks(world, folder, other):
    words = {"task__target": f"{__file__}:Reads", "task__args__other": other, "train__steps": 2}
    train_in(folder, **words, train__global_batch_size="auto")


def test_the_one_rank_that_reads_other_rows_is_named(tmp_path, diff_of):
    for other in ("false", "true"):
        on_ranks(2, train_on_ranks, tmp_path / other, other)
    status, output, _ = diff_of(tmp_path / "false", tmp_path / "true")
    assert status == 1
    assert "  only the losses of rank 1 differ: look at what it reads first\n" in output


def test_what_a_launcher_sets_is_no_difference_of_environments():
    names = ["RANK", "MASTER_ADDR", "TORCHELASTIC_RUN_ID", "PET_NNODES", "SLURM_JOB_ID"]
    names += ["TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"]
    names += ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "DIST_AMP_LAUNCHER"]
    launched = {f"variables.{name}": "1" for name in names}
    assert diff.differences(launched, {}, diff.NOT_ENVIRONMENT) == {}
    assert diff.differences({"variables.NCCL_ALGO": "ring"}, {}, diff.NOT_ENVIRONMENT)


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


# ---- --deep with other files, settings and models


VERSION = """
from scaled import SCALE
from tiny import Tiny

class Mine(Tiny):
    def loss_sum(self, model, batch):
        return SCALE * super().loss_sum(model, batch)
"""


def version(folder, scale):
    """A task's settings; the file has the same name in each folder."""
    folder.mkdir(exist_ok=True)
    (folder / "versioned.py").write_text(VERSION)
    (folder / "scaled.py").write_text(f"SCALE = {scale}")
    diff.make_room_for(folder / "versioned.py")
    return {"task__target": f"{folder}/versioned.py:Mine", "train__steps": 2}


def test_deep_compares_two_versions_of_one_module(tmp_path, diff_of, monkeypatch):
    monkeypatch.chdir(tmp_path)  # a run's config alone names no file elsewhere
    folders = []
    for name, scale in (("one", 1.0), ("two", 2.0)):
        folders.append(train_in(tmp_path / "runs" / name, **version(tmp_path / name, scale)))
    status, output, errors = diff_of(*folders, "--deep")
    assert status == 1, errors
    assert "both replayed: step 1: the loss of the model" in output
    assert not output.startswith("the task's source file"), "versioned.py is the same"


@pytest.mark.bad_input("`diff --deep` of a run whose task was edited since")
def test_an_edited_task_is_the_first_line_and_the_verdict(tmp_path, diff_of, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = version(tmp_path / "mine", 1.0)
    a = train_in(tmp_path / "a", **words)
    task = tmp_path / "mine/versioned.py"
    task.write_text(VERSION.replace("return SCALE", "return 1.5 * SCALE"))
    for name in ("versioned", "scaled"):
        del sys.modules[name]
    b = train_in(tmp_path / "b", **words)
    status, output, errors = diff_of(a, b, "--deep")
    assert status == 1, errors
    lines = output.splitlines()
    assert lines[0].startswith("the task's source file differs (hashes ")
    assert f"not replayed: {task} was edited since {a} was started; put " in lines[-1]


def test_steps_that_are_taken_again_forget_the_settings_of_before(trained, tmp_path):
    words = {"optim__schedule": "constant", "checkpoint__keep": 9}
    folder = Path(shutil.copytree(trained(**words), tmp_path / "copy"))
    words["run__allow_config_change"] = "true"
    for step in (6, 4):
        for later in (8, step + 2):
            shutil.rmtree(folder / f"checkpoints/step_0000000{later}", ignore_errors=True)
        train_in(folder, **words, optim__lr=1.0 / step, train__steps=8)
    kept = [path.name for path in folder.glob("config_until*")]
    assert kept == ["config_until_step_00000004.toml"]
    assert Record(folder).settings_at(4)["optim.lr"] == 1e-2
    assert Record(folder).settings_at(5)["optim.lr"] == 0.25
    with pytest.raises(DataError, match="replays the steps 4 to 6 with one config"):
        diff.compare_inside([folder, folder], 3, 6)


@pytest.mark.bad_input("dist_amp diff of runs of other tasks and models")
def test_runs_of_other_models_are_compared_as_far_as_they_go(trained, diff_of):
    status, text, _ = diff_of(trained(), trained(task__target=TINY))
    assert status == 1
    assert "task.target" in text
    assert "the models have no module in common" in text
    assert "metrics part at step 1" in text


# ---- bad inputs


def emptied(folder):
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def lines_become(change):
    def write(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join(change(lines)))

    return write


def of_later_steps(lines):
    return [json.dumps(json.loads(line) | {"step": 100 + i}) for i, line in enumerate(lines)]


def config_is_damaged(folder):
    (folder / "config.toml").write_text("[train\n")


NO_LINE = "{}/metrics.jsonl has no complete line; wait for the step"


@pytest.mark.bad_input("dist_amp diff of a folder that is no run, and of one that does not exist")
@pytest.mark.bad_input("dist_amp diff of a run that has logged nothing yet")
@pytest.mark.bad_input("dist_amp diff of a run with a damaged config.toml")
@pytest.mark.bad_input("dist_amp diff of runs that have no logged step in common")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (emptied, "{} is not the folder of a run: config.toml"),
        (shutil.rmtree, "{} is not the folder of a run: config.toml"),
        (lambda folder: (folder / "metrics.jsonl").unlink(), NO_LINE),
        (lines_become(lambda lines: ['{"step": 1, "trai']), NO_LINE),
        (config_is_damaged, "config.toml: it is not TOML"),
        (lines_become(of_later_steps), "no logged step in common"),
    ],
)
def test_what_cannot_be_compared_is_named(change, said, trained, copied, diff_of):
    change(copied)
    status, output, errors = diff_of(trained(), copied)
    assert (status, output) == (DataError.exit_code, ""), output + errors
    assert said.format(copied) in errors
    assert errors.count("\n") == 1


@pytest.mark.bad_input("dist_amp diff of the same folder twice")
def test_the_same_folder_twice_is_rejected(trained, diff_of):
    folder = trained()
    status, _, errors = diff_of(folder, folder / ".." / folder.name)
    assert status == 64
    assert "are the same folder; give two runs" in errors


def test_a_last_line_that_a_kill_has_torn_is_left_out(trained, copied):
    with (copied / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "train/lo')
    assert report_of(trained(), copied)["metrics"]["equal_until"] == STEPS
