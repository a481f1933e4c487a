"""Tasks: how a user's class is found, checked and built, and what its methods may return."""

import sys
import time
from dataclasses import replace

import pytest
import torch
from messages import message_of
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps, variant
from torch import nn

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.config.text import to_toml
from dist_amp.errors import DataError
from dist_amp.step import evaluate
from dist_amp.task import build_split
from dist_amp.world import World

METHODS = """
    def build_model(self): ...
    def build_dataset(self, split): ...
    def loss_sum(self, model, batch): ...
    def weight(self, batch): ...
"""


@pytest.fixture(autouse=True)
def clean_imports(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


def task_file(folder, parameters="", body="pass", head="", name="mine.py"):
    """The target of a file with a task called Mine, whose constructor does `body`."""
    constructor = f"    def __init__(self, {parameters}):\n        {body}\n"
    (folder / name).write_text(f"{head}\n\nclass Mine:\n{constructor}{METHODS}")
    return f"{folder / name}:Mine"


def build(target, *argv):
    return build_task(load_config(["--task.target", target, *map(str, argv)], {}))


def test_a_task_is_found_by_module_by_file_and_by_relative_path(tmp_path, monkeypatch):
    task = build("tiny:Tiny", "--task.args.samples", 12, "--task.args.uneven", "true")
    assert (task.samples, task.uneven, task.depth) == (12, True, 2)
    (tmp_path / "helper_of_mine.py").write_text("ANSWER = 42")
    head = "from helper_of_mine import ANSWER"  # a file beside it
    target = task_file(tmp_path, head=head, body="self.answer = ANSWER", name="near.py")
    assert build(target).answer == 42
    monkeypatch.chdir(tmp_path)
    assert type(build("near.py:Mine")).__name__ == "Mine"


@pytest.mark.parametrize(
    ("parameter", "words", "value"),
    [
        ("value: str", "it", "it"),
        ("value=0.5", "2", 2.0),
        ("value=(8, 8)", "1 2", (1, 2)),
        ("value: list[int] = [8, 8]", "1 2 3", [1, 2, 3]),
        ("value", "7", 7),
        ("value", "seven", "seven"),
    ],
)
def test_an_argument_has_the_type_of_its_annotation_or_default_and_data_is_that_section(
    tmp_path, parameter, words, value
):
    target = task_file(tmp_path, f"data, {parameter}", "self.data, self.value = data, value")
    task = build(target, "--task.args.value", *words.split(), "--data.path", "here")
    assert (task.value, type(task.value)) == (value, type(value))
    assert task.data.path == "here"


def test_an_argument_that_is_none_reads_back_from_toml(tmp_path):
    config = load_config(["--task.target", task_file(tmp_path, "name: str | None = None")], {})
    (tmp_path / "written.toml").write_text(to_toml(config))
    again = load_config(["--config", str(tmp_path / "written.toml")], {})
    assert again == config


def test_a_dataclass_is_a_task_too(tmp_path):
    head = "from dataclasses import dataclass, field"
    fields = "    width: int = 8\n    layers: list[int] = field(default_factory=lambda: [1])\n"
    (tmp_path / "mine.py").write_text(f"{head}\n\n@dataclass\nclass Mine:\n{fields}{METHODS}")
    task = build(f"{tmp_path}/mine.py:Mine", "--task.args.width", "4")
    assert (task.width, task.layers) == (4, [1])


@pytest.mark.parametrize(
    ("wrong", "words", "said"),
    [
        ({"head": "raise RuntimeError('out of luck')"}, "", "RuntimeError: out of luck"),
        ({"head": "\ndef ("}, "", "mine.py, line 2"),
        ({"head": "raise SystemExit(3)"}, "", "SystemExit"),
        ({"head": "import not_there_at_all"}, "", "No module named 'not_there_at_all'"),
        ({}, "--task.args.width 1", "no arguments"),
        ({"parameters": "count: int"}, "", "task.args.count is required and not set; add --task."),
        ({"parameters": "a: int"}, "--task.args.a x", "task.args.a=x on the command line must be "),
        ({"parameters": "a: int | None = None"}, "--task.args.a x", "a valid integer"),
        ({"parameters": "a: 'Missing' = 1"}, "", "'Missing'"),
        ({"body": "raise ValueError('a=2 must be odd')"}, "", "a=2 must be odd"),
        ({"name": "queue.py"}, "", "another module has the name"),
    ],
)
def test_a_task_that_can_not_be_built_is_named_with_the_cause(tmp_path, wrong, words, said):
    message = message_of(64, build, task_file(tmp_path, **wrong), *words.split())
    assert said in message
    assert "<class" not in message


NO_WEIGHT = "not a number or a scalar tensor that is at least 0"


@pytest.mark.bad_input("`metrics(model, batch)` that returns other names for another batch")
@pytest.mark.bad_input("a metric that is no number, or has a negative weight")
@pytest.mark.bad_input("a `weight(batch)` that is negative or no number")
@pytest.mark.bad_input(
    "a `build_model` that returns no module, or a model without anything to train"
)
@pytest.mark.parametrize(
    ("method", "answers", "said"),
    [
        ("metrics", [{"hits": (1.0, -2.0)}], "metrics()['hits'] has the weight -2, not a number "),
        ("metrics", [{"hits": [1, 2]}], "()['hits'] is a list, not a number or a scalar tensor"),
        ("metrics", [{"hits": 1.0}, {}], "same names for every batch on every rank; batches by "),
        ("weight", [-0.5], f"weight(batch) returned -0.5, {NO_WEIGHT}"),
        ("weight", [None], f"weight(batch) returned a NoneType, {NO_WEIGHT}"),
        ("build_model", [None], "build_model returned NoneType; return the model, an nn.Module"),
        ("build_model", [nn.ReLU()], "the task's model is trained; build_model must leave"),
    ],
)
def test_what_a_method_may_not_return_is_refused(method, answers, said):
    def use(call, *args):
        left = iter(answers)
        task = variant(**{method: lambda *_: next(left, answers[-1])})
        call(make_run(World(), task, "--eval.every", 1), *args)

    assert said in message_of(65, use, evaluate)
    if method != "metrics":
        assert said in message_of(65, use, take_steps, 1)


class Counted(Tiny):
    """`hits` per sample, whatever the samples count for, and `sum` per unit of weight."""

    def metrics(self, model, batch):
        assert isinstance(model, nn.Sequential), "without DDP's wrapper"
        hits = ((batch["y"] > 0).sum(), len(batch["y"]))
        return {"hits": hits, "sum": batch["y"].sum(), "none": (0.0, 0)}


def evaluated(world, task):
    words = ["--eval.every", 1, "--use_amp", "false", "--train.micro_batch_size", 4]
    try:
        return evaluate(make_run(world, task, *words))
    except DataError as error:
        return str(error)


def test_metrics_of_the_unwrapped_model_are_divided_by_their_own_weight_if_they_have_one():
    samples = 35
    task = Counted(uneven=True, samples=samples)
    rows = task.build_dataset("validation")[:]
    for values in on_ranks(2, evaluated, task):
        assert list(values) == ["loss", "hits", "sum"]
        assert values["hits"] == (rows["y"] > 0).sum().item() / samples  # whole numbers: exact
        mean = (rows["y"].sum() / rows["counts"].sum()).item()
        assert values["sum"] == pytest.approx(mean, rel=1e-5)  # float32 sums in another order


class MetricsOfRank(Tiny):
    """Each rank's metrics have their names in another order; rank 1 may have one more."""

    def __init__(self, *names):
        super().__init__(uneven=True)
        self.names = names

    def metrics(self, model, batch):
        rank = torch.distributed.get_rank()
        names = self.names[:2] if rank == 0 else self.names[::-1]
        return {name: (float(len(name)) * len(batch["y"]), len(batch["y"])) for name in names}


@pytest.mark.bad_input("metrics that have other names on another rank")
def test_metrics_may_differ_in_order_between_ranks_but_not_in_names_and_may_have_the_loss():
    for values in on_ranks(2, evaluated, MetricsOfRank("loss", "misses")):
        assert values == {"loss": 4.0, "misses": 6.0}
    said = "{'loss': 8, 'misses': 8} on rank 0 and {'loss': 8, 'b': 8, 'misses': 8} on rank 1"
    for text in on_ranks(2, evaluated, MetricsOfRank("loss", "misses", "b")):
        assert said in text


def build_in_turn(world, folder):
    def build_dataset(split):
        if world.is_main:
            time.sleep(0.3)
            (folder / "cache").touch()
        assert (folder / "cache").exists(), "the node's first rank has not filled it yet"
        return Tiny().build_dataset(split)

    world = replace(world, local_rank=world.rank)
    return len(build_split(variant(build_dataset=build_dataset), "train", world))


def test_the_other_ranks_of_a_node_build_their_datasets_after_its_first(tmp_path):
    assert on_ranks(2, build_in_turn, tmp_path) == [64, 64]
