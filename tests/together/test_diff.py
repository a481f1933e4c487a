"""`dist_amp diff` finds where two runs diverge: the step, the metric, the module."""

import json
import re
import shutil
from functools import cache
from pathlib import Path

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
STEPS = 6
WORDS = {
    "task.target": TASK,
    "train.steps": STEPS,
    "train.micro_batch_size": 4,
    "train.global_batch_size": 8,
    "optim.lr": 1e-2,
    "optim.schedule": "constant",
    "metrics.log_every": 1,
    "metrics.fingerprint": 1,
    "precision.use_amp": "false",
    "eval.every": "off",
    "checkpoint.every": 2,
    "checkpoint.keep": 9,
    "checkpoint.async_save": "false",
    "run.device": "cpu",
}


def train_in(folder, **settings):
    """Train in a folder; settings: as keys with __ for the dot. Returns the folder."""
    words = WORDS | {key.replace("__", "."): value for key, value in settings.items()}
    argv = [part for key, value in words.items() for part in (f"--{key}", str(value))]
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


FP16 = {"precision__use_amp": "true", "precision__dtype": "fp16"}
SCALES = [FP16 | {"precision__scaler__init_scale": scale} for scale in (256, 512)]
# By name: the first step whose numbers it changes, what the fingerprints say, and what --deep says
# where it is in a module. Then the settings in place of a fault, and of the other run.
FAULTS = {
    "scaled_twice": (1, "blocks.1.up is", "the gradient of the parameters of blocks.1.up"),
    "flipped_bit": (AT + 1, "in step 3 or", "the first other parameters are in blocks.1.down"),
    "attention_order": (1, "", "the forward of blocks.1.mix.attend, aten.bmm"),
    "backward_scaled": (1, "blocks.1.mix.out is", "the backward of blocks.1, in AddBackward0"),
    "dropped_sample": (AT + 1, "", ""),
    "lost_momentum": (AT + 2, "", ""),
    "eps": (2, "", "", {"optim__eps": 1e-6}),
    "loss_scale": (1, "", "", *SCALES),
}
QUICK = ("scaled_twice", "flipped_bit", "attention_order")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_a_planted_fault_is_found_in_its_step_and_its_module(name, trained, diff_of):
    step, because, deep, *settings = FAULTS[name]
    faulty, healthy = [*settings, {}][:2] if settings else [{"task__args__fault": name}, {}]
    status, output, _ = diff_of(trained(**healthy), trained(**faulty), "--json", "--deep")
    assert status == 1
    report = json.loads(output)
    found = min(report[part].get("step", 99) for part in ("metrics", "fingerprints"))
    assert found == step
    assert because in report["fingerprints"].get("because", "")
    assert deep in report["deep"]
    assert re.search(rf"step {step}:|the update of step {step - 1}:", report["deep"]) or not deep


def test_equal_runs_one_of_them_resumed_are_equal_with_status_0(trained, tmp_path, diff_of):
    for steps in (4, STEPS):
        resumed = train_in(tmp_path / "resumed", checkpoint__every=3, train__steps=steps)
    status, text, _ = diff_of(trained(), resumed, "--deep")
    assert status == 0, text
    assert "checkpoint.every  2  3" in text
    assert "run.dir" not in text
    assert "compared bit by bit: 6 logged steps\nmetrics are equal up to step 6\n" in text
    assert "fingerprints are equal up to step 6\n" in text
    assert "not replayed: nothing differs through step 6" in text


def test_the_report_names_settings_step_metrics_and_module(trained, diff_of):
    runs = [str(trained()), str(trained(task__args__fault="scaled_twice"))]
    _, text, _ = diff_of(*runs)
    lines = text.splitlines()
    assert "  task.args.fault     scaled_twice" in lines
    assert "metrics diverge at step 1" in lines
    assert "\n  train/grad_norm: 0." in text
    said = "parameters are equal; blocks.1.up is the module nearest to the output"
    assert lines[-3].endswith(said)
    assert lines[-2] == "  parameters differ in 0 of 17 modules"
    assert lines[-1] == "  gradients differ in 1 of 17 modules: blocks.1.up"
    report = json.loads(diff_of(*runs, "--json")[1])
    assert report["runs"] == runs
    assert report["settings"] == {"task.args.fault": ["", "scaled_twice"]}
    assert report["data"][0] == report["data"][1] != ""
    assert diff.relative_difference(1.0, 2.0) == diff.relative_difference(-4.0, -2.0) == 0.5


def test_a_damaged_checkpoint_gives_way_to_an_older_one(trained, copied):
    (copied / "checkpoints/step_00000006/manifest.json").write_text("{")
    data = report_of(trained(), copied)["data"]
    assert data[0] == data[1] != ""


def test_other_layouts_are_judged_within_rounding(trained):
    """Whole batches of 8 and two micro-batches of 4 round other sums."""
    in_one = {"task__target": TINY, "train__micro_batch_size": 8}
    report = report_of(trained(task__target=TINY), trained(**in_one))
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not report["fingerprints"]
    assert "metrics are within 0.001 up to step 6" in diff.text_of(report)
    report = report_of(trained(task__target=TINY), trained(**in_one, optim__eps=1.0))
    assert diff.has_fault(report), "its steps draw no random numbers"
    assert "no fault" not in diff.text_of(report)
    full, half = {"precision.use_amp": False}, {"precision.use_amp": True}
    for dtype in ("bf16", "fp16", "fp8"):
        assert diff.rounding([full, half | {"precision.dtype": dtype}]) > diff.rounding([full])


def test_random_numbers_of_other_layouts_are_no_fault(trained, diff_of):
    """The masks of dropout are others in micro-batches of another size."""
    status, output, _ = diff_of(trained(), trained(train__micro_batch_size=8), "--deep")
    assert status == 0
    assert "metrics diverge at step 1\n" in output
    assert "no fault is reported: the steps draw random numbers" in output
    assert "both replayed: step 1: other samples" in output
    report = report_of(trained(), trained(train__micro_batch_size=8, optim__lr=0.1))
    assert diff.has_fault(report)
    assert report["metrics"]["metrics"].keys() == {"train/lr"}


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(tmp_path):
    """Two layouts, which become bit-exact after the first four steps."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, size in zip(folders, (4, 8), strict=True):
        train_in(folder, task__target=TINY, train__micro_batch_size=size, train__steps=4)
        train_in(folder, task__target=TINY, parallel__bit_exact="true")
    report = report_of(*folders)
    assert report["tolerance"] == diff.TOLERANCE["fp32"]
    assert not diff.has_fault(report)
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


def test_intervals_of_other_lengths_are_left_out_and_without_hashes_the_logged_step_is_found(
    trained,
):
    words = {"metrics__log_every": 2, "metrics__fingerprint": 3}
    report = report_of(trained(), trained(**words))
    assert not diff.has_fault(report)
    assert (report["metrics"]["steps"], report["fingerprints"]["equal_until"]) == (3, STEPS)
    words["metrics__fingerprint"] = "off"
    report = report_of(trained(**words), trained(**words, task__args__fault="dropped_sample"))
    assert report["fingerprints"] == {}
    assert (report["metrics"]["step"], report["metrics"]["equal_until"]) == (AT + 1, AT - 1)


def test_steps_that_are_taken_again_forget_the_settings_of_before(trained, copied):
    for step in (6, 4):
        for later in (8, step + 2):
            shutil.rmtree(copied / f"checkpoints/step_0000000{later}", ignore_errors=True)
        words = {"run__allow_config_change": "true", "train__steps": 8}
        train_in(copied, **words, optim__lr=1.0 / step)
    kept = [path.name for path in copied.glob("config_until*")]
    assert kept == ["config_until_step_00000004.toml"]
    assert Record(copied).settings_at(4)["optim.lr"] == 1e-2
    assert Record(copied).settings_at(5)["optim.lr"] == 0.25
    with pytest.raises(DataError, match="replays the steps 4 to 6 with one config"):
        diff.compare_inside([copied, copied], 3, 6)


def test_runs_of_other_models_are_compared_as_far_as_they_go(trained, diff_of):
    status, text, _ = diff_of(trained(), trained(task__target=TINY))
    assert status == 1
    assert "task.target" in text
    assert "the models have no module in common" in text
    assert "metrics diverge at step 1" in text


def lines_become(change):
    def write(folder):
        lines = (folder / "metrics.jsonl").read_text().splitlines()
        (folder / "metrics.jsonl").write_text("\n".join(change(lines)))

    return write


def of_later_steps(lines):
    return [json.dumps(json.loads(line) | {"step": 100 + i}) for i, line in enumerate(lines)]


@pytest.mark.bad_input("dist_amp diff of what is no run, has logged nothing, or has no common step")
@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (shutil.rmtree, 65, "{} is not the folder of a run: config.toml"),
        (lines_become(lambda lines: ['{"step": 1, "trai']), 65, "{}/metrics.jsonl has no complete"),
        (lines_become(of_later_steps), 65, "no logged step in common"),
        (None, 64, "are the same folder; give two runs"),
    ],
)
def test_what_cannot_be_compared_is_named(change, status, said, trained, copied, diff_of):
    if change is not None:
        change(copied)
    found, output, errors = diff_of(trained() if change else copied / "../copy", copied)
    assert (found, output) == (status, ""), output + errors
    assert said.format(copied) in errors
    assert errors.count("\n") == 1
