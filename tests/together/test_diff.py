"""`dist_amp diff` finds where two runs diverge: the step, the metric, the module."""

import json
import re
import shutil
from functools import cache, partial
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
WORDS = (
    f"--task.target {TASK} --train.steps {STEPS} --train.micro_batch_size 4 --eval.every off "
    "--train.global_batch_size 8 --optim.lr 0.01 --optim.schedule constant --metrics.log_every 1 "
    "--metrics.fingerprint 1 --use_amp false --checkpoint.every 2 --checkpoint.keep 9 "
    "--checkpoint.async_save false --run.device cpu"
)
LARGER = "--train.micro_batch_size 8"
OF_TINY = f"--task.target {TINY}"


def train_in(folder, words=""):
    """Train in a folder, with these words besides; returns the folder."""
    assert train(f"{WORDS} --run.dir {folder} {words}".split()) == 0
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """trained(words): the folder of a run with them, which is trained once."""
    return cache(lambda words="": train_in(tmp_path_factory.mktemp("runs") / "run", words))


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


def edit_metrics(change, folder):
    path = folder / "metrics.jsonl"
    lines = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(line | change(line)) + "\n" for line in lines))


def cut_off(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "trai')


# By name: the first step whose numbers it changes, what the fingerprints say, and what --deep says
# where it is in a module.
FAULTS = {
    "scaled_twice": (1, "blocks.1.up is", "the gradient of the parameters of blocks.1.up"),
    "flipped_bit": (AT + 1, "in step 3 or", "the first other parameters are in blocks.1.down"),
    "attention_order": (1, "", "the forward of blocks.1.mix.attend, aten.bmm"),
    "backward_scaled": (1, "blocks.1.mix.out is", "the backward of blocks.1, in AddBackward0"),
    "lost_momentum": (AT + 2, "", ""),
}
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in [*FAULTS][3:]]


@pytest.mark.parametrize("name", [*[*FAULTS][:3], *SLOW])
def test_a_planted_fault_is_found_in_its_step_and_its_module(name, trained, diff_of):
    step, because, deep = FAULTS[name]
    status, text, _ = diff_of(trained(), trained(f"--task.args.fault {name}"), "--deep")
    assert status == 1
    assert min(map(int, re.findall(r"diverge at step (\d+)", text))) == step
    assert because in text
    assert deep in text
    assert re.search(rf"step {step}:|the update of step {step - 1}:", text) or not deep


def without_last_checkpoint(folder):
    shutil.rmtree(folder / "checkpoints/step_00000006")
    return folder


def test_equal_runs_one_of_them_resumed_are_equal_with_status_0(trained, copied, diff_of):
    resumed = train_in(without_last_checkpoint(copied), "--checkpoint.every 3")
    status, text, _ = diff_of(trained(), resumed, "--deep")
    assert status == 0, text
    assert "checkpoint.every  2  3" in text
    assert "run.dir" not in text
    assert "compared bit by bit: 6 logged steps\nmetrics are equal up to step 6\n" in text
    assert "fingerprints are equal up to step 6\n" in text
    assert "not replayed: nothing differs through step 6" in text


def test_the_report_names_settings_step_metrics_and_module(trained, copied, diff_of):
    (copied / "checkpoints/step_00000006/manifest.json").write_text("{")  # an older one is read
    runs = [str(copied), str(trained("--task.args.fault scaled_twice"))]
    _, text, _ = diff_of(*runs)
    lines = text.splitlines()
    assert "  task.args.fault     scaled_twice" in lines
    assert "metrics diverge at step 1" in lines
    assert "\n  train/grad_norm: 0." in text
    said = "parameters are equal; blocks.1.up is the module nearest to the output"
    assert lines[-3].endswith(said)
    assert lines[-2] == "  parameters differ in 0 of 17 modules"
    assert lines[-1] == "  gradients differ in 1 of 17 modules: blocks.1.up"
    assert diff.relative_difference(1.0, 2.0) == diff.relative_difference(-4.0, -2.0) == 0.5
    assert "data: " not in text


def test_other_layouts_are_judged_within_rounding(trained, diff_of, tmp_path):
    """Whole batches of 8 and two micro-batches of 4 round other sums."""
    status, text, _ = diff_of(trained(OF_TINY), trained(f"{OF_TINY} {LARGER}"))
    assert status == 0
    assert "metrics are within 0.001 up to step 6" in text
    assert "fingerprints" not in text.partition("compared as other layouts")[2]
    status, _, _ = diff_of(trained(OF_TINY), trained(f"{OF_TINY} {LARGER} --optim.eps 1.0"))
    assert status == 1
    faster = shutil.copytree(trained(f"{OF_TINY} {LARGER}"), tmp_path / "faster")
    edit_metrics(lambda line: {"train/lr": line["train/lr"] + 1e-9}, faster)
    _, text, _ = diff_of(trained(OF_TINY), faster)
    assert "metrics diverge at step 1\n  train/lr: " in text, "which is not rounded"
    full, half = {"precision.use_amp": False}, {"precision.use_amp": True}
    for dtype in ("bf16", "fp16", "fp8"):
        assert diff.rounding([full, half | {"precision.dtype": dtype}]) > diff.rounding([full])


def test_dropout_of_other_layouts_differs_and_the_report_says_so(trained, diff_of):
    """The masks are others in micro-batches of another size."""
    status, output, _ = diff_of(trained(), trained(LARGER), "--deep")
    assert status == 1
    assert "dropout differs too, unless both are bit-exact: 6 logged steps\n" in output
    assert "both replayed: step 1: other samples" in output


def test_each_step_is_judged_by_the_settings_with_which_it_was_taken(trained, diff_of, tmp_path):
    """Two layouts, which become bit-exact after the first four steps."""
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder, words in zip(folders, (OF_TINY, f"{OF_TINY} {LARGER}"), strict=True):
        shutil.copytree(trained(words), folder)
        train_in(without_last_checkpoint(folder), f"{words} --parallel.bit_exact true")
    status, text, _ = diff_of(*folders)
    assert status == 0
    assert f"metrics are within 0.001 up to step {STEPS}" in text


class ReadsAnotherRow(Rows):
    def __getitem__(self, index):
        is_other = dist.get_rank() == 1 and index % 4 == 1  # a start compares some others
        return super().__getitem__(index + is_other)


class Misreads(Tiny):
    def build_dataset(self, split):
        return ReadsAnotherRow(**super().build_dataset(split).columns)


def train_on_ranks(world, folder, target):
    words = "--train.steps 2 --train.global_batch_size auto"
    train_in(folder, f"--task.target {target} {words}")


def test_the_one_rank_that_reads_other_rows_is_named(tmp_path, diff_of):
    on_ranks(2, train_on_ranks, tmp_path / "a", TINY)
    on_ranks(2, train_on_ranks, tmp_path / "b", f"{__file__}:Misreads")
    status, output, _ = diff_of(tmp_path / "a", tmp_path / "b")
    assert status == 1
    assert "  only the losses of rank 1 differ: look at what it reads first\n" in output


def test_intervals_of_other_lengths_are_left_out_and_without_hashes_the_logged_step_is_found(
    trained, diff_of
):
    every_second = trained("--metrics.log_every 2 --metrics.fingerprint 3")
    status, text, _ = diff_of(trained(), every_second)
    assert status == 0
    assert "bit by bit: 3 logged steps" in text
    assert f"fingerprints are equal up to step {STEPS}" in text
    words = "--metrics.log_every 2 --metrics.fingerprint off --task.args.fault dropped_sample"
    _, text, _ = diff_of(every_second, trained(words))
    assert "fingerprints " not in text
    assert f"metrics diverge at step {AT + 1}, equal up to step {AT - 1}" in text


def test_steps_that_are_taken_again_forget_the_settings_of_before(trained, copied):
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
        diff.compare_inside([copied, copied], 3, 6)


def test_runs_of_other_models_are_compared_as_far_as_they_go(trained, diff_of):
    status, text, _ = diff_of(trained(), trained(OF_TINY))
    assert status == 1
    for said in ("task.target", "the models have no module in common", "diverge at step 1"):
        assert said in text


@pytest.mark.bad_input("dist_amp diff of what is no run, has logged nothing, or has no common step")
@pytest.mark.parametrize(
    ("change", "status", "said"),
    [
        (shutil.rmtree, 65, "{} is not the folder of a run: config.toml"),
        (cut_off, 65, "{} logged no complete line; run"),
        (partial(edit_metrics, lambda line: {"step": line["step"] + 100}), 65, "no logged step in"),
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
