"""The task's callbacks in the main job see each step and evaluation, and may end the run."""

import json
import math
import re

import pytest
import torch
from optimizer_runs import Counter
from ranks import on_ranks
from test_background_saves import SHARD, check_end, start
from test_metrics import scalars
from tiny import Tiny, log, make_run, take_steps
from torch import nn

from dist_amp import task
from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.errors import Failure
from dist_amp.files import read_rows
from dist_amp.optimizers.groups import call_on_evaluation
from dist_amp.supervise.callbacks import OPTIONAL, Callbacks, train_metrics
from dist_amp.supervise.stop import AgreedStop
from dist_amp.train import main
from dist_amp.world import World


class Watched(Tiny):
    """on_step stops after step stop_at on rank 1, on_evaluation from step `patience` on."""

    best_metric = "min:rmse"

    def __init__(self, stop_at: int = 0, patience: int = 0):
        super().__init__()
        self.stop_at = stop_at
        self.patience = patience

    def on_step(self, run, report):
        print(f"on_step {run.step} on rank {run.world.rank}: {report.applied.item()}")
        return "stop" if (run.step, run.world.rank) == (self.stop_at, 1) else None

    def on_evaluation(self, run, values):
        is_same = values == run.metrics.evaluation
        print(f"on_evaluation {run.step} on rank {run.world.rank}: {sorted(values)} {is_same}")
        values |= {"rmse": values["loss"] ** 0.5, "nan": math.nan, "one": torch.ones(())}
        del values["loss"]
        return "stop" if self.patience and run.step >= self.patience else None

    def train_metrics(self, run, report):
        """Numbers of the host, one of the device, one of sharded parameters."""
        norm = sum(p.detach().square().sum() for p in run.parallel.parameters).sqrt()
        values = {"rank": run.world.rank, "loss_per_rank": report.loss_sum}
        return values | {"parameter_norm": norm, "best": math.inf}


SMALL = """
    --task.target test_callbacks:Watched --train.micro_batch_size 2 --train.steps 12 --run.dir run
    --metrics.log_every 5 --eval.every 4 --checkpoint.every 6
""".split()


def check_ended_at_step_8(folder, cause):
    """The run says why, and its last step is logged and saved."""
    summary = json.loads((folder / "summary.json").read_text())
    expected = {"stopped_by": "completed", "exit_code": 0, "cause": cause, "steps": 8}
    assert summary | expected == summary
    saved = [path.name for path in all_checkpoints(folder)]
    assert saved == ["step_00000006", "step_00000008"]
    rows = [row for row in read_rows(folder / "metrics.jsonl")[0] if "train/loss" in row]
    assert [row["step"] for row in rows] == [5, 8]
    return rows


def test_callbacks_are_called_on_every_rank_and_one_that_says_stop_ends_the_run(launch, tmp_path):
    done = launch.each(2, *SMALL, "--parallel.strategy", "fsdp", "--task.args.stop_at", 7)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    for rank, one in enumerate(done):
        # One step after 7, on any number of ranks: what the ranks tell each other overlaps it.
        assert [line for line in one.stdout.splitlines() if line.startswith("on_")] == [
            *(f"on_step {n} on rank {rank}: True" for n in range(1, 5)),
            f"on_evaluation 4 on rank {rank}: ['loss'] True",
            *(f"on_step {n} on rank {rank}: True" for n in range(5, 9)),
        ]
    cause = 'on_step(run, report) returned "stop" on rank 1 after step 7'
    assert f"ended after step 8 of 12: the task's {cause}\n" in done[0].stdout
    rows = check_ended_at_step_8(tmp_path / "run", cause)
    norms = [(row["step"], pytest.approx(row["train/parameter_norm"])) for row in rows]
    for rank in range(2):
        logged = scalars(tmp_path / "run", rank)
        assert logged["train/rank"] == [(5, rank), (8, rank)]
        assert logged["train/parameter_norm"] == norms, "the same on both ranks"


def test_an_evaluation_callback_ends_the_run_for_good_and_what_it_adds_is_logged_and_saved(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    words = [*SMALL, "--task.args.patience", "7"]
    assert main(words) == 0
    cause = 'on_evaluation(run, values) returned "stop" on rank 0 after step 8'
    rows = check_ended_at_step_8(tmp_path / "run", cause)
    values = read_manifest(tmp_path / "run/checkpoints/step_00000008").evaluation
    assert list(values) == ["loss", "rmse", "nan", "one"]
    rmse = values["loss"] ** 0.5
    assert values["rmse"] == rmse
    assert f"rmse {rmse:.4f}  nan nan  one 1.0000\n" in capsys.readouterr().out
    _, row = [row for row in read_rows(tmp_path / "run/metrics.jsonl")[0] if "eval/loss" in row]
    assert (row["eval/rmse"], row["eval/nan"], row["eval/one"]) == (rmse, "nan", 1.0)
    assert main(words) == 0
    said = f"it ended after 8 of train.steps=12, because the task's {cause};"
    assert said in capsys.readouterr().out
    assert check_ended_at_step_8(tmp_path / "run", cause) == rows


def other_rmse(self, run, values):
    values["rmse"] = float(run.world.rank)


def other_factor(self, run, values):
    run.schedule.factor = 1.0 + run.world.rank


def other_rate(self, run, values):
    torch.optim.lr_scheduler.ConstantLR(run.optimizer, 0.5)


def freeze(self, run, report):
    next(run.model.parameters()).requires_grad_(False)


def replace(self, run, report):
    run.parallel.module[2] = nn.Linear(8, 1)


REFUSED = [  # (method, what it does, what is said)
    ("on_step", lambda *_: 3, "task's on_step(run, report) returned 3 after step 1; return None"),
    ("on_step", lambda *_: {}["key"], "on_step(run, report) failed after step 1: KeyError: 'key'"),
    ("on_step", freeze, "the parameter 0.0.weight was frozen or added to the model by step 1"),
    ("on_step", replace, "the parameter 2.weight was frozen or added to the model by step 1"),
    ("on_evaluation", lambda _, run, v: v.update(f1="0.5"), "values['f1'] to a str, not a number "),
    ("on_evaluation", other_rmse, "and rank 1 has [('loss', 1.0), ('rmse', 1.0)], schedule.factor"),
    ("on_evaluation", other_factor, "and rank 1 has [('loss', 1.0)], schedule.factor 2.0"),
    ("on_evaluation", other_rate, "but each step sets it to the schedule's"),
    ("train_metrics", lambda *_: {"lr": 1}, "returned lr, but the run writes train/lr itself"),
    ("train_metrics", lambda _, run, report: {"a": report.norm.expand(3)}, "returned a=tensor(["),
]


def step_evaluate_and_log(run):
    callbacks = Callbacks(run, AgreedStop(run.world))
    (report,) = take_steps(run, 1)
    callbacks.after_step(report, [])
    call_on_evaluation(run, {"loss": 1.0})
    train_metrics(run, report)
    run.metrics.after_step(report)
    callbacks.on_log(log(run))


def message_of_callback(world, number, strategy):
    method, does, _ = REFUSED[number]
    task = type("Odd", (Watched,), {method: does})()
    words = ["--parallel.strategy", strategy, "--use_amp", "false", "--optim.schedule", "constant"]
    with pytest.raises(Failure) as error:
        step_evaluate_and_log(make_run(world, task, *words))
    return str(error.value)


@pytest.mark.bad_input("a callback or `train_metrics` that fails, or returns something else")
@pytest.mark.bad_input("an `on_evaluation` that adds other values, or another rate, on some ranks")
@pytest.mark.bad_input("a learning rate that `on_evaluation` sets on the optimizer")
@pytest.mark.bad_input("a parameter that is frozen, or a module that is replaced, while training")
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_what_a_callback_may_not_do_is_refused_on_all_ranks(number, strategy):
    for message in on_ranks(2, message_of_callback, number, strategy):
        assert REFUSED[number][-1] in message


def test_the_tasks_own_metrics_are_not_waited_for():
    run = make_run(World(), Watched())
    (report,) = take_steps(run, 1)
    run.metrics.after_step(report)
    with Counter("_local_scalar_dense") as counter:
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
    assert counter.count == 0
    row = run.metrics.read()
    assert row.task_tags["train/loss_per_rank"] == report.loss_sum.item()
    assert row.task_tags["train/best"] == math.inf
    take_steps(run, 1)
    assert log(run).task_tags == {}, "of that log step alone"


class Misspelt(Tiny):
    def on_steps(self, run, report): ...
    def sheduler(self, step): ...


@pytest.mark.bad_input("a method of the task whose name is almost an optional one's")
def test_a_method_that_nothing_calls_is_warned_of(capsys):
    Callbacks(make_run(World(), Misspelt()), AgreedStop(World()))
    *_, first, second = capsys.readouterr().err.splitlines()
    assert first.endswith("the task's method on_steps; if it is meant for on_step, rename it")
    assert second.endswith("the task's method sheduler; if it is meant for schedule, rename it")
    names = re.findall(r"(?:^    |, )(\w+)\(", task.__doc__, re.MULTILINE)
    assert sorted(names) == sorted(OPTIONAL), "each is described"


@pytest.mark.bad_input("a disk that blocks the save of a run that a signal stops")
def test_a_job_whose_save_is_stuck_ends_and_can_be_continued(launch):
    words = ["--train.steps", "8"]
    briefly = ["--run.timeout_seconds", "2"]
    ends = start(launch, 1, *words, *briefly, plant=f"{SHARD}:0:3", PREEMPTED_AT="3")
    check_end(launch, ends, [0], "write_shards", *words)
