"""Core as test_task.py tests it, with causal_lm."""

import json
import math
from pathlib import Path

import pytest
import torch
from test_task import (
    assert_says,
    build,
    clean_imports,  # noqa: F401
    own_cache,  # noqa: F401
    refusal,
)

from dist_amp.config.load import load_config
from dist_amp.config.task_class import build_task
from dist_amp.tasks.causal_lm import GPT, rotary_table, rotate

# ---- tasks that can't be found ----


@pytest.mark.bad_input("task target not importable, no such class, a method missing")
@pytest.mark.parametrize(
    ("target", "parts"),
    [
        ("tiny", ["task.target=tiny must be module:Class or path/to/file.py:Class"]),
        ("tiny:", ["task.target=tiny: must be module:Class"]),
        (":Tiny", ["task.target=:Tiny must be module:Class"]),
        ("missing:Mine", ["task.target=missing:Mine", "No module named 'missing'"]),
        ("dist_amp.missing.part:Mine", ["No module named 'dist_amp.missing'"]),
        ("/nowhere/missing.py:Mine", ["there is no file /nowhere/missing.py; check the path"]),
        ("elsewhere/tiny.py:Tiny", ["there is no file elsewhere/tiny.py; check the path"]),
        ("tiny:Tinny", ["task.target=tiny:Tinny", "no class Tinny in tiny, which has", "Tiny,"]),
        ("dist_amp.tasks.causal_lm:rotate", ["there is no class rotate in dist_amp.tasks"]),
        ("tiny:LacksWeight", ["lacks the method weight", "def weight(self, batch) -> number"]),
    ],
)
def test_a_target_that_is_no_task_is_refused_with_the_reason(target, parts):
    message = refusal(build, target)
    assert_says(message, *parts)
    assert "Annotated" not in message, "imported classes are not suggested"


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
    sizes = [sum(p.numel() for p in model.parameters()) for model in (untied, tied)]
    assert sizes[0] - sizes[1] == 256 * 32


def test_rotary_positions_depend_on_the_distance_alone_and_keep_length_and_dtype():
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
    x = torch.randn(64, 32)
    # torch's tolerance for float32
    torch.testing.assert_close(rotate(x, cos, sin).norm(dim=-1), x.norm(dim=-1))
    assert rotate(x.bfloat16(), cos, sin).dtype == torch.bfloat16


GPT_124M = Path(__file__).parents[2] / "configs" / "gpt_124m.toml"
CAUSAL_LM = "dist_amp.tasks.causal_lm:CausalLM"


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
