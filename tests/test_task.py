"""Tasks: how a user's class is found, checked and built; and the two shipped ones."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from ranks import on_ranks
from tiny import Tiny, make_run, take_steps

from dist_amp.config.load import load_config, to_toml
from dist_amp.config.parse import flat_values
from dist_amp.config.task_class import build_task
from dist_amp.errors import ConfigError, DataError, Failure
from dist_amp.step import evaluate
from dist_amp.task import built_model
from dist_amp.tasks.causal_lm import GPT, rotary_table, rotate
from dist_amp.world import World

GPT_124M = Path(__file__).parent.parent / "configs" / "gpt_124m.toml"
SINUSOID = "dist_amp.tasks.sinusoid:Sinusoid"
METHODS = """
    def build_model(self): ...
    def build_dataset(self, split): ...
    def loss_sum(self, model, batch): ...
    def weight(self, batch): ...
"""


@pytest.fixture(autouse=True)
def imported_modules_are_removed_after_each_test(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture(autouse=True)
def datasets_are_cached_in_the_tests_folder(monkeypatch, tmp_path):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def task_file(folder, parameters="", body="pass", head="", name="mine.py"):
    """A file with a task called Mine, whose constructor takes `parameters` and does `body`; returns
    its target.
    """
    constructor = f"    def __init__(self, {parameters}):\n        {body}\n"
    (folder / name).write_text(f"{head}\n\nclass Mine:\n{constructor}{METHODS}")
    return f"{folder / name}:Mine"


def build(target, *argv):
    config = load_config(["--task.target", target, *map(str, argv)], {})
    return build_task(config.task, config.data)


def refusal(call, *args, status=64):
    """The error message for a wrong task or wrong data: one line."""
    with pytest.raises(Failure) as caught:
        call(*args)
    assert isinstance(caught.value, {64: ConfigError, 65: DataError}[status])
    assert caught.value.exit_code == status
    assert "\n" not in str(caught.value)
    return str(caught.value)


def assert_says(message, *parts):
    missing = [part for part in parts if str(part) not in message]
    assert not missing, f"{missing} not in: {message}"


# Finding a task, and its arguments.


def test_a_task_is_found_by_module_and_class():
    assert type(build("tiny:Tiny")).__name__ == "Tiny"


def test_a_task_is_found_by_file_and_class(tmp_path):
    assert type(build(task_file(tmp_path))).__name__ == "Mine"


def test_a_task_is_found_by_a_relative_path(tmp_path, monkeypatch):
    task_file(tmp_path, name="near.py")
    monkeypatch.chdir(tmp_path)
    assert type(build("near.py:Mine")).__name__ == "Mine"


def test_a_file_beside_the_task_can_be_imported(tmp_path):
    (tmp_path / "helper_of_mine.py").write_text("ANSWER = 42")
    target = task_file(
        tmp_path, head="from helper_of_mine import ANSWER", body="self.answer = ANSWER"
    )
    assert build(target).answer == 42


def test_arguments_set_on_the_command_line_reach_the_constructor():
    task = build("tiny:Tiny", "--task.args.samples", 12, "--task.args.uneven", "true")
    assert (task.samples, task.uneven, task.depth) == (12, True, 2)


def test_a_required_argument_may_be_set(tmp_path):
    assert (
        build(task_file(tmp_path, "name: str", "self.name = name"), "--task.args.name", "it").name
        == "it"
    )


def test_an_argument_without_annotation_takes_the_type_of_its_default(tmp_path):
    target = task_file(tmp_path, "rate=0.5, layers=(8, 8)", "self.all = (rate, layers)")
    assert build(target, "--task.args.rate", "2", "--task.args.layers", "1", "2").all == (
        2.0,
        (1, 2),
    )


def test_an_argument_without_annotation_and_default_is_a_number_if_it_can_be_read_as_one(tmp_path):
    target = task_file(tmp_path, "name", "self.name = name")
    for text, value in (("7", 7), ("0.5", 0.5), ("seven", "seven")):
        assert build(target, "--task.args.name", text).name == value


def test_an_argument_called_data_is_the_data_section(tmp_path):
    target = task_file(tmp_path, "data, width: int = 8", "self.data = data")
    assert build(target, "--data.path", "here").data.path == "here"


def test_an_argument_may_be_a_list(tmp_path):
    target = task_file(tmp_path, "layers: list[int] = [8, 8]", "self.layers = layers")
    assert build(target).layers == [8, 8]
    assert build(target, "--task.args.layers", "1", "2", "3").layers == [1, 2, 3]


def test_an_argument_that_is_none_reads_back_from_toml(tmp_path):
    target = task_file(tmp_path, "name: str | None = None", "self.name = name")
    config = load_config(["--task.target", target], {})
    (tmp_path / "written.toml").write_text(to_toml(config))
    assert dict(flat_values(load_config(["--config", str(tmp_path / "written.toml")], {}))) == dict(
        flat_values(config)
    )


def test_a_dataclass_is_a_task_too(tmp_path):
    head = "from dataclasses import dataclass, field"
    fields = "    width: int = 8\n    layers: list[int] = field(default_factory=lambda: [1])\n"
    (tmp_path / "mine.py").write_text(f"{head}\n\n@dataclass\nclass Mine:\n{fields}{METHODS}")
    task = build(f"{tmp_path}/mine.py:Mine", "--task.args.width", "4")
    assert (task.width, task.layers) == (4, [1])


# Tasks that can't be found.


@pytest.mark.parametrize("target", ["tiny", "tiny:", ":Tiny", ""])
def test_a_target_without_module_or_class_shows_the_form(target):
    assert_says(
        refusal(build, target), f"task.target={target}", "module:Class or path/to/file.py:Class"
    )


@pytest.mark.parametrize(
    "module", ["missing", "missing.part", "dist_amp.missing", "dist_amp.missing.part"]
)
def test_a_missing_module_is_named(module):
    assert_says(
        refusal(build, f"{module}:Mine"),
        f"task.target={module}:Mine",
        f"there is no module {module}",
    )


def test_a_missing_file_is_named(tmp_path):
    assert_says(
        refusal(build, f"{tmp_path}/missing.py:Mine"), "there is no", f"{tmp_path}/missing.py"
    )


def test_for_a_missing_class_the_nearest_is_suggested():
    assert_says(
        refusal(build, "tiny:Tinny"),
        "task.target=tiny:Tinny",
        "no class Tinny",
        "did you mean Tiny?",
    )


def test_a_function_is_not_a_class_and_only_the_modules_own_classes_are_suggested():
    message = refusal(build, "dist_amp.tasks.causal_lm:rotate")
    assert_says(message, "there is no class rotate")
    assert "Annotated" not in message


@pytest.mark.bad_input("task target not importable, no such class, a method missing")
def test_a_class_that_lacks_a_method_is_shown_its_signature():
    message = refusal(build, "tiny:LacksWeight")
    assert_says(
        message, "tiny:LacksWeight", "lacks the method weight", "def weight(self, batch) -> number"
    )


def test_a_module_that_raises_is_quoted(tmp_path):
    message = refusal(build, task_file(tmp_path, head="raise RuntimeError('out of luck')"))
    assert_says(message, "mine.py:Mine", "RuntimeError", "out of luck")


def test_a_module_with_a_mistake_in_it_names_file_and_line(tmp_path):
    assert_says(
        refusal(build, task_file(tmp_path, head="\ndef (")),
        "mine.py:Mine",
        "SyntaxError",
        "mine.py, line 2",
    )


def test_a_module_that_exits_is_named(tmp_path):
    assert_says(
        refusal(build, task_file(tmp_path, head="raise SystemExit(3)")),
        "mine.py:Mine",
        "SystemExit",
    )


@pytest.mark.parametrize("what", ["not_there_at_all", "json.not_there"])
def test_a_missing_module_that_the_tasks_module_imports_is_named(tmp_path, what):
    message = refusal(build, task_file(tmp_path, head=f"import {what}"))
    assert_says(message, "mine.py:Mine", f"it imports {what}, which is missing", "install")


def test_for_a_file_named_like_another_module_the_error_says_to_rename_it(tmp_path):
    assert_says(
        refusal(build, task_file(tmp_path, name="queue.py")), tmp_path / "queue.py", "rename"
    )


# Arguments that are wrong.


def test_for_a_task_without_arguments_the_error_says_so(tmp_path):
    assert_says(
        refusal(build, task_file(tmp_path), "--task.args.width", "1"),
        "task.args.width",
        "no arguments",
    )


def test_a_missing_argument_is_named(tmp_path):
    message = refusal(build, task_file(tmp_path, "count: int"))
    assert_says(message, "task.args.count is required", "--task.args.count VALUE")


def test_a_wrong_value_of_a_required_argument_is_the_one_that_is_named(tmp_path):
    message = refusal(
        build, task_file(tmp_path, "count: int"), "--train.steps", "5", "--task.args.count", "x"
    )
    assert message == "task.args.count=x on the command line is not a whole number"


def test_an_optional_argument_says_in_words_what_it_takes(tmp_path):
    message = refusal(
        build, task_file(tmp_path, "count: int | None = None"), "--task.args.count", "x"
    )
    assert_says(message, "task.args.count=x", "a whole number")
    assert "<class" not in message


def test_a_constructor_that_raises_value_error_is_quoted(tmp_path):
    target = task_file(tmp_path, "a: int = 2", "raise ValueError(f'a={a} must be odd')")
    assert_says(refusal(build, target), target, "task.args", "a=2 must be odd")


def test_an_unknown_name_in_an_annotation_is_named(tmp_path):
    assert_says(refusal(build, task_file(tmp_path, "a: 'Missing' = 1")), "Mine", "'Missing'")


# The shipped language model: data.

SMALL = ("--task.args.context", 16, "--task.args.width", 16, "--task.args.heads", 2)
DOCUMENTS = {chr(33 + n): chr(33 + n) * 100 for n in range(40)}  # each of one byte of its own


def language_model(path, *argv):
    return build("dist_amp.tasks.causal_lm:CausalLM", *SMALL, "--data.path", path, *argv)


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

    datasets.Dataset.from_dict({"text": list(DOCUMENTS.values())}).to_parquet(
        folder / "rows.parquet"
    )
    return folder / "rows.parquet"


def bytes_in(dataset):
    return {chr(token) for row in dataset for token in row["input_ids"].tolist()} - {"\0"}


@pytest.mark.parametrize("write", [write_text, write_jsonl, write_parquet])
def test_local_files_become_samples_of_context_plus_one_with_some_documents_held_out(
    tmp_path, write
):
    task = language_model(write(tmp_path), "--data.validation_split", "0.1")
    train, held_out = task.build_dataset("train"), task.build_dataset("validation")
    assert train[0]["input_ids"].shape == held_out[0]["labels"].shape == (17,)
    assert (len(bytes_in(train)), len(bytes_in(held_out))) == (36, 4)
    assert bytes_in(train) | bytes_in(held_out) == set(DOCUMENTS)


def test_documents_are_packed_end_to_end_with_a_zero_after_each(tmp_path):
    (tmp_path / "two.jsonl").write_text('{"text": "abcdefgh"}\n{"text": "ijklmnopqrstuvw"}\n')
    task = language_model(tmp_path / "two.jsonl", "--data.validation_split", "train")
    assert bytes(task.build_dataset("train")[0]["input_ids"].tolist()) == b"abcdefgh\0ijklmnop"


def test_the_same_documents_are_held_out_every_time(tmp_path):
    path = write_jsonl(tmp_path)
    assert (
        len(
            {
                frozenset(bytes_in(language_model(path).build_dataset("validation")))
                for _ in range(2)
            }
        )
        == 1
    )


def test_a_single_document_is_trained_on_and_nothing_is_held_out(tmp_path):
    (tmp_path / "one.txt").write_text("word " * 100)
    task = language_model(tmp_path / "one.txt")
    assert len(task.build_dataset("train")) == 501 // 17
    assert task.build_dataset("validation") is None


def data_refusal(path, *argv):
    return refusal(language_model(path, *argv).build_dataset, "train", status=65)


@pytest.mark.bad_input("missing column")
def test_a_missing_column_lists_the_existing_ones(tmp_path):
    message = data_refusal(write_jsonl(tmp_path), "--data.text_column", "body")
    assert_says(message, "data.text_column=body", "text, length")


def test_a_column_that_is_not_text_is_rejected(tmp_path):
    message = data_refusal(write_jsonl(tmp_path), "--data.text_column", "length")
    assert_says(message, "the column length holds int, not text", "name a column of text")


def test_a_path_without_a_file_is_named(tmp_path):
    message = data_refusal(tmp_path / "missing" / "*.txt")
    assert_says(
        message, f"data.path={tmp_path}/missing/*.txt", "no file", "a file, a folder or a glob"
    )


def test_files_of_two_formats_are_rejected(tmp_path):
    write_text(tmp_path)
    write_jsonl(tmp_path)
    assert_says(data_refusal(tmp_path), f"data.path={tmp_path}", "one format", ".jsonl", ".parquet")


@pytest.mark.parametrize("key", ["data.split", "data.validation_split"])
def test_for_an_unknown_split_the_existing_ones_are_listed(tmp_path, key):
    message = data_refusal(write_jsonl(tmp_path), f"--{key}", "trian")
    assert_says(message, f"{key}=trian", "the dataset has train")


@pytest.mark.parametrize(
    "text", ['{"text": "fine"}\n{"text": oops}\n', ""], ids=["malformed", "empty"]
)
def test_a_broken_file_is_named(tmp_path, text):
    (tmp_path / "broken.jsonl").write_text(text)
    message = data_refusal(tmp_path / "*.jsonl")
    assert_says(message, f"data.path={tmp_path}/*.jsonl", "could not be loaded", "broken.jsonl")


def test_a_held_out_part_that_leaves_nothing_to_train_on_is_rejected(tmp_path):
    message = data_refusal(write_jsonl(tmp_path), "--data.validation_split", "0.999")
    assert_says(message, "data.validation_split=0.999", "40")


def test_a_width_that_the_heads_do_not_divide_is_rejected():
    message = refusal(build, "dist_amp.tasks.causal_lm:CausalLM", "--task.args.heads", "3")
    assert_says(message, "width=128", "2 x heads=3")


# The shipped language model: the network.


def test_gpt_124m_has_the_parameters_that_its_file_names():
    config = load_config(["--config", str(GPT_124M)], {})
    with torch.device("meta"):
        model = build_task(config.task, config.data).build_model()
    parameters = sum(p.numel() for p in model.parameters())
    assert 120e6 <= parameters <= 128e6
    assert f"{parameters:,} parameters" in GPT_124M.read_text()


def test_a_prediction_does_not_depend_on_later_bytes():
    torch.manual_seed(0)
    model = GPT(vocabulary=256, context=16, width=32, layers=2, heads=2, tied=False)
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 9] = (tokens[:, 9] + 1) % 256
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_tied_weights_are_one_parameter():
    shape = {"vocabulary": 256, "context": 16, "width": 32, "layers": 1, "heads": 2}
    tied, untied = GPT(**shape, tied=True), GPT(**shape, tied=False)
    assert tied.head.weight is tied.embedding.weight
    assert (
        sum(p.numel() for p in untied.parameters()) - sum(p.numel() for p in tied.parameters())
        == 256 * 32
    )


def test_rotary_positions_depend_on_the_distance_alone():
    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 32, dtype=torch.float64)
    cos, sin = rotary_table(64, 32)
    scores = rotate(query.expand(64, 32), cos, sin) @ rotate(key.expand(64, 32), cos, sin).T
    # The table is float32: an angle of 63 rad is off by up to 4e-6, times 32 products of numbers of
    # size 1.
    for distance in range(-63, 64):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=0, atol=1e-4)
    assert scores[0].unique().numel() == 64


def test_rotary_positions_keep_length_and_dtype():
    cos, sin = rotary_table(8, 16)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1)
    )  # torch's tolerance for float32
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


def test_a_sample_continues_the_prompt_and_is_the_same_every_time(tmp_path):
    task = language_model("off", "--task.args.sample_bytes", 8, "--task.args.prompt", "from the ")
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        texts = {task.sample(model) for _ in range(2)}
    assert len(texts) == 1
    assert texts.pop().startswith("from the ")


def test_evaluation_reports_bits_per_byte():
    task = language_model("off")
    tokens = torch.randint(256, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = task.collate([{"input_ids": row, "labels": row} for row in tokens])
    sums = task.metrics(task.build_model(), batch)
    assert task.weight(batch) == 32
    assert sums["bits_per_byte"].item() == pytest.approx(sums["loss"].item() / math.log(2))
    assert sums["bits_per_byte"].item() / 32 == pytest.approx(
        8, abs=0.5
    )  # an untrained model is close to uniform


# The shipped picture.


def test_the_sinusoid_net_has_exactly_134145_parameters():
    assert sum(p.numel() for p in build(SINUSOID).build_model().parameters()) == 134_145


def test_the_picture_has_exactly_its_four_levels():
    _, levels = build(SINUSOID).picture(0, 0, 512)
    assert torch.equal(levels.unique(), torch.arange(4) / 3)


def test_crops_to_train_on_are_cut_from_within_the_picture():
    task = build(SINUSOID, "--task.args.size", 48, "--task.args.crop", 16, "--task.args.crops", 50)
    dataset = task.build_dataset("train")
    whole, picture = task.picture(0, 0, 48)
    assert len(dataset) == 50
    for sample in dataset:
        left, top = ((sample["coordinates"][:, 0, 0] + 1) / 2 * 47).round().int().tolist()
        assert torch.equal(sample["coordinates"], whole[:, top : top + 16, left : left + 16])
        assert torch.equal(sample["levels"], picture[:, top : top + 16, left : left + 16])


def test_crops_to_validate_on_cover_every_pixel_once():
    task = build(SINUSOID, "--task.args.size", 48, "--task.args.crop", 16)
    pixels = [
        tuple(pixel)
        for sample in task.build_dataset("validation")
        for pixel in sample["coordinates"].flatten(1).T.tolist()
    ]
    assert len(pixels) == len(set(pixels)) == 48 * 48


@pytest.mark.parametrize(("size", "crop"), [(32, 64), (40, 16)])
def test_a_picture_that_crops_can_not_tile_is_rejected(size, crop):
    message = refusal(build, SINUSOID, "--task.args.size", size, "--task.args.crop", crop)
    assert_says(message, f"size={size}", f"crop={crop}")


def test_a_picture_of_one_pixel_is_rejected():
    message = refusal(build, SINUSOID, "--task.args.size", 1, "--task.args.crop", 1)
    assert_says(message, "size=1", "at least 2")


def test_the_sample_shows_the_target_next_to_the_models_drawing():
    task = build(SINUSOID, "--task.args.size", 32, "--task.args.crop", 16, "--task.args.width", 8)
    with torch.no_grad():
        image = task.sample(task.build_model())
    assert image.shape == (1, 32, 64)
    assert 0 <= image.min() <= image.max() <= 1
    assert torch.equal(image[:, :, :32], task.picture(0, 0, 32)[1])


def test_files_named_after_splits_are_those_splits(tmp_path):
    splits, folder = (
        ("train", "validation"),
        tmp_path / "corpus",
    )  # the cache lies in tmp_path itself
    folder.mkdir()
    for split in splits:
        rows = [f'{{"text": "{split} {split} {split} {n}"}}' for n in range(20)]
        (folder / f"{split}-0.jsonl").write_text("\n".join(rows))
    task = build(
        "dist_amp.tasks.causal_lm:CausalLM", "--data.path", folder, "--task.args.context", "32"
    )
    for split, other in (splits, splits[::-1]):
        text = b"".join(
            bytes(row["input_ids"].tolist()) for row in task.build_dataset(split)
        ).decode()
        assert split in text
        assert other not in text


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
@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([None], "metrics() returned NoneType; return a dict of sums, or of pairs (sum, weight)"),
        (
            [{"hits": (1.0, 2.0, 3.0)}],
            "metrics() gave hits 3 values; return a sum, or a pair (sum, weight)",
        ),
        (
            [{"hits": (1.0, -2.0)}],
            "metrics() gave hits the weight -2; return what counts in the batch: a number or",
        ),
        (
            [{"hits": 1.0}, {}],
            "metrics() returned nothing for one batch and hits, loss for another",
        ),
        (
            [{"hits": 1.0}, {"misses": 1.0}],
            "metrics() returned misses for one batch and hits, loss for another",
        ),
    ],
)
def test_metrics_that_are_no_dict_or_change_their_names_are_an_error(answers, said):
    run = make_run(World(), ChangingMetrics(*answers), "--eval.every", 1)
    with pytest.raises(DataError) as error:
        evaluate(run)
    assert said in str(error.value)


class Counted(Tiny):
    """Two metrics: `hits` per sample whatever the samples count for, and `sum` per unit of the
    batch's weight.
    """

    def metrics(self, model, batch):
        return {"hits": ((batch["y"] > 0).sum(), len(batch["y"])), "sum": batch["y"].sum()}


def evaluated(world, task, words):
    run = make_run(world, task, "--eval.every", 1, "--use_amp", "false", *words)
    return evaluate(run), run.task.build_dataset("validation")[:]


@pytest.mark.parametrize("samples", [32, 35])
def test_a_metric_with_a_weight_of_its_own_is_divided_by_that_one_alone(samples):
    task, words = Counted(uneven=True, samples=samples), ["--train.micro_batch_size", 4]
    for values, rows in on_ranks(2, evaluated, task, words):
        assert list(values) == ["hits", "sum", "loss"]
        assert values["hits"] == (rows["y"] > 0).sum().item() / samples  # whole numbers: exact
        # float32 sums in another order
        assert values["sum"] == pytest.approx(
            (rows["y"].sum() / rows["counts"].sum()).item(), rel=1e-5
        )


class LossPerSample(Tiny):
    def metrics(self, model, batch):
        return {"loss": (2.0 * len(batch["y"]), torch.tensor(len(batch["y"]))), "none": (0.0, 0)}


def test_a_metric_of_weight_zero_is_left_out_and_the_loss_may_have_its_own_weight():
    values, _ = evaluated(World(), LossPerSample(uneven=True), [])
    assert values == {"loss": 2.0}


class OfTheRank(Tiny):
    """Metrics whose names, or their order, depend on the rank."""

    def __init__(self, rank, *names):
        super().__init__()
        self.rank, self.names = rank, names

    def metrics(self, model, batch):
        rank = torch.distributed.get_rank()
        return {
            name: float(len(name)) * len(batch["y"])
            for name in self.names[:: 1 if rank == 0 else -1][: 2 + rank]
        }


def refusal_of_names(world):
    with pytest.raises(DataError) as error:
        evaluate(make_run(world, OfTheRank(world.rank, "hits", "misses", "b"), "--eval.every", 1))
    return str(error.value)


@pytest.mark.bad_input("metrics that have other names on another rank")
def test_metrics_whose_names_differ_between_ranks_are_an_error_on_every_rank():
    said = (
        "returned hits, misses, loss on rank 0 and b, misses, hits, loss on rank 1; "
        "return the same names on every rank"
    )
    assert all(said in text for text in on_ranks(2, refusal_of_names))


def evaluated_in_another_order(world):
    values = evaluate(make_run(world, OfTheRank(world.rank, "hits", "misses"), "--eval.every", 1))
    return {name: values[name] for name in ("hits", "misses")}


def test_metrics_may_come_in_another_order_on_another_rank():
    assert on_ranks(2, evaluated_in_another_order) == [{"hits": 4.0, "misses": 6.0}] * 2


class OfNoUse(Tiny):
    """Its build_model returns what the test sets."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def build_model(self):
        return self.model


@pytest.mark.bad_input(
    "a `build_model` that returns no module, or a model without anything to train"
)
@pytest.mark.parametrize(
    ("model", "said"),
    [
        (None, "build_model returned NoneType; return the model, an nn.Module"),
        ([torch.nn.Linear(8, 1)], "build_model returned list; return the model, an nn.Module"),
        (
            torch.nn.Linear(8, 1).requires_grad_(False),
            "none of the 2 parameters of the task's model is trained; build_",
        ),
        (
            torch.nn.ReLU(),
            "none of the 0 parameters of the task's model is trained; build_model must leave some "
            "of",
        ),
    ],
    ids=["nothing", "list", "frozen", "no_parameters"],
)
def test_a_model_that_is_none_or_has_nothing_to_train_is_refused(model, said):
    assert said in refusal(make_run, World(), OfNoUse(model), status=65)


class Weighs(Tiny):
    def __init__(self, weight):
        super().__init__()
        self.own_weight = weight

    def weight(self, batch):
        return self.own_weight


@pytest.mark.bad_input("a `weight(batch)` that is negative or no number")
@pytest.mark.parametrize(
    ("weight", "said"), [(-2, "-2"), (-0.5, "-0.5"), (None, "NoneType"), ("8", "str")]
)
def test_a_weight_that_is_negative_or_no_number_is_refused(weight, said):
    run = make_run(World(), Weighs(weight), "--eval.every", 1)
    message = f"weight(batch) returned {said}; return what counts in the batch: a number or scalar tensor, at least 0"
    assert message in refusal(take_steps, run, 1, status=65)
    assert message in refusal(evaluate, run, status=65)


@pytest.mark.bad_input("a model with trained complex parameters")
def test_complex_parameters_are_refused_when_the_model_is_built():
    class Complex(Tiny):
        def build_model(self):
            model = super().build_model()
            model[0].phase = torch.nn.Parameter(
                torch.zeros(3, dtype=torch.complex64), requires_grad=self.trained
            )
            return model

    made = Complex()
    made.trained = True
    with pytest.raises(
        DataError,
        match=r"the parameter 0.phase of the task's model is torch.complex64, and only real",
    ):
        built_model(made)
    made.trained = False
    built_model(made)
