"""The task's callbacks in the main job: they see each step and evaluation, and may end the run; its own metrics."""

import json
import math
import re
import textwrap

import pytest
import torch
from conftest import ROOT
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from test_optim import Counter
from tiny import Tiny, log, make_run, take_steps

from dist_amp import task
from dist_amp.checkpoint.format import all_checkpoints
from dist_amp.runtime.task_calls import OPTIONAL, misspelt_methods
from dist_amp.supervise.callbacks import Callbacks, train_metrics
from dist_amp.supervise.signals import AgreedStop
from dist_amp.tasks.causal_lm import CausalLM
from dist_amp.tasks.hf_causal_lm import HFCausalLM
from dist_amp.tasks.hf_classification import HFClassification
from dist_amp.tasks.sinusoid import Sinusoid
from dist_amp.telemetry.async_copy import StepReport
from dist_amp.world import World


class Watched(Tiny):
    """stop_at: the step after which on_step says "stop", on rank `stop_rank`; patience: steps without a better loss."""

    def __init__(self, stop_at: int = 0, stop_rank: int = 0, patience: int = 0, answer: str = "stop"):
        super().__init__()
        self.stop_at = stop_at
        self.stop_rank = stop_rank
        self.patience = patience
        self.answer = answer

    def on_step(self, run, report):
        assert isinstance(report, StepReport)
        print(f"on_step {run.step} on rank {run.world.rank}: {report.applied.item()}")
        if run.step == self.stop_at and run.world.rank == self.stop_rank:
            return self.answer
        return None

    def on_evaluation(self, run, values):
        print(f"on_evaluation {run.step} on rank {run.world.rank}: {sorted(values)} {values == run.metrics.evaluation}")
        return "stop" if self.patience and run.step >= self.patience else None


SMALL = [
    "--task.target",
    "test_callbacks:Watched",
    "--train.micro_batch_size",
    2,
    "--train.steps",
    12,
    "--run.dir",
    "run",
]
SMALL += ["--metrics.log_every", 5, "--eval.every", 4, "--checkpoint.every", 6]


def summary_of(folder):
    return json.loads((folder / "run/summary.json").read_text())


def steps_of(folder):
    return [path.name for path in all_checkpoints(folder / "run")]


def rows_of(folder):
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if "train/loss" in line]


def started(launch, ranks, *words):
    """(outputs, exit statuses) of a run on so many ranks."""
    done = launch.each(ranks, *SMALL, *words) if ranks > 1 else [launch(0, *SMALL, *words)]
    return [one.stdout for one in done], [one.returncode for one in done], "".join(one.stderr for one in done)


@pytest.mark.parametrize("ranks", [1, 2])
def test_callbacks_are_called_on_every_rank_after_each_step_and_evaluation(launch, tmp_path, ranks):
    outputs, statuses, errors = started(launch, ranks)
    assert set(statuses) == {0}, errors
    for rank, text in enumerate(outputs):
        lines = [line for line in text.splitlines() if line.startswith("on_")]
        assert [line for line in lines if "on_step" in line] == [
            f"on_step {n} on rank {rank}: True" for n in range(1, 13)
        ]
        assert [line for line in lines if "evaluation" in line] == [
            f"on_evaluation {n} on rank {rank}: ['loss'] True" for n in (4, 8, 12)
        ]
        assert lines.index(f"on_step 4 on rank {rank}: True") + 1 == lines.index(
            f"on_evaluation 4 on rank {rank}: ['loss'] True"
        )
    assert (summary_of(tmp_path)["stopped_by"], summary_of(tmp_path)["cause"]) == ("completed", "")


@pytest.mark.parametrize(("ranks", "stop_rank"), [(1, 0), (2, 1)])
def test_a_step_callback_that_says_stop_on_any_rank_ends_the_run_saved_and_completed(
    launch, tmp_path, ranks, stop_rank
):
    words = ["--task.args.stop_at", 7, "--task.args.stop_rank", stop_rank]
    outputs, statuses, errors = started(launch, ranks, *words)
    assert set(statuses) == {0}, errors
    cause = f'on_step(run, report) returned "stop" on rank {stop_rank} after step 7'
    summary = summary_of(tmp_path)
    # One more step, on any number of ranks: what the ranks tell each other overlaps it.
    expected = {"stopped_by": "completed", "exit_code": 0, "cause": cause, "steps": 8, "applied_steps": 8}
    assert {key: summary[key] for key in expected} == expected
    assert f"ended after step 8 of 12: the task's {cause}\n" in outputs[0]
    assert "done: 8 steps (8 applied, 0 skipped), loss " in outputs[0]
    assert steps_of(tmp_path) == ["step_00000006", "step_00000008"]
    assert [row["step"] for row in rows_of(tmp_path)] == [5, 8]
    before = rows_of(tmp_path)
    outputs, statuses, errors = started(launch, ranks, *words)
    assert set(statuses) == {0}, errors
    assert (
        f"run is finished: it ended after 8 of train.steps=12, because the task's {cause}; to go on, st" in outputs[0]
    )
    assert (rows_of(tmp_path), summary_of(tmp_path)) == (before, summary)
    more = ["--run.dir", "new", "--run.resume", "run"]
    outputs, statuses, errors = started(launch, ranks, *words, *more)
    assert set(statuses) == {0}, errors
    assert "step     12/12" in outputs[0]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_evaluation_callback_ends_the_run_at_its_own_step(launch, tmp_path, ranks):
    _, statuses, errors = started(launch, ranks, "--task.args.patience", 7)
    assert set(statuses) == {0}, errors
    summary = summary_of(tmp_path)
    assert (summary["steps"], summary["stopped_by"]) == (8, "completed")
    assert summary["cause"] == 'on_evaluation(run, values) returned "stop" on rank 0 after step 8'
    assert steps_of(tmp_path) == ["step_00000006", "step_00000008"]
    assert [row["step"] for row in rows_of(tmp_path)] == [5, 8]


def test_a_signal_counts_more_than_the_tasks_wish():
    stop = AgreedStop(World())
    stop.ended_by = "the task"
    assert not stop.poll()
    assert stop.poll()
    assert stop.by_task
    stop.requested_by = "SIGTERM"
    assert stop.poll()
    assert not stop.by_task


@pytest.mark.parametrize(
    ("method", "body", "said"),
    [
        ("on_step(self, run, report)", "return 3", "the task's on_step(run, report) returned 3 after step 1; return N"),
        (
            "on_step(self, run, report)",
            "return True",
            "on_step(run, report) returned True after step 1; return None or",
        ),
        (
            "on_evaluation(self, run, values)",
            'return "halt"',
            "on_evaluation(run, values) returned 'halt' after step 2",
        ),
        (
            "on_step(self, run, report)",
            "{}['key']",
            "the task's on_step(run, report) failed after step 1: KeyError: 'key' (odd.py, line 5); fix it",
        ),
        (
            "train_metrics(self, run, report)",
            "return 3",
            "train_metrics(run, report) returned int; return a dict of num",
        ),
        (
            "train_metrics(self, run, report)",
            "return {'lr': 1}",
            "gave lr, but train/lr is the run's own; give it anot",
        ),
        ("train_metrics(self, run, report)", "return {'a': 'b'}", "gave a='b'; give a number or a scalar tensor"),
        (
            "train_metrics(self, run, report)",
            "return {'a': report.norm.expand(3)}",
            "gave a a tensor of shape [3], not",
        ),
    ],
)
def test_a_callback_that_fails_or_returns_something_else_is_refused_as_the_tasks(launch, tmp_path, method, body, said):
    (tmp_path / "odd.py").write_text(f"from tiny import Tiny\n\nclass Odd(Tiny):\n    def {method}:\n        {body}\n")
    done = launch(0, *SMALL, "--task.target", "odd:Odd", "--train.steps", 2, "--metrics.log_every", 1)
    assert done.returncode == 65
    assert "error: " in done.stderr.splitlines()[-1]
    assert said in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


class Measures(Tiny):
    """One number of the host, one of the device, one of sharded parameters."""

    def train_metrics(self, run, report):
        norm = sum(p.detach().square().sum() for p in run.parallel.parameters).sqrt()
        return {"rank": run.world.rank, "loss_per_rank": report.loss_sum, "parameter_norm": norm}


def scalars_of(folder, rank):
    events = EventAccumulator(str(folder / f"run/tensorboard/rank{rank:05d}"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "fsdp")])
def test_the_tasks_own_metrics_are_written_by_every_rank_at_log_steps(launch, tmp_path, ranks, strategy):
    words = ["--task.target", "test_callbacks:Measures", "--parallel.strategy", strategy]
    _, statuses, errors = started(launch, ranks, *words)
    assert set(statuses) == {0}, errors
    norms = []
    for rank in range(ranks):
        scalars = scalars_of(tmp_path, rank)
        assert scalars["train/rank"] == [(5, rank), (10, rank), (12, rank)]
        assert [step for step, _ in scalars["train/loss_per_rank"]] == [5, 10, 12]
        norms.append(scalars["train/parameter_norm"])
        assert norms[-1] == norms[0]
    rows = rows_of(tmp_path)
    assert [row["train/rank"] for row in rows] == [0, 0, 0]
    assert [(row["step"], pytest.approx(row["train/parameter_norm"])) for row in rows] == norms[0]


def test_the_tasks_own_metrics_are_not_waited_for():
    run = make_run(World(), Measures())
    report = take_steps(run, 1)[0]
    run.metrics.record(report)
    with Counter("_local_scalar_dense") as counter:
        run.metrics.begin(run.step, run.schedule, run.scaler, run.data, train_metrics(run, report))
    assert counter.count == 0
    row = run.metrics.read()
    assert row.of_task["train/loss_per_rank"] == report.loss_sum.item()
    take_steps(run, 1)
    assert log(run).of_task == {}, "of that log step alone"


def test_metrics_that_are_not_finite_are_written_as_such():
    class Infinite(Tiny):
        def train_metrics(self, run, report):
            return {"best": math.inf, "mean": torch.tensor(math.nan)}

    run = make_run(World(), Infinite())
    values = train_metrics(run, take_steps(run, 1)[0])
    assert (values["train/best"].item(), values["train/mean"].isnan().item()) == (math.inf, True)


def test_the_metrics_that_the_recipes_show_compare_with_the_runs_own():
    page = (ROOT / "docs/recipes.md").read_text()
    (example,) = re.findall(r"^    def train_metrics.*?^        }\n", page, re.DOTALL | re.MULTILINE)
    shown = {}
    exec(textwrap.dedent(example), shown)
    task = type("Shown", (Tiny,), {"train_metrics": shown["train_metrics"]})()
    run = make_run(World(), task, "--train.max_grad_norm", 1e-3)
    report = take_steps(run, 1)[0]
    values = train_metrics(run, report)
    assert values["train/clipped"] == 1
    assert values["train/loss_of_this_rank"] == report.loss_sum / report.weight


def test_a_task_without_callbacks_has_none():
    run = make_run(World(), Tiny())
    assert train_metrics(run, take_steps(run, 1)[0]) == {}


# Optional methods by name.


class Misspelt(Tiny):
    def on_eval(self, run, values):
        return "stop"

    def train_metric(self, run, report):
        return {}

    def sheduler(self, step):
        return 1.0


class Helpers(Tiny):
    """Helpers of a task, some with names much like an optional method's."""

    def collate(self, samples):
        return self.collated(samples)

    def collated(self, samples):
        return torch.utils.data.default_collate(samples)

    def on_step(self, run, report):
        return self.on_log_step(run)

    def on_log_step(self, run):
        return None

    def tokenize(self, text):
        return text.split()

    def load_rows(self, path):
        return [path]

    def _metric(self):
        return 0


def test_a_method_that_looks_like_a_misspelt_optional_one_is_warned_of(capsys):
    run = make_run(World(), Misspelt())
    capsys.readouterr()
    Callbacks(run, AgreedStop(World()))
    assert capsys.readouterr().err.splitlines() == [
        f"warning: nothing calls the task's method {name}; if it is meant for {near}, rename it"
        for name, near in [("on_eval", "on_evaluation"), ("sheduler", "schedule"), ("train_metric", "train_metrics")]
    ]


def test_helpers_of_a_task_are_not_warned_of():
    assert misspelt_methods(Helpers()) == {}
    for kind in (Tiny, Watched, Measures, CausalLM, Sinusoid, HFCausalLM, HFClassification):
        assert misspelt_methods(kind.__new__(kind)) == {}


def test_every_optional_method_is_described():
    names = re.findall(r"(?:^    |, )(\w+)\(", task.__doc__, re.MULTILINE)
    assert sorted(names) == sorted(OPTIONAL)


class Evaluated(Tiny):
    def on_evaluation(self, run, values):
        pass


def test_an_on_evaluation_that_nothing_calls_is_warned_of(capsys):
    run = make_run(World(), Evaluated(), "--eval.every", "off")
    with AgreedStop(World()) as stop:
        Callbacks(run, stop)
    assert "warning: the task's on_evaluation is never called, because nothing is evaluated" in capsys.readouterr().err
