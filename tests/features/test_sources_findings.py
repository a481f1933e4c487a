"""Regressions: each once read the wrong rows, hung, or ended with a message that did not help."""

import errno
import json
import re

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from messages import message_of
from PIL import Image
from tiny import Tiny, make_run

from dist_amp.config.load import load_config
from dist_amp.settings import DataConfig
from dist_amp.sources import converted
from dist_amp.sources.files import find_files
from dist_amp.sources.labelled_images import LabelledImage, labelled_rows
from dist_amp.sources.load import Converted, class_names, load_rows, load_split
from dist_amp.sources.packing import Packing
from dist_amp.sources.tokenizer import open_tokenizer
from dist_amp.sources.tokens import token_documents, tokenize
from dist_amp.world import World

BYTES = open_tokenizer("bytes")


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache") / "datasets"
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)


def write_texts(path, texts):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def write_parquet(path, columns, group=4):
    pyarrow.parquet.write_table(pyarrow.table(columns), path, row_group_size=group)
    return str(path)


def write_tokens(folder):
    rows = datasets.Dataset.from_dict({"text": ["one"]})
    tokenize(folder, {"train": rows}, BYTES, "text")


class Conjugated(Tiny):
    def collate(self, samples):
        x = torch.utils.data.default_collate(samples)["x"]
        return {"x": x, "conjugated": torch.complex(x, x).conj(), "negative": x._neg_view()}


def test_a_worker_sends_conjugated_and_negated_views(tmp_path):
    run = make_run(World(), Conjugated(), "--data.workers", 1)
    (batch,) = next(run.data)
    run.data.close()
    assert torch.equal(batch["conjugated"].imag, -batch["x"])
    assert torch.equal(batch["negative"], -batch["x"])


def test_images_are_read_from_a_parquet_view_that_knows_nothing_of_pictures(tmp_path):
    Image.new("L", (8, 8)).save(tmp_path / "a.png")
    content = {"bytes": (tmp_path / "a.png").read_bytes(), "path": None}
    columns = {"image": [content] * 24, "label": [0, 1, 2] * 8}
    data = DataConfig(path=write_parquet(tmp_path / "a.parquet", columns), view="parquet")
    rows = labelled_rows(data, "train", "image", "label")
    assert not class_names(rows, "label")
    samples = Converted(rows, LabelledImage(("image", "label"), (8, 8), 1, 3, {}))
    assert samples[0]["image"].shape == (1, 8, 8)
    assert sorted({int(samples[number]["label"]) for number in range(len(samples))}) == [0, 1, 2]


@pytest.mark.bad_input("text labels of images in a Parquet view")
def test_text_labels_of_a_parquet_view_are_refused_with_what_to_use(tmp_path):
    table = datasets.Dataset.from_dict({"image": [b""] * 16, "label": ["cat", "dog"] * 8})
    table.to_parquet(tmp_path / "a.parquet", batch_size=4)
    data = DataConfig(path=str(tmp_path / "a.parquet"), view="parquet")
    rows = labelled_rows(data, "train", "image", "label")
    assert "use data.view=map, or store whole numbers" in message_of(65, class_names, rows, "label")


TWO_AND_ONE = {"train": 2, "test": 1}


@pytest.mark.parametrize(
    ("names", "splits"),
    [
        (["train.txt", "testament.txt", "training_notes.txt"], {"train": 3}),
        (["training-0.csv", "testing-0.csv"], {"train": 1, "test": 1}),
        (["train/0.jsonl", "valid/0.jsonl"], {"train": 1, "validation": 1}),
        (["wiki.train.txt", "wiki.valid.txt"], {"train": 1, "validation": 1}),
        (["en_train.csv", "de_train.csv", "EN_TEST.csv"], TWO_AND_ONE),
        (["train.txt", "valid.txt", "LICENSE.txt", "vocab.txt"], {"train": 1, "validation": 1}),
        (["test.csv"], {"train": 1}),
        (["test_io.py", "io.py", "val.py"], {"train": 3}),
        (["train/test.csv", "dev/train.csv"], {"train": 1, "validation": 1}),
        (["car/1.png", "train/1.png"], {"train": 2}),  # classes
        (["train/bus/train_1.png", "train/train/test_2.png", "test/a/3.png"], TWO_AND_ONE),
    ],
)
def test_a_whole_word_of_a_path_names_a_split(names, splits, tmp_path):
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text\nsome\n")
    found = find_files(DataConfig(path=str(tmp_path)))
    assert {split: len(paths) for split, paths in found.splits.items()} == splits


@pytest.mark.bad_input("a folder in which one file names no split, and others do")
@pytest.mark.bad_input("a folder with files to hold out, and none to train on")
@pytest.mark.bad_input("an image beside the folders of classes")
@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("train.jsonl test.jsonl extra.jsonl", r"extra\S+ names no split, though \S+test"),
        ("wiki.test.txt extra.txt", r"extra\S+ names no split, though \S+test"),
        ("train/1.png val/1.png extra/1.png", r"extra\S+ names no split, though \S+val"),
        ("dev.jsonl test.jsonl", "dev.jsonl.*test.jsonl are to hold out, and none is to train on"),
        ("cat/1.png dog/2.png stray.png", "stray.png lies in no class's folder"),
    ],
)
def test_files_that_do_not_tell_their_split_or_class_are_refused(names, message, tmp_path):
    for name in names.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    data = DataConfig(path=str(tmp_path))
    assert re.search(message, message_of(65, load_split, data, "train", "image"))


@pytest.mark.bad_input("a symbolic link to data that leads nowhere")
def test_files_behind_symbolic_links_are_read_and_a_link_to_nothing_is_named(tmp_path):
    write_texts(tmp_path / "real/b.jsonl", ["b"] * 20)
    write_texts(tmp_path / "data/a.jsonl", ["a"] * 10)
    (tmp_path / "data/more").symlink_to(tmp_path / "real")
    (tmp_path / "real/back").symlink_to(tmp_path / "data")
    data = DataConfig(path=str(tmp_path / "data"), validation_split="train")
    assert sorted(load_rows(data, "train")["text"]) == ["a"] * 10 + ["b"] * 20
    (tmp_path / "data/gone.jsonl").symlink_to(tmp_path / "nowhere.jsonl")
    assert "gone.jsonl" in message_of(65, load_rows, data, "train")


@pytest.mark.bad_input("`data.text_column`, `data.split` or `data.view` for a folder of tokens")
@pytest.mark.parametrize(
    ("key", "value"), [("text_column", "body"), ("split", "test"), ("view", "parquet")]
)
def test_settings_of_rows_are_refused_for_tokens(key, value, tmp_path):
    write_tokens(tmp_path)
    data = load_config(["--data.path", str(tmp_path), f"--data.{key}", value], {}).data
    fragment = message_of(64, token_documents, data, "train", BYTES)
    assert fragment.startswith(
        f"data.{key}={value} has no effect: data.path={tmp_path} holds tokens"
    )


@pytest.mark.bad_input("`data.name` beside `data.path`")
def test_two_sources_at_once_are_refused():
    data = DataConfig(path="a.jsonl", name="user/name")
    assert "are two sources; remove one" in message_of(64, load_split, data, "train")


def test_a_row_that_can_not_be_encoded_is_named_by_its_number_in_the_file(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["text"] * 31 + [None] + ["text"] * 8)
    data = DataConfig(path=path, validation_split=0.01)
    fragment = message_of(65, token_documents, data, "train", BYTES)
    assert fragment.startswith("row 31: the column text")


@pytest.mark.bad_input("documents that do not fill one row")
def test_data_that_do_not_fill_one_row_are_refused_with_their_size(tmp_path):
    path = write_texts(tmp_path / "a.jsonl", ["abc", "abd", "e" * 40])
    data = DataConfig(path=path, validation_split=0.1)
    rows = Packing(100, "cut", "split").rows
    documents = token_documents(data, "train", BYTES)
    fragment = message_of(65, rows, documents, "train")
    assert (
        f"have {int(sum(documents.lengths))} tokens in all, fewer than one row of 100" in fragment
    )
    assert rows(token_documents(data, "validation", BYTES), "validation") is None


def test_rows_that_another_process_converts_at_the_same_time_are_read(tmp_path, monkeypatch):
    look = datasets.load_dataset_builder

    def look_before_the_other_is_done(*args, **kwargs):
        builder = look(*args, **kwargs)
        look(*args, **kwargs).download_and_prepare()
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", look_before_the_other_is_done)
    data = DataConfig(path=write_texts(tmp_path / "a.jsonl", ["a", "b", "c"]), validation_split=0.3)
    assert len(load_rows(data, "train")) + len(load_rows(data, "validation")) == 3


@pytest.mark.bad_input("a full disk under the cache of `datasets`")
def test_a_full_disk_is_named_with_the_cache_and_not_with_a_file(tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(converted, "convert", full)
    data = DataConfig(path=write_texts(tmp_path / "a.jsonl", ["a", "b"]))
    fragment = message_of(1, load_rows, data, "train")
    assert "the disk of the cache " in fragment
    assert fragment.endswith("is full; make room, or set HF_DATASETS_CACHE")


@pytest.mark.bad_input("tokens without `tokens.json`, or `--out` that is a file")
def test_tokens_without_their_manifest_are_named_and_a_file_is_no_folder_for_them(tmp_path):
    write_tokens(tmp_path / "tokens")
    (tmp_path / "tokens/tokens.json").unlink()
    data = DataConfig(path=str(tmp_path / "tokens"))
    fragment = message_of(65, token_documents, data, "train", BYTES)
    assert "holds tokens without their tokens.json" in fragment
    (tmp_path / "file").write_text("")
    assert "file is a file; give a folder" in message_of(64, write_tokens, tmp_path / "file")
