"""Tasks: how a user's class is found, checked and built; and the two shipped ones."""

import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from dist_amp.config.load import load_config, to_toml
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.step import evaluate
from dist_amp.task import build_split, built_model
from dist_amp.world import World

GPT_124M = Path(__file__).parents[2] / "configs" / "gpt_124m.toml"
SINUSOID = "dist_amp.tasks.sinusoid:Sinusoid"
CAUSAL_LM = "dist_amp.tasks.causal_lm:CausalLM"
METHODS = """
    def build_model(self): ...
    def build_dataset(self, split): ...
    def loss_sum(self, model, batch): ...
    def weight(self, batch): ...
"""


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


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
    config = load_config(["--task.target", target, *map(str, argv)], {})
    return build_task(config)


def refusal(call, *args, status=64):
    """The error message for a wrong task or wrong data: one line."""
    with pytest.raises({64: ConfigError, 65: DataError}[status]) as caught:
        call(*args)
    assert isinstance(caught.value, Failure)
    assert caught.value.exit_code == status
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_says(message, *parts):
    missing = [part for part in parts if str(part) not in message]
    assert not missing, f"{missing} not in: {message}"


# ---- finding a task, and its arguments ----


def test_a_task_is_found_by_module_by_file_and_by_relative_path(tmp_path, monkeypatch):
    assert type(build("tiny:Tiny")).__name__ == "Tiny"
    assert type(build(task_file(tmp_path, name="near.py"))).__name__ == "Mine"
    monkeypatch.chdir(tmp_path)
    assert type(build("near.py:Mine")).__name__ == "Mine"


def test_a_file_beside_the_task_can_be_imported(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("ANSWER = 42")
    head = "from helper_of_mine import ANSWER"
    assert build(task_file(tmp_path, head=head, body="self.answer = ANSWER")).answer == 42


def test_arguments_set_on_the_command_line_reach_the_constructor():
    task = build("tiny:Tiny", "--task.args.samples", 12, "--task.args.uneven", "true")
    assert (task.samples, task.uneven, task.depth) == (12, True, 2)


@pytest.mark.parametrize(
    ("parameter", "words", "value"),
    [
        ("value: str", ["it"], "it"),
        ("value=0.5", ["2"], 2.0),
        ("value=(8, 8)", ["1", "2"], (1, 2)),
        ("value: list[int] = [8, 8]", [], [8, 8]),
        ("value: list[int] = [8, 8]", ["1", "2", "3"], [1, 2, 3]),
        ("value", ["7"], 7),
        ("value", ["0.5"], 0.5),
        ("value", ["seven"], "seven"),
    ],
)
def test_an_argument_has_the_type_of_its_annotation_or_default(tmp_path, parameter, words, value):
    target = task_file(tmp_path, parameter, "self.value = value")
    argv = ["--task.args.value", *words] if words else []
    built = build(target, *argv).value
    assert (built, type(built)) == (value, type(value))


def test_an_argument_called_data_is_the_data_section(tmp_path):
    target = task_file(tmp_path, "data, width: int = 8", "self.data = data")
    assert build(target, "--data.path", "here").data.path == "here"


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
    ("head", "parts"),
    [
        ("raise RuntimeError('out of luck')", ["mine.py:Mine", "RuntimeError", "out of luck"]),
        ("\ndef (", ["mine.py:Mine", "SyntaxError", "mine.py, line 2"]),
        ("raise SystemExit(3)", ["mine.py:Mine", "SystemExit"]),
        ("import not_there_at_all", ["No module named 'not_there_at_all'", "install"]),
        ("import json.not_there", ["No module named 'json.not_there'"]),
    ],
)
def test_a_task_whose_file_cannot_be_imported_is_quoted(tmp_path, head, parts):
    assert_says(refusal(build, task_file(tmp_path, head=head)), *parts)


def test_for_a_file_named_like_another_module_the_error_says_to_rename_it(tmp_path):
    message = refusal(build, task_file(tmp_path, name="queue.py"))
    assert_says(message, tmp_path / "queue.py", "rename")


# ---- arguments that are wrong ----


@pytest.mark.parametrize(
    ("parameters", "body", "words", "parts"),
    [
        ("", "pass", ["--task.args.width", "1"], ["task.args.width", "no arguments"]),
        ("count: int", "pass", [], ["task.args.count is required", "--task.args.count VALUE"]),
        (
            "count: int",
            "pass",
            ["--train.steps", "5", "--task.args.count", "x"],
            ["task.args.count=x on the command line must be a whole number"],
        ),
        (
            "count: int | None = None",
            "pass",
            ["--task.args.count", "x"],
            ["task.args.count=x", "a whole number"],
        ),
        ("a: int = 2", "raise ValueError(f'a={a} must be odd')", [], ["a=2 must be odd"]),
        ("a: 'Missing' = 1", "pass", [], ["Mine", "'Missing'"]),
    ],
)
def test_a_wrong_argument_is_named_with_the_rule(tmp_path, parameters, body, words, parts):
    message = refusal(build, task_file(tmp_path, parameters, body), *words)
    assert_says(message, *parts)
    assert "<class" not in message


# ---- the shipped language model: data ----

SMALL = ("--task.args.context", 16, "--task.args.width", 16, "--task.args.heads", 2)
DOCUMENTS = {chr(33 + n): chr(33 + n) * 100 for n in range(40)}  # each of one byte


def language_model(path, *argv):
    return build(CAUSAL_LM, *SMALL, "--data.path", path, *argv)


def write_text(folder):
    (folder / "texts").mkdir()
    for n, text in enumerate(DOCUMENTS.values()):
        (folder / "texts" / f"{n}.txt").write_text(text)
    return folder / "texts"


def write_jsonl(folder):
    rows = [json.dumps({"text": text, "length": len(text)}) for text in DOCUMENTS.values()]
    (folder / "rows.jsonl").write_text("\n".join(rows) + "\n")
    return folder / "rows.jsonl"


def write_parquet(folder):
    import datasets

    rows = datasets.Dataset.from_dict({"text": list(DOCUMENTS.values())})
    rows.to_parquet(folder / "rows.parquet")
    return folder / "rows.parquet"


def bytes_in(dataset):
    return {chr(token) for row in dataset for token in row["input_ids"].tolist()} - {"\0"}


@pytest.mark.parametrize("write", [write_text, write_jsonl, write_parquet])
def test_local_files_become_samples_and_the_same_documents_are_held_out_every_time(tmp_path, write):
    task = language_model(write(tmp_path), "--data.validation_split", "0.1")
    train, held_out = task.build_dataset("train"), task.build_dataset("validation")
    assert train[0]["input_ids"].shape == held_out[0]["labels"].shape == (17,)
    assert (len(bytes_in(train)), len(bytes_in(held_out))) == (36, 4)
    assert bytes_in(train) | bytes_in(held_out) == set(DOCUMENTS)
    assert bytes_in(task.build_dataset("validation")) == bytes_in(held_out)


def test_documents_are_packed_end_to_end_with_a_zero_after_each(tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "abcdefgh"}\n{"text": "ijklmnopqrstuvw"}\n')
    task = language_model(tmp_path / "two.jsonl", "--data.validation_split", "train")
    assert bytes(task.build_dataset("train")[0]["input_ids"].tolist()) == b"abcdefgh\0ijklmnop"


def test_a_single_document_is_trained_on_and_nothing_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("word " * 100)
    task = language_model(tmp_path / "one.txt")
    assert len(task.build_dataset("train")) == 501 // 17
    assert task.build_dataset("validation") is None


def test_files_named_after_splits_are_those_splits(tmp_path):
    folder = tmp_path / "corpus"  # the cache lies in tmp_path itself
    folder.mkdir()
    for split in ("train", "validation"):
        rows = [f'{{"text": "{split} {split} {split} {n}"}}' for n in range(20)]
        (folder / f"{split}-0.jsonl").write_text("\n".join(rows))
    task = build(CAUSAL_LM, "--data.path", folder, "--task.args.context", "32")
    for split, other in (("train", "validation"), ("validation", "train")):
        rows = [bytes(row["input_ids"].tolist()) for row in task.build_dataset(split)]
        text = b"".join(rows).decode()
        assert split in text
        assert other not in text


def data_refusal(path, *argv):
    return refusal(language_model(path, *argv).build_dataset, "train", status=65)


@pytest.mark.bad_input("missing column")
@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["--data.text_column", "body"], ["data.text_column=body", "text, length"]),
        (["--data.text_column", "length"], ["the column length holds int, not text"]),
        (["--data.split", "trian"], ["data.split=trian", "the dataset has train"]),
        (["--data.validation_split", "trian"], ["data.validation_split=trian", "has train"]),
        (["--data.validation_split", "0.999"], ["data.validation_split=0.999", "40"]),
    ],
)
def test_a_column_or_split_that_does_not_fit_the_data_is_refused(tmp_path, words, parts):
    assert_says(data_refusal(write_jsonl(tmp_path), *words), *parts)


def test_a_path_without_a_file_and_files_of_two_formats_are_refused(tmp_path):
    message = data_refusal(tmp_path / "missing" / "*.txt")
    parts = [f"data.path={tmp_path}/missing/*.txt", "no file", "a file, a folder or a glob"]
    assert_says(message, *parts)
    write_text(tmp_path)
    write_jsonl(tmp_path)
    assert_says(data_refusal(tmp_path), f"data.path={tmp_path}", "one format", ".jsonl", ".parquet")


@pytest.mark.parametrize("text", ['{"text": "fine"}\n{"text": oops}\n', ""])
def test_a_malformed_or_empty_file_is_named(tmp_path, text):
    (tmp_path / "broken.jsonl").write_text(text)
    message = data_refusal(tmp_path / "*.jsonl")
    assert_says(message, f"data.path={tmp_path}/*.jsonl", "could not be loaded", "broken.jsonl")


# ---- the shipped language model: the network ----


def test_a_width_that_the_heads_do_not_divide_is_rejected():
    assert_says(refusal(build, CAUSAL_LM, "--task.args.heads", "3"), "width=128", "2 x heads=3")


def test_gpt_124m_has_the_parameters_that_its_file_names():
    config = load_config(["--config", str(GPT_124M)], {})
    with torch.device("meta"):
        model = build_task(config).build_model()
    parameters = sum(p.numel() for p in model.parameters())
    assert 120e6 <= parameters <= 128e6
    assert f"{parameters:,} parameters" in GPT_124M.read_text()


def test_a_sample_continues_the_prompt_and_is_the_same_every_time():
    task = language_model("off", "--task.args.sample_bytes", 8, "--task.args.prompt", "from the ")
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        first, second = task.sample(model), task.sample(model)
    assert first == second
    assert first.startswith("from the ")


def test_evaluation_reports_bits_per_byte():
    task = language_model("off")
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = task.collate([{"input_ids": row, "labels": row} for row in tokens])
    sums = task.metrics(task.build_model(), batch)
    assert task.weight(batch) == 32
    assert sums["bits_per_byte"].item() == pytest.approx(sums["loss"].item() / math.log(2))
    # an untrained model is close to uniform
    assert sums["bits_per_byte"].item() / 32 == pytest.approx(8, abs=0.5)


# ---- the shipped picture ----


def test_the_sinusoid_has_134145_parameters_and_exactly_four_levels():
    task = build(SINUSOID)
    assert sum(p.numel() for p in task.build_model().parameters()) == 134_145
    assert torch.equal(task.picture["levels"].unique(), torch.arange(4) / 3)


def test_crops_to_train_on_are_cut_from_the_picture_and_those_to_validate_on_cover_it_once():
    task = build(SINUSOID, "--task.args.size", 48, "--task.args.crop", 16, "--task.args.crops", 50)
    dataset = task.build_dataset("train")
    whole, picture = task.picture.values()
    assert len(dataset) == 50
    for sample in dataset:
        left, top = ((sample["coordinates"][:, 0, 0] + 1) / 2 * 47).round().int().tolist()
        assert torch.equal(sample["coordinates"], whole[:, top : top + 16, left : left + 16])
        assert torch.equal(sample["levels"], picture[:, top : top + 16, left : left + 16])
    crops = [sample["coordinates"].flatten(1).T.tolist() for sample in task.build_dataset("valid")]
    pixels = [tuple(pixel) for crop in crops for pixel in crop]
    assert len(pixels) == len(set(pixels)) == 48 * 48


@pytest.mark.parametrize(
    ("size", "crop", "parts"),
    [
        (32, 64, ["size=32", "crop=64"]),
        (40, 16, ["size=40", "crop=16"]),
        (1, 1, ["size=1", "at least 2"]),
    ],
)
def test_a_picture_that_crops_can_not_tile_is_rejected(size, crop, parts):
    message = refusal(build, SINUSOID, "--task.args.size", size, "--task.args.crop", crop)
    assert_says(message, *parts)


def test_the_sample_shows_the_target_next_to_the_models_drawing():
    task = build(SINUSOID, "--task.args.size", 32, "--task.args.crop", 16, "--task.args.width", 8)
    with torch.no_grad():
        image = task.sample(task.build_model())
    assert image.shape == (1, 32, 64)
    assert 0 <= image.min() <= image.max() <= 1
    assert torch.equal(image[:, :, :32], task.picture["levels"])


# ---- what a task's methods return ----


class Returns(Tiny):
    """Its methods return what the test sets: Returns(weight=-2)."""

    def __init__(self, **returned):
        super().__init__()
        for name, value in returned.items():
            setattr(self, name, lambda *_, value=value: value)


class ChangingMetrics(Tiny):
    """Its metrics() returns what `answers` has, one after the other."""

    def __init__(self, *answers):
        super().__init__()
        self.answers = list(answers)

    def metrics(self, model, batch):
        return self.answers.pop(0)


@pytest.mark.bad_input(
    "`metrics(model, batch)` that returns no dict, or other names for another batch"
)
@pytest.mark.bad_input("a metric that is no sum or pair, or has a negative weight")
@pytest.mark.bad_input("a metric that is a list or a text")
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([None], "returned NoneType; return a dict of sums, or of pairs (sum, weight)"),
        ([{"hits": (1.0, 2.0, 3.0)}], "gave hits 3 values; return a sum, or a pair (sum, weight)"),
        ([{"hits": (1.0, -2.0)}], "gave hits the weight -2, not what counts in the batch"),
        ([{"hits": [1, 2]}], "gave hits a list, not a number or a scalar tensor"),
        ([{"hits": 1.0}, {}], "returned nothing for one batch and hits, loss for another"),
        (
            [{"hits": 1.0}, {"misses": 1.0}],
            "returned misses for one batch and hits, loss for another",
        ),
    ],
)
def test_metrics_that_are_no_dict_or_change_their_names_are_an_error(answers, said):
    run = make_run(World(), ChangingMetrics(*answers), "--eval.every", 1)
    assert f"the task's metrics() {said}" in refusal(evaluate, run, status=65)


class Counted(Tiny):
    """`hits` per sample, whatever the samples count for, and `sum` per unit of weight."""

    def metrics(self, model, batch):
        return {"hits": ((batch["y"] > 0).sum(), len(batch["y"])), "sum": batch["y"].sum()}


def evaluated(world, task, words):
    run = make_run(world, task, "--eval.every", 1, "--use_amp", "false", *words)
    return evaluate(run), run.task.build_dataset("validation")[:]


@pytest.mark.parametrize("samples", [32, 35])
def test_a_metric_with_its_own_weight_is_divided_by_that_one_alone(samples):
    task, words = Counted(uneven=True, samples=samples), ["--train.micro_batch_size", 4]
    for values, rows in on_ranks(2, evaluated, task, words):
        assert list(values) == ["loss", "hits", "sum"]
        assert values["hits"] == (rows["y"] > 0).sum().item() / samples  # whole numbers: exact
        mean = (rows["y"].sum() / rows["counts"].sum()).item()
        assert values["sum"] == pytest.approx(mean, rel=1e-5)  # float32 sums in another order


class LossPerSample(Tiny):
    def metrics(self, model, batch):
        return {"loss": (2.0 * len(batch["y"]), torch.tensor(len(batch["y"]))), "none": (0.0, 0)}


def test_a_metric_of_weight_zero_is_left_out_and_the_loss_may_have_its_own_weight():
    values, _ = evaluated(World(), LossPerSample(uneven=True), [])
    assert values == {"loss": 2.0}


class MetricsOfRank(Tiny):
    """Each rank's metrics have their names in another order; rank 1 may have one more."""

    def __init__(self, *names):
        super().__init__()
        self.names = names

    def metrics(self, model, batch):
        rank = torch.distributed.get_rank()
        names = self.names[:2] if rank == 0 else self.names[::-1]
        return {name: float(len(name)) * len(batch["y"]) for name in names}


def evaluated_by_rank(world, *names):
    try:
        return evaluate(make_run(world, MetricsOfRank(*names), "--eval.every", 1))
    except DataError as error:
        return str(error)


@pytest.mark.bad_input("metrics that have other names on another rank")
def test_metrics_may_differ_in_order_between_ranks_but_not_in_names():
    for values in on_ranks(2, evaluated_by_rank, "hits", "misses"):
        assert (values["hits"], values["misses"]) == (4.0, 6.0)
    said = (
        "returned loss, hits, misses on rank 0 and loss, b, hits, misses on rank 1; "
        "return the same names on every rank"
    )
    assert all(said in text for text in on_ranks(2, evaluated_by_rank, "hits", "misses", "b"))


@pytest.mark.bad_input(
    "a `build_model` that returns no module, or a model without anything to train"
)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "build_model returned NoneType; return the model, an nn.Module"),
        ([torch.nn.Linear(8, 1)], "build_model returned list; return the model, an nn.Module"),
        (torch.nn.Linear(8, 1).requires_grad_(False), "none of the 2 parameters of the task's"),
        (torch.nn.ReLU(), "none of the 0 parameters of the task's model is trained; build_model"),
    ],
)
def test_a_model_that_is_none_or_has_nothing_to_train_is_refused(model, said):
    assert said in refusal(make_run, World(), Returns(build_model=model), status=65)


@pytest.mark.bad_input("a `weight(batch)` that is negative or no number")
@pytest.mark.parametrize(
    ("weight", "said"), [(-2, "-2"), (-0.5, "-0.5"), (None, "a NoneType"), ("8", "a str")]
)
def test_a_weight_that_is_negative_or_no_number_is_refused(weight, said):
    run = make_run(World(), Returns(weight=weight), "--eval.every", 1)
    message = (
        f"weight(batch) returned {said}, not what counts in the batch: a number or a scalar "
        "tensor, at least 0"
    )
    assert message in refusal(take_steps, run, 1, status=65)
    assert message in refusal(evaluate, run, status=65)


@pytest.mark.bad_input("a model with trained complex parameters")
@pytest.mark.parametrize("trained", [True, False])
def test_only_trained_complex_parameters_are_refused(trained):
    model = Tiny().build_model()
    model[0].phase = torch.nn.Parameter(torch.zeros(3, dtype=torch.complex64), trained)
    task = Returns(build_model=model)
    if trained:
        said = "the parameter 0.phase of the task's model is torch.complex64, and only real"
        assert said in refusal(built_model, task, status=65)
    else:
        built_model(task)


class FillsACache(Tiny):
    def __init__(self, folder, rank):
        super().__init__()
        self.cache, self.rank = folder / "cache", rank

    def build_dataset(self, split):
        if self.rank == 0:
            time.sleep(0.3)
            self.cache.touch()
        assert self.cache.exists(), "the node's first rank has not filled it yet"
        return super().build_dataset(split)


def build_in_turn(world, folder):
    world = replace(world, local_rank=world.rank)
    return len(build_split(FillsACache(folder, world.rank), "train", world))


def test_the_other_ranks_of_a_node_build_their_datasets_after_its_first(tmp_path):
    assert on_ranks(2, build_in_turn, tmp_path) == [64, 64]
