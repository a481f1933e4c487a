"""The task's callbacks in the main job see each step and evaluation, and may end the run."""

import json
import math
import re

import pytest
import torch
from optimizer_runs import Counter
from ranks import on_ranks
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny import Tiny, log, make_run, take_steps

from dist_amp import task
from dist_amp.checkpoint.format import all_checkpoints, read_manifest
from dist_amp.errors import ConfigError, DataError
from dist_amp.optimizers.groups import call_on_evaluation
from dist_amp.supervise.callbacks import OPTIONAL, Callbacks, train_metrics
from dist_amp.supervise.stop import AgreedStop
from dist_amp.telemetry.step_report import StepReport
from dist_amp.world import World


class Watched(Tiny):
    """on_step stops after step stop_at on rank stop_rank, on_evaluation from `patience` on."""

    def __init__(self, stop_at: int = 0, stop_rank: int = 0, patience: int = 0):
        super().__init__()
        self.stop_at = stop_at
        self.stop_rank = stop_rank
        self.patience = patience

    def on_step(self, run, report):
        assert isinstance(report, StepReport)
        print(f"on_step {run.step} on rank {run.world.rank}: {report.applied.item()}")
        if run.step == self.stop_at and run.world.rank == self.stop_rank:
            return "stop"
        return None

    def on_evaluation(self, run, values):
        is_same = values == run.metrics.evaluation
        print(f"on_evaluation {run.step} on rank {run.world.rank}: {sorted(values)} {is_same}")
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


def summary_of(folder):
    return json.loads((folder / "run/summary.json").read_text())


def steps_of(folder):
    return [path.name for path in all_checkpoints(folder / "run")]


def rows_of(folder):
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def scalars_of(folder, rank):
    events = EventAccumulator(str(folder / f"run/tensorboard/rank{rank:05d}")).Reload()
    tags = events.Tags()["scalars"]
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in tags}


def started(launch, *words):
    """The outputs of a run on two ranks."""
    done = launch.each(2, *SMALL, *words)
    assert [one.returncode for one in done] == [0, 0], done[0].stderr
    return [one.stdout for one in done]


def test_callbacks_are_called_on_every_rank_and_one_that_says_stop_ends_the_run(launch, tmp_path):
    words = ["--parallel.strategy", "fsdp", "--task.args.stop_at", 7, "--task.args.stop_rank", 1]
    outputs = started(launch, *words)
    for rank, text in enumerate(outputs):
        assert [line for line in text.splitlines() if line.startswith("on_")] == [
            *(f"on_step {n} on rank {rank}: True" for n in range(1, 5)),
            f"on_evaluation 4 on rank {rank}: ['loss'] True",
            *(f"on_step {n} on rank {rank}: True" for n in range(5, 9)),
        ]
    cause = 'on_step(run, report) returned "stop" on rank 1 after step 7'
    summary = summary_of(tmp_path)
    # One more step, on any number of ranks: what the ranks tell each other overlaps it.
    expected = {"stopped_by": "completed", "exit_code": 0, "cause": cause, "steps": 8}
    assert {key: summary[key] for key in expected} == expected
    assert summary["applied_steps"] == 8
    assert f"ended after step 8 of 12: the task's {cause}\n" in outputs[0]
    assert "done: 8 steps (8 applied, 0 skipped), loss " in outputs[0]
    assert steps_of(tmp_path) == ["step_00000006", "step_00000008"]
    assert [row["step"] for row in rows_of(tmp_path)] == [5, 8]
    check_metrics(tmp_path)
    before = rows_of(tmp_path)
    again = started(launch, *words)[0]
    finished = f"run is finished: it ended after 8 of train.steps=12, because the task's {cause};"
    assert f"{finished} to continue, st" in again
    assert (rows_of(tmp_path), summary_of(tmp_path)) == (before, summary)


def check_metrics(folder):
    """The task's metrics are written by every rank at log steps."""
    norms = []
    for rank in range(2):
        scalars = scalars_of(folder, rank)
        assert scalars["train/rank"] == [(5, rank), (8, rank)]
        assert [step for step, _ in scalars["train/loss_per_rank"]] == [5, 8]
        norms.append(scalars["train/parameter_norm"])
    assert norms[0] == norms[1]
    rows = rows_of(folder)
    assert [row["train/rank"] for row in rows] == [0, 0]
    assert [(row["step"], pytest.approx(row["train/parameter_norm"])) for row in rows] == norms[0]


def test_an_evaluation_callback_ends_the_run_at_its_own_step(launch, tmp_path):
    outputs = started(launch, "--task.args.patience", 7)
    for rank, text in enumerate(outputs):
        evaluations = [line for line in text.splitlines() if line.startswith("on_evaluation")]
        assert evaluations == [f"on_evaluation {n} on rank {rank}: ['loss'] True" for n in (4, 8)]
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["stopped_by"]) == (8, "completed")
    assert summary["cause"] == 'on_evaluation(run, values) returned "stop" on rank 0 after step 8'
    assert steps_of(tmp_path) == ["step_00000006", "step_00000008"]
    assert [row["step"] for row in rows_of(tmp_path)] == [5, 8]


class Derived(Tiny):
    """Adds metrics of the loss to an evaluation, in a way that `kind` names."""

    best_metric = "min:rmse"

    def __init__(self, kind: str = "numbers"):
        super().__init__()
        self.kind = kind

    def on_evaluation(self, run, values):
        if self.kind == "numbers":
            values |= {"rmse": values["loss"] ** 0.5, "nan": math.nan, "one": torch.ones(())}
            del values["loss"]
        if self.kind == "a name":
            values |= {"rmse": 1.0} if run.world.rank else {}
        if self.kind == "a value":
            values["rmse"] = float(run.world.rank)
        if self.kind == "a rate":
            run.schedule.factor = 1.0 + run.world.rank


def test_what_on_evaluation_adds_is_logged_saved_and_returned(tmp_path, capsys):
    run = make_run(World(), Derived(), "--eval.every", 1, "--run.dir", tmp_path)
    run.metrics.open(tmp_path, 0, "")
    take_steps(run, 1)
    values = run.evaluate()
    rmse = values["loss"] ** 0.5
    assert list(values) == ["loss", "rmse", "nan", "one"]
    assert values["rmse"] == rmse
    assert f"rmse {rmse:.4f}  nan nan  one 1.0000\n" in capsys.readouterr().out
    (row,) = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert (row["eval/rmse"], row["eval/nan"], row["eval/one"]) == (rmse, "nan", 1.0)
    assert read_manifest(run.save()).evaluation["rmse"] == rmse
    run.close()


def added_on_ranks(world, kind):
    with pytest.raises(DataError) as error:
        call_on_evaluation(make_run(world, Derived(kind)), {"loss": 1.0})
    return str(error.value)


@pytest.mark.bad_input("an `on_evaluation` that adds other values, or another rate, on some ranks")
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("a name", "rank 0 has [('loss', 1.0)], schedule.factor 1.0, and rank 1 has [('loss', 1.0"),
        ("a value", "and rank 1 has [('loss', 1.0), ('rmse', 1.0)], schedule.factor 1.0"),
        ("a rate", "and rank 1 has [('loss', 1.0)], schedule.factor 2.0"),
    ],
)
def test_an_on_evaluation_that_does_another_thing_on_another_rank_is_refused_on_all(kind, said):
    errors = on_ranks(2, added_on_ranks, kind)
    assert errors[0] == errors[1]
    assert said in errors[0]


@pytest.mark.bad_input("a learning rate that `on_evaluation` sets on the optimizer")
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_a_rate_that_is_set_on_the_optimizer_is_refused_with_what_to_set_instead(name):
    class Plateau(Tiny):
        def on_evaluation(self, run, values):
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(run.optimizer, patience=-1)
            plateau.best = 0.0
            plateau.step(values["loss"])

    run = make_run(World(), Plateau(), "--optim.schedule", "constant", "--optim.name", name)
    with pytest.raises(ConfigError) as error:
        call_on_evaluation(run, {"loss": 1.0})
    assert ", and the schedule's is 0.0003, which the steps set again" in str(error.value)
    assert "change run.schedule.factor instead" in str(error.value)


def test_a_signal_counts_more_than_the_tasks_wish():
    stop = AgreedStop(World())
    stop.every_poll = True
    stop.ended_by = "the task"
    assert not stop.poll()
    assert stop.poll()
    assert stop.by_task
    stop.requested_by = "SIGTERM"
    stop.poll()
    assert stop.poll()
    assert not stop.by_task


ODD = [
    ("on_step", "return 3", "the task's on_step(run, report) returned 3 after step 1; return None"),
    ("on_step", "return True", "on_step(run, report) returned True after step 1; return None or"),
    ("on_evaluation", 'return "halt"', "on_evaluation(run, values) returned 'halt' after step 1"),
    ("on_evaluation", "report['f1'] = '0.5'", "gave f1 a str, not a number or a scalar tensor"),
    ("on_evaluation", "report['f1'] = None", "gave f1 a NoneType, not a number or a scalar tens"),
    ("on_evaluation", "report['f1'] = [0.5]", "gave f1 a list, not a number or a scalar tensor"),
    ("on_evaluation", "report['loss'] /= 2", "changed loss; give it another name"),
    ("train_metrics", "return 3", "train_metrics(run, report) returned int; return a dict of num"),
    ("train_metrics", "return {'lr': 1}", "gave lr, but train/lr is the run's own; give it anot"),
    ("train_metrics", "return {'a': 'b'}", "gave a='b'; give a number or a scalar tensor"),
    ("train_metrics", "return {'a': report.norm.expand(3)}", "gave a=tensor(["),
]


@pytest.mark.bad_input("a callback or `train_metrics` that fails, or returns something else")
def test_a_callback_that_returns_something_else_is_refused():
    for method, body, said in ODD:
        made = {}
        exec(f"def {method}(self, run, report):\n    {body}", made)
        run = make_run(World(), type("Odd", (Tiny,), {method: made[method]})())
        report = take_steps(run, 1)[0]
        callbacks = Callbacks(run, AgreedStop(World()))
        calls = {
            "on_step": lambda: callbacks.after_step(report, []),  # noqa: B023
            "on_evaluation": lambda: call_on_evaluation(run, {"loss": 1.0}),  # noqa: B023
            "train_metrics": lambda: train_metrics(run, report),  # noqa: B023
        }
        with pytest.raises(DataError) as error:
            calls[method]()
        assert said in str(error.value)


@pytest.mark.bad_input("a callback or `train_metrics` that fails, or returns something else")
def test_a_callback_that_fails_is_one_line_with_the_status_of_wrong_data(launch, tmp_path):
    text = "from tiny import Tiny\n\nclass Odd(Tiny):\n    def on_step(self, run, report):\n"
    (tmp_path / "odd.py").write_text(f"{text}        {{}}['key']\n")
    done = launch(0, *SMALL, "--task.target", "odd:Odd")
    assert done.returncode == 65
    said = "the task's on_step(run, report) failed after step 1: KeyError: 'key' (odd.py, line 5);"
    assert f"error: {said} fix it" in done.stderr.splitlines()[-1]


def test_the_tasks_own_metrics_are_not_waited_for():
    run = make_run(World(), Watched())
    report = take_steps(run, 1)[0]
    run.metrics.record(report)
    with Counter("_local_scalar_dense") as counter:
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
    assert counter.count == 0
    row = run.metrics.read()
    assert row.of_task["train/loss_per_rank"] == report.loss_sum.item()
    assert row.of_task["train/best"] == math.inf
    take_steps(run, 1)
    assert log(run).of_task == {}, "of that log step alone"


class Misspelt(Tiny):
    def on_eval(self, run, values):
        return "stop"

    def train_metric(self, run, report):
        return {}

    def sheduler(self, step):
        return 1.0


@pytest.mark.bad_input(
    "a method of the task whose name is almost an optional one's, which nothing calls"
)
def test_a_method_that_looks_like_a_misspelt_optional_one_is_warned_of(capsys):
    run = make_run(World(), Misspelt())
    capsys.readouterr()
    Callbacks(run, AgreedStop(World()))
    expected = {"on_eval": "on_evaluation", "sheduler": "schedule", "train_metric": "train_metrics"}
    assert capsys.readouterr().err.splitlines() == [
        f"warning: nothing calls the task's method {name}; if it is meant for {near}, rename it"
        for name, near in expected.items()
    ]


def test_every_optional_method_is_described():
    names = re.findall(r"(?:^    |, )(\w+)\(", task.__doc__, re.MULTILINE)
    assert sorted(names) == sorted(OPTIONAL)


class Evaluated(Tiny):
    def on_evaluation(self, run, values):
        pass


@pytest.mark.bad_input("an `on_evaluation` where nothing is evaluated")
def test_an_on_evaluation_that_nothing_calls_is_warned_of(capsys):
    run = make_run(World(), Evaluated(), "--eval.every", "off")
    Callbacks(run, AgreedStop(World()))
    said = "warning: the task's on_evaluation is never called, because nothing is evaluated"
    assert said in capsys.readouterr().err
