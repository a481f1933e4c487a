"""The main job as users start it: real launches, real signals, real exit statuses."""

import gc
import json
import os
import signal
import time
import tomllib
import weakref
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from chaos import children, is_there
from forked import Launch
from ranks import on_ranks
from tiny import Tiny, make_run

from dist_amp.supervise.lifecycle import bound_evaluation
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import train
from dist_amp.world import World

TINY = ["--task.target", "tiny:Tiny", "--train.micro_batch_size", "2", "--metrics.log_every", "1"]


def summary_of(folder):
    return json.loads((Path(folder) / "summary.json").read_text())


def losses(folder):
    lines = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["train/loss"] for line in lines if "train/loss" in line}


def wait_for(condition, what, seconds=300):
    """Wait for what must happen; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen within {seconds} s"
        time.sleep(0.05)


CONFIG_ERROR = "error: unknown key train.stps on the command line; did you mean train.steps?"


def test_all_ranks_together_report_a_config_error_once(launch):
    done = launch.each(2, *TINY, "--train.stps", "4")
    assert [rank.returncode for rank in done] == [64, 64]
    assert "".join(rank.stderr for rank in done) == f"{CONFIG_ERROR}\n"


@pytest.mark.bad_input("run folder unwritable or read-only")
@pytest.mark.parametrize(
    ("words", "status", "cause"),
    [
        ("--train.global_batch_size 7", 64, "global_batch_size=7 is not a multiple of micro_b"),
        ("--task.target tiny:NoSuch", 64, "there is no class NoSuch in tiny"),
        ("--task.target tiny:EmptyDataset", 65, "the training dataset is empty"),
        ("--task.target tiny:VectorLoss", 65, "not a float32 scalar"),
        ("--run.resume nowhere", 65, "run.resume=nowhere does not exist"),
        ("--run.dir file/run", 1, "run.dir=file/run can't be written (Not a directory); choose a"),
    ],
)
def test_each_kind_of_failure_has_its_exit_status_and_one_line(
    launch, tmp_path, words, status, cause
):
    (tmp_path / "file").touch()
    done = launch(0, *TINY, "--train.steps", "5", "--run.dir", "run", *words.split())
    assert done.returncode == status
    assert cause in done.stderr.strip().splitlines()[-1]
    assert "Traceback" not in done.stderr
    if (tmp_path / "run").exists():  # a config that can't be read names no folder
        summary = summary_of(tmp_path / "run")
        assert (summary["stopped_by"], summary["exit_code"]) == ("failed", status)
        assert cause in summary["cause"]


# A rank that waits for one that has left does so for run.timeout_seconds: longer than `launch`
# waits for the job.
WAITS_LONG = ["--run.timeout_seconds", "3600"]


def test_a_failure_of_all_ranks_is_reported_once_and_recorded_in_the_summary(launch, tmp_path):
    words = [*TINY, *WAITS_LONG, "--run.dir", "run", "--parallel.strategy", "fsdp"]
    words += ["--task.target", "tiny:AlwaysNan", "--train.max_skips_in_a_row", "3"]
    done = launch.each(2, *words)
    assert [rank.returncode for rank in done] == [70, 70]
    lines = [line for rank in done for line in rank.stderr.splitlines()]
    error = "error: 3 steps in a row were not finite"
    assert len([line for line in lines if line.startswith(error)]) == 1
    assert summary_of(tmp_path / "run")["exit_code"] == 70
    assert summary_of(tmp_path / "run")["skipped_steps"] == 3


def test_a_rank_that_raises_ends_the_others_and_is_named(launch, tmp_path):
    (tmp_path / "faulty.py").write_text(
        "import os\nfrom tiny import Tiny\n\nclass Faulty(Tiny):\n    def loss_sum(self, model, "
        "batch):\n        if os.environ['RANK'] == '1':\n            raise RuntimeError('broken "
        "sample')\n        return super().loss_sum(model, batch)\n"
    )
    words = [*TINY, *WAITS_LONG, "--task.target", "faulty:Faulty", "--run.dir", "run"]
    first, second = launch.each(2, *words)
    assert [first.returncode, second.returncode] == [1, 1]
    assert "rank 1: Traceback" in second.stderr
    cause = summary_of(tmp_path / "run")["cause"]
    assert cause == "rank 1: RuntimeError: broken sample (faulty.py, line 7)"


HANDLED = ("--signals-to-handle", "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")


@pytest.mark.parametrize(
    ("ranks", "sent_to", "workers"),
    [
        (2, "rank", 1),
        pytest.param(2, "rank of torchrun", 0, marks=pytest.mark.slow),
        pytest.param(2, "torchrun", 2, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_all_ranks_at_one_step_and_the_run_goes_on(
    launch, tmp_path, ranks, sent_to, workers
):
    words = [*TINY, "--task.target", "tiny:Slow", "--train.steps", "60", "--run.seed", "3"]
    words += ["--data.workers", str(workers), "--checkpoint.every", "1000"]
    by_torchrun = "torchrun" in sent_to
    if by_torchrun:
        started = [launch.start(ranks, *words, "--run.dir", "run", torchrun=HANDLED)]
    else:
        started = launch.start_each(ranks, *words, "--run.dir", "run")
    wait_for(lambda: (tmp_path / "run/metrics.jsonl").exists(), "the first logged step")
    below = [pid for process in started for pid in (process.pid, *children(process.pid))]
    os.kill(below[-1] if sent_to == "rank of torchrun" else started[-1].pid, signal.SIGTERM)
    outputs, errors = zip(*(process.communicate(timeout=300) for process in started), strict=True)
    again = "; to continue, start the same job again with --run.dir run\n"
    assert (again in outputs[0]) != by_torchrun
    expected = [1] if by_torchrun else [75] * ranks
    assert [process.returncode for process in started] == expected, errors[0][-2000:]
    stopped = summary_of(tmp_path / "run")
    assert (stopped["stopped_by"], stopped["exit_code"]) == ("preempted", 75)
    assert 0 < stopped["steps"] < 60
    (checkpoint,) = (tmp_path / "run/checkpoints").iterdir()
    assert checkpoint.name == f"step_{stopped['steps']:08d}"
    wait_for(lambda: not any(map(is_there, below)), "the end of every process")

    for folder in ("run", "through"):
        done = launch.each(ranks, *words, "--run.dir", folder)
        assert [rank.returncode for rank in done] == [0] * ranks, done[0].stderr[-2000:]
    assert summary_of(tmp_path / "run")["resumed_from_step"] == stopped["steps"]
    assert losses(tmp_path / "run") == losses(tmp_path / "through")


@pytest.mark.bad_input("a run.dir that is a checkpoint")
def test_a_checkpoint_with_no_steps_left_is_finished_elsewhere_too_and_is_no_runs_folder(
    launch, tmp_path
):
    words = [*TINY, "--train.steps"]
    assert launch(0, *words, "2", "--run.dir", "run").returncode == 0
    elsewhere = launch(0, *words, "2", "--run.dir", "other", "--run.resume", "run")
    assert elsewhere.returncode == 0
    assert "other is finished: it took 2 of train.steps=2" in elsewhere.stdout
    checkpoint = "run/checkpoints/step_00000002"
    refused = launch(0, *words, "4", "--run.dir", checkpoint)
    assert refused.returncode == 64
    assert f"run.dir={checkpoint} is a checkpoint; name a run's folder, and g" in refused.stderr
    on = launch(0, *words, "4", "--run.dir", "other", "--run.resume", "run")
    assert f"run    other, resumed from step 2 ({checkpoint})" in on.stdout
    again = launch(0, *words, "6", "--run.dir", "other", "--run.resume", "run")
    said = "run    other, resumed from step 4; it has continued since it began from run.resume=run"
    assert said in again.stdout


def test_figures_of_a_run_whose_checkpoints_are_gone_are_kept(launch, tmp_path):
    words = [*TINY, "--train.steps", "2", "--run.dir", "run", "--checkpoint.every", "off"]
    assert launch(0, *words).returncode == 0
    before = (tmp_path / "run/metrics.jsonl").read_text()
    again = launch(0, *words)
    said = "warning: run had metrics but no checkpoint: they are kept in run/metrics_before.jsonl"
    assert said in again.stderr
    assert (tmp_path / "run/metrics_before.jsonl").read_text() == before


@pytest.mark.bad_input("a run whose last steps were all skipped")
@pytest.mark.bad_input("a run in which every step was skipped")
@pytest.mark.parametrize(
    ("task", "steps", "status", "said"),
    [
        ("LaterNan", 3, 70, "error: the last 2 of 3 steps were skipped: their gradients were inf"),
        ("AlwaysNan", 3, 70, "error: the last 3 of 3 steps were skipped: their gradients"),
        ("LaterNan", 2, 0, "done: 2 steps (1 applied, 1 skipped)"),  # as of a growing loss scale
    ],
)
def test_a_run_whose_last_steps_were_skipped_is_saved_and_not_done_also_when_started_again(
    launch, tmp_path, task, steps, status, said
):
    words = ["--task.target", f"tiny:{task}", "--train.steps", steps, "--run.dir", "run"]
    for attempt in range(2 if status else 1):
        done = launch(0, *TINY, *words)
        assert done.returncode == status, attempt
        assert said in done.stderr + done.stdout
        assert ("done:" in done.stdout) == (status == 0)
        assert "skipped), loss nan" not in done.stdout
        assert (tmp_path / f"run/checkpoints/step_0000000{steps}").is_dir()
        assert summary_of(tmp_path / "run")["exit_code"] == status


def test_by_default_an_evaluation_takes_a_part_of_the_samples_the_same_after_a_resume(
    launch, tmp_path
):
    words = [*TINY, "--task.args.samples", "1000", "--run.dir", "run", "--train.steps"]
    for steps in (2, 4):
        done = launch(0, *words, steps)
        said = "eval   takes 32 of the 1,000 held-out samples, the same each time, and about"
        assert done.stdout.count(said) == 1, done.stderr
    settings = tomllib.loads((tmp_path / "run/config.toml").read_text())
    assert settings["eval"]["batches"] == 16


def evaluated_samples(world, micro_batches):
    """What an evaluation reads, after the main job has bounded it."""
    words = ["--train.micro_batch_size", 2, "--train.accumulation_steps", micro_batches]
    run = make_run(world, Tiny(samples=5000), *words, "--eval.every", 50, "--train.steps", 400)
    bound_evaluation(run, run.validation)
    seen = []
    for _ in run.validation.one_epoch(run.config.eval.batches):
        seen += [index for _, indices in run.validation.last_step for index in indices]
    return seen


def test_the_samples_of_a_bounded_evaluation_depend_on_no_world_size_and_are_spread():
    alone = sorted(evaluated_samples(World(), 4))
    assert len(set(alone)) == len(alone) == round(0.1 * 3 * 50 * 4 * 2)
    assert min(alone) < 500
    assert max(alone) > 4500
    of_ranks = on_ranks(2, evaluated_samples, 2)
    assert sorted(of_ranks[0] + of_ranks[1]) == alone


# --- what is due after a step


class Noted:
    """An observer that notes what happens in which order, and asks for a stop in step `at`."""

    def __init__(self, run, stop, asks="", at=0):
        self.run, self.stop, self.asks, self.at = run, stop, asks, at
        self.noted = []

    def note(self, what):
        self.noted.append(f"{what} {self.run.step}")

    def ask(self, when):
        if self.asks == when and self.run.step == self.at:
            self.stop.requested_by = "SIGTERM"

    def after_step(self, report, micro_batches):
        self.ask("a signal in a step")
        if self.asks == "the task" and self.run.step == self.at:
            self.stop.end("the task's on_step")

    def during_evaluation(self, done, steps):
        self.ask("a signal in an evaluation")

    def after_evaluation(self):
        self.note("evaluate")

    def on_log(self, row):
        self.note("log")

    def state_dict(self):
        self.note("save")
        return {}


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
    train(run, stop)
    run.close()
    assert ", ".join(observer.noted) == expected


class Reads:
    """Calls `read` after each step."""

    def __init__(self, read):
        self.read, self.seen = read, []

    def after_step(self, report, micro_batches):
        self.seen.append(self.read())


def test_garbage_from_before_a_training_is_not_kept_through_it(tmp_path):
    run = make_run(World(), Tiny(), "--train.steps", 1, "--run.dir", tmp_path)
    garbage = torch.nn.Module()
    garbage.itself = [garbage]
    observer = Reads(weakref.ref(garbage))
    run.observers.add(observer)
    del garbage
    gc.disable()
    try:
        train(run, AgreedStop(World()))
    finally:
        gc.enable()
    assert observer.seen == [None]


def main_with_a_group(world, folder):
    from dist_amp.train import main

    status = main([*TINY, "--train.steps", "2", "--run.dir", folder])
    return status, dist.is_initialized()


def test_main_uses_a_process_group_that_is_there_and_leaves_it(tmp_path):
    assert on_ranks(2, main_with_a_group, str(tmp_path / "run")) == [(0, True)] * 2
    assert summary_of(tmp_path / "run")["world_size"] == 2


# Without the barrier before destroy_process_group, eight of 24 such runs were aborted as they
# exited.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_a_two_rank_fsdp_run_exits_with_0_every_time(launch, part):
    words = [*TINY, "--train.steps", "2", "--parallel.strategy", "fsdp"]
    words += ["--checkpoint.every", "off"]
    assert [launch(2, *words, "--run.dir", f"run{n}").returncode for n in range(5)] == [0] * 5


@pytest.fixture(scope="module")
def bits_per_byte(tmp_path_factory):
    """bits_per_byte(strategy, dtype): held out, after 100 steps of the demo on two ranks."""

    @cache
    def trained(strategy, dtype):
        folder = tmp_path_factory.mktemp("demo")
        words = ["--use_amp", "false"] if dtype == "fp32" else ["--precision.dtype", dtype]
        words += ["--parallel.strategy", strategy, "--train.steps", "100"]
        words += ["--config", "demo", "--task.args.sample_bytes", "0", "--run.dir", "run"]
        for rank in Launch(folder).each(2, *words, timeout=3600):
            assert rank.returncode == 0, rank.stderr[-2000:]
        return summary_of(folder / "run")["evaluation"]["bits_per_byte"]

    return trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "dtype"), [("ddp", "bf16"), ("fsdp", "bf16"), ("ddp", "fp16"), ("fsdp", "fp16")]
)
def test_every_precision_learns_as_float32_does(bits_per_byte, strategy, dtype):
    assert bits_per_byte("ddp", "fp32") < 5
    assert bits_per_byte(strategy, dtype) == pytest.approx(bits_per_byte("ddp", "fp32"), rel=0.05)
