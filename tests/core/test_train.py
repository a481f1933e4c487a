"""The main job as users start it: real launches, real signals, real exit statuses."""

import gc
import json
import os
import signal
import time
import tomllib
import weakref
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from test_metrics import scalars
from tiny import Tiny, make_run, variant

from dist_amp.supervise.lifecycle import open_run
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.startup import PHASES
from dist_amp.train import loop, train
from dist_amp.world import World

TINY = ["--task.target", "tiny:Tiny", "--train.micro_batch_size", "2", "--metrics.log_every", "1"]


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def wait_for(condition, what="what is waited for", seconds=600):
    """Wait for what must happen; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


# A rank that waits for one that has left does so for run.timeout_seconds: longer than `launch`
# waits for the job.
TINY_RUN = [*TINY, "--run.timeout_seconds", "3600", "--run.dir", "run"]


class FaultyRank(Tiny):
    """In the third step, once per folder, rank 1 raises, or gets a signal."""

    steps = 0

    def loss_sum(self, model, batch):
        self.steps += model.training
        if os.environ["RANK"] == "1" and self.steps == 3 and not Path("sent").exists():
            Path("sent").touch()
            if "SIGNAL" not in os.environ:
                raise RuntimeError("broken sample")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss_sum(model, batch)


FAULTY = "--task.target test_train:FaultyRank"
NAN = "--task.target tiny:AlwaysNan --train.max_skips_in_a_row 3 --parallel.strategy fsdp"


@pytest.mark.bad_input("run folder unwritable or read-only")
@pytest.mark.parametrize(
    ("ranks", "words", "status", "cause"),
    [
        (2, "--train.stps 4", 64, "unknown key train.stps on the command line; did you mean trai"),
        (1, "--train.global_batch_size 7", 64, "global_batch_size=7 is not a multiple of micro_b"),
        (1, "--task.target tiny:NoSuch", 64, "there is no class NoSuch in tiny"),
        (1, "--task.target tiny:VectorLoss", 65, "not a float32 scalar"),
        (1, "--run.resume nowhere", 65, "run.resume=nowhere does not exist"),
        (1, "--run.dir file/run", 1, "run.dir=file/run can't be written (Not a directory); choose"),
        (2, NAN, 70, "3 steps in a row were not finite"),
        (2, FAULTY, 1, "rank 1: RuntimeError: broken sample (test_train.py, line "),
    ],
)
def test_each_kind_of_failure_has_its_exit_status_and_one_line_of_all_ranks(
    launch, tmp_path, ranks, words, status, cause
):
    (tmp_path / "file").touch()
    done = launch.each(ranks, *TINY_RUN, "--train.steps", "5", *words.split())
    assert [rank.returncode for rank in done] == [status] * ranks
    errors = "".join(rank.stderr for rank in done)
    assert ("rank 1: Traceback" in errors) == ("Traceback" in errors) == (words == FAULTY)
    if words != FAULTY:
        assert [cause in line for line in errors.splitlines()].count(True) == 1
        assert any(cause in rank.stderr.rstrip().rpartition("\n")[2] for rank in done)
    if (tmp_path / "run").exists():  # a config that can't be read names no folder
        summary = summary_of(tmp_path / "run")
        assert (summary["stopped_by"], summary["exit_code"]) == ("failed", status)
        assert cause in summary["cause"]


def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on(launch, tmp_path):
    words = [*TINY_RUN, *FAULTY.split(), "--train.steps", "24"]
    words += ["--data.workers", "0", "--eval.every", "off", "--checkpoint.every", "1000"]
    ends = {}
    for attempt, folder in enumerate(("run", "run", "through")):
        ranks = launch.each(2, *words, "--run.dir", folder, SIGNAL="SIGTERM")
        status = 0 if attempt else 75
        assert [rank.returncode for rank in ranks] == [status] * 2, ranks[0].stderr[-2000:]
        ends[attempt] = summary_of(tmp_path / folder)
        if not attempt:
            said = "; to continue, start the same job again with --run.dir run\n"
            assert said in ranks[0].stdout
            (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert (ends[0]["stopped_by"], ends[0]["exit_code"]) == ("preempted", 75)
    assert 3 <= ends[0]["steps"] == ends[1]["resumed_from_step"] < 24
    assert checkpoint.name == f"step_{ends[0]['steps']:08d}"
    assert losses(tmp_path / "run") == losses(tmp_path / "through")


def main_with_a_group(world, folder):
    from dist_amp.train import main

    words = ["--train.steps", "2", "--train.global_batch_size", "4", "--run.dir", folder]
    return main([*TINY, *words]), dist.is_initialized()


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The folder of a run of two steps on two ranks, which had a process group before main()."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert on_ranks(2, main_with_a_group, str(folder)) == [(0, True)] * 2, "it leaves the group"
    return folder


def test_main_uses_a_process_group_that_is_there_and_every_rank_logs_its_start_once(finished):
    assert summary_of(finished)["world_size"] == 2
    for rank in range(2):
        started = {tag: at for tag, at in scalars(finished, rank).items() if "start/" in tag}
        assert started.keys() == {f"start/{phase}_seconds" for phase in PHASES}
        assert [step for step, _ in started["start/imports_seconds"]] == [1]


@pytest.mark.bad_input("a run.dir that is a checkpoint")
def test_a_checkpoint_with_no_steps_left_is_finished_elsewhere_too_and_is_no_runs_folder(
    launch, finished
):
    def start(steps, folder="other"):
        words = ["--train.global_batch_size", "4", "--run.resume", finished, "--run.dir", folder]
        return launch(0, *TINY, *words, "--train.steps", steps)

    checkpoint = finished / "checkpoints/step_00000002"
    assert "other is finished: it took 2 of train.steps=2" in start(2).stdout
    refused = start(4, checkpoint)
    assert refused.returncode == 64
    assert f"run.dir={checkpoint} is a checkpoint; name a run's folder, and g" in refused.stderr
    assert f"run    other, resumed from step 2 ({checkpoint})" in start(4).stdout
    assert "run    other, resumed from step 4\n" in start(6).stdout


@pytest.mark.bad_input("a run whose last steps were all skipped")
@pytest.mark.bad_input("a run in which every step was skipped")
@pytest.mark.parametrize(
    ("task", "steps", "status", "said"),
    [
        ("LaterNan", 3, 70, "error: the last 2 of 3 steps were skipped: their gradients were inf"),
        ("AlwaysNan", 1, 70, "error: the last 1 of 1 steps were skipped: their gradients"),
        ("LaterNan", 2, 0, "done: 2 steps (1 applied, 1 skipped)"),  # as of a growing loss scale
    ],
)
def test_a_run_whose_last_steps_were_skipped_is_saved_and_not_done_also_when_started_again(
    launch, tmp_path, task, steps, status, said
):
    words = ["--task.target", f"tiny:{task}", "--train.steps", steps, "--run.dir", "run"]
    for attempt in range(2 if steps == 3 else 1):
        done = launch(0, *TINY, *words)
        assert done.returncode == status, attempt
        assert said in done.stderr + done.stdout
        assert ("done:" in done.stdout) == (status == 0)
        assert "skipped), loss nan" not in done.stdout
        assert (tmp_path / f"run/checkpoints/step_0000000{steps}").is_dir()
        assert summary_of(tmp_path / "run")["exit_code"] == status


def evaluated_samples(world, folder, steps, micro_batches):
    """What an evaluation reads, after the main job has bounded it."""
    words = ["--train.micro_batch_size", 2, "--train.accumulation_steps", micro_batches]
    words += ["--eval.every", 50, "--train.steps", steps, "--run.dir", folder]
    samples = {"train": 6000, "validation": 5000}
    task = variant(build_dataset=lambda split: Tiny(samples=samples[split]).build_dataset(split))
    run = make_run(world, task, *words)
    open_run(run)
    settings = tomllib.loads((folder / "config.toml").read_text())
    assert settings["eval"]["batches"] == run.config.eval.batches
    seen = []
    for _ in run.validation.one_epoch(run.config.eval.batches):
        seen += [index for _, indices in run.validation.last_step for index in indices]
    return seen


def test_by_default_an_evaluation_takes_a_part_of_the_samples_spread_and_the_same_on_all_ranks(
    tmp_path, capsys
):
    assert len(evaluated_samples(World(), tmp_path / "short", 2, 1)) == 16 * 2
    alone = sorted(evaluated_samples(World(), tmp_path / "long", 400, 4))
    said = "eval   uses 120 of the 5,000 held-out samples, the same each time, and takes about 10%"
    assert capsys.readouterr().out.count(said) == 1
    assert len(set(alone)) == len(alone) == round(0.1 * 3 * 50 * 4 * 2)
    assert min(alone) < 500
    assert max(alone) > 4500
    of_ranks = on_ranks(2, evaluated_samples, tmp_path / "ranks", 400, 2)
    assert sorted(of_ranks[0] + of_ranks[1]) == alone


# --- what is due after a step


class Noted:
    """An observer that notes what happens in which order, and asks for a stop in step `at`."""

    def __init__(self, run, stop, asks, at):
        self.run, self.stop, self.asks, self.at = run, stop, asks, at
        self.noted = []

    def ask(self, when):
        if self.run.step == self.at and self.asks == f"a signal in {when}":
            self.stop.requested_by = "SIGTERM"
        elif self.run.step == self.at and self.asks == "the task":
            self.stop.end("the task's on_step")

    def note(self, what):
        self.noted.append(f"{what} {self.run.step}")
        return {}

    def after_step(self, report, micro_batches):
        self.ask("a step")

    def during_evaluation(self, done, steps):
        self.ask("an evaluation")

    def after_evaluation(self):
        self.note("evaluate")

    def on_log(self, row):
        self.note("log")

    def state_dict(self):
        return self.note("save")


@pytest.mark.parametrize(
    ("asks", "at", "expected"),
    [
        ("", 0, "log 4, evaluate 4, save 4, log 6, evaluate 6, save 6"),
        ("a signal in a step", 3, "log 4, save 4"),
        ("a signal in a step", 4, "log 4, save 4"),
        ("a signal in an evaluation", 4, "log 4, save 4"),
        ("the task", 2, "log 3, save 3"),
        ("the task", 5, "log 4, evaluate 4, save 4, log 6, save 6"),
    ],
)
def test_what_is_due_after_a_step_happens_once_and_in_one_order(tmp_path, asks, at, expected):
    words = ["--train.steps", 6, "--metrics.log_every", 4, "--eval.every", 4]
    run = make_run(World(), Tiny(), *words, "--checkpoint.every", 4, "--run.dir", tmp_path)
    stop = AgreedStop(World())
    stop.every_poll = True
    observer = Noted(run, stop, asks, at)
    run.observers.add(observer)
    loop(run, stop)
    run.close()
    assert ", ".join(observer.noted) == expected


def test_garbage_from_before_a_training_is_not_kept_through_it(tmp_path):
    garbage = torch.nn.Module()
    garbage.itself = [garbage]
    there, seen = weakref.ref(garbage), []

    def loss_sum(model, batch):
        seen.append(there())
        return Tiny().loss_sum(model, batch)

    task = variant(samples=8, loss_sum=loss_sum)
    run = make_run(World(), task, "--train.steps", 1, "--run.dir", tmp_path)
    del garbage
    gc.disable()
    try:
        train(run, AgreedStop(World()))
    finally:
        gc.enable()
    assert {*seen} == {None}


# Without the barrier before destroy_process_group, eight of 24 such runs were aborted as they
# exited.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_two_rank_fsdp_run_exits_with_0_every_time(launch, part):
    words = [*TINY, "--train.steps", "2", "--parallel.strategy", "fsdp"]
    words += ["--checkpoint.every", "off"]
    assert [launch(2, *words, "--run.dir", f"run{n}").returncode for n in range(5)] == [0] * 5
